"""Measure a model on videos: quality, flicker, speed and memory, as numbers and as a page to look at.

MODEL is a weights file, a model, checkpoint or run folder, or a diffusers VAE folder. DATA is a folder of videos, one
video, an annotation file (.json, .jsonl) or an index of `tinyvae data index`. Where the data has splits, the videos
annotated as val are taken, unless --split says otherwise. Every frame is streamed through the model in constant memory
and compared with its input frame. With --output, results.json and report.html are written.

With --teacher FOLDER (a diffusers VAE) three more round trips of the same frames stand beside the model's own: the
teacher's; the teacher's latents decoded by the model; the model's latents decoded by the teacher. You also see how much
faster than the teacher the model encodes and decodes.

example:
  tinyvae eval output/my_run --data videos/val --output output/my_run/eval
  tinyvae eval output/my_run --teacher CogVideoX-2b/vae --data videos/val --output output/my_run/eval
  tinyvae eval taew2_2.pth --data clips.jsonl --split test --frames 49 --size 480x720

exit code: 0 all videos measured; 1 some were skipped or gave no numbers (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyvae.cli.options import MODEL, add_options, number, place


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}, or a diffusers VAE folder")
    add_options(parser, "--variant")
    add_data_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """What eval and compare share."""
    what = "folder, video, annotations or index; a path or a URL"
    parser.add_argument("--data", type=place, required=True, metavar="DATA", help=what)
    add_options(parser, "--output", help="folder for results.json and report.html")
    add_options(parser, "--device", help="cpu, cuda, cuda:1 or cuda:0,cuda:1; default: every GPU, else the CPU")
    teacher = "diffusers VAE folder or hub name of its teacher: show decoder and encoder beside it, each alone"
    parser.add_argument("--teacher", metavar="FOLDER", help=teacher)
    add_options(parser, "--data_root", "--split", "--frames", "--size", "--dtype", "--fused")
    clips = "at most this many videos, evenly spread"
    parser.add_argument("--max_clips", type=number(int, 1), metavar="N", help=clips)
    parser.add_argument("--lpips", metavar="FILE", help="LPIPS weights; 'off' leaves the metric out; default: as found")
    films = "clips shown as films (default 6)"
    parser.add_argument("--films", type=number(int, 0), default=6, metavar="N", help=films)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.compare import compare
    from tinyvae.evaluation.evaluating import evaluate
    from tinyvae.evaluation.results import result_text

    round_trips, settings = open_models(arguments, [(arguments.model, arguments.variant)])
    if arguments.teacher is None:
        result: Any = evaluate(round_trips[0], arguments.data, **settings)
    else:
        result = compare(round_trips, arguments.data, **settings)
    print(result_text(result))
    return finish(result, round_trips, arguments)


def open_models(
    arguments: argparse.Namespace, models: Sequence[tuple[str, str | None]]
) -> tuple[list[Any], dict[str, Any]]:
    """(the models, on the first device; what `evaluate` and `compare` take besides). Checks folder and data first.

    With --teacher the models are the teacher and what stands beside it.
    """
    from tinyvae.evaluation.clip_sources import choose_split
    from tinyvae.evaluation.cost import choose_devices
    from tinyvae.evaluation.round_trip import is_teacher, open_model
    from tinyvae.evaluation.teacher_figures import beside_teacher, open_teacher
    from tinyvae.files import make_output_folder

    if arguments.output is not None:
        make_output_folder(arguments.output)
    split, note = choose_split(arguments.data, data_root=arguments.data_root, wanted=arguments.split)
    if note:
        print(f"note: {note}", file=sys.stderr)
        split = split or "all"  # so that nobody chooses again, and says it again
    devices = choose_devices(arguments.device)
    settings = {
        "split": split,
        "device": devices,
        "lpips": None if arguments.lpips in ("off", "none") else arguments.lpips or "auto",
        "max_frames": arguments.frames,
        "max_clips": arguments.max_clips,
        "size": arguments.size,
        "data_root": arguments.data_root,
        "show_progress_bar": True,
    }
    opened = []
    for path, variant in models:
        # A single VAE cannot be fused, and `open_model` says so; beside other models --fused is meant for those.
        fused = arguments.fused and not (len(models) > 1 and is_teacher(Path(path)))
        opened.append(open_model(path, variant=variant, device=devices[0], dtype=arguments.dtype, fused=fused))
    if arguments.teacher is not None:
        teacher = open_teacher(arguments.teacher, opened, device=devices[0], dtype=arguments.dtype)
        opened = beside_teacher(opened, teacher)
    return opened, settings


def finish(result: Any, round_trips: list[Any], arguments: argparse.Namespace) -> int:
    """Say on stderr what was skipped and what was not measured, and write the files; returns the exit code."""
    evaluations = result.evaluations
    for note in dict.fromkeys(note for evaluation in evaluations for note in evaluation.notes):
        print(f"note: {note}", file=sys.stderr)
    skipped = {clip.name: clip.reason for evaluation in evaluations for clip in evaluation.skipped}
    for reason in skipped.values():
        print(f"skipped: {reason}", file=sys.stderr)
    if skipped:
        names = {clip.name for evaluation in evaluations for clip in (*evaluation.clips, *evaluation.skipped)}
        print(f"{len(skipped)} of {len(names)} videos could not be measured and were skipped.", file=sys.stderr)
    if arguments.output is not None:
        from tinyvae.evaluation.cost import command_line
        from tinyvae.evaluation.report import publish
        from tinyvae.files import writing_to

        with writing_to(arguments.output):
            how = {"command": command_line(), "num_films": arguments.films, "show_progress_bar": True}
            files = publish(result, round_trips, arguments.output, **how)
        print("\n" + "\n".join(f"wrote {file}" for file in files))
    return 0 if result.is_complete else 1
