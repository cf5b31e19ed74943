"""The options that several verbs have. Each is declared once, so that a word means the same in every verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tinyvae.errors import UserError, nearest_name
from tinyvae.storage import Place, place_of
from tinyvae.terminal import count_of

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}  # with the short forms
MODEL = "weights file, model, checkpoint or run folder"


class Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`.")


class OldWord(argparse.Action):
    """An old word for an option. It works, and one line on stderr says the new word."""

    def __init__(self, *, new: str, option: argparse.Action | None = None, **how: Any) -> None:
        super().__init__(help=argparse.SUPPRESS, **how)
        self._new, self._option = new, option

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, word: str | None = None) -> None:
        print(f"{word} is called {self._new} now; both work", file=sys.stderr)
        if self._option is not None:
            self._option.required = False  # it was given, under its old word
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def number(kind: type[int] | type[float], low: float, high: float | None = None) -> Callable[[str], float]:
    """A converter for argparse: text to a number from ``low`` to ``high``."""
    noun = "whole number" if kind is int else "number"
    wanted = f"a {noun}, at least {low}" if high is None else f"a {noun} from {low} to {high}"

    def convert(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= (float("inf") if high is None else high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return convert


def size(text: str) -> tuple[int, int]:
    """``480x720`` -> (height, width)."""
    height, cross, width = text.lower().partition("x")
    if not (cross and height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write HEIGHTxWIDTH in pixels, e.g. 480x720")
    return int(height), int(width)


def full_dtype_name(text: str) -> str:
    """``fp16`` -> ``float16``; other words stay as they are."""
    return next((name for name, short in DTYPES.items() if text == short), text)


def dtype(text: str) -> Any:
    """``float16`` or ``fp16`` -> torch.float16."""
    name = full_dtype_name(text)
    if name not in DTYPES:
        known = [*DTYPES, *DTYPES.values()]
        hint = f"{nearest_name(text, known)} Use one of {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not known.{hint}")
    import torch

    return getattr(torch, name)


def variant_of_each(models: Sequence[str], variants: Sequence[str]) -> list[str | None]:
    """One ``--variant`` for each model: ``-`` and none at all leave it to the file."""
    if variants and len(variants) != len(models):
        what = f"--variant was given {count_of(len(variants), 'time')} for {count_of(len(models), 'model')}"
        raise UserError(f"{what}; give it once for each, with - where the file tells.")
    return [None if variant == "-" else variant for variant in variants or ["-"] * len(models)]


def place(text: str) -> Place:
    """A path or a URL. A URL that is refused is not shown as it was written: it may hold a password."""
    try:
        return place_of(text)
    except UserError as mistake:
        raise argparse.ArgumentTypeError(str(mistake)) from None


def local_path(text: str) -> Path:
    """A path on this machine: what cannot be written behind a URL."""
    found = place(text)
    if not isinstance(found, Path):
        raise argparse.ArgumentTypeError(f"{found} is a URL; name a local path")
    return found


SHARED: dict[str, dict[str, Any]] = {
    "--data_root": {
        "type": place,
        "metavar": "FOLDER",
        "help": "folder or URL that relative paths start from (default: beside the file)",
    },
    "--device": {"metavar": "NAME", "help": "cpu, cuda or cuda:1; default: the first GPU, else the CPU"},
    "--dtype": {
        "type": dtype,
        "metavar": "NAME",
        "help": f"precision of the weights: {', '.join(f'{name} ({short})' for name, short in DTYPES.items())}; "
        "default: float32 on a CPU, else the file's",
    },
    "--frames": {"type": number(int, 1), "metavar": "N", "help": "only the first frames of each video"},
    "--fused": {"action": "store_true", "help": "run the folded network (not of a VAE): same output, faster on a GPU"},
    "--output": {"type": local_path, "metavar": "FOLDER", "help": "folder for the files"},
    "--overwrite": {"action": "store_true", "help": "replace files that exist"},
    "--ray": {
        "metavar": "local|ADDRESS",
        "help": "work on a Ray cluster: local (one in this machine), auto, HOST:PORT or ray://HOST:PORT",
    },
    "--size": {"type": size, "metavar": "HxW", "help": "crop and scale to this size; default: as they are"},
    "--split": {
        "metavar": "train|val|test|all",
        "help": "the videos annotated so, or all; default: val where the data has splits, else all",
    },
    "--variant": {"metavar": "NAME", "help": "which variant the weights are, where the file cannot tell"},
    "--workers": {"type": number(int, 0), "metavar": "N", "help": "processes (default: one per core)"},
}
OLD_WORDS = {
    "--frames": ["--max_frames", "--n_frames"],
    "--output": ["--output_dir", "-o"],
    "--overwrite": ["--force"],
    "--workers": ["--num_workers"],
}


def add_options(parser: argparse.ArgumentParser, *words: str, **changes: Any) -> None:
    """Add shared options to a verb, with the old words for them. ``changes`` replace what is declared above.

    Example: ``add_options(parser, "--frames", default=49, help="frames of the video (default: 49)")``.
    """
    for word in words:
        option = parser.add_argument(word, **{**SHARED[word], **changes})
        how: dict[str, Any] = {"dest": option.dest, "nargs": option.nargs, "type": option.type}
        for old in OLD_WORDS.get(word, []):
            parser.add_argument(old, action=OldWord, new=word, option=option, default=argparse.SUPPRESS, **how)
