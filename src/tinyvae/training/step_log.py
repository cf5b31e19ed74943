"""The numbers of the steps since the last log line: averaged over micro-batches, steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from tinyvae.config import TrainConfig
from tinyvae.training.engine import Engine, StepResult
from tinyvae.training.schedule import learning_rate_factor

GIB = 2**30


class StepLog:
    """Collects on the device, without waiting for it; only a log line reads the values back."""

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # steps in each sum: a term can begin in the middle of a line
        self._step: dict[str, Tensor] = {}
        self._steps = 0
        self._norms: list[float] = []
        self._seconds = 0.0
        self._clips = 0
        self.recent_loss = math.nan

    def begin_step(self) -> None:
        """A step's computation starts (again: what a failed attempt left is forgotten)."""
        self._step = {}

    def add(self, losses: Mapping[str, Tensor], *, share: float) -> None:
        """The losses of a part of the step's clips; ``share`` of all the rank's clips of the step."""
        for name, value in losses.items():
            weighted = value.float() * share
            self._step[name] = self._step[name] + weighted if name in self._step else weighted

    def end_step(self, result: StepResult, *, num_clips: int, seconds: float) -> None:
        self._seconds += seconds
        self._clips += num_clips
        if not result.stepped:
            return  # a loss that is not finite would hide the others of the line
        self._steps += 1
        self._norms.append(result.gradient_norm)
        for name, value in self._step.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def own_loss(self) -> float:
        """This rank's loss of the step just computed."""
        return float(self._step["loss"].item()) if "loss" in self._step else math.nan

    def is_due(self, step: int) -> bool:
        return step % self._config.log_every == 0 or step == 1 or step == self._config.max_train_steps

    @property
    def is_empty(self) -> bool:
        """Whether no step, not even a skipped one, was done since the last line."""
        return self._clips == 0

    def take(self, step: int) -> dict[str, float]:
        """The averages since the last line, over all ranks, by their TensorBoard names; starts a new line.

        ``step``: how many optimiser steps are done; the learning rate is that of the last of them.
        """
        values: dict[str, float] = {}
        if self._steps:
            names = sorted(self._sums)
            means = torch.stack([self._sums[name] / self._counts[name] for name in names])
            self._engine.average_([means])
            values = {f"train/{name}": float(mean) for name, mean in zip(names, means.tolist(), strict=True)}
            values["train/gradient_norm"] = sum(self._norms) / len(self._norms)
            self.recent_loss = values["train/loss"]
        values |= {f"train/{name}": rate for name, rate in learning_rates(step - 1, self._config).items()}
        values["train/frames_per_second"] = self._clips * self._config.n_frames / max(self._seconds, 1e-9)
        values["train/gpu_memory_gb"] = (
            torch.cuda.max_memory_allocated() / GIB if self._engine.device.type == "cuda" else 0.0
        )
        if self._config.log_system_stats:
            values |= system_stats(self._engine.device)
        self._sums, self._counts, self._steps, self._norms, self._seconds, self._clips = {}, {}, 0, [], 0.0, 0
        return values

    def state_dict(self) -> dict[str, Any]:
        """This rank's unfinished line: a resumed run writes the line that an undisturbed one would have written."""
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "counts": dict(self._counts),
            "steps": self._steps,
            "norms": list(self._norms),
            "seconds": self._seconds,
            "clips": self._clips,
            "recent_loss": self.recent_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {name: value.to(self._engine.device) for name, value in state["sums"].items()}
        # Older checkpoints have one count for all terms.
        self._counts = dict(state.get("counts") or dict.fromkeys(state["sums"], state["steps"]))
        self._steps, self._norms = state["steps"], list(state["norms"])
        self._seconds, self._clips = state["seconds"], state["clips"]
        self.recent_loss = state["recent_loss"]

    def bar_text(self, values: Mapping[str, float]) -> str:
        """What stands behind the progress bar."""
        memory = values["train/gpu_memory_gb"] or psutil.Process().memory_info().rss / GIB
        loss = f"loss {values['train/loss']:.4g}, " if "train/loss" in values else ""
        return (
            f"{loss}lr {values['train/learning_rate']:.2e}, "
            f"{_two_digits(values['train/frames_per_second'])} frames/s, {memory:.1f} GiB"
        )


def learning_rates(step: int, config: TrainConfig) -> dict[str, float]:
    """The rates at an optimiser step (counted from 0), by name."""
    factor = learning_rate_factor(step, config)
    rates = {"learning_rate": config.learning_rate * factor}
    if config.optimizer == "muon":
        rates["muon_learning_rate"] = config.muon_learning_rate * factor
    return rates


def _two_digits(speed: float) -> str:
    """``64`` and ``1234`` as they are, ``0.35`` instead of 0."""
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"


def system_stats(device: torch.device) -> dict[str, float]:
    """Use of this machine: CPU and memory always, GPU load and temperature where the driver tells."""
    stats = {"system/cpu_percent": psutil.cpu_percent(), "system/memory_percent": psutil.virtual_memory().percent}
    if device.type == "cuda":
        try:
            stats["system/gpu_percent"] = float(torch.cuda.utilization(device))
            stats["system/gpu_celsius"] = float(torch.cuda.temperature(device))
        except (ModuleNotFoundError, RuntimeError):  # no pynvml: the numbers above are what there is
            stats["system/gpu_memory_percent"] = (
                100 * torch.cuda.memory_reserved(device) / (torch.cuda.get_device_properties(device).total_memory)
            )
    return stats
