"""The command line: ``tinyvae VERB ...``.

Each verb has a file in ``tinyvae.cli`` with ``add_arguments(parser)`` and ``run(arguments) -> exit code``. It is
imported only when it is called, and torch only when the verb works: help texts come at once.
Exit codes: 0 success, 1 the work was done and something in it failed, 2 a mistake in what the user gave.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tinyvae import __version__
from tinyvae.cli.options import Parser
from tinyvae.errors import UserError, closed_paths_told, nearest_name

VERBS: dict[str, str] = {
    "train": "train an autoencoder from a preset or a settings file",
    "check": "try everything out before a long run: GPUs, data, rules, disk, one real step",
    "latents": "run the teacher once over a run's clips and keep its latents",
    "data": "index a data set, check what is in it, or write sample clips",
    "bench": "measure how fast a model is here, plain against fused",
    "info": "say what a weights file or variant is: network, sizes, frame rule",
    "lpips-weights": "get the LPIPS weights that the perceptual loss and metric need",
    "eval": "measure a model on videos: quality, flicker, speed, with a report to look at",
    "compare": "compare models on the same videos, clip by clip",
    "reconstruct": "send videos through a model: mp4 in, mp4 out",
    "encode": "videos to latents",
    "decode": "latents to videos",
    "prune": "make a narrower network of a trained one",
    "push": "push a model to the Hugging Face hub, with card, settings and report",
    "export": "write a model for ComfyUI, diffusers, LightX2V, stable-diffusion.cpp, ONNX or the browser",
}
"""Verb -> the line that ``tinyvae --help`` shows. The module is ``tinyvae.cli.<verb>``, with _ for -."""

TAKE_SETTINGS = ("train", "check", "latents")
"""Verbs that also take the settings of a run, in any order; ``arguments.words`` holds what is no option of the verb."""
LONG_RUNS = ("train", "latents")
"""Verbs that check the paths of a run before it begins. What the system refuses later is not the user's mistake."""

FORMAT_OF_LIBRARIES = warnings.formatwarning


def usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {line}" for verb, line in VERBS.items()]
    return (
        "usage: tinyvae VERB [options]\n\n"
        "Train, evaluate, speed up and ship tiny video autoencoders.\n\n"
        "verbs:\n" + "\n".join(lines) + "\n\n"
        "`tinyvae VERB --help` explains each one, with an example."
    )


def build_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb; the module's docstring is its help text."""
    module = importlib.import_module(f"tinyvae.cli.{verb.replace('-', '_')}")
    parser = Parser(
        prog=f"tinyvae {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=verb not in TAKE_SETTINGS,
        allow_abbrev=verb not in TAKE_SETTINGS,
    )
    module.add_arguments(parser)
    parser.set_defaults(run_verb=module.run)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. ``UserError`` passes through to the caller."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        print(f"tinyvae {__version__}")
        return 0
    verb = argv[0]
    if verb not in VERBS:
        raise UserError(f"there is no verb {verb!r}.{nearest_name(verb, VERBS)} `tinyvae --help` lists them.")
    parser = build_parser(verb)
    # Files may stand before, between and behind options. (argparse cannot do that for the actions of data.)
    has_plain_words = verb not in (*TAKE_SETTINGS, "data")
    parse = parser.parse_known_intermixed_args if has_plain_words else parser.parse_known_args
    arguments, words = parse(argv[1:])
    if words and verb not in TAKE_SETTINGS:
        taker = getattr(arguments, "parser", parser)  # `data` has a parser for each action
        near = nearest_name(words[0], [word for action in taker._actions for word in action.option_strings])
        raise UserError(f"unknown words: {' '.join(words)}.{near} `{taker.prog} --help` says what it takes.")
    arguments.words = words
    with nullcontext() if verb in LONG_RUNS else closed_paths_told():
        return int(arguments.run_verb(arguments))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``tinyvae`` command."""
    # Before torch is loaded: its threads otherwise spin while they wait for each other, which made a training step of
    # quickstart 4 to 8 times slower where the cores were not all free.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    warnings.formatwarning = format_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: names of files need not be valid UTF-8
    try:
        leave(run(sys.argv[1:] if argv is None else argv))
    except UserError as mistake:
        print(f"tinyvae: error: {mistake}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tinyvae: stopped", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT
    except BrokenPipeError:
        # `tinyvae ... | head` closed our output; the interpreter's flush at exit must not complain a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def format_warning(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Our own warnings as one sentence; those of libraries with the place they come from."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"tinyvae: warning: {message}\n"
    return FORMAT_OF_LIBRARIES(message, category, filename, lineno, line)


def leave(exit_code: int) -> None:
    """End the process. Under a launcher skip the clean-up, where a library's thread sometimes aborts after the work."""
    if int(os.environ.get("WORLD_SIZE") or "1") > 1:  # some scripts export it empty
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
