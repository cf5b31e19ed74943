"""Look at, index and make training data.

  index    list and probe the videos of a folder, JSONL or annotation JSON; run it again to add what is new
  check    say what is in a data set, what a preset would use of it, and draw a contact sheet
  sample   write a set of procedural clips to try things with

example:
  tinyvae data index videos/ -o videos.tvi
  tinyvae data check videos.tvi --preset h100 --contact_sheet sheet.png
  tinyvae data sample sample_clips/
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tinyvae.errors import MissingFileError, UserError

CLIP_FLAGS = ("height", "width", "n_frames", "min_frame_delta", "max_frame_delta")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="index|check|sample")
    index = actions.add_parser("index", help="probe the videos of a data set and write an index")
    index.add_argument("source", type=Path, help="a folder tree, a .jsonl file, or an annotation .json")
    index.add_argument("-o", "--output", type=Path, required=True, metavar="INDEX", help="the index file to write")
    _add_probe_arguments(index)

    check = actions.add_parser("check", help="say what is in a data set and draw a contact sheet")
    check.add_argument("source", type=Path, help="an index, a folder tree, a .jsonl file, or an annotation .json")
    check.add_argument("--preset", metavar="NAME_OR_FILE", help="say what this preset or settings file would use")
    check.add_argument(
        "--contact_sheet",
        type=Path,
        default=Path("contact_sheet.png"),
        metavar="PNG",
        help="where to draw the contact sheet (default: contact_sheet.png)",
    )
    check.add_argument(
        "--samples", type=int, default=18, help="clips on the sheet and in the value ranges (default: 18)"
    )
    check.add_argument("--variant", metavar="NAME", help="hold the clip length against this variant's frame rule")
    for flag in CLIP_FLAGS:
        check.add_argument(f"--{flag}", type=int, metavar="N", help="instead of the preset's value")
    check.add_argument("--train_split", type=float, metavar="SHARE", help="instead of the preset's value")
    _add_probe_arguments(check)

    sample = actions.add_parser("sample", help="write a deterministic set of procedural clips")
    sample.add_argument("folder", type=Path, help="where to write the clips and their annotations.json")
    sample.add_argument("--count", type=int, default=40, help="number of clips (default: 40)")
    sample.add_argument("--height", type=int, default=128, help="height in pixels (default: 128)")
    sample.add_argument("--width", type=int, default=192, help="width in pixels (default: 192)")
    sample.add_argument("--frames", type=int, default=33, help="frames of each clip (default: 33)")
    sample.add_argument("--seed", type=int, default=0, help="another seed, other clips (default: 0)")
    sample.add_argument("--overwrite", action="store_true", help="write over clips that are already there")


def _add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data_root", type=Path, help="folder that relative paths start from (default: beside the file)"
    )
    parser.add_argument("--num_workers", type=int, metavar="N", help="probing processes (default: one per core)")
    parser.add_argument("--timeout_s", type=float, default=30.0, help="deadline for each file (default: 30)")
    parser.add_argument(
        "--thorough", action="store_true", help="decode every frame, to find damage in the middle of files too"
    )


def run(arguments: argparse.Namespace) -> int:
    actions = {"index": run_index, "check": run_check, "sample": run_sample}
    return actions[arguments.action](arguments)


def run_index(arguments: argparse.Namespace) -> int:
    """Build or update an index; 1 when not a single file is good."""
    from tinyvae.data.check import bad_file_lines, summarise
    from tinyvae.data.clip_reading import BadFileLog
    from tinyvae.data.index_build import build_index
    from tinyvae.files import check_output_file

    _check_probe_arguments(arguments)
    check_output_file(arguments.output, option="--output")
    report = build_index(
        arguments.source,
        arguments.output,
        data_root=arguments.data_root,
        num_workers=arguments.num_workers,
        timeout_s=arguments.timeout_s,
        thorough=arguments.thorough,
    )
    print(report.sentence())
    index = report.index
    bad_list = arguments.output.with_name(arguments.output.name + ".bad_files.jsonl")
    bad_list.unlink(missing_ok=True)
    if index.num_bad:
        BadFileLog(bad_list).add_index(index)
        bad = ((row.path, row.reason) for row in index.bad_rows())
        print("\n".join(bad_file_lines(bad, summarise(index).bad_kinds)))
        print(f"all of them are in {bad_list}")
    return 1 if index.num_bad == len(index) else 0


def run_check(arguments: argparse.Namespace) -> int:
    """Print the tables and draw the sheet; 1 when the data cannot be trained on as asked."""
    from tinyvae.cli.data_check import planned_use, print_check
    from tinyvae.data.index import is_index, open_index
    from tinyvae.data.index_build import build_index
    from tinyvae.files import check_output_file

    _check_probe_arguments(arguments)
    if arguments.samples < 1:
        raise UserError(f"--samples is {arguments.samples}; the sheet needs at least 1 clip")
    if not arguments.source.exists():
        raise MissingFileError(f"the data source {arguments.source} does not exist; give an index, a folder or a list")
    check_output_file(arguments.contact_sheet, option="--contact_sheet", suffix=".png")
    use = planned_use(arguments)
    if is_index(arguments.source):
        return print_check(open_index(arguments.source, arguments.data_root), use, arguments)
    with tempfile.TemporaryDirectory(prefix="tinyvae_check_") as folder:
        report = build_index(
            arguments.source,
            Path(folder) / "check.tvi",
            data_root=arguments.data_root,
            num_workers=arguments.num_workers,
            timeout_s=arguments.timeout_s,
            thorough=arguments.thorough,
        )
        return print_check(report.index, use, arguments)


def run_sample(arguments: argparse.Namespace) -> int:
    from tinyvae.data.sample_clips import write_sample_clips
    from tinyvae.files import make_output_folder, writing_to

    make_output_folder(arguments.folder, option="the folder")
    with writing_to(arguments.folder):
        write_sample_clips(
            arguments.folder,
            count=arguments.count,
            height=arguments.height,
            width=arguments.width,
            frames=arguments.frames,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
        )
    print(f"wrote {arguments.count} clips and annotations.json to {arguments.folder}")
    return 0


def _check_probe_arguments(arguments: argparse.Namespace) -> None:
    if arguments.num_workers is not None and arguments.num_workers < 0:
        raise UserError(f"--num_workers is {arguments.num_workers}; it must be at least 0")
    if arguments.timeout_s <= 0:
        raise UserError(f"--timeout_s is {arguments.timeout_s}; it must be above 0")
    if arguments.data_root is not None and not arguments.data_root.is_dir():
        raise MissingFileError(f"--data_root {arguments.data_root} is not a folder")
