"""The worker processes of a loader: how they start, which signals they hear, and which memory their batches use.

A worker writes its clips into shared memory. New memory has a cost: the kernel clears each page, which takes a sixth of
the time of decoding. So each worker keeps a few buffers. When the main process has discarded a batch, it notes this on
a board that all of them share, and the worker uses the buffer again. Where none is free, the batch gets new memory.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy
from torch.multiprocessing.reductions import StorageWeakRef

from tinyvae.errors import UserError
from tinyvae.heap import trim_heap

BUFFERS = 3
"""Of each worker at most: one that is being filled, one that the trainer uses, one that it has just discarded."""

MAX_KEPT_BYTES = 128 * 10**6
"""Of all buffers of a worker; larger batches have fewer, so that many workers stay small. Where batches have several
sizes, buffer i has grown to at most 1 / (i + 1) of this, and all of them together to 1.8 times as much."""


@dataclass(frozen=True, kw_only=True)
class Loan:
    """A worker's buffer that the main process has."""

    worker: int
    buffer: int
    token: int
    """Of this one loan by this one process."""


def make_board(num_workers: int) -> Tensor:
    """Which loans are over: int64 (workers, buffers) in shared memory; a worker looks for the token of its own loan."""
    board = torch.zeros((num_workers, BUFFERS), dtype=torch.int64)
    return board.share_memory_() if num_workers else board


def give_back(board: Tensor, loan: Loan) -> None:
    board[loan.worker, loan.buffer] = loan.token


class WorkerBuffers:
    """The buffers of one worker process. Outside of one (no workers) batches lie in ordinary memory."""

    def __init__(self, board: Tensor) -> None:
        self._board = board
        self._buffers: list[torch.UntypedStorage | None] = [None] * BUFFERS
        self._tokens = [0] * BUFFERS
        self._loans = 0

    def take(self, shape: tuple[int, ...]) -> tuple[Tensor, Loan | None]:
        """An empty uint8 tensor, and the loan to hand over with it (None: its memory is used once)."""
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return torch.empty(shape, dtype=torch.uint8), None
        num_bytes = math.prod(shape)
        number = self._free_buffer(self._board[worker.id].tolist(), num_bytes)
        if number is None:
            return _tensor(_shared_memory(num_bytes), shape), None
        buffer = self._buffers[number]
        if buffer is None or buffer.nbytes() < num_bytes:
            buffer = self._buffers[number] = _shared_memory(num_bytes)
        self._loans += 1
        self._tokens[number] = os.getpid() << 32 | self._loans
        return _tensor(buffer, shape), Loan(worker=worker.id, buffer=number, token=self._tokens[number])

    def _free_buffer(self, given_back: list[int], num_bytes: int) -> int | None:
        """One that is back, else one that does not exist yet: so no more are made than needed."""
        usable = range(min(BUFFERS, MAX_KEPT_BYTES // num_bytes))
        back = [i for i in usable if self._tokens[i] and self._tokens[i] == given_back[i]]
        unmade = [i for i in usable if not self._tokens[i]]
        return next(iter(back + unmade), None)


class BorrowedBatches:
    """In the main process: gives buffers back when nothing there refers to them."""

    def __init__(self, board: Tensor) -> None:
        self._board = board
        self._borrowed: list[tuple[StorageWeakRef, Loan]] = []

    def see(self, frames: Tensor, loan: Loan | None) -> None:
        """A batch has come. Pinned frames are a copy: their buffer goes back at once."""
        if loan is not None and frames.is_pinned():
            give_back(self._board, loan)
        elif loan is not None:
            self._borrowed.append((StorageWeakRef(frames.untyped_storage()), loan))

    def give_back(self) -> None:
        """Give back the buffers of all batches that are gone."""
        borrowed, self._borrowed = self._borrowed, []
        for storage, loan in borrowed:
            if storage.expired():
                give_back(self._board, loan)
            else:
                self._borrowed.append((storage, loan))


def _tensor(storage: torch.UntypedStorage, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)[: math.prod(shape)].view(shape)


def _shared_memory(num_bytes: int) -> torch.UntypedStorage:
    try:
        storage = torch.UntypedStorage._new_shared(num_bytes, device="cpu")
        if hasattr(os, "posix_fallocate") and get_sharing_strategy() == "file_descriptor":
            # torch 2.8 and older promise memory that does not exist; a process that writes to it dies of SIGBUS.
            os.posix_fallocate(storage._share_fd_cpu_()[0], 0, num_bytes)
        return storage
    except (RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "shared memory" not in str(error):
            raise
        raise UserError(
            f"a loader's worker found no {num_bytes / 1e6:.0f} MB for a batch in shared memory (/dev/shm); in a "
            "container give it more (docker run --ipc=host, or --shm-size=16g), or lower dataloader_num_workers or "
            "prefetch_factor (dataloader_num_workers=0 needs none)"
        ) from None


CLIPS_PER_TRIM = 8

JOB_SIGNALS = {signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)}
"""Schedulers and terminals send these to every process of a job; the main process decides what they mean."""


@contextmanager
def starting_workers(num_workers: int) -> Iterator[None]:
    """While workers start: a signal to the whole job cannot end one before `start_worker` makes it ignore signals.

    With the first workers of a process torch sets a SIGCHLD handler that would raise in the middle of a step or a save.
    It is taken back: the loader checks its workers itself when a batch does not come.
    """
    if num_workers:
        gc.collect()  # here and not in the workers: see `start_worker`
    if not num_workers or not hasattr(signal, "pthread_sigmask"):  # Windows, where nobody signals a whole job
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_worker(worker: int) -> None:
    """Called once in each worker before its first batch."""
    torch.set_num_threads(1)
    # Imported modules stay for ever. Without them a collection takes 0.1 ms and not 50, and there is one after every
    # clip. What the main process left to be collected stays too: it may hold an FFmpeg object that waits for its
    # threads when it is freed, and a fork has none of them.
    gc.freeze()
    for number in JOB_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    _ignore_foreign_sigterm()


def _ignore_foreign_sigterm() -> None:
    """Ignore SIGTERM unless our own main process sent it.

    A scheduler sends it to every process of a job, and the trainer still needs its workers to finish its step. A worker
    whose main process is gone ends by itself (torch's watchdog). Where the system does not say who sent a signal
    (macOS, Windows), SIGTERM ends a worker.
    """
    if not hasattr(signal, "sigwaitinfo"):
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while True:
            if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
                os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def free_clip_memory(num_clips: int) -> None:
    """Free what reading a clip leaves behind in a worker; ``num_clips``: how many it has read.

    A closed decoder is a cycle of Python objects that still holds its frames. The freed frames leave holes in the heap,
    which grow by megabytes a clip. Outside a worker (a notebook) a full collection would cost too much.
    """
    if torch.utils.data.get_worker_info() is None:
        return
    gc.collect()
    if num_clips % CLIPS_PER_TRIM == 0:
        trim_heap()
