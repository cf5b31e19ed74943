"""Train a tiny video autoencoder.

A preset's name or a settings file says what to do; any setting can be changed with --key value, in any order.
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
from collections.abc import Sequence
from pathlib import Path

from tinyvae.errors import UserError
from tinyvae.terminal import outlive_readers

SWITCH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tinyvae.config.schema import config_help_text

    parser.add_argument("-h", "--help", action="store_true", help="show this text, or with a preset its settings")
    parser.usage = "tinyvae train PRESET_OR_FILE [--key value ...]"
    parser.epilog = f"presets:\n{preset_list()}\n\n{config_help_text()}"
    parser.set_defaults(parser=parser)


def preset_list() -> str:
    from tinyvae.config.load import preset_names, preset_summary

    return "\n".join(f"  {name:<12}{preset_summary(name).splitlines()[0]}" for name in preset_names())


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the preset or file, the settings), from words in any order.

    Example: ``--data_root videos quickstart`` gives ``("quickstart", ["--data_root", "videos"])``.
    """
    from tinyvae.config.load import preset_names
    from tinyvae.config.schema import TrainConfig

    defaults, names, settings = TrainConfig(), [], []
    default: object = None  # of the last --key
    num_values = 0  # how many of the next words can belong to it
    for word in words:
        if word.startswith("--"):
            key, equals, _ = word[2:].partition("=")
            default = getattr(defaults, key.replace("-", "_"), None)
            num_values = len(default) if isinstance(default, tuple) else 1
            if equals or key.startswith(("no-", "no_")):
                num_values = 0
            settings.append(word)
        elif num_values and (not isinstance(default, bool) or word.lower() in SWITCH_WORDS):
            num_values -= 1
            settings.append(word)
        else:
            names.append(word)
    if len(names) > 1:
        known = ", ".join(preset_names())
        raise UserError(
            f"{' and '.join(map(repr, names))} were given: name one preset or settings file, and write settings as "
            f"--key value. The presets are {known}."
        )
    return (names[0] if names else None), settings


def required_preset(preset: str | None, verb: str) -> str:
    if preset is None:
        raise UserError(
            f"say what to {verb}: a preset's name, a settings file or a run's folder, as in "
            f"`tinyvae {verb} quickstart` (it needs no data and no GPU). The presets are:\n{preset_list()}"
        )
    return preset


def help_of(preset_or_file: str, settings: list[str]) -> str:
    """What a preset or file is, and every setting with the value that it would have here."""
    from tinyvae.config.load import load_config, preset_names, preset_summary
    from tinyvae.config.schema import config_help_text

    table = config_help_text(load_config(preset_or_file, settings).config)
    return f"{preset_summary(preset_or_file)}\n\n{table}" if preset_or_file in preset_names() else table


def note_end(exit_code: int, reason: str = "") -> bool:
    """Tell the launcher script, where there is one, how the run ended: torchrun's own exit code is always 1."""
    note = os.environ.get("TINYVAE_EXIT_NOTE")
    if note:
        Path(note).write_text(f"{exit_code}\n{reason}\n")
    return bool(note)


def run(arguments: argparse.Namespace) -> int:
    outlive_readers()
    preset, settings = split_words(arguments.words)
    if arguments.help and preset is not None:
        print(help_of(preset, settings))
        return 0
    if arguments.help:
        arguments.parser.print_help()
        arguments.parser.exit()
    try:
        return train(required_preset(preset, "train"), settings)
    except UserError as mistake:
        note_end(2, str(mistake))
        raise


def train(preset: str, settings: list[str]) -> int:
    from tinyvae.config.load import load_config

    loaded = load_config(preset, settings)
    from tinyvae.training.engine import PeerLostError
    from tinyvae.training.guards import StopRequested
    from tinyvae.training.start import run_training

    try:
        finished = run_training(loaded, command=shlex.join(["tinyvae", "train", preset, *settings]))
    except StopRequested as stop:
        if not note_end(stop.exit_code):  # the launcher says it, once, when all processes have ended
            print(f"stopped by {stop}; go on with --resume latest", file=sys.stderr)
        return stop.exit_code
    except PeerLostError as lost:
        # Not the user's mistake, and not 2: whoever restarts runs may try this one again.
        print(f"tinyvae: error: {lost}", file=sys.stderr)
        return 1
    if finished.is_main:
        print(f"the run is in {finished.folder}")
    return 0
