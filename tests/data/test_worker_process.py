"""What a loader's worker does when it starts."""

from __future__ import annotations

import gc
import multiprocessing
from fractions import Fraction

import av
import av.filter
import pytest

from tinyvae.data.workers import start_worker


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


def graph_with_threads() -> av.filter.Graph:
    graph = av.filter.Graph()
    graph.threads = 2
    source = graph.add_buffer(width=64, height=64, format=av.VideoFormat("yuv420p"), time_base=Fraction(1, 25))
    sink = graph.add("buffersink")
    source.link_to(sink)
    graph.configure()
    graph.push(av.VideoFrame(64, 64, "yuv420p"))
    return graph


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_a_worker_frees_nothing_that_it_inherited() -> None:
    """FFmpeg's threads do not survive the fork: whoever frees a graph there waits for them without end."""
    gc.disable()
    try:
        Cycle(graph_with_threads())
        worker = multiprocessing.get_context("fork").Process(target=start_worker, args=(0,))
        worker.start()
        worker.join(20)
        still_there = worker.is_alive()
        if still_there:
            worker.kill()
    finally:
        gc.enable()
    assert not still_there and worker.exitcode == 0
