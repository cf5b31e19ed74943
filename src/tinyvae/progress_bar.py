"""How long work shows how far it is: a moving bar on a terminal, a line now and then in a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

SECONDS_PER_LINE = 10.0
"""How often a line is written where nobody watches a bar move."""


class _Lines:
    """Takes what tqdm writes to move a bar, and writes each state of it as one line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(line + "\n")

    def flush(self) -> None:
        self._stream.flush()


class _LineBar(tqdm):
    """A bar whose words behind it wait for the next line that is due."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        super().set_postfix_str(s, refresh=False)


def progress_bar(iterable: Iterable[Any] | None = None, *, leave: bool = True, **options: Any) -> tqdm[Any]:
    """`tqdm` on stderr. Where that is no terminal: the first state, one each ten seconds, and the last.

    A bar that disappears from a terminal at its end (``leave=False``) writes lines there only where it takes longer
    than ten seconds.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, leave=leave, **options)
    lines: Any = _Lines(sys.stderr)
    delay = 0.0 if leave else SECONDS_PER_LINE
    return _LineBar(iterable, file=lines, mininterval=SECONDS_PER_LINE, miniters=1, delay=delay, **options)
