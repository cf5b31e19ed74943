"""Output that outlives its reader: a run goes on when ``| tee`` ends, the terminal closes or the disk is full."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

log = logging.getLogger(__name__)


class LastingStream:
    """A stream whose writes never fail. Once one has, everything for it goes nowhere, also what C libraries write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as fault:
            self._let_go(fault)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as fault:
            self._let_go(fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self, fault: OSError) -> None:
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
