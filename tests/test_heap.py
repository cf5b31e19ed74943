"""Freed memory goes back to the system; imports are not looked through."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tests.processes import HANGS_S
from tinyvae.heap import no_collections

SCRIPT = """
import ctypes
from tinyvae.heap import trim_heap
def resident_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
    libc.free(block)
before = resident_kib()
trim_heap()
print(before - resident_kib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' heaps are not trimmed")
def test_holes_in_the_heap_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert int(done.stdout) > 80_000


def test_no_collections_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ImportError), no_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled(), "a caller had switched it off"
    finally:
        gc.enable()
