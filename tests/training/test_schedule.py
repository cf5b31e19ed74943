"""The learning-rate schedule is a function of the optimiser step alone."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from tinyvae.config.schema import TrainConfig
from tinyvae.training.optim import learning_rate_factor


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(max_train_steps=110, lr_warmup_steps=10, **changes)


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_warm_up_rises_evenly_from_above_zero(name: str) -> None:
    factors = [learning_rate_factor(step, config(lr_scheduler=name)) for step in range(11)]
    assert factors == pytest.approx([(step + 1) / 11 for step in range(11)])


def test_shapes_at_the_middle_and_at_the_end() -> None:
    middle, last = 60, 109
    assert learning_rate_factor(middle, config(lr_scheduler="linear")) == pytest.approx(0.5)
    assert learning_rate_factor(middle, config(lr_scheduler="cosine")) == pytest.approx(0.5)
    assert learning_rate_factor(middle, config(lr_scheduler="polynomial", lr_power=2.0)) == pytest.approx(0.25)
    assert learning_rate_factor(middle, config(lr_scheduler="constant")) == 1.0
    assert learning_rate_factor(0, config(lr_scheduler="constant")) == 1.0
    for name in ("linear", "cosine", "polynomial"):
        assert 0 < learning_rate_factor(last, config(lr_scheduler=name)) < 0.02
    restarts = [learning_rate_factor(s, config(lr_scheduler="cosine_with_restarts", lr_num_cycles=2)) for s in (10, 60)]
    assert restarts == pytest.approx([1.0, 1.0])


def test_never_rises_again_after_the_end() -> None:
    """Schedules stepped once per process hit zero at an eighth of a run on eight GPUs and climb again."""
    factors = [learning_rate_factor(step, config(lr_scheduler="cosine")) for step in range(10, 200)]
    assert all(later <= earlier for earlier, later in pairwise(factors))
    assert all(math.isfinite(factor) for factor in factors)
