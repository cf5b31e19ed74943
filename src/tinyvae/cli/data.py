"""Look at, index and make training data.

  index    list and probe the videos of a folder, JSONL or annotation JSON; run it again to add what is new
  check    say what is in a data set, what a preset would use of it, and draw a contact sheet
  sample   write a set of procedural clips to try things with

example:
  tinyvae data index videos/ --output videos.tvi
  tinyvae data index s3://bucket/videos --output s3://bucket/videos.tvi
  tinyvae data check videos.tvi --preset h100 --contact_sheet sheet.png
  tinyvae data sample sample_clips/
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvae.cli.options import OldWord, add_options, local_path, number, place
from tinyvae.errors import MissingFileError, UserError
from tinyvae.storage import Url, local_file, upload, work_folder

if TYPE_CHECKING:
    from tinyvae.data.check import PlannedUse
    from tinyvae.data.index_build import BuildReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="index|check|sample")

    def add_action(name: str, does: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
        action.set_defaults(parser=action)
        return action

    index = add_action("index", "probe the videos of a data set and write an index")
    index.add_argument("source", type=place, help="a folder tree, a .jsonl file, or an annotation .json; or its URL")
    add_options(
        index, "--output", type=place, required=True, metavar="INDEX", help="the index file to write, or its URL"
    )
    add_options(index, "--ray")
    _add_probe_arguments(index)

    check = add_action("check", "say what is in a data set and draw a contact sheet")
    check.add_argument(
        "source", type=place, help="an index, a folder tree, a .jsonl file, or an annotation .json; or its URL"
    )
    check.add_argument("--preset", metavar="NAME_OR_FILE", help="say what this preset or settings file would use")
    sheet = Path("contact_sheet.png")
    check.add_argument("--contact_sheet", type=Path, default=sheet, metavar="PNG", help=f"picture (default: {sheet})")
    clips = "clips on the contact sheet (default: 18)"
    check.add_argument("--samples", type=number(int, 1), default=18, metavar="N", help=clips)
    add_options(check, "--variant", help="compare the clip length with this variant's frame rule")
    _add_clip_size(check, help="clip size, instead of the preset's")
    add_options(check, "--frames", help="frames of a clip, instead of the preset's")
    for flag in ("min_frame_delta", "max_frame_delta"):
        check.add_argument(f"--{flag}", type=int, metavar="N", help="instead of the preset's value")
    check.add_argument("--train_split", type=float, metavar="SHARE", help="instead of the preset's value")
    _add_probe_arguments(check)

    sample = add_action("sample", "write a deterministic set of procedural clips")
    sample.add_argument("folder", type=local_path, help="where to write the clips and their annotations.json")
    sample.add_argument("--count", type=int, default=40, metavar="N", help="number of clips (default: 40)")
    _add_clip_size(sample, help="size of each clip (default: 128x192)")
    add_options(sample, "--frames", default=33, help="frames of each clip (default: 33)")
    sample.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other clips (default: 0)")
    add_options(sample, "--overwrite")


def _add_clip_size(parser: argparse.ArgumentParser, *, help: str) -> None:
    add_options(parser, "--size", help=help)
    for side in ("height", "width"):
        parser.add_argument(f"--{side}", type=int, action=OldWord, new="--size HxW")


def _clip_size(arguments: argparse.Namespace) -> dict[str, int]:
    """Height and width as far as they are given."""
    sides = dict(zip(("height", "width"), arguments.size or (None, None), strict=True))
    given = {side: getattr(arguments, side) or value for side, value in sides.items()}
    return {side: value for side, value in given.items() if value is not None}


def _add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--data_root", "--workers")
    deadline = "deadline for each file (default: 30)"
    parser.add_argument("--timeout_s", type=number(float, 0.001), default=30.0, metavar="SECONDS", help=deadline)
    parser.add_argument("--thorough", action="store_true", help="decode every frame, to find damage anywhere in a file")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "sample":
        return run_sample(arguments)
    if arguments.data_root is not None and not arguments.data_root.is_dir():
        raise MissingFileError(f"--data_root {arguments.data_root} is not a folder")
    return run_index(arguments) if arguments.action == "index" else run_check(arguments)


def run_index(arguments: argparse.Namespace) -> int:
    """Build or update an index; 1 when not a single file is good."""
    from tinyvae.data.check import bad_file_lines
    from tinyvae.data.clip_reading import BadFileLog
    from tinyvae.data.ray_cluster import check_address
    from tinyvae.files import check_output_file, writing_to

    if arguments.ray is not None:
        if arguments.workers == 0:
            raise UserError("--workers 0 probes in this process, and --ray on a cluster; leave one of them out")
        check_address(arguments.ray)  # before the source is read, which may take long
    output = arguments.output if isinstance(arguments.output, Path) else _fetch_index(arguments.output)
    check_output_file(output, option="--output")
    with writing_to(output.parent):
        report = _build(arguments, output, ray=arguments.ray)
    print(report.sentence())
    index = report.index
    bad_list = output.with_name(output.name + ".bad_files.jsonl")
    bad_list.unlink(missing_ok=True)
    if index.num_bad:
        BadFileLog(bad_list).add_index(index)
        print("\n".join(bad_file_lines(index)))
        print(f"all of them are in {bad_list}")
    if isinstance(arguments.output, Url):
        upload(output, arguments.output)
        print(f"copied to {arguments.output}")
    return 1 if index.num_bad == len(index) else 0


def _fetch_index(url: Url) -> Path:
    """Where an index that goes to a URL is made on this machine, with what is at the URL already."""
    folder = work_folder(url)
    folder.mkdir(parents=True, exist_ok=True)
    if url.is_file():
        shutil.copyfile(local_file(url), folder / url.name)
    return folder / url.name


def run_check(arguments: argparse.Namespace) -> int:
    """Print the tables and draw the sheet; 1 when the data cannot be trained on as asked."""
    from tinyvae.data.check import print_check
    from tinyvae.data.index import is_index, open_index
    from tinyvae.files import check_output_file

    if not arguments.source.exists():
        raise MissingFileError(f"the data source {arguments.source} does not exist; give an index, a folder or a list")
    check_output_file(arguments.contact_sheet, option="--contact_sheet", suffix=".png")
    use = _planned_use(arguments)
    with tempfile.TemporaryDirectory(prefix="tinyvae_check_") as folder:
        if is_index(arguments.source):
            index = open_index(arguments.source, arguments.data_root)
        else:
            index = _build(arguments, Path(folder) / "check.tvi").index
        title, sheet = str(arguments.source), arguments.contact_sheet
        is_usable = print_check(index, use, title=title, num_samples=arguments.samples, sheet=sheet)
    return 0 if is_usable else 1


def run_sample(arguments: argparse.Namespace) -> int:
    from tinyvae.data.sample_clips import write_sample_clips
    from tinyvae.files import make_output_folder, writing_to

    make_output_folder(arguments.folder, option="the folder")
    with writing_to(arguments.folder):
        write_sample_clips(
            arguments.folder,
            count=arguments.count,
            frames=arguments.frames,
            seed=arguments.seed,
            overwrite=arguments.overwrite,
            **_clip_size(arguments),
        )
    print(f"wrote {arguments.count} clips and annotations.json to {arguments.folder}")
    return 0


def _build(arguments: argparse.Namespace, output: Path, *, ray: str | None = None) -> BuildReport:
    from tinyvae.data.index_build import build_index

    return build_index(
        arguments.source,
        output,
        data_root=arguments.data_root,
        num_workers=arguments.workers,
        ray=ray,
        timeout_s=arguments.timeout_s,
        thorough=arguments.thorough,
    )


def _planned_use(arguments: argparse.Namespace) -> PlannedUse:
    """The preset (or the defaults of training), with the flags put over it."""
    from tinyvae.config import load_config
    from tinyvae.config.schema import TrainConfig
    from tinyvae.data.check import PlannedUse
    from tinyvae.data.clip import ClipSettings
    from tinyvae.data.sizes import with_size
    from tinyvae.training.clips import validation_settings

    names = ("min_frame_delta", "max_frame_delta", "train_split", "variant")
    given = {"n_frames": arguments.frames} | {name: getattr(arguments, name) for name in names}
    changes = _clip_size(arguments) | {name: value for name, value in given.items() if value is not None}
    if "min_frame_delta" in changes and "max_frame_delta" not in changes:
        default = TrainConfig() if arguments.preset is None else load_config(arguments.preset).config
        changes["max_frame_delta"] = max(changes["min_frame_delta"], default.max_frame_delta)
    if arguments.preset is None:
        # Not a run: only the clip matters, so rules between the other settings of a run do not apply.
        config: Any = TrainConfig(**changes)
        name = "the default settings" if not changes else "the flags given"
    else:
        config = load_config(arguments.preset, changes).config
        name = f"preset {arguments.preset}"
    return PlannedUse(
        name=name,
        settings=with_size(ClipSettings.from_config(config), config.sizes.bounds),
        validation=None if arguments.preset is None else validation_settings(config),
        train_split=config.train_split,
        split_by=config.split_by,
        bad_file_limit=config.bad_file_limit,
        samples_per_step=config.train_batch_size * config.gradient_accumulation_steps,
        variant=config.variant if arguments.preset is not None else arguments.variant,
    )
