"""Videos to latents: each VIDEO becomes NAME_latents.safetensors, a tensor `latents` N T C H W in diffusion space.

Any length in constant memory. The file also states variant, frame count, size and frame rate, so that `tinyvae decode`
gives the whole video back; for that the last frame is repeated where the frame rule would lose some at the end.

example:
  tinyvae encode output/my_run film.mp4 --output latents
  tinyvae decode output/my_run latents/film_latents.safetensors --audio_from film.mp4

exit code: 0 all videos encoded; 1 some could not be read (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvae.cli.options import MODEL
from tinyvae.cli.reconstruct import Done, add_stream_arguments, add_videos, find_videos, for_each, open_stream
from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.convert.reconstruct import OnFrames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    add_videos(parser)
    add_stream_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.reconstruct import encode_to_file

    videos, names = find_videos(arguments.videos)
    targets = [arguments.output / f"{name}_latents.safetensors" for name in names]
    round_trip = open_family_model(arguments, targets)

    def encode(video: Path, target: Path, on_frames: OnFrames) -> Done:
        how = {"overwrite": arguments.overwrite, "max_frames": arguments.frames}
        num_latents = encode_to_file(round_trip, video, target, **how, on_frames=on_frames)
        return Done(line=f"{video}: {num_latents} latents -> {target}")

    return for_each(videos, targets, encode, arguments.output)


def open_family_model(arguments: argparse.Namespace, targets: Iterable[Path]) -> Any:
    """A network of the family; a reference VAE has no stream."""
    from tinyvae.evaluation.round_trip import StreamedCodec

    round_trip = open_stream(arguments, targets)
    if not isinstance(round_trip, StreamedCodec):
        what = f"{arguments.model} is a reference VAE, which works on whole clips"
        raise UserError(f"{what}; encode and decode stream, and need a model of the family.")
    return round_trip
