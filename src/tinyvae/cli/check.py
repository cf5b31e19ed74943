"""Try everything out before a long run: GPUs, packages, data, weights, rules, disk, port, and one real step.

Prints a table with a tick or the fix for each line. The exit code is 0 only if all is well. The settings are those of
`tinyvae train`: a preset or a settings file, then --key value.

options of its own:
  --gpus N       processes on this machine (default: all visible GPUs, or 1)
  --launch FILE  the launch configuration (accelerate_configs/*.yaml) that the run will use
  --port N       where the processes meet (default: MASTER_PORT or 29500, where there are several)
  --no_step      leave out the real step
  --quick        only what the run itself would refuse at its start, without a table

example:
  tinyvae check quickstart
  tinyvae check h100 --gpus 8 --launch accelerate_configs/ddp_8gpu.yaml --data_root /data/videos
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyvae.config.schema import TrainConfig
    from tinyvae.training.preflight import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", metavar="PRESET_OR_FILE", help="what `tinyvae train` would be given")
    parser.add_argument(
        "settings", nargs=argparse.REMAINDER, metavar="--key value", help="settings and options"
    ).required = False  # else the preset's absence is told as that of the settings too


def own_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the options of `check`, the settings of the run)."""
    parser = argparse.ArgumentParser(prog="tinyvae check", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--launch", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--no_step", "--no-step", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options, settings = parser.parse_known_args(words)
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus must be at least 1, not {options.gpus}")
    if options.port is not None and not 0 <= options.port < 65536:
        parser.error(f"--port must be from 0 (any) to 65535, not {options.port}")
    return options, settings


def meeting_port(options: argparse.Namespace, processes: int) -> int | None:
    """Where the processes meet; None where there is only one."""
    from tinyvae.errors import UserError

    if options.port is not None or processes == 1:
        return options.port
    stated = os.environ.get("MASTER_PORT", "29500")
    if not stated.isdigit() or not 0 < int(stated) < 65536:
        raise UserError(f"MASTER_PORT must be a number from 1 to 65535, not {stated!r}.")
    return int(stated)


def wanted_gpus(options: argparse.Namespace) -> list[Check]:
    """A line where several GPUs are asked for and there is none: the table itself would be content with the CPU."""
    import torch

    from tinyvae.training.preflight import Check

    if options.gpus in (None, 1) or torch.cuda.is_available() or os.environ.get("USE_CPU"):
        return []  # one process is at home on a CPU
    fix = f"{options.gpus} wanted: try it on the machine that has them, or set USE_CPU=1 to train on the CPU"
    return [Check(name="GPUs", found="none is visible here", fix=fix)]


def checkpoint_to_resume(config: TrainConfig) -> list[Check]:
    """A line for the checkpoint that ``--resume`` asks for."""
    from tinyvae.errors import UserError
    from tinyvae.training.preflight import Check
    from tinyvae.training.resume import asked_checkpoint

    asked = config.resume_from_checkpoint
    if asked is None:
        return []
    try:
        found = asked_checkpoint(asked, config)
    except UserError as mistake:
        return [Check(name="resume", found=asked, fix=str(mistake))]
    damaged = f"; damaged and passed over: {'; '.join(found.passed_over)}" if found.passed_over else ""
    return [Check(name="resume", found=f"{found.folder} is whole{damaged}")]


def run(arguments: argparse.Namespace) -> int:
    if "-h" in arguments.settings or "--help" in arguments.settings:
        print(__doc__)
        return 0
    from tinyvae.config.load import load_config
    from tinyvae.training.deepspeed import read_launch_file

    options, settings = own_options(arguments.settings)
    loaded = load_config(arguments.preset, settings)
    launch = read_launch_file(options.launch) if options.launch else None
    if options.quick:
        from tinyvae.training.resume import asked_checkpoint
        from tinyvae.training.start import check_before_start

        check_before_start(loaded)
        if loaded.config.resume_from_checkpoint is not None:
            asked_checkpoint(loaded.config.resume_from_checkpoint, loaded.config)
        if launch is not None:
            launch.check(loaded.config)
        return 0

    import torch

    from tinyvae.training.preflight import preflight, print_table

    processes = options.gpus or torch.cuda.device_count() or 1
    checks = wanted_gpus(options) + checkpoint_to_resume(loaded.config)
    checks += preflight(
        loaded.config,
        loaded.given_paths,
        processes=processes,
        port=meeting_port(options, processes),
        launch=launch,
        with_step=not options.no_step,
    )
    for notice in loaded.notices:
        print(f"note: {notice}")
    print_table(checks)
    failed = [check for check in checks if not check.passes]
    print(f"\n{len(failed)} of {len(checks)} lines need a fix" if failed else "\nready to train")
    return 1 if failed else 0
