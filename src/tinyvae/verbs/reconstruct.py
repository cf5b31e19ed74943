"""Send videos through a model: encode, decode, write. Same frames, same frame rate, same size, with their sound.

Any length in constant memory: frames are streamed. Sizes that are no multiple of the model's space factor are padded by
their edge pixels and cropped back. Each VIDEO (a file, or a folder of them) becomes NAME_reconstructed.mp4.

example:
  tinyvae reconstruct output/my_run film.mp4
  tinyvae reconstruct taehv.safetensors videos/ --output_dir out --side_by_side --latents

exit code: 0 all videos written; 1 some could not be read (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.verbs.eval import parse_dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="weights file, model, checkpoint or run folder, or a diffusers VAE folder")
    parser.add_argument("videos", nargs="+", type=Path, metavar="VIDEO", help="video files or folders of them")
    parser.add_argument(
        "--side_by_side", action="store_true", help="also NAME_side_by_side.mp4: input | output | error"
    )
    parser.add_argument("--latents", action="store_true", help="also NAME_latents.safetensors")
    add_stream_arguments(parser)
    parser.add_argument("--max_frames", type=int, help="only the first frames of each video")
    parser.add_argument("--crf", type=float, default=18, help="H.264 quality of what is written, less is better (18)")


def add_stream_arguments(parser: argparse.ArgumentParser) -> None:
    """What reconstruct, encode and decode share."""
    parser.add_argument("--output_dir", type=Path, default=Path(), help="folder for the files (default: this one)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    parser.add_argument("--variant", help="which variant the weights are, where the file cannot tell")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: the first GPU, else the CPU")
    parser.add_argument("--fused", action="store_true", help="run the folded network: same output, faster on a GPU")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; default: float32 on a CPU, else the file's")


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.reconstruct import Outputs, reconstruct_video

    if arguments.max_frames is not None and arguments.max_frames < 1:
        raise UserError(f"--max_frames must be at least 1, got {arguments.max_frames}.")
    videos = find_videos(arguments.videos)
    stems = distinct_stems(videos)
    folder = arguments.output_dir
    plan = [
        Outputs(
            video=folder / f"{stem}_reconstructed.mp4",
            side_by_side=folder / f"{stem}_side_by_side.mp4" if arguments.side_by_side else None,
            latents=folder / f"{stem}_latents.safetensors" if arguments.latents else None,
            overwrite=arguments.overwrite,
            crf=arguments.crf,
        )
        for stem in stems
    ]
    if not arguments.overwrite:
        refuse_existing(path for outputs in plan for path in outputs.paths())
    round_trip = open_stream(arguments)

    def one(number: int, on_frames: Callable[[int], None]) -> str:
        done = reconstruct_video(
            round_trip, videos[number], plan[number], max_frames=arguments.max_frames, on_frames=on_frames
        )
        if done.note:
            print(f"note: {done.note}", file=sys.stderr)
        speed = done.num_frames / done.seconds
        return (
            f"{videos[number]}: {done.num_frames} frames, PSNR {done.psnr:.2f} dB, MSE {done.mse:.6f}, "
            f"{speed:.1f} frames/s -> {', '.join(map(str, done.written))}"
        )

    return for_each(videos, one)


def find_videos(given: Sequence[Path]) -> list[Path]:
    """The files that were named, and those inside named folders."""
    from tinyvae.evaluation.clip_sources import find_clips

    return [clip.path for path in given for clip in (find_clips(path) if path.is_dir() else find_clips_of_file(path))]


def find_clips_of_file(path: Path) -> list[Any]:
    from tinyvae.errors import MissingFileError
    from tinyvae.evaluation.clip_sources import ClipSource

    if not path.exists():
        raise MissingFileError(f"there is no video at {path} (looked from {Path.cwd()}); check the path.")
    return [ClipSource(name=path.name, path=path)]


def distinct_stems(files: Sequence[Path]) -> list[str]:
    """A name for the outputs of each file; files of the same name in different folders get a number."""
    seen: dict[str, int] = {}
    stems = []
    for file in files:
        seen[file.stem] = seen.get(file.stem, 0) + 1
        stems.append(file.stem if seen[file.stem] == 1 else f"{file.stem}_{seen[file.stem]}")
    return stems


def refuse_existing(paths: Any) -> None:
    """Before any work: a file that would be written over."""
    from tinyvae.errors import FileExistsAlreadyError

    for path in paths:
        if path.exists():
            raise FileExistsAlreadyError(f"{path} exists already; remove it, pass --overwrite or another --output_dir.")


def open_stream(arguments: argparse.Namespace) -> Any:
    from tinyvae.evaluation.resources import choose_devices
    from tinyvae.evaluation.round_trip import open_model

    device = choose_devices(arguments.device)[0]
    if arguments.output_dir.is_file():
        raise UserError(f"--output_dir {arguments.output_dir} is a file; name a folder.")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    return open_model(
        arguments.model,
        variant=arguments.variant,
        device=device,
        dtype=parse_dtype(arguments.dtype),
        fused=arguments.fused,
    )


def for_each(files: Sequence[Path], one: Callable[[int, Callable[[int], None]], str]) -> int:
    """Do each file under a progress bar. One that cannot be read is named and skipped; alone it is the user's error."""
    from tqdm import tqdm

    failed = 0
    for number, file in enumerate(files):
        with tqdm(desc=file.name, unit="frame") as bar:
            try:
                line = one(number, lambda frames, bar=bar: bar.update(frames))  # type: ignore[misc]
            except UnreadableVideoError as bad:
                if len(files) == 1:
                    raise
                failed += 1
                line = ""
                print(f"skipped: {bad}", file=sys.stderr)
        if line:
            print(line)
    if failed:
        print(f"{failed} of {len(files)} files could not be read and were skipped.", file=sys.stderr)
    return 1 if failed else 0
