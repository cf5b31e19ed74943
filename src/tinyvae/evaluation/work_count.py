"""How many operations and bytes a folded network needs at least: the floor under every measured time.

Operations: two per multiply-add of the convolutions. Bytes: every layer reads its input once, writes its output once
and reads its weights once; what a memory block does between its three convolutions is counted like that too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tinyvae.engines.fold import (
    ClampLayer,
    ConvLayer,
    GrowLayer,
    Layer,
    MemLayer,
    PoolLayer,
    Size,
    SuperMemLayer,
    fold_layers,
)
from tinyvae.models.taehv import TAEHV


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One folded layer over one video."""

    name: str
    flops: float
    bytes_moved: float


def count_layers(layers: list[Layer], size: Size, *, element_size: int) -> list[LayerWork]:
    """Work of each layer; ``size`` is what enters the first one."""
    counted: list[LayerWork] = []
    for layer in layers:
        after = layer.output(size)
        if isinstance(layer, MemLayer | SuperMemLayer):
            name, macs, values, weights = _block_work(layer, size)
        elif isinstance(layer, ClampLayer):
            name, macs, values, weights = "soft clamp", 0, 0, 0  # done where the next layer reads
        else:
            assert isinstance(layer, ConvLayer | PoolLayer | GrowLayer)
            weights, values = layer.weight.numel(), size.values + after.values
            grid = after if isinstance(layer, PoolLayer) else size  # where the convolution's outputs lie
            macs = grid.frames * grid.height * grid.width * weights
            name = f"conv to {layer.weight.shape[0]}"
            name = "pool, 3x3 stride 2" if isinstance(layer, PoolLayer) else name
            name = "upsample, grow, 3x3" if isinstance(layer, GrowLayer) else name
        counted.append(LayerWork(name=name, flops=2.0 * macs, bytes_moved=float((values + weights) * element_size)))
        size = after
    return counted


def _block_work(layer: MemLayer | SuperMemLayer, size: Size) -> tuple[str, int, int, int]:
    """(name, multiply-adds, activations moved, weights) of a memory block."""
    pixels = size.frames * size.height * size.width
    if isinstance(layer, MemLayer):
        weights = layer.first.numel() + layer.second.numel() + layer.third.numel()
        # three convolutions, each in and out, and the residual
        return f"memory block {size.channels}", pixels * weights, 7 * size.values, weights
    weights = layer.depth.numel() + layer.past_depth.numel() + layer.widen.numel() + layer.narrow.numel()
    moved = (1 + 2 + 2 + 4 + 4 + 1 + 1) * size.values
    return f"super memory block {size.channels}", pixels * weights, moved, weights


def layers_of(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> list[LayerWork]:
    """Work per layer of encoding ``num_frames`` frames of this size, or of decoding what they encode to."""
    spec = model.spec
    with torch.no_grad():
        layers = fold_layers(model.encoder if operation == "encode" else model.decoder)
    latents = spec.latents(num_frames)
    size = Size(latents, spec.latent_channels, height // spec.space_factor, width // spec.space_factor)
    if operation == "encode":
        patch = spec.patch_size
        size = Size(latents * spec.time_factor, spec.image_channels, height // patch, width // patch)
    return count_layers(layers, size, element_size=model.dtype.itemsize)


def count_work(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> tuple[float, float]:
    """(operations, bytes) of the whole pass."""
    layers = layers_of(model, operation, num_frames, height, width)
    return sum(layer.flops for layer in layers), sum(layer.bytes_moved for layer in layers)
