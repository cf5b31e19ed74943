"""Latents to videos: each LATENTS file of `tinyvae encode` (or any safetensors file with one tensor N T C H W in
diffusion space) becomes NAME_decoded.mp4. Any length in constant memory.

Size, length and frame rate are those the file states; a file that states none gives all frames at 24 per second.

example:
  tinyvae decode output/my_run film_latents.safetensors
  tinyvae decode taew2_2.pth latents/*.safetensors --output_dir videos --fps 16

exit code: 0 all files decoded; 2 a mistake in the command or a file that holds no latents of this model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.encode import open_family_model
from tinyvae.cli.reconstruct import (
    Done,
    add_quality_argument,
    add_stream_arguments,
    check_numbers,
    distinct_names,
    for_each,
    refuse_existing,
)
from tinyvae.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from tinyvae.convert.reconstruct import OnFrames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="weights file, model, checkpoint or run folder")
    parser.add_argument("latents", nargs="+", type=Path, metavar="LATENTS", help="safetensors files")
    parser.add_argument("--fps", type=float, help="frames per second; default: as the file states, else 24")
    parser.add_argument(
        "--audio_from",
        type=Path,
        help="a video whose sound and uneven frame times are carried over (one LATENTS file only)",
    )
    add_quality_argument(parser)
    add_stream_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.reconstruct import decode_to_video

    check_numbers(arguments)
    files = arguments.latents
    if arguments.audio_from is not None and len(files) > 1:
        raise UserError("--audio_from goes with one LATENTS file; decode them one by one.")
    if arguments.audio_from is not None and not arguments.audio_from.is_file():
        raise MissingFileError(f"there is no video at --audio_from {arguments.audio_from}; check the path.")
    if arguments.fps is not None and not 0 < arguments.fps <= 1000:
        raise UserError(f"--fps must be above 0 and at most 1000, got {arguments.fps:g}.")
    names = distinct_names([file.stem.removesuffix("_latents") for file in files])
    targets = [arguments.output_dir / f"{name}_decoded.mp4" for name in names]
    if not arguments.overwrite:
        refuse_existing(targets)
    round_trip = open_family_model(arguments)

    def one(number: int, on_frames: OnFrames) -> Done:
        num_frames = decode_to_video(
            round_trip,
            files[number],
            targets[number],
            fps=arguments.fps,
            audio_from=arguments.audio_from,
            overwrite=arguments.overwrite,
            crf=arguments.crf,
            on_frames=on_frames,
        )
        return Done(line=f"{files[number]}: {num_frames} frames -> {targets[number]}")

    return for_each(files, one, arguments.output_dir)
