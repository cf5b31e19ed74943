"""What may go wrong while a run is under way, and what all ranks then do together.

A process that is in trouble says so with a code in the status exchange of each step; the largest code over all ranks
decides for everybody, so nobody acts alone. The exchange before each of Seraena's averages is the same exchange: a
rank that fails leaves its work, gives its code once, and meets the others at whichever of them they come to next.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.training.engine import Engine

log = logging.getLogger(__name__)

STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)
SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none
LAUNCHER_CHECK_S = 1.0
SAME_ORDER_S, SAME_ORDER_BY_TORCHRUN_S = 0.3, 1.0
"""Slurm and systemd tell every process of a job, ``timeout`` its child and then the group, and each launcher hands on
what it is told: one order to stop arrives several times in a moment. The same signal so soon is not a second one; of
torchrun no signal is, for it answers a signal during its own shutdown with SIGTERM to its processes."""
OUT_OF_MEMORY_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",  # pinned memory, or a library beside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)
END = 0  # no signal's number
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Status(IntEnum):
    """How a rank's local work of a step went; larger is worse."""

    WELL = 0
    OUT_OF_MEMORY = 1
    HAS_TO_STOP = 2


class AnotherRankInTrouble(Exception):  # noqa: N818 (news, not an error of this rank)
    """Raised in the middle of a rank's local work when an exchange tells that another rank cannot go on with it."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


class StopRequested(Exception):  # noqa: N818 (a wish, not an error)
    """A signal asked the run to end; the emergency checkpoint has been written."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


def average_when_all_are_well(engine: Engine) -> Callable[[list[Tensor]], None]:
    """The engine's average, asked for only once every rank has said that it will come."""

    def average(tensors: list[Tensor]) -> None:
        worst = Status(engine.worst(Status.WELL)[0])
        if worst != Status.WELL:
            raise AnotherRankInTrouble(worst)
        engine.average_(tensors)

    return average


class SignalWatch:
    """Notes the first stop signal for the loop to see at the end of its step; a second one ends the process at once.

    The interpreter itself runs a handler only when the main thread comes back from what it is doing, and a rank can
    wait for another one for hours. So the signal's number goes through a socket to a thread of its own, which can end
    the process at any time. Before `hold` is called there is nothing to save and the first signal ends the process.
    A launcher that dies without a word counts as SIGTERM.
    """

    def __init__(self) -> None:
        self.received = 0
        self._received_at = 0.0
        self._holds = False
        self._by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if self._by_torchrun else None
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._before = {n: signal.signal(n, _leave_to_the_watch) for n in STOP_SIGNALS if not _is_for_nobody(n)}
        self._wakeup_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signal watch", daemon=True)
        self._thread.start()
        _open_watches.append(self)

    def hold(self) -> None:
        """From now on somebody asks for ``received`` and saves before the process ends."""
        self._holds = True

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        _open_watches.remove(self)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._mouth.send(bytes([END]))  # closing would not do: a worker that lives on has the socket open too
        self._thread.join()
        self._mouth.close()
        self._ear.close()

    def _watch(self) -> None:
        while True:
            heard, _, _ = select.select([self._ear], [], [], LAUNCHER_CHECK_S)
            if heard:
                numbers = self._ear.recv(64)
                if END in numbers:
                    return
                for number in numbers:
                    if number in self._before:
                        self._note(number, signal.Signals(number).name + " received")
            elif self._launcher not in (None, os.getppid()):
                self._launcher = None
                if not self.received:
                    self._note(signal.SIGTERM, "the launcher has died")

    def _note(self, number: int, what: str) -> None:
        if not self._holds:
            _say(f"{what} before the first step: there is nothing to save")
            _end_now(128 + number)
        if self._is_same_order(number):
            return
        if self.received:
            _say(f"{what} again: stopping at once")
            _end_now(128 + number)
        self.received, self._received_at = number, time.monotonic()
        hurry = "SIGTERM stops" if number == SIGHUP else "send it again to stop"
        _say(f"{what}: finishing the step, then saving; {hurry} at once")

    def _is_same_order(self, number: int) -> bool:
        if number == SIGHUP and self.received:
            return True  # kernel and shell each tell of one closed terminal, at their own pace; it hurries nobody
        since = time.monotonic() - self._received_at
        if self._by_torchrun:
            return bool(self.received) and since < SAME_ORDER_BY_TORCHRUN_S
        return self.received == number and since < SAME_ORDER_S


def _is_for_nobody(number: int) -> bool:
    """Whether ``nohup`` (or a shell's ``trap ''``) has said that a closed terminal is no reason to stop."""
    return number == SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _say(text: str) -> None:
    """Tell the terminal: by write(2) rather than logging, so that it comes out whatever the main thread is doing."""
    with suppress(OSError):  # nobody reads it any more (a closed pipe or terminal); the watch must go on
        os.write(2, f"\n{text}\n".encode())


def _leave_to_the_watch(number: int, frame: FrameType | None) -> None:
    """Without a handler in Python the signal would end the process; the watch hears of it by itself."""


def _end_now(exit_code: int) -> None:
    """No clean-up: whoever signals twice wants the process gone, and checkpoints are whole at any moment."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(exit_code)


_open_watches: list[SignalWatch] = []
_forked_by_main_thread = True


def _note_forking_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _forget_in_child() -> None:
    """A forked child (a data worker) must not speak into its parent's socket, nor shrug off being terminated."""
    if _open_watches:
        _open_watches.clear()
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None and _forked_by_main_thread:
            # A parent that is killed cannot end its children, and a pool's worker would wait for ever. (The kernel's
            # "parent" is the forking thread: a thread that ends would take the child with it, hence main only.)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in STOP_SIGNALS:
            if number != signal.SIGTERM:  # signals to a whole process group: the parent decides when its children end
                signal.signal(number, signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_note_forking_thread, after_in_child=_forget_in_child)


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on a CPU."""
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(fault, RuntimeError) and any(words in str(fault) for words in OUT_OF_MEMORY_WORDS)


def check_skipped(skipped_in_a_row: int, *, limit: int, mixed_precision: str) -> None:
    """End the run after too many skipped steps in a row, with what to look at."""
    if skipped_in_a_row < limit:
        return
    likely = (
        "fp16 overflows easily: use bf16"
        if mixed_precision == "fp16"
        else "the learning rate is too high, or the weights it started from hold values that are not finite"
    )
    raise UserError(
        f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite, so the run stops: the weights "
        f"are those of the last good step. Likely: {likely}. The log names the clips of each skipped step. "
        "See docs/troubleshooting.md#steps-that-are-skipped"
    )


def out_of_memory_error(n_frames: int, height: int, width: int) -> UserError:
    """What to say when not even one clip fits; the caller has saved the run."""
    return UserError(
        f"out of memory with a single clip of {n_frames} frames of {height}x{width}; the run is saved. Use "
        "--gradient_checkpointing true, fewer frames or smaller ones, then --resume latest "
        "--allow_changed_settings true. See docs/troubleshooting.md#out-of-memory"
    )
