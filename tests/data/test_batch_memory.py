"""Workers' buffers come back, and a batch that somebody still holds is never written over."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch

from tests.video.numbered_video import numbered_frames, write_video
from tinyvae.data import ClipSettings, build_index, make_train_loader, split
from tinyvae.data import workers as bm
from tinyvae.data.loader import TrainLoader

SETTINGS = ClipSettings(height=96, width=160, n_frames=8)
BATCHES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number in range(5):
        write_video(folder / f"{number}.mp4", numbered_frames(30, scene=number))
    return folder


def loader(folder: Path, num_workers: int) -> TrainLoader:
    index = build_index(folder, folder / "i.tvi", num_workers=0, show_progress_bar=False).index
    train, _ = split(index, SETTINGS, train_split=1.0)
    return make_train_loader(train, SETTINGS, batch_size=2, num_workers=num_workers)


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
    for read, _ in zip(one._loader, range(BATCHES), strict=False):
        assert read.batch is not None and read.loan is not None
        one._board.give_back(read.loan)  # type: ignore[union-attr]
        places.add(read.loan.buffer)
    assert len(places) <= bm.BUFFERS


class OfWorker:
    id = 0


def test_large_batches_are_kept_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: OfWorker)
    monkeypatch.setattr(bm, "MAX_KEPT_BYTES", 100)
    for size, kept in ((20, 3), (49, 2), (60, 1), (101, 0)):
        buffers = bm.WorkerBuffers(bm.LoanBoard(1))
        loans = [buffers.take((size,))[1] for _ in range(5)]
        assert sum(loan is not None for loan in loans) == kept


def test_a_returned_buffer_is_the_next_one_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: OfWorker)
    board = bm.LoanBoard(1)
    buffers = bm.WorkerBuffers(board)
    first, loan = buffers.take((4, 5))
    assert loan is not None
    board.give_back(bm.Loan(worker=0, buffer=0, token=loan.token + 1))  # of another process
    second, _ = buffers.take((4, 5))
    board.give_back(loan)
    third, _ = buffers.take((3, 5))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr() and third.shape == (3, 5)
