"""Latents to videos: each LATENTS file of `tinyvae encode` (or any safetensors file with one tensor N T C H W in
diffusion space) becomes NAME.mp4. Any length in constant memory.

Size, length and frame rate are those the file states; a file that states none gives all frames at 24 per second.

example:
  tinyvae decode output/my_run film_latents.safetensors
  tinyvae decode taew2_2.pth latents/*.safetensors --output_dir videos --fps 16

exit code: 0 all files decoded; 2 a mistake in the command or a file that holds no latents of this model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tinyvae.errors import UserError
from tinyvae.verbs.encode import open_family_model
from tinyvae.verbs.reconstruct import add_stream_arguments, distinct_stems, for_each, refuse_existing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="weights file, model, checkpoint or run folder")
    parser.add_argument("latents", nargs="+", type=Path, metavar="LATENTS", help="safetensors files")
    parser.add_argument("--fps", type=float, help="frames per second; default: as the file states, else 24")
    parser.add_argument("--audio_from", type=Path, help="a video whose sound is carried over (one LATENTS file only)")
    parser.add_argument("--crf", type=float, default=18, help="H.264 quality of what is written, less is better (18)")
    add_stream_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.reconstruct import decode_to_video

    files = arguments.latents
    if arguments.audio_from is not None and len(files) > 1:
        raise UserError("--audio_from goes with one LATENTS file; decode them one by one.")
    if arguments.fps is not None and arguments.fps <= 0:
        raise UserError(f"--fps must be above 0, got {arguments.fps:g}.")
    targets = [arguments.output_dir / f"{stem.removesuffix('_latents')}.mp4" for stem in distinct_stems(files)]
    if not arguments.overwrite:
        refuse_existing(targets)
    round_trip = open_family_model(arguments)

    def one(number: int, on_frames: Callable[[int], None]) -> str:
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
        return f"{files[number]}: {num_frames} frames -> {targets[number]}"

    return for_each(files, one)
