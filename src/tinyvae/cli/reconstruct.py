"""Send videos through a model: encode, decode, write. Same frames, same times, same size, with their sound.

Any length in constant memory: frames are streamed. Sizes that are no multiple of the model's space factor are padded by
their edge pixels and cropped back. Each VIDEO (a file, or a folder of them) becomes NAME_reconstructed.mp4.
A diffusers VAE as MODEL has no stream and holds the whole video in memory: use --max_frames with it.

example:
  tinyvae reconstruct output/my_run film.mp4
  tinyvae reconstruct taehv.safetensors videos/ --output_dir out --side_by_side --latents

exit code: 0 all videos written; 1 some could not be read or came out as no numbers (they are named);
2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvae.cli.eval import add_dtype_argument, parse_dtype
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UnreadableVideoError, UserError
from tinyvae.terminal import progress_bar

if TYPE_CHECKING:
    from tinyvae.convert.reconstruct import OnFrames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="weights file, model, checkpoint or run folder, or a diffusers VAE folder")
    parser.add_argument("videos", nargs="+", type=Path, metavar="VIDEO", help="video files or folders of them")
    parser.add_argument(
        "--side_by_side", action="store_true", help="also NAME_side_by_side.mp4: input | output | error"
    )
    parser.add_argument("--latents", action="store_true", help="also NAME_latents.safetensors")
    add_stream_arguments(parser)
    parser.add_argument("--max_frames", type=int, help="only the first frames of each video")
    add_quality_argument(parser)


def add_quality_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--crf", type=float, default=18, help="H.264 quality of what is written, 0 (largest file) to 51; default 18"
    )


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """What reconstruct, encode and decode share."""
    parser.add_argument("--output_dir", type=Path, default=Path(), help="folder for the files (default: this one)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument("--variant", help="which variant the weights are, where the file cannot tell")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: the first GPU, else the CPU")
    parser.add_argument("--fused", action="store_true", help="run the folded network: same output, faster on a GPU")
    add_dtype_argument(parser)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What to say of one file: a line, a note beside it, and whether its content is sound."""

    line: str
    note: str = ""
    is_sound: bool = True


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.reconstruct import Outputs, reconstruct_video

    check_numbers(arguments)
    videos = find_videos(arguments.videos)
    folder = arguments.output_dir
    plan = [
        Outputs(
            video=folder / f"{stem}_reconstructed.mp4",
            side_by_side=folder / f"{stem}_side_by_side.mp4" if arguments.side_by_side else None,
            latents=folder / f"{stem}_latents.safetensors" if arguments.latents else None,
            overwrite=arguments.overwrite,
            crf=arguments.crf,
        )
        for stem in distinct_names([video.stem for video in videos])
    ]
    if not arguments.overwrite:
        refuse_existing(path for outputs in plan for path in outputs.paths())
    round_trip = open_stream(arguments)

    def one(number: int, on_frames: OnFrames) -> Done:
        done = reconstruct_video(
            round_trip, videos[number], plan[number], max_frames=arguments.max_frames, on_frames=on_frames
        )
        line = (
            f"{videos[number]}: {done.num_frames} frames, PSNR {done.psnr:.2f} dB, MSE {done.mse:.6f}, "
            f"{done.num_frames / done.seconds:.1f} frames/s -> {', '.join(map(str, done.written))}"
        )
        if not math.isfinite(done.mse):
            broken = f"{videos[number]}: the decoder made values that are no numbers (NaN), shown in magenta"
            return Done(line=line, note=broken, is_sound=False)
        return Done(line=line, note=done.note)

    return for_each(videos, one, folder)


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse --max_frames and --crf that mean nothing."""
    max_frames, crf = getattr(arguments, "max_frames", None), getattr(arguments, "crf", 18)
    if max_frames is not None and max_frames < 1:
        raise UserError(f"--max_frames must be at least 1, got {max_frames}.")
    if not 0 <= crf <= 51:
        raise UserError(f"--crf must be from 0 (largest file) to 51, got {crf:g}.")


def find_videos(given: Sequence[Path]) -> list[Path]:
    """The files that were named, and those inside named folders."""
    from tinyvae.evaluation.clip_sources import find_clips

    videos: list[Path] = []
    for path in given:
        if not path.exists():
            raise MissingFileError(f"there is no video at {path} (looked from {Path.cwd()}); check the path.")
        videos += [clip.path for clip in find_clips(path)] if path.is_dir() else [path]
    return videos


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


def refuse_existing(paths: Iterable[Path]) -> None:
    """Before any work: a file that would be written over."""
    for path in paths:
        if os.path.exists(path):  # unlike Path.exists never an error: the folder is tried afterwards
            raise FileExistsAlreadyError(f"{path} exists already; remove it, pass --overwrite or another --output_dir.")


def open_stream(arguments: argparse.Namespace) -> Any:
    from tinyvae.evaluation.cost import choose_devices
    from tinyvae.evaluation.round_trip import open_model
    from tinyvae.files import make_output_folder

    device = choose_devices(arguments.device)[0]
    make_output_folder(arguments.output_dir)
    return open_model(
        arguments.model,
        variant=arguments.variant,
        device=device,
        dtype=parse_dtype(arguments.dtype),
        fused=arguments.fused,
    )


def for_each(files: Sequence[Path], one: Callable[[int, OnFrames], Done], folder: Path) -> int:
    """Do each file under a progress bar. One that cannot be read is named and skipped; alone it is the user's error.

    Returns the exit code: 1 where something was skipped or came out broken.
    """
    from tinyvae.evaluation.cost import fitting_in_memory
    from tinyvae.files import writing_to

    skipped = broken = 0
    for number, file in enumerate(files):
        fault: UnreadableVideoError | None = None
        done: Done | None = None
        # The bar is gone before anything is said, so that no sentence starts in the middle of it.
        with (
            progress_bar(desc=file.name, unit="frame", leave=False) as bar,
            writing_to(folder),
            fitting_in_memory(file),
        ):

            def advance(frames: int, total: int, bar: Any = bar) -> None:
                bar.total = total
                bar.update(frames)
                if bar.n >= total:
                    bar.refresh()  # tqdm draws at most ten times a second, and the last update must be seen

            try:
                done = one(number, advance)
            except UnreadableVideoError as bad:
                if len(files) == 1:
                    raise
                fault = bad
        if done is None:
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
