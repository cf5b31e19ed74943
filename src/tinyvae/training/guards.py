"""What may go wrong while a run is under way, and what all ranks then do together.

A process that is in trouble says so with a code in the status exchange of each step; the largest code over all ranks
decides for everybody, so nobody acts alone.
"""

from __future__ import annotations

import logging
import os
import signal
from enum import IntEnum
from types import FrameType

import torch

from tinyvae.errors import UserError

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Status(IntEnum):
    """How a rank's local work of a step went; larger is worse."""

    WELL = 0
    OUT_OF_MEMORY = 1


class StopRequested(Exception):  # noqa: N818 (a wish, not an error)
    """A signal asked the run to end; the emergency checkpoint has been written."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        return 128 + self.signal_number


class SignalWatch:
    """Notes the first stop signal for the loop to see at the end of its step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            # No clean-up: whoever signals twice wants the process gone, and checkpoints are whole at any moment.
            os._exit(128 + number)
        self.received = number
        # write(2) rather than logging: a log call may be what the signal has interrupted
        name = signal.Signals(number).name
        os.write(2, f"\n{name} received: finishing the step, then saving; send it again to stop at once\n".encode())

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on a CPU."""
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(fault, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(fault)


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
