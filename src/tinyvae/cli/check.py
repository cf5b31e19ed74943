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
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.options import number
from tinyvae.cli.train import only_preset
from tinyvae.config.load import load_config, parse_words
from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.config.schema import TrainConfig
    from tinyvae.training.preflight import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tinyvae check PRESET_OR_FILE [options] [--key value ...]"
    parser.add_argument("-h", "--help", action="help", help="show this text")
    gpus = "processes on this machine (default: all visible GPUs, or 1)"
    launch = "the launch configuration (accelerate_configs/*.yaml) that the run will use"
    port = "where the processes meet (default: MASTER_PORT or 29500, where there are several); 0 is any"
    quick = "only what the run itself would refuse at its start, without a table"
    parser.add_argument("--gpus", type=number(int, 1), metavar="N", help=gpus)
    parser.add_argument("--launch", type=Path, metavar="FILE", help=launch)
    parser.add_argument("--port", type=number(int, 0, 65535), metavar="N", help=port)
    parser.add_argument("--no_step", "--no-step", action="store_true", help="leave out the real step")
    parser.add_argument("--quick", action="store_true", help=quick)


def meeting_port(named: int | None, processes: int) -> int | None:
    """Where the processes meet; None where there is only one."""
    if named is not None or processes == 1:
        return named
    stated = os.environ.get("MASTER_PORT", "29500")
    if not stated.isdigit() or not 0 < int(stated) < 65536:
        raise UserError(f"MASTER_PORT must be a number from 1 to 65535, not {stated!r}.")
    return int(stated)


def extra_checks(num_gpus: int | None, config: TrainConfig) -> Iterator[Check]:
    """Lines that `preflight` does not have: GPUs that were asked for, the checkpoint of ``--resume``, the folder."""
    import torch

    from tinyvae.training.preflight import Check
    from tinyvae.training.resume import asked_checkpoint

    if num_gpus not in (None, 1) and not torch.cuda.is_available() and not os.environ.get("USE_CPU"):
        fix = f"{num_gpus} wanted: try it on the machine that has them, or set USE_CPU=1 to train on the CPU"
        yield Check(name="GPUs", found="none is visible here", fix=fix)
    asked, checkpoint = config.resume_from_checkpoint, None
    if asked is not None:
        try:
            checkpoint, faults = asked_checkpoint(asked, config)
        except UserError as mistake:
            yield Check(name="resume", found=asked, fix=str(mistake))
            return
        damaged = f"; damaged and passed over: {'; '.join(faults)}" if faults else ""
        yield Check(name="resume", found=f"{checkpoint} is whole{damaged}")
    if fix := folder_refusal(config, checkpoint):
        yield Check(name="folder", found=str(config.output_dir), fix=fix)


def folder_refusal(config: TrainConfig, checkpoint: Path | None) -> str:
    """Why the run may not write into its folder, by the rule of the run itself; empty where it may."""
    from tinyvae.training.run_folder import has_time, new_run_folder, why_taken

    if checkpoint is not None and has_time(config.output_dir):  # it goes on in its own folder, or in a new one
        return ""
    return why_taken(new_run_folder(config.output_dir, datetime.now()), checkpoint)


def run(arguments: argparse.Namespace) -> int:
    names, settings = parse_words(arguments.words)
    loaded = load_config(only_preset(names, "check"), settings)

    from tinyvae.training.deepspeed import read_launch_file

    launch = read_launch_file(arguments.launch) if arguments.launch else None
    if arguments.quick:
        from tinyvae.training.resume import asked_checkpoint
        from tinyvae.training.start import check_before_start

        check_before_start(loaded)
        asked = loaded.config.resume_from_checkpoint
        checkpoint = None if asked is None else asked_checkpoint(asked, loaded.config)[0]
        if refusal := folder_refusal(loaded.config, checkpoint):
            raise UserError(f"{refusal}.")
        if launch is not None:
            launch.check(loaded.config)
        return 0

    import torch

    from tinyvae.training.preflight import preflight, print_table

    processes = arguments.gpus or torch.cuda.device_count() or 1
    port = meeting_port(arguments.port, processes)
    given, with_step = loaded.given_paths, not arguments.no_step
    checks = list(extra_checks(arguments.gpus, loaded.config))
    checks += preflight(loaded.config, given, processes=processes, port=port, launch=launch, with_step=with_step)
    for notice in loaded.notices:
        print(f"note: {notice}")
    print_table(checks)
    failed = [check for check in checks if not check.passes]
    need = "needs" if len(failed) == 1 else "need"
    print(f"\n{len(failed)} of {len(checks)} lines {need} a fix" if failed else "\nready to train")
    return 1 if failed else 0
