"""Faults to inject into a rank of a run: each is called with the rank before the run begins and patches what it must.

Nothing of this is in the product: there is no flag that makes tinyvae fail.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.processes import wait_until
from tinyvae.losses.seraena import Seraena
from tinyvae.training import guards, start
from tinyvae.training.engine import Engine
from tinyvae.training.task import StepLosses, TrainingTask


def _around_losses(change: Callable[[int, Callable[[], StepLosses], int], StepLosses]) -> None:
    """Have ``change(number, compute, num_clips)`` decide on what each call of `TrainingTask.losses` returns.

    Calls are counted from 1 over the process's life, here and below.
    """
    original, numbers = TrainingTask.losses, itertools.count(1)

    def losses(self: TrainingTask, frames: torch.Tensor, **options: Any) -> StepLosses:
        return change(next(numbers), lambda: original(self, frames, **options), len(frames))

    TrainingTask.losses = losses  # type: ignore[method-assign]


@dataclass
class NanLoss:
    """The total of the given calls of one rank's losses is NaN."""

    rank: int
    calls: Container[int]

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Callable[[], StepLosses], num_clips: int) -> StepLosses:
            losses = compute()
            if rank != self.rank or number not in self.calls:
                return losses
            nan = losses.total * float("nan")
            return StepLosses(total=nan, logged={**losses.logged, "loss": nan.detach()})

        _around_losses(change)


@dataclass
class OutOfMemory:
    """One rank runs out of memory in the given calls."""

    rank: int
    calls: Container[int]

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Callable[[], StepLosses], num_clips: int) -> StepLosses:
            if rank == self.rank and number in self.calls:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return compute()

        _around_losses(change)


@dataclass
class OutOfMemoryInSeraena:
    """One rank runs out of memory in Seraena: before its exchange with the others, or after it."""

    rank: int
    calls: Container[int]
    after_exchange: bool

    def __call__(self, rank: int) -> None:
        original, numbers = Seraena.step, itertools.count(1)

        def step(this: Seraena, *arguments: Any, **options: Any) -> Any:
            is_due = next(numbers) in self.calls and rank == self.rank
            if not is_due or self.after_exchange:
                result = original(this, *arguments, **options)
            if is_due:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return result

        Seraena.step = step  # type: ignore[method-assign]


@dataclass
class SignalInStep:
    """A rank signals itself in the middle of one of its losses' calls."""

    rank: int
    call: int
    number: int = signal.SIGTERM

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Callable[[], StepLosses], num_clips: int) -> StepLosses:
            if (rank, number) == (self.rank, self.call):
                os.kill(os.getpid(), self.number)
                wait_until(lambda: guards._open_watches[0].received)  # by a thread, which may be late
            return compute()

        _around_losses(change)


@dataclass
class HeldStep:
    """One call (of one rank, or of all) does not go on before `release`, so that a test can act in the middle of it on
    any machine."""

    gate: Path
    call: int
    rank: int | None = None

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Callable[[], StepLosses], num_clips: int) -> StepLosses:
            print(f"call {number}", flush=True)
            while number == self.call and self.rank in (None, rank) and not self.gate.exists():
                time.sleep(0.01)
            return compute()

        _around_losses(change)

    def release(self) -> None:
        self.gate.touch()


class Both:
    """Several faults at once."""

    def __init__(self, *faults: Callable[[int], None]) -> None:
        self.faults = faults

    def __call__(self, rank: int) -> None:
        for fault in self.faults:
            fault(rank)


@dataclass
class KeepWeights:
    """Each rank writes the weights (and Seraena's) that it ends with, to compare them over ranks."""

    folder: Path

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


@dataclass
class OutOfMemoryInZero:
    """DeepSpeed's own step of the given call runs out of memory."""

    call: int

    def __call__(self, rank: int) -> None:
        from tinyvae.training.deepspeed import DeepSpeedEngine

        original, numbers = DeepSpeedEngine._step_zero, itertools.count(1)

        def step_zero(engine: DeepSpeedEngine, gradients: list[torch.Tensor]) -> None:
            if next(numbers) == self.call:
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            original(engine, gradients)

        DeepSpeedEngine._step_zero = step_zero  # type: ignore[method-assign]
