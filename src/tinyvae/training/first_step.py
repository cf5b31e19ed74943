"""``debug``: what the first step works with, one line for each thing: a wrong range or dtype is seen at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from tinyvae.training.engine import StepResult

log = logging.getLogger(__name__)


class FirstStepLog:
    """Tells of the first part of the first step that it hears of, and is silent from then on."""

    def __init__(self) -> None:
        self._has_tensors = False
        self._has_losses = False

    def tensors(self, named: Mapping[str, Tensor | None]) -> None:
        if not self._has_tensors:
            self._has_tensors = True
            for name, value in named.items():
                log.info("debug: %s: %s", name, "none" if value is None else describe(value))

    def losses(self, named: Mapping[str, Tensor]) -> None:
        if not self._has_losses:
            self._has_losses = True
            for name, value in named.items():
                log.info("debug: %s: %.6g", name, float(value))

    def step(self, result: StepResult, rates: Mapping[str, float]) -> None:
        applied = "applied" if result.stepped else "NOT applied"
        log.info("debug: gradient norm before clipping: %.6g, the step was %s", result.gradient_norm, applied)
        for name, rate in rates.items():
            log.info("debug: %s: %.6g", name, rate)


def describe(value: Tensor) -> str:
    """Shape, dtype, device and range of a tensor."""
    shape = "x".join(map(str, value.shape))
    kind = f"{shape} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    numbers = value.detach().float()
    finite = torch.isfinite(numbers)
    num_bad = int((~finite).sum())
    if num_bad == numbers.numel():
        return f"{kind}, no value is finite"
    numbers = numbers[finite]
    bad = f", {num_bad} values are not finite" if num_bad else ""
    return f"{kind}, min {numbers.min():.4g}, max {numbers.max():.4g}, mean {numbers.mean():.4g}{bad}"
