"""What commands write to a terminal, a file or a pipe: progress, numbers in words, output that outlives its reader."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)

SECONDS_PER_LINE = 10.0  # of progress, where stderr is no terminal
MINUTE, HOUR, DAY, YEAR = 60.0, 3600.0, 86_400.0, 365.25 * 86_400.0


def progress_bar(iterable: Iterable[Any] | None = None, *, leave: bool = True, **options: Any) -> tqdm[Any]:
    """`tqdm` on stderr. Without a terminal: a line at the start, each ten seconds, and at the end.

    A bar with ``leave=False`` writes lines only if it takes longer than ten seconds.
    """
    if sys.stderr.isatty():
        return tqdm(iterable, leave=leave, **options)
    lines: Any = _Lines(sys.stderr)
    delay = 0.0 if leave else SECONDS_PER_LINE
    return _LineBar(iterable, file=lines, mininterval=SECONDS_PER_LINE, miniters=1, delay=delay, **options)


class _Lines:
    """Takes what tqdm writes to move a bar, and writes each state of it as one line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.encoding = stream, stream.encoding

    def write(self, text: str) -> None:
        if text.strip():
            self._stream.write(text.strip() + "\n")

    def flush(self) -> None:
        self._stream.flush()


class _LineBar(tqdm):
    """A bar that shows the words behind it with the next line that is due, and not at once."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        super().set_postfix_str(s, refresh=False)


class LastingStream:
    """A stream whose writes never fail. After a first failure all output is discarded, that of C libraries too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as fault:
            self._discard(fault)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as fault:
            self._discard(fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _discard(self, fault: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        reason = fault.strerror or fault
        log.warning("%s can no longer be written (%s); the run goes on, train.log has its lines", self.name, reason)


def outlive_readers() -> None:
    """From now on no write to stdout or stderr of this process fails."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, LastingStream):
            setattr(sys, name, LastingStream(stream))


def bytes_in_words(count: float) -> str:
    """``0 bytes``, ``12.3 KiB``, ``1.50 GiB``: three digits and the unit that suits them."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1000 or unit == "TiB":
            break
    return f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {unit}"


def duration_in_words(seconds: float) -> str:
    """``0.35 s``, ``12 s``, ``4 min``, ``2.7 hours``, ``11 days``, ``31 years``."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    for limit, unit, name in ((2 * HOUR, MINUTE, "min"), (2 * DAY, HOUR, "hours"), (2 * YEAR, DAY, "days")):
        if seconds < limit:
            return f"{seconds / unit:.{1 if seconds < 10 * unit else 0}f} {name}"
    return f"{seconds / YEAR:,.0f} years"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row of cells; each column is as wide as its widest cell, and two spaces lie between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def count_of(number: int, noun: str) -> str:
    """``1 clip``, ``3 clips``, for nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def in_utf8(text: str) -> str:
    """A text with the name of a file: where its bytes are no UTF-8, which files and trackers need, it has escapes."""
    return text.encode(errors="backslashreplace").decode()
