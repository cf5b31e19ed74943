"""One process at a time: a lock on an open file, where the system has such locks."""

from __future__ import annotations

from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_file(stream: IO[bytes], *, wait: bool) -> None:
    """Hold ``stream`` alone until it is closed; ``BlockingIOError`` where another process does and ``wait`` is False.

    A system without file locks lets everybody in.
    """
    if fcntl is not None:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
