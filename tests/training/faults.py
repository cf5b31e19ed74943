"""Faults to inject into a rank of a run: each is called with the rank before the run begins and patches what it must.

Nothing of this is in the product: there is no flag that makes tinyvae fail.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from tests.processes import wait_until
from tinyvae.losses.seraena import Seraena
from tinyvae.training import checkpoint, guards, start
from tinyvae.training.engine import Engine
from tinyvae.training.task import StepLosses, TrainingTask


class _Calls:
    """Counts the calls of a function over the process's life."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


def _around_losses(change: Any) -> None:
    """Have ``change(number, losses, clips)`` decide on what each call of `TrainingTask.losses` returns."""
    original, calls = TrainingTask.losses, _Calls()

    def losses(self: TrainingTask, frames: torch.Tensor, **options: Any) -> StepLosses:
        return change(calls.next(), lambda: original(self, frames, **options), len(frames))

    TrainingTask.losses = losses  # type: ignore[method-assign]


class NanLoss:
    """The total of the given calls (counted from 1) of one rank's losses is NaN."""

    def __init__(self, *, rank: int, calls: range | tuple[int, ...]) -> None:
        self.rank, self.calls = rank, calls

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return

        def change(number: int, compute: Any, num_clips: int) -> StepLosses:
            losses = compute()
            if number not in self.calls:
                return losses
            nan = losses.total * float("nan")
            return StepLosses(total=nan, logged={**losses.logged, "loss": nan.detach()})

        _around_losses(change)


class OutOfMemory:
    """One rank runs out of memory: where more than ``fits`` clips come at once, or in the given calls."""

    def __init__(self, *, rank: int, fits: int | None = None, calls: range | tuple[int, ...] = ()) -> None:
        self.rank, self.fits, self.calls = rank, fits, calls

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return

        def change(number: int, compute: Any, num_clips: int) -> StepLosses:
            if number in self.calls or (self.fits is not None and num_clips > self.fits):
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return compute()

        _around_losses(change)


class OutOfMemoryInSeraena:
    """One rank runs out of memory in Seraena: before its exchange with the others, or after it."""

    def __init__(self, *, rank: int, calls: tuple[int, ...], after_exchange: bool) -> None:
        self.rank, self.calls, self.after_exchange = rank, calls, after_exchange

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        original, calls = Seraena.step, _Calls()

        def step(this: Seraena, *arguments: Any, average: Any) -> Any:
            is_due = calls.next() in self.calls
            if is_due and not self.after_exchange:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            result = original(this, *arguments, average=average)
            if is_due:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return result

        Seraena.step = step  # type: ignore[method-assign]


class SignalInStep:
    """A rank signals itself in the middle of one of its losses' calls."""

    def __init__(self, *, rank: int, call: int, number: int = signal.SIGTERM) -> None:
        self.rank, self.call, self.number = rank, call, number

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return

        def change(number: int, compute: Any, num_clips: int) -> StepLosses:
            if number == self.call:
                os.kill(os.getpid(), self.number)
                wait_until(lambda: guards._open_watches[0].received)  # by a thread, which may be late
            return compute()

        _around_losses(change)


class SlowSteps:
    """Every step takes at least so long, so that a test can act in the middle of a run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Any, num_clips: int) -> StepLosses:
            print(f"call {number}", flush=True)
            time.sleep(self.seconds)
            return compute()

        _around_losses(change)


class HeldStep:
    """One call does not go on before `release`, so that a test can act in the middle of it on any machine."""

    def __init__(self, gate: Path, *, call: int) -> None:
        self.gate, self.call = gate, call

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Any, num_clips: int) -> StepLosses:
            print(f"call {number}", flush=True)
            while number == self.call and not self.gate.exists():
                time.sleep(0.01)
            return compute()

        _around_losses(change)

    def release(self) -> None:
        self.gate.touch()


class Both:
    """Two faults at once."""

    def __init__(self, *faults: Any) -> None:
        self.faults = faults

    def __call__(self, rank: int) -> None:
        for fault in self.faults:
            fault(rank)


class FullDisk:
    """Saves number ``first`` to ``last`` (counted from 1) meet a full disk after half of the shared state."""

    def __init__(self, *, first: int, last: int) -> None:
        self.first, self.last = first, last

    def __call__(self, rank: int) -> None:
        original, calls = checkpoint._write_state, _Calls()

        def write_state(file: Any, state: Any) -> Any:
            facts = original(file, state)
            if file.name == checkpoint.SHARED_STATE and self.first <= calls.next() <= self.last:
                os.truncate(file, facts["bytes"] // 2)
                raise OSError(28, "No space left on device (injected)")
            return facts

        checkpoint._write_state = write_state


class KeepWeights:
    """Each rank writes the weights (and Seraena's) that it ends with, to compare them over ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int) -> None:
        finish = Engine.close

        def keep(engine: Engine) -> None:
            model, seraena = self.seen
            state: dict[str, Any] = {"model": model.state_dict()}
            if seraena is not None:
                state["seraena"] = seraena.shared_state_dict()
            torch.save(state, self.folder / f"weights_of_rank_{rank}.pt")
            finish(engine)

        build = start.build_task

        def build_and_see(config: Any, engine: Any, model: Any, **options: Any) -> Any:
            task = build(config, engine, model, **options)
            self.seen = (model, task.seraena)
            return task

        Engine.close = keep  # type: ignore[method-assign]
        start.build_task = build_and_see  # type: ignore[assignment]


class OutOfMemoryInZero:
    """DeepSpeed's own step of the given call (counted from 1) runs out of memory."""

    def __init__(self, *, call: int) -> None:
        self.call = call

    def __call__(self, rank: int) -> None:
        from tinyvae.training.deepspeed import DeepSpeedEngine

        original, calls = DeepSpeedEngine._step_zero, _Calls()

        def step_zero(engine: DeepSpeedEngine, gradients: list[torch.Tensor]) -> None:
            if calls.next() == self.call:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            original(engine, gradients)

        DeepSpeedEngine._step_zero = step_zero  # type: ignore[method-assign]
