"""Memory between Python, the C library and the system: what is looked through, and what is given back."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def trim_heap() -> None:
    """Give freed memory of the heap back. To get its pages again costs time, so do not call it after every tensor."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # only glibc has and needs it
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage collection inside: for imports. torch and its compiler make a million objects that stay, and to look
    through them again and again takes a fifth of the time.

    Example: ``with no_collections(): import torch``
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
