"""Train a tiny video autoencoder.

A preset's name or a settings file says what to do; any setting can be changed with --key value, in any order.
`tinyvae train PRESET --help` lists every setting with its value there; `tinyvae check PRESET` tries everything out.

Exit codes: 0 the run is complete; 2 something has to be fixed first; 1 another process of the run was lost (or a
bug); 128 + n signal n stopped the run, which is saved.

example:
  tinyvae train quickstart
  tinyvae train h100 --data_root /data/videos --max_train_steps 5000
  tinyvae train distill --teacher CogVideoX-2b --data_root /data/videos
  tinyvae train my_settings.py --resume latest
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from pathlib import Path

from tinyvae.config.load import LoadedConfig, load_config, parse_words, preset_names, preset_summary
from tinyvae.config.schema import config_help_text
from tinyvae.errors import UserError
from tinyvae.heap import no_collections
from tinyvae.terminal import outlive_readers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="store_true", help="show this text, or with a preset its settings")
    parser.usage = "tinyvae train PRESET_OR_FILE [--key value ...]"
    parser.epilog = f"presets:\n{preset_list()}\n\n{config_help_text()}"
    parser.set_defaults(parser=parser)


def preset_list() -> str:
    return "\n".join(f"  {name:<12}{preset_summary(name).splitlines()[0]}" for name in preset_names())


def only_preset(names: list[str], verb: str, *, work: str | None = None) -> str:
    """The preset or file, out of the words of a command that are no settings. ``work``: what the verb does with it."""
    if len(names) > 1:
        given = " and ".join(map(repr, names))
        raise UserError(f"{given} were given: name one preset or settings file, and write settings as --key value.")
    if not names:
        what = f"say what to {work or verb}: a preset's name, a settings file or a run's folder, as in"
        raise UserError(f"{what} `tinyvae {verb} quickstart`. The presets are:\n{preset_list()}")
    return names[0]


def note_end(exit_code: int, reason: str = "") -> bool:
    """Tell the launcher script, where there is one, how the run ended: torchrun's own exit code is always 1."""
    note = os.environ.get("TINYVAE_EXIT_NOTE")
    if note:
        Path(note).write_text(f"{exit_code}\n{reason}\n")
    return bool(note)


def run(arguments: argparse.Namespace) -> int:
    outlive_readers()
    try:
        names, settings = parse_words(arguments.words)
        if arguments.help and not names:
            arguments.parser.print_help()
            return 0
        preset = only_preset(names, "train")
        loaded = load_config(preset, settings)
        if arguments.help:
            summary = f"{preset_summary(preset)}\n\n" if preset in preset_names() else ""
            print(summary + config_help_text(loaded.config))
            return 0
        return train(loaded, arguments.words)
    except UserError as mistake:
        note_end(2, str(mistake))
        raise


def train(loaded: LoadedConfig, words: list[str]) -> int:
    is_fresh = "torch" not in sys.modules
    with no_collections():
        from tinyvae.training.engine import PeerLostError
        from tinyvae.training.guards import StopRequested
        from tinyvae.training.start import run_training
    if is_fresh:
        gc.freeze()  # no later collection looks through what was imported

    try:
        finished = run_training(loaded, command=shlex.join(["tinyvae", "train", *words]))
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
