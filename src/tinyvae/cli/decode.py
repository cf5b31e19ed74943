"""Latents to videos: each LATENTS (a file of `tinyvae encode`, any safetensors file with one tensor N T C H W in
diffusion space, or a folder of them) becomes NAME_decoded.mp4. Any length in constant memory.

Size, length and frame rate are those the file states; a file that states none gives all frames at 24 per second.

example:
  tinyvae decode output/my_run film_latents.safetensors
  tinyvae decode taew2_2.pth latents/*.safetensors --output videos --fps 16

exit code: 0 all files decoded; 2 a mistake in the command or a file that holds no latents of this model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.encode import open_family_model
from tinyvae.cli.options import MODEL, number
from tinyvae.cli.reconstruct import Done, add_quality, add_stream_arguments, distinct_names, for_each
from tinyvae.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from tinyvae.convert.reconstruct import OnFrames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument("latents", nargs="+", type=Path, metavar="LATENTS", help="safetensors files or folders of them")
    fps = "frames per second; default: as the file states, else 24"
    audio = "a video whose sound and uneven frame times are carried over (one LATENTS file only)"
    parser.add_argument("--fps", type=number(float, 0.001, 1000), metavar="N", help=fps)
    parser.add_argument("--audio_from", type=Path, metavar="VIDEO", help=audio)
    add_quality(parser)
    add_stream_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.reconstruct import decode_to_video

    files = find_latents(arguments.latents, model=Path(arguments.model))
    if arguments.audio_from is not None and len(files) > 1:
        raise UserError("--audio_from goes with one LATENTS file; decode them one by one.")
    if arguments.audio_from is not None and not arguments.audio_from.is_file():
        raise MissingFileError(f"there is no video at --audio_from {arguments.audio_from}; check the path.")
    stems = [file.stem.removesuffix("_latents") for file in files]
    targets = [arguments.output / f"{name}_decoded.mp4" for name in distinct_names(stems)]
    round_trip = open_family_model(arguments, targets)

    how = {"audio_from": arguments.audio_from, "overwrite": arguments.overwrite}
    how |= {"fps": arguments.fps, "crf": arguments.crf}

    def decode(file: Path, target: Path, on_frames: OnFrames) -> Done:
        num_frames = decode_to_video(round_trip, file, target, **how, on_frames=on_frames)
        return Done(line=f"{file}: {num_frames} frames -> {target}")

    return for_each(files, targets, decode, arguments.output)


def find_latents(given: Sequence[Path], *, model: Path) -> list[Path]:
    """The files that were named, and those in named folders, where the model may lie beside them."""
    files: list[Path] = []
    for path in given:
        inside = [path]
        if path.is_dir():
            inside = sorted(file for file in path.glob("*.safetensors") if file.resolve() != model.resolve())
        if not inside:
            raise MissingFileError(f"there is no safetensors file in {path}; give latents of `tinyvae encode`.")
        files += inside
    return files
