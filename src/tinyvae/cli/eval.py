"""Measure a model on videos: quality, flicker, speed and memory, as numbers and as a page to look at.

MODEL is a weights file, a model, checkpoint or run folder, or a diffusers VAE folder. DATA is a folder of videos, one
video, an annotation file (.json, .jsonl) or an index of `tinyvae data index`; of data with splits the videos annotated
as val are taken, unless --split says otherwise. Every frame is streamed through the model in constant memory and
compared with the input frame it stands for. Sizes that are no multiple of the model's space factor are padded by their
edge and cropped back. With --output_dir, results.json and report.html are written.

example:
  tinyvae eval output/my_run --data videos/val --output_dir output/my_run/eval
  tinyvae eval taew2_2.pth --data clips.jsonl --split test --max_frames 49 --size 480x720

exit code: 0 all videos measured; 1 some were skipped or gave no numbers (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tinyvae.errors import UserError, nearest_name

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""What --dtype takes in every verb, and the short form of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="weights file, model, checkpoint or run folder, or a diffusers VAE folder")
    parser.add_argument("--variant", help="which variant the weights are, where the file cannot tell")
    add_data_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """What eval and compare share."""
    parser.add_argument("--data", type=Path, required=True, metavar="DATA", help="folder, video, annotations or index")
    parser.add_argument("--data_root", type=Path, help="folder that relative paths in DATA start from")
    parser.add_argument("--output_dir", type=Path, help="folder for results.json and report.html")
    add_split_argument(parser)
    parser.add_argument("--max_clips", type=int, help="at most this many videos, evenly spread")
    parser.add_argument("--max_frames", type=int, help="only the first frames of each video")
    parser.add_argument("--size", metavar="HxW", help="crop and scale to this size, e.g. 480x720; default: as they are")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 or cuda:0,cuda:1; default: every GPU, else the CPU")
    add_dtype_argument(parser)
    parser.add_argument(
        "--fused", action="store_true", help="run the folded network (not of a VAE): same output, faster on a GPU"
    )
    parser.add_argument("--lpips", metavar="FILE", help="LPIPS weights; 'off' leaves the metric out; default: as found")
    parser.add_argument("--films", type=int, default=6, help="clips shown as films in the report (default 6)")


def add_split_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        metavar="train|val|test|all",
        help="the videos annotated so, or all; default: val where the data has splits, else all",
    )


def add_dtype_argument(parser: argparse.ArgumentParser, *, default: str = "float32 on a CPU, else the file's") -> None:
    """The same in every verb: eval, compare, reconstruct, encode, decode, bench."""
    names = ", ".join(f"{name} ({short})" for name, short in DTYPES.items())
    parser.add_argument("--dtype", help=f"precision of the weights: {names}; default: {default}")


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.cost import choose_devices
    from tinyvae.evaluation.evaluating import evaluate
    from tinyvae.evaluation.results import evaluation_table
    from tinyvae.evaluation.round_trip import open_model

    options = data_options(arguments)
    prepare_output(arguments)
    options["split"] = announced_split(arguments)
    devices = choose_devices(arguments.device)
    round_trip = open_model(
        arguments.model,
        variant=arguments.variant,
        device=devices[0],
        dtype=options.pop("dtype"),
        fused=arguments.fused,
    )
    result = evaluate(round_trip, arguments.data, **{**options, "device": devices}, show_progress_bar=True)
    print(evaluation_table([result]))
    report_problems([result])
    publish_results(result, [round_trip], arguments)
    return 0 if result.is_complete else 1


def prepare_output(arguments: argparse.Namespace) -> None:
    """Before any work: the folder for the results can be written."""
    if arguments.output_dir is not None:
        from tinyvae.files import make_output_folder

        make_output_folder(arguments.output_dir)


def announced_split(arguments: argparse.Namespace) -> str | None:
    """The split to take; one that the user did not ask for is said before the work, not after it."""
    from tinyvae.evaluation.clip_sources import choose_split

    split, note = choose_split(arguments.data, data_root=arguments.data_root, wanted=arguments.split)
    if note:
        print(f"note: {note}", file=sys.stderr)
    return split


def data_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `evaluate` and `compare` that the command line gives."""
    lpips: str | None = arguments.lpips if arguments.lpips is not None else "auto"
    if arguments.films < 0:
        raise UserError(f"--films must not be negative, got {arguments.films}.")
    return {
        "device": arguments.device,
        "dtype": parse_dtype(arguments.dtype),
        "lpips": None if lpips == "off" else lpips,
        "max_frames": arguments.max_frames,
        "max_clips": arguments.max_clips,
        "size": parse_size(arguments.size),
        "data_root": arguments.data_root,
    }


def parse_size(text: str | None) -> tuple[int, int] | None:
    """``480x720`` -> (height, width)."""
    if text is None:
        return None
    height, cross, width = text.lower().partition("x")
    if not (cross and height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise UserError(f"--size {text!r} is not a size; write HEIGHTxWIDTH in pixels, e.g. 480x720.")
    return int(height), int(width)


def parse_dtype(text: str | None) -> Any:
    """``float16`` or ``fp16`` -> torch.float16."""
    if text is None:
        return None
    import torch

    name = next((name for name, short in DTYPES.items() if text in (name, short)), None)
    if name is None:
        known = [*DTYPES, *DTYPES.values()]
        raise UserError(f"--dtype {text!r} is not known.{nearest_name(text, known)} Use one of {', '.join(known)}.")
    return getattr(torch, name)


def report_problems(results: list[Any]) -> None:
    """Name on stderr what was skipped and what was not measured."""
    for note in dict.fromkeys(note for result in results for note in result.notes):
        print(f"note: {note}", file=sys.stderr)
    skipped = {clip.name: clip.reason for result in results for clip in result.skipped}
    for reason in skipped.values():
        print(f"skipped: {reason}", file=sys.stderr)
    if skipped:
        names = {clip.name for result in results for clip in (*result.clips, *result.skipped)}
        print(f"{len(skipped)} of {len(names)} videos could not be measured and were skipped.", file=sys.stderr)


def publish_results(result: Any, round_trips: list[Any], arguments: argparse.Namespace) -> None:
    if arguments.output_dir is None:
        return
    from tinyvae.evaluation.cost import command_line
    from tinyvae.evaluation.report import publish
    from tinyvae.files import writing_to

    folder = arguments.output_dir
    with writing_to(folder):
        files = publish(
            result, round_trips, folder, command=command_line(), num_films=arguments.films, show_progress_bar=True
        )
    print("\n" + "\n".join(f"wrote {file}" for file in files))
