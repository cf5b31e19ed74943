"""Try everything out before a long run: GPUs, packages, data, weights, rules, disk, port, and one real step.

Prints a table with a tick or the fix for each line. The exit code is 0 only if all is well. The settings are those of
`tinyvae train`: a preset or a settings file, and --key value, in any order.

example:
  tinyvae check quickstart
  tinyvae check h100 --gpus 8 --launch accelerate_configs/ddp_8gpu.yaml --data_root /data/videos
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.options import number
from tinyvae.cli.train import required_preset, split_words
from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.config.schema import TrainConfig
    from tinyvae.training.preflight import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tinyvae check PRESET_OR_FILE [options] [--key value ...]"
    parser.add_argument("-h", "--help", action="help", help="show this text")
    parser.add_argument(
        "--gpus", type=number(int, 1), metavar="N", help="processes on this machine (default: all visible GPUs, or 1)"
    )
    parser.add_argument(
        "--launch",
        type=Path,
        metavar="FILE",
        help="the launch configuration (accelerate_configs/*.yaml) that the run will use",
    )
    parser.add_argument(
        "--port",
        type=number(int, 0, 65535),
        metavar="N",
        help="where the processes meet (default: MASTER_PORT or 29500, where there are several); 0 is any",
    )
    parser.add_argument("--no_step", "--no-step", action="store_true", help="leave out the real step")
    parser.add_argument(
        "--quick", action="store_true", help="only what the run itself would refuse at its start, without a table"
    )


def meeting_port(named: int | None, processes: int) -> int | None:
    """Where the processes meet; None where there is only one."""
    if named is not None or processes == 1:
        return named
    stated = os.environ.get("MASTER_PORT", "29500")
    if not stated.isdigit() or not 0 < int(stated) < 65536:
        raise UserError(f"MASTER_PORT must be a number from 1 to 65535, not {stated!r}.")
    return int(stated)


def wanted_gpus(num_gpus: int | None) -> list[Check]:
    """A line where several GPUs are asked for and there is none: `preflight` itself accepts the CPU."""
    import torch

    from tinyvae.training.preflight import Check

    if num_gpus in (None, 1) or torch.cuda.is_available() or os.environ.get("USE_CPU"):
        return []  # one process can run on a CPU
    fix = f"{num_gpus} wanted: try it on the machine that has them, or set USE_CPU=1 to train on the CPU"
    return [Check(name="GPUs", found="none is visible here", fix=fix)]


def checkpoint_to_resume(config: TrainConfig) -> list[Check]:
    """A line for the checkpoint that ``--resume`` asks for."""
    from tinyvae.training.preflight import Check
    from tinyvae.training.resume import asked_checkpoint

    asked = config.resume_from_checkpoint
    if asked is None:
        return []
    try:
        folder, faults = asked_checkpoint(asked, config)
    except UserError as mistake:
        return [Check(name="resume", found=asked, fix=str(mistake))]
    damaged = f"; damaged and passed over: {'; '.join(faults)}" if faults else ""
    return [Check(name="resume", found=f"{folder} is whole{damaged}")]


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.config.load import load_config
    from tinyvae.training.deepspeed import read_launch_file

    preset, settings = split_words(arguments.words)
    loaded = load_config(required_preset(preset, "check"), settings)
    launch = read_launch_file(arguments.launch) if arguments.launch else None
    if arguments.quick:
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

    processes = arguments.gpus or torch.cuda.device_count() or 1
    checks = wanted_gpus(arguments.gpus) + checkpoint_to_resume(loaded.config)
    checks += preflight(
        loaded.config,
        loaded.given_paths,
        processes=processes,
        port=meeting_port(arguments.port, processes),
        launch=launch,
        with_step=not arguments.no_step,
    )
    for notice in loaded.notices:
        print(f"note: {notice}")
    print_table(checks)
    failed = [check for check in checks if not check.passes]
    print(f"\n{len(failed)} of {len(checks)} lines need a fix" if failed else "\nready to train")
    return 1 if failed else 0
