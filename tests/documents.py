"""The documents, and what a reader could type out of them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tinyvae.cli.options import OldWord

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]+)`")


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def commands(path: Path) -> list[str]:
    """What a reader could type: lines of code blocks without comments, and code inside sentences."""
    text = path.read_text()
    blocks = [body.replace("\\\n", " ") for _, body in FENCE.findall(text)]
    typed = [re.split(r" #|^#", line)[0] for block in blocks for line in block.splitlines()]
    # what a program prints is no command
    typed = [line for line in typed if not line.startswith(("tinyvae: error", " ✓", "  - "))]
    return [line.removeprefix("$ ") for line in typed] + INLINE_CODE.findall(without_code(text))


def flags_in(words: str) -> set[str]:
    return {flag.replace("-", "_") for flag in re.findall(r"(?:^|(?<=\s))--([a-zA-Z][\w-]*)", words)}


def flags_of_verb(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a verb and of its actions (`tinyvae data index` and the like). Documents show no old word."""
    found: set[str] = set()
    for action in (action for action in parser._actions if not isinstance(action, OldWord)):
        found |= {option.lstrip("-").replace("-", "_") for option in action.option_strings}
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found |= flags_of_verb(inner)
    return found
