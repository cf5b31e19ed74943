"""The training step's forward pass in folded form: weights folded inside the step, gradients exact.

`TAEHV.folded_training = True` routes `encode`, `decode` and `forward` through here. Parameters, their names and the
saved file stay what they are; only the way from parameters to output changes, so the switch may be thrown between any
two videos (not within a stream: what a stream remembers has another form here).
"""

from __future__ import annotations

from torch import Tensor, autocast, nn

from tinyvae.models.blocks import Memory
from tinyvae.models.fold import fold_layers
from tinyvae.models.folded_run import run_steps


def run_folded_layers(
    layers: nn.Sequential, frames_NTCHW: Tensor, memory: Memory | None = None, *, checkpointing: bool = False
) -> tuple[Tensor, Memory]:
    """`blocks.run_layers` in folded form. A memory made here belongs here; it is not that of the plain layers."""
    # The folded weights are sums of products of parameters: taken in the parameters' own precision, then cast once
    # by autocast like any other weight.
    with autocast(frames_NTCHW.device.type, enabled=False):
        steps = fold_layers(layers)
    # A copy of the list, because run_steps uses it up and the plain layers, which this stands for, do not.
    return run_steps(steps, frames_NTCHW, None if memory is None else list(memory), checkpointing=checkpointing)
