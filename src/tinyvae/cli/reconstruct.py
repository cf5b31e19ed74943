"""Send videos through a model: encode, decode, write. Same frames, same times, same size, with their sound.

Any length in constant memory: frames are streamed. Sizes that are no multiple of the model's space factor are padded by
their edge pixels and cropped back. Each VIDEO (a file, or a folder of them) becomes NAME_reconstructed.mp4.
A diffusers VAE as MODEL has no stream and holds the whole video in memory: use --frames with it.

example:
  tinyvae reconstruct output/my_run film.mp4
  tinyvae reconstruct taehv.safetensors videos/ --output out --side_by_side --latents

exit code: 0 all videos written; 1 some could not be read or came out as no numbers (they are named);
2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tinyvae.cli.options import MODEL, add_options, number
from tinyvae.errors import MissingFileError, UnreadableVideoError
from tinyvae.terminal import progress_bar

if TYPE_CHECKING:
    from tinyvae.convert.reconstruct import OnFrames, Outputs

Target = TypeVar("Target")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}, or a diffusers VAE folder")
    add_videos(parser)
    side_by_side = "also NAME_side_by_side.mp4: input | output | error"
    parser.add_argument("--side_by_side", action="store_true", help=side_by_side)
    parser.add_argument("--latents", action="store_true", help="also NAME_latents.safetensors")
    add_stream_arguments(parser)
    add_quality(parser)


def add_videos(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("videos", nargs="+", type=Path, metavar="VIDEO", help="video files or folders of them")
    add_options(parser, "--frames")


def add_quality(parser: argparse.ArgumentParser) -> None:
    help = "H.264 quality of what is written, 0 (largest file) to 51; default 18"
    parser.add_argument("--crf", type=number(float, 0, 51), default=18.0, metavar="N", help=help)


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """What reconstruct, encode and decode share."""
    add_options(parser, "--output", default=Path(), help="folder for the files (default: this one)")
    add_options(parser, "--overwrite", "--variant", "--device", "--fused", "--dtype")


@dataclass(frozen=True, kw_only=True)
class Done:
    """What to say of one file: a line, a note beside it, and whether its content is sound."""

    line: str
    note: str = ""
    is_sound: bool = True


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.reconstruct import Outputs, reconstruct_video

    (videos, names), folder = find_videos(arguments.videos), arguments.output
    targets = [
        Outputs(
            video=folder / f"{stem}_reconstructed.mp4",
            side_by_side=folder / f"{stem}_side_by_side.mp4" if arguments.side_by_side else None,
            latents=folder / f"{stem}_latents.safetensors" if arguments.latents else None,
            overwrite=arguments.overwrite,
            crf=arguments.crf,
        )
        for stem in names
    ]
    round_trip = open_stream(arguments, [path for outputs in targets for path in outputs.paths()])

    def reconstruct(video: Path, outputs: Outputs, on_frames: OnFrames) -> Done:
        done = reconstruct_video(round_trip, video, outputs, max_frames=arguments.frames, on_frames=on_frames)
        line = f"{video}: {done.num_frames} frames, PSNR {done.psnr:.2f} dB, MSE {done.mse:.6f}, "
        line += f"{done.num_frames / done.seconds:.1f} frames/s -> {', '.join(map(str, done.written))}"
        if math.isfinite(done.mse):
            return Done(line=line, note=done.note)
        broken = f"{video}: the decoder made values that are no numbers (NaN), shown in magenta"
        return Done(line=line, note=broken, is_sound=False)

    return for_each(videos, targets, reconstruct, folder)


def find_videos(given: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """(the files that were named, and those inside named folders; the name that the outputs of each start with)."""
    from tinyvae.evaluation.clip_sources import find_clips
    from tinyvae.storage import local_file

    videos: list[Path] = []
    for path in given:
        if not path.exists():
            raise MissingFileError(f"there is no video at {path} (looked from {Path.cwd()}); check the path.")
        videos += [local_file(clip.path) for clip in find_clips(path)] if path.is_dir() else [path]
    return videos, distinct_names([video.stem for video in videos])


def distinct_names(stems: Sequence[str]) -> list[str]:
    """The names that outputs start with: the stems of the files, with a number where two files have the same."""
    taken: set[str] = set()
    names = []
    for stem in stems:
        name, number = stem, 1
        while name in taken or (number > 1 and name in stems):
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        names.append(name)
    return names


def open_stream(arguments: argparse.Namespace, targets: Iterable[Path]) -> Any:
    """The model. Before it is read, files that exist and a folder that cannot be written are refused."""
    from tinyvae.evaluation.cost import choose_devices
    from tinyvae.evaluation.round_trip import open_model
    from tinyvae.files import make_output_folder, refuse_existing

    refuse_existing([] if arguments.overwrite else targets)
    device = choose_devices(arguments.device)[0]
    make_output_folder(arguments.output)
    return open_model(
        arguments.model, variant=arguments.variant, device=device, dtype=arguments.dtype, fused=arguments.fused
    )


def for_each(
    files: Sequence[Path], targets: Sequence[Target], work: Callable[[Path, Target, OnFrames], Done], folder: Path
) -> int:
    """Do each file under a progress bar; returns the exit code. Skip what cannot be read, except if it is alone."""
    from tinyvae.evaluation.cost import fitting_in_memory
    from tinyvae.files import writing_to

    skipped = broken = 0
    for file, target in zip(files, targets, strict=True):
        bar = progress_bar(desc=file.name, unit="frame", leave=False)

        def advance(frames: int, total: int, bar: Any = bar) -> None:
            bar.total = total
            bar.update(frames)
            if bar.n >= total:
                bar.refresh()  # tqdm draws at most ten times a second, and the last update must be seen

        try:
            with bar, writing_to(folder), fitting_in_memory(file):
                done = work(file, target, advance)
        except UnreadableVideoError as fault:
            if len(files) == 1:
                raise
            skipped += 1
            print(f"skipped: {fault}", file=sys.stderr)
            continue
        print(done.line)
        if done.note:
            print(f"note: {done.note}", file=sys.stderr)
        broken += not done.is_sound
    if skipped:
        print(f"{skipped} of {len(files)} files could not be read and were skipped.", file=sys.stderr)
    return 1 if skipped or broken else 0
