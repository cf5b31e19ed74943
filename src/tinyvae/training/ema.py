"""A running mean of the weights: what is validated, exported and shipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """fp32 exponential moving average of a model's parameters.

    The decay warms up as (1 + n) / (10 + n) after n updates, so that the mean of a short run is not the mean of its
    random start.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.values = {name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        """Move towards the model's weights by one step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        current = [p.detach().to(torch.float32) for p in model.parameters()]
        torch._foreach_lerp_(list(self.values.values()), current, 1.0 - decay)

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights inside the block, its own again after it."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        _copy_into(model, self.values)
        try:
            yield
        finally:
            _copy_into(model, own)

    def state_dict(self) -> dict[str, object]:
        return {"updates": self.updates, "values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        values, updates = state["values"], state["updates"]
        assert isinstance(values, Mapping) and isinstance(updates, int)
        assert list(values) == list(self.values), "the average belongs to another network"
        self.updates = updates
        for name, value in values.items():
            self.values[name].copy_(value)


def _copy_into(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
