"""What can go wrong while a run is running, and how all ranks then act together.

After each step every rank tells the others how its work went, as a number, and the largest number decides for all.
Seraena asks the same question before it averages: a rank that fails gives its number there and goes to the next one.
"""

from __future__ import annotations

import ctypes
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

from tinyvae.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tinyvae.training.engine import Engine

SIGHUP = getattr(signal, "SIGHUP", None)  # Windows has none
STOP_SIGNALS = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")]
LAUNCHER_CHECK_S = 1.0
SAME_ORDER_S, SAME_ORDER_BY_TORCHRUN_S = 0.3, 1.0
"""Seconds in which a signal that comes again is the same order to stop: schedulers signal every process, and launchers
pass on what they get. Under torchrun any signal counts, because a signal during its shutdown makes it send SIGTERM."""
OUT_OF_MEMORY_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",  # pinned memory, or a library beside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
)
END = 0  # no signal has this number
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Status(IntEnum):
    """How a rank's local work of a step went; larger is worse."""

    WELL = 0
    OUT_OF_MEMORY = 1
    HAS_TO_STOP = 2


class AnotherRankInTrouble(Exception):  # noqa: N818 (news, not an error of this rank)
    """Raised during a rank's local work when another rank cannot go on with it."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.name)
        self.status = status


def average_when_all_are_well(engine: Engine) -> Callable[[list[Tensor]], None]:
    """The engine's average; it is called only after every rank has said that it is well."""

    def average(tensors: list[Tensor]) -> None:
        worst = Status(engine.worst(Status.WELL)[0])
        if worst != Status.WELL:
            raise AnotherRankInTrouble(worst)
        engine.average_(tensors)

    return average


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on a CPU."""
    import torch  # here: the launcher uses this module and needs no torch

    said = isinstance(fault, RuntimeError) and any(words in str(fault) for words in OUT_OF_MEMORY_WORDS)
    return said or isinstance(fault, torch.OutOfMemoryError | MemoryError)


def out_of_memory_error(n_frames: int, height: int, width: int) -> UserError:
    """The error if not even one clip fits; the caller has saved the run."""
    return UserError(
        f"out of memory with a single clip of {n_frames} frames of {height}x{width}; the run is saved. Use "
        "--gradient_checkpointing true, fewer frames or smaller ones, then --resume latest "
        "--allow_changed_settings true. See docs/troubleshooting.md#out-of-memory"
    )


def skipped_steps_error(skipped_in_a_row: int, *, mixed_precision: str) -> UserError:
    """The error after too many skipped steps in a row, with what to look at; the caller has saved the run."""
    likely = "the learning rate is too high, or the weights it started from hold values that are not finite"
    if mixed_precision == "fp16":
        likely = "fp16 overflows easily: use bf16"
    return UserError(
        f"{skipped_in_a_row} steps in a row had a loss or gradient that is not finite, so the run stops: the weights "
        f"are those of the last good step. Likely: {likely}. The log names the clips of each skipped step. "
        "See docs/troubleshooting.md#steps-that-are-skipped"
    )


class StopRequested(Exception):  # noqa: N818 (a request, not an error)
    """A signal asked the run to end; the loop has tried to write an emergency checkpoint."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


class SignalWatch:
    """Keeps the first stop signal in ``received``, for the loop to see at the end of its step. A second signal ends the
    process and its children at once, and so does the first one before `hold`: there is nothing to save yet.

    The signal's number goes through a socket to a thread: Python's own handlers wait for the main thread, which can
    wait for another rank for hours. A torchrun that dies counts as SIGTERM. A launcher gets the first by ``pass_on``.
    """

    def __init__(self, pass_on: Callable[[int], None] | None = None) -> None:
        self.received = 0
        self._received_at = 0.0
        self._holds = False
        self._pass_on = pass_on
        self._by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if self._by_torchrun else None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        ignored = [SIGHUP] if SIGHUP and signal.getsignal(SIGHUP) == signal.SIG_IGN else []  # by nohup
        self._before = {n: signal.signal(n, _do_nothing) for n in STOP_SIGNALS if n not in ignored}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signal watch", daemon=True)
        self._thread.start()
        _open_watches.append(self)

    def hold(self) -> None:
        """From now on the caller reads ``received`` and saves before the process ends."""
        self._holds = True

    def close(self) -> None:
        """Give the signals back to their former handlers."""
        _open_watches.remove(self)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.send(bytes([END]))  # closing is not enough: a living worker has the socket open too
        self._thread.join()
        self._writer.close()
        self._reader.close()

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], LAUNCHER_CHECK_S)
            if ready:
                numbers = self._reader.recv(64)
                if END in numbers:
                    return
                for number in numbers:
                    if number in self._before:
                        self._note(number, signal.Signals(number).name + " received")
            elif self._launcher not in (None, os.getppid()):
                self._launcher = None
                if not self.received:
                    self._note(signal.SIGTERM, "the launcher has died")

    def _note(self, number: int, event: str) -> None:
        if not self._holds:
            _print(f"{event} before the first step: there is nothing to save")
            _end_now(128 + number)
        if self._is_same_order(number):
            return
        if self.received:
            _print(f"{event} again: stopping at once")
            _end_now(128 + number)
        self.received, self._received_at = number, time.monotonic()
        if self._pass_on is not None:
            self._pass_on(number)
        else:
            hurry = "SIGTERM stops" if number == SIGHUP else "send it again to stop"
            _print(f"{event}: finishing the step, then saving; {hurry} at once")

    def _is_same_order(self, number: int) -> bool:
        if number == SIGHUP and self.received:
            return True  # kernel and shell both report one closed terminal, each in its own time
        since = time.monotonic() - self._received_at
        if self._by_torchrun:
            return bool(self.received) and since < SAME_ORDER_BY_TORCHRUN_S
        return self.received == number and since < SAME_ORDER_S


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Without a Python handler the signal would end the process; the watch reads it from its socket."""


def _print(text: str) -> None:
    """Tell the terminal by write(2) and not by logging, which may have to wait for the main thread."""
    with suppress(OSError):  # nobody reads it any more (a closed pipe or terminal); the watch must go on
        os.write(2, f"\n{text}\n".encode())


def _end_now(exit_code: int) -> None:
    """End without clean-up: checkpoints are whole at any moment."""
    kill_children(os.getpid())
    os._exit(exit_code)


def kill_children(pid: int) -> None:
    """Kill all processes that a process started, and those that these started."""
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


_open_watches: list[SignalWatch] = []
_forked_by_main_thread = True


def _note_forking_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _reset_in_child() -> None:
    """A forked child (a data worker) must not write to its parent's socket, and SIGTERM must end it."""
    if _open_watches:
        _open_watches.clear()
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None and _forked_by_main_thread:
            # A parent that is killed cannot end its children, and a pool's worker would wait for ever. (The kernel's
            # "parent" is the forking thread. A thread that ends would take the child with it, so main only.)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:  # other signals to the whole group do nothing: the parent ends its children
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_note_forking_thread, after_in_child=_reset_in_child)
