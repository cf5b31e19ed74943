"""Train a tiny video autoencoder.

A preset's name or a settings file says what to do; any setting can be changed behind it with --key value.
`tinyvae train PRESET --help` lists every setting with its value there; `tinyvae check PRESET` tries everything out.

Exit codes: 0 the run is complete; 2 something has to be fixed first; 1 another process of the run was lost (or a
bug); 128 + n signal n stopped the run, which is saved.

example:
  tinyvae train quickstart
  tinyvae train h100 --data_root /data/videos --max_train_steps 5000
  tinyvae train my_settings.py --resume latest
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from tinyvae.errors import UserError
from tinyvae.terminal import outlive_readers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tinyvae.config.schema import config_help_text

    parser.add_argument(
        "preset", nargs="?", metavar="PRESET_OR_FILE", help="a preset's name, a settings file or a run's folder"
    )
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--key value", help="settings to change")
    parser.usage = "tinyvae train PRESET_OR_FILE [--key value ...]"
    parser.epilog = f"presets:\n{preset_list()}\n\n{config_help_text()}"


def preset_list() -> str:
    from tinyvae.config.load import preset_names, preset_summary

    return "\n".join(f"  {name:<12}{preset_summary(name).splitlines()[0]}" for name in preset_names())


def help_of(preset_or_file: str, settings: list[str]) -> str:
    """What a preset or file is, and every setting with the value that it would have here."""
    from tinyvae.config.load import load_config, preset_names, preset_summary
    from tinyvae.config.schema import config_help_text

    table = config_help_text(load_config(preset_or_file, settings).config)
    return f"{preset_summary(preset_or_file)}\n\n{table}" if preset_or_file in preset_names() else table


def note_end(exit_code: int, reason: str = "") -> bool:
    """Leave word for the launcher script, where there is one: torchrun says 1 for everything, below which the reason
    is hard to find."""
    note = os.environ.get("TINYVAE_EXIT_NOTE")
    if note:
        Path(note).write_text(f"{exit_code}\n{reason}\n")
    return bool(note)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.config.load import load_config

    outlive_readers()
    if arguments.preset is None:
        raise UserError(
            "say what to train: a preset's name, a settings file or a run's folder, as in `tinyvae train quickstart` "
            f"(it needs no data and no GPU). The presets are:\n{preset_list()}"
        )
    if "-h" in arguments.settings or "--help" in arguments.settings:
        print(help_of(arguments.preset, [word for word in arguments.settings if word not in ("-h", "--help")]))
        return 0
    try:
        loaded = load_config(arguments.preset, arguments.settings)
    except UserError as mistake:
        note_end(2, str(mistake))
        raise
    from tinyvae.training.engine import PeerLostError
    from tinyvae.training.guards import StopRequested
    from tinyvae.training.start import run_training

    command = shlex.join(["tinyvae", "train", arguments.preset, *arguments.settings])
    try:
        finished = run_training(loaded, command=command)
    except StopRequested as stop:
        if not note_end(stop.exit_code):  # the launcher says it, once, when all processes have ended
            print(f"stopped by {stop}; go on with --resume latest", file=sys.stderr)
        return stop.exit_code
    except PeerLostError as lost:
        # Not the user's mistake, and not 2: whoever restarts runs may try this one again.
        print(f"tinyvae: error: {lost}", file=sys.stderr)
        return 1
    except UserError as mistake:
        note_end(2, str(mistake))
        raise
    if finished.is_main:
        print(f"the run is in {finished.folder}")
    return 0
