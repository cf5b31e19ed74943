"""What the steps of a run look like inside: a profiler's trace of a few steps, and ``debug`` lines of the first."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

TRACED_STEPS = 5  # ten small steps already make a file of 150 MB
SETTLING_STEPS = 5  # before the traced ones: compilation and the first clips are not what a step costs


class StepProfiler:
    """Traces some of the next ``steps_left`` steps into ``file`` (None: nothing), written right after the last one."""

    def __init__(self, file: Path | None, *, device: torch.device, steps_left: int) -> None:
        self._file = file
        self._profile: torch.profiler.profile | None = None
        if file is None or steps_left < 1:
            return
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU]
        traced = min(TRACED_STEPS, max(1, steps_left - 1))
        warm_up = min(1, steps_left - traced)  # of the profiler itself
        settling = min(SETTLING_STEPS, steps_left - traced - warm_up)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=settling, warmup=warm_up, active=traced, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Write a trace that has begun as far as it goes."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(self._file))
        log.info("profile of some steps: %s", self._file)


def log_tensors(named: Mapping[str, Tensor | None]) -> None:
    for name, value in named.items():
        log.info("debug: %s: %s", name, "none" if value is None else describe(value))


def log_losses(named: Mapping[str, Tensor | float]) -> None:
    for name, value in named.items():
        log.info("debug: %s: %.6g", name, float(value))


def describe(value: Tensor) -> str:
    kind = f"{'x'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    numbers = value.detach().float()
    numbers = numbers[torch.isfinite(numbers)]
    num_bad = value.numel() - numbers.numel()
    if num_bad == value.numel():
        return f"{kind}, no value is finite"
    bad = f", {num_bad} values are not finite" if num_bad else ""
    return f"{kind}, min {numbers.min():.4g}, max {numbers.max():.4g}, mean {numbers.mean():.4g}{bad}"
