"""A narrow network with its channels filled up: zeros, so that kernels that want whole groups of channels can run it.

A channel that only zeros read and write stays zero behind every convolution, residual and activation. So the results
are the same numbers. What comes in and what goes out keep their channels; inside, each count becomes the next multiple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines.fold import ClampLayer, ConvLayer, GrowLayer, Layer, MemLayer, PoolLayer, channels_last


def fill_channels(layers: Sequence[Layer], multiple: int) -> list[Layer] | None:
    """The layers of a base network, their inner channels filled up to a multiple; None for other networks.

    Example: ``fill_channels(fold_layers(TAEHV("taehv", width=0.5).decoder), 64)`` has 128, 64, 64 and 64 channels.
    """
    filled: list[Layer] = []
    inputs: int | None = None  # filled channels that come into a layer; None: as they are
    for place, layer in enumerate(layers):
        if isinstance(layer, ConvLayer) and not layer.shuffle:
            outputs = None if place == len(layers) - 1 else _up(layer.weight.shape[0] // layer.frames, multiple)
            bias = None if layer.bias is None else _fill(layer.bias, layer.frames, outputs)
            weight = _fill(layer.weight, layer.frames, outputs, inputs=inputs)
            filled.append(replace(layer, weight=weight, bias=bias))
        elif isinstance(layer, MemLayer):
            outputs = inputs
            weights: dict[str, Any] = {
                name: _fill(getattr(layer, name), 2 if name.startswith("first") else 1, outputs, inputs=inputs)
                for name in ("first", "first_bias", "second", "second_bias", "third", "third_bias")
            }
            filled.append(replace(layer, **weights))
        elif isinstance(layer, GrowLayer):
            outputs = _up(layer.weight.shape[0] // (4 * layer.frames), multiple)
            filled.append(replace(layer, weight=_fill(layer.weight, 4 * layer.frames, outputs, inputs=inputs)))
        elif isinstance(layer, PoolLayer):
            outputs = _up(layer.weight.shape[0], multiple)
            weight = _fill(layer.weight, 1, outputs, inputs=inputs, stacked=layer.stride)
            filled.append(replace(layer, weight=weight))
        elif isinstance(layer, ClampLayer):
            outputs = inputs
            filled.append(layer)
        else:
            return None
        inputs = outputs
    return filled


def _up(channels: int, multiple: int) -> int:
    return -(-channels // multiple) * multiple


def _fill(weight: Tensor, together: int, outputs: int | None, *, inputs: int | None = None, stacked: int = 1) -> Tensor:
    """A bias, or a weight OIHW, whose outputs are ``together`` groups and whose inputs are ``stacked`` ones: each group
    filled up with zeros behind its own channels, in channels_last memory. None: it stays as it is."""
    groups = weight.unflatten(0, (together, -1))
    more = 0 if outputs is None else outputs - groups.shape[1]
    if weight.ndim == 1:
        return F.pad(groups, (0, more)).flatten()
    groups = groups.unflatten(2, (stacked, -1))
    wider = 0 if inputs is None else inputs - groups.shape[3]
    return channels_last(F.pad(groups, (0, 0, 0, 0, 0, wider, 0, 0, 0, more)).flatten(2, 3).flatten(0, 1))
