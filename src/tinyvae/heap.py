"""Memory that was freed and that the C library keeps: how to give it back to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def trim_heap() -> None:
    """Give freed memory of the heap back. Its pages cost time to get again, so not after every tensor."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries have none and need none."""
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found
