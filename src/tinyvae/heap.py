"""Give freed memory, which the C library keeps, back to the system."""

import ctypes
import sys


def trim_heap() -> None:
    """Give freed memory of the heap back. To get its pages again costs time, so do not call it after every tensor."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):  # only glibc has and needs it
        ctypes.CDLL(None).malloc_trim(0)
