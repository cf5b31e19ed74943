"""A worker's start, its buffers, and its shared memory.

Buffers come back, a batch that somebody still holds is never written over, and a container's small /dev/shm ends in one
sentence, not in the traceback of a worker.
"""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import textwrap
from collections import deque
from fractions import Fraction
from pathlib import Path

import av
import av.filter
import pytest
import torch

from tests.data.small_indexes import training_clips
from tests.processes import HANGS_S
from tests.video.small_videos import write_video
from tinyvae.data import ClipSettings, make_train_loader, workers
from tinyvae.data.loader import TrainLoader

SETTINGS = ClipSettings(height=96, width=160, n_frames=8)
BATCHES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number in range(5):
        write_video(folder / f"{number}.mp4", width=160, height=96, seed=number)
    return folder


def loader(folder: Path, num_workers: int) -> TrainLoader:
    return make_train_loader(training_clips(folder, SETTINGS), SETTINGS, batch_size=2, num_workers=num_workers)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[torch.Tensor]:
    return [batch.frames for batch, _ in zip(loader(folder, 0), range(BATCHES), strict=False)]


@pytest.mark.parametrize("held", [0, 1, 7])
def test_a_batch_that_is_held_stays_what_it_is(folder: Path, expected: list[torch.Tensor], held: int) -> None:
    """Compared late, when the workers have long gone on; a view is a hold too."""
    waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    for batch, wanted in zip(loader(folder, 2), expected, strict=False):
        waiting.append((batch.frames[1, 2:, 1], wanted[1, 2:, 1]))
        del batch
        if len(waiting) > held:
            found, should_be = waiting.popleft()
            assert torch.equal(found, should_be)
    assert all(torch.equal(found, should_be) for found, should_be in waiting)


def test_two_iterators_over_one_loader(folder: Path, expected: list[torch.Tensor]) -> None:
    """Their workers share a board."""
    both = loader(folder, 1)
    for first, second, wanted in zip(both, both, expected, strict=False):
        assert torch.equal(first.frames, wanted) and torch.equal(second.frames, wanted)


def test_buffers_come_back(folder: Path, expected: list[torch.Tensor]) -> None:
    """A handful of buffers is all that a run of batches sees, since none is held."""
    one = loader(folder, 1)
    places = set()
    for read, _ in zip(one._start_workers(0), range(BATCHES), strict=False):
        assert read.batch is not None and read.loan is not None
        workers.give_back(one._clips.board, read.loan)
        places.add(read.loan.buffer)
    assert len(places) <= workers.BUFFERS


class OfWorker:
    id = 0


def test_large_batches_are_kept_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: OfWorker)
    monkeypatch.setattr(workers, "MAX_KEPT_BYTES", 100)
    for size, kept in ((20, 3), (49, 2), (60, 1), (101, 0)):
        buffers = workers.WorkerBuffers(workers.make_board(1))
        loans = [buffers.take((size,))[1] for _ in range(5)]
        assert sum(loan is not None for loan in loans) == kept


def test_buffers_of_several_sizes_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: OfWorker)
    monkeypatch.setattr(workers, "MAX_KEPT_BYTES", 600)
    board = workers.make_board(1)
    buffers = workers.WorkerBuffers(board)
    for number in range(300):
        frames, loan = buffers.take((1 + number * 7919 % 700,))
        assert frames.shape == (1 + number * 7919 % 700,)
        if loan is not None and number % 3:
            workers.give_back(board, loan)
        if number % 50 == 49:
            board.copy_(torch.tensor([buffers._tokens]))  # all are back
        assert sum(buffer.nbytes() for buffer in buffers._buffers if buffer is not None) <= 600 + 300 + 200


def test_a_returned_buffer_is_the_next_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: OfWorker)
    board = workers.make_board(1)
    buffers = workers.WorkerBuffers(board)
    first, loan = buffers.take((4, 5))
    assert loan is not None
    workers.give_back(board, workers.Loan(worker=0, buffer=0, token=loan.token + 1))  # of another process
    second, _ = buffers.take((4, 5))
    workers.give_back(board, loan)
    third, _ = buffers.take((3, 5))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr() and third.shape == (3, 5)


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
        worker = multiprocessing.get_context("fork").Process(target=workers.start_worker, args=(0,))
        worker.start()
        worker.join(HANGS_S)
        still_there = worker.is_alive()
        if still_there:
            worker.kill()
    finally:
        gc.enable()
    assert not still_there and worker.exitcode == 0


SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.data.small_indexes import training_clips
    from tinyvae.data import ClipSettings, make_train_loader
    from tinyvae.errors import UserError

    settings = ClipSettings(height=96, width=160, n_frames=8)
    clips = training_clips(Path(sys.argv[1]), settings)
    try:
        for _ in make_train_loader(clips, settings, batch_size=8, num_workers=1):
            pass
    except UserError as error:
        print("SENTENCE", error)
    """
)


def test_shared_memory_that_is_too_small(folder: Path) -> None:
    in_small_memory = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    setup = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    try:
        possible = subprocess.run([*in_small_memory, setup], capture_output=True, timeout=HANGS_S).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("this machine lets nobody mount a small /dev/shm")
    command = f'{setup} && exec "$0" -c "$1" "$2"'
    run = [*in_small_memory, command, sys.executable, SCRIPT, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=HANGS_S, cwd=Path(__file__).parents[2])
    assert "SENTENCE a loader's worker found no 3 MB for a batch in shared memory" in done.stdout, done.stderr[-2000:]
    assert "--shm-size" in done.stdout and "Traceback" not in done.stderr
