"""Seconds and memory of the stages alone."""

from __future__ import annotations

import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from tinyvae.evaluation import cost
from tinyvae.evaluation.cost import StageTimes, free_memory, peak_memory_bytes

CPU = torch.device("cpu")
BIG = 100 * 2**20  # bytes


def resident_peak_of(num_bytes: int) -> int:
    times = StageTimes(with_memory=True)
    # Not from the heap: in a process that has run other tests it may have a hole of this size, and keeps it.
    with times.stage("encode", CPU), mmap.mmap(-1, num_bytes) as block:
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
    assert times.peak_bytes is not None
    return times.peak_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark of a process can be set back on Linux only")
def test_a_stage_sees_its_own_block_only() -> None:
    small = resident_peak_of(1)
    assert resident_peak_of(BIG) > small + 0.9 * BIG
    assert resident_peak_of(1) < small + 0.5 * BIG  # what was used before it started is not counted


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark of a process can be set back on Linux only")
def test_the_marks_of_the_process_are_left_alone_unless_asked() -> None:
    """Others measure this process too; a reconstruction must not wipe out what they look at."""
    resident_peak_of(BIG)
    high = peak_memory_bytes(CPU)
    times = StageTimes()
    with times.stage("decode", CPU):
        pass
    assert times.peak_bytes is None and peak_memory_bytes(CPU) == high
    assert high is not None and resident_peak_of(1) < high - BIG // 2


def test_stages_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    times = StageTimes()
    for name, seconds in (("encode", 1.0), ("decode", 8.0), ("encode", 2.0)):
        with times.stage(name, CPU):
            clock[0] += seconds
        clock[0] += 100.0  # between stages
    assert (times.encode_s, times.decode_s) == (3.0, 8.0)
    assert times.peak_bytes is None


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory; other libraries do not")
def test_freed_memory_goes_back() -> None:
    blocks = [bytearray(60_000) for _ in range(2000)]  # 120 MB in pieces small enough to stay on the heap
    keep = blocks[-1]
    del blocks
    free_memory()
    after = resident_peak_of(1)
    more = [bytearray(60_000) for _ in range(2000)]
    assert resident_peak_of(1) > after + 65 * 2**20 and keep and more
