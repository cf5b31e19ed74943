"""What a loader's worker process does besides reading clips: keep to one thread, stay small, and outlive signals."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tinyvae.heap import trim_heap

CLIPS_PER_TRIM = 8

JOB_SIGNALS = {signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)}
"""Sent to every process of a job by schedulers and terminals; the main process decides what they mean."""


@contextmanager
def signals_held_back() -> Iterator[None]:
    """While workers are started: they inherit the block, so that a signal to the whole job cannot end one before
    `start_worker` has made it deaf. The main process gets what came in between afterwards."""
    gc.collect()  # here and not in the workers: see `start_worker`
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where nobody signals a whole job
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deaths_found_at_the_fetch() -> Iterator[None]:
    """While workers are started: keep torch from raising the death of one in the middle of a step or a save.

    With the first workers of a process torch sets a SIGCHLD handler that raises in whatever line the main process is
    at. The handler from before is put back: the loader itself looks after its workers when a batch does not come.
    """
    number = getattr(signal, "SIGCHLD", None)
    before = None if number is None else signal.getsignal(number)
    try:
        yield
    finally:
        if number is not None and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


def start_worker(worker: int) -> None:
    """Called once in each worker before its first batch."""
    torch.set_num_threads(1)
    # What was imported stays for good. Set apart, it makes a collection cost a tenth of a millisecond and not fifty;
    # `WorkerMemory` collects after every clip. What the main process left to be collected stays as well: it may hold an
    # FFmpeg object that waits for its threads when it is freed, and a fork has none of them.
    gc.freeze()
    for number in JOB_SIGNALS - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    _end_only_when_the_parent_says_so()


def _end_only_when_the_parent_says_so() -> None:
    """Let SIGTERM pass unless our own main process sent it.

    A scheduler sends SIGTERM to every process of a job. Workers that died of it would break the loader under the
    trainer, which has one more step to finish and an emergency checkpoint to write. The main process ends its workers
    itself, by message or by SIGTERM, and a worker whose main process is gone ends by itself (torch's watchdog).
    Where nobody tells who sent a signal (macOS, Windows), SIGTERM ends a worker: a main process must be able to.
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


class WorkerMemory:
    """Gives back what a clip leaves behind.

    A closed decoder is a cycle of Python objects with its frames still in it, which only a collection frees; and the
    freed frames leave holes in the heap that grow by megabytes a clip until it is trimmed. Outside a worker (no
    worker processes, a notebook) Python's own collections must do: a full one there would cost too much.
    """

    def __init__(self) -> None:
        self._clips = 0

    def after_clip(self) -> None:
        if torch.utils.data.get_worker_info() is None:
            return
        gc.collect()
        self._clips += 1
        if self._clips % CLIPS_PER_TRIM == 0:
            trim_heap()
