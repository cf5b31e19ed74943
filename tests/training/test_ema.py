"""The average of weights: its formula, its swap, its state."""

from __future__ import annotations

import pytest
import torch

from tinyvae.training.optim import WeightAverage


def one_weight(value: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_formula_with_warm_up() -> None:
    layer = one_weight(0.0)
    average = WeightAverage(layer, decay=0.5)
    expected = 0.0
    for n, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        torch.nn.init.constant_(layer.weight, value)
        average.update(layer)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value
    assert average.values["weight"].item() == pytest.approx(expected)


def test_swap_gives_the_weights_back_even_after_an_error() -> None:
    layer = one_weight(0.0)
    average = WeightAverage(layer, decay=0.9)
    torch.nn.init.constant_(layer.weight, 5.0)
    with pytest.raises(ZeroDivisionError), average.swapped_into(layer):
        assert layer.weight.item() == 0.0
        _ = 1 / 0
    assert layer.weight.item() == 5.0


def test_state_round_trip_goes_on_alike() -> None:
    layer = one_weight(1.0)
    first = WeightAverage(layer, decay=0.9)
    first.update(layer)
    second = WeightAverage(one_weight(9.0), decay=0.9)
    second.load_state_dict(first.state_dict())
    torch.nn.init.constant_(layer.weight, 3.0)
    for average in (first, second):
        average.update(layer)
    assert torch.equal(first.values["weight"], second.values["weight"])
