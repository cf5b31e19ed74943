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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", metavar="PRESET_OR_FILE", help="what `tinyvae train` would be given")
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--key value", help="settings and options")


def own_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the options of `check`, the settings of the run)."""
    parser = argparse.ArgumentParser(prog="tinyvae check", add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--launch", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--no_step", "--no-step", action="store_true")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_known_args(words)


def run(arguments: argparse.Namespace) -> int:
    if "-h" in arguments.settings or "--help" in arguments.settings:
        print(__doc__)
        return 0
    from tinyvae.config_files.loading import load_config
    from tinyvae.errors import UserError
    from tinyvae.training.launch_config import LAUNCH_FILE_VARIABLE, read_launch_file

    options, settings = own_options(arguments.settings)
    loaded = load_config(arguments.preset, settings)
    named = options.launch or os.environ.get(LAUNCH_FILE_VARIABLE)
    launch = read_launch_file(Path(named)) if named else None
    if options.quick:
        from tinyvae.training.resume import find_checkpoint
        from tinyvae.training.start import check_before_start

        check_before_start(loaded)
        if loaded.config.resume_from_checkpoint is not None:
            find_checkpoint(loaded.config.resume_from_checkpoint, loaded.config)
        clashes = [] if launch is None else launch.disagreements(loaded.config)
        if clashes:
            raise UserError(f"{'; '.join(clashes)}.")
        return 0

    import torch

    from tinyvae.training.preflight import preflight, print_table

    processes = options.gpus or torch.cuda.device_count() or 1
    port = options.port
    if port is None and processes > 1:
        port = int(os.environ.get("MASTER_PORT", "29500"))
    checks = preflight(
        loaded.config,
        loaded.given_paths,
        processes=processes,
        port=port,
        launch=launch,
        with_step=not options.no_step,
    )
    for notice in loaded.notices:
        print(f"note: {notice}")
    print_table(checks)
    failed = [check for check in checks if not check.passes]
    print(f"\n{len(failed)} of {len(checks)} lines need a fix" if failed else "\nready to train")
    return 1 if failed else 0
