"""Give freed memory, which the C library keeps, back to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def trim_heap() -> None:
    """Give freed memory of the heap back. To get its pages again costs time, so do not call it after every tensor."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; other C libraries have none and need none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
