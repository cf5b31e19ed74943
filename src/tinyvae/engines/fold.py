"""Weights folded into fewer, larger layers: the same function as the plain network with less work.

Four facts make it exact. Nearest upsampling, the 1x1 of `TGrow` and the 3x3 behind it have no activation between
them, so they are one 2x2 convolution per output phase on the small grid. The 1x1 of `TPool` and the stride-2 3x3
behind it are one 3x3 over stacked frames. The first convolution of a `MemBlock` over [x_t, x_{t-1}] is a sum of two
convolutions, each over one frame. In the super decoders the last `TGrow` and the last 3x3 are one 3x3.

Every function here is differentiable: training folds in every step, `FusedTAEHV` folds once. Convolution weights are
OIHW. Where the channels hold several frames, the frame is the outer index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tinyvae.models.blocks import Clamp, MemBlock, SuperMemBlock, TGrow, TPool, Upsample, WideMemBlock


class Size(NamedTuple):
    """How many frames, and how large each of them is."""

    frames: int
    channels: int
    height: int
    width: int

    @property
    def values(self) -> int:
        return self.frames * self.channels * self.height * self.width


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One folded layer; the base class keeps the size of its frames."""

    def output(self, size: Size) -> Size:
        """What comes out when frames of this size go in."""
        return size


@dataclass(frozen=True, kw_only=True)
class ClampLayer(Layer):
    """3·tanh(x/3)."""


@dataclass(frozen=True, kw_only=True)
class ConvLayer(Layer):
    """A convolution that keeps the grid, then perhaps a ReLU, then perhaps a pixel-shuffle by 2.

    Here and below ``slope`` is that of the ReLU below zero: not 0 is LeakyReLU.
    """

    weight: Tensor  # (out, in, 1, 1) or (out, in, 3, 3)
    bias: Tensor | None
    relu: bool = False
    slope: float = 0.0
    shuffle: bool = False
    frames: int = 1  # > 1: the output channels hold this many consecutive frames

    def output(self, size: Size) -> Size:
        scale = 2 if self.shuffle else 1
        channels = self.weight.shape[0] // (self.frames * scale**2)
        return Size(size.frames * self.frames, channels, size.height * scale, size.width * scale)


@dataclass(frozen=True, kw_only=True)
class BlockLayer(Layer):
    """A memory block: it needs the frame before each frame."""

    slope: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TwoFrameLayer(BlockLayer):
    """What `MemLayer` and `WideMemLayer` share: convolutions of which the first sees two frames."""

    first: Tensor  # (2C, C, 3, 3), wide (2C, C, 1, 1): the half for x_t, then the half for x_{t-1}
    first_bias: Tensor  # (2C,): zero in the half for x_{t-1}, so that the frame before a video adds nothing
    second: Tensor  # (C, C, 3, 3), wide (C, C / groups, 3, 3)
    second_bias: Tensor
    third: Tensor  # (C, C, 3, 3), wide (C, C, 1, 1)
    third_bias: Tensor


@dataclass(frozen=True, kw_only=True)
class MemLayer(TwoFrameLayer):
    """`MemBlock`: relu(third(relu(second(relu(now(x_t) + then(x_{t-1}))))) + x_t), [now, then] = first."""


@dataclass(frozen=True, kw_only=True)
class WideMemLayer(TwoFrameLayer):
    """`WideMemBlock`: as `MemLayer`, with a 1x1, a grouped 3x3, a 1x1 and a grouped 3x3."""

    fourth: Tensor  # (C, C / groups, 3, 3)
    fourth_bias: Tensor

    @property
    def groups(self) -> int:
        return self.second.shape[0] // self.second.shape[1]


@dataclass(frozen=True, kw_only=True)
class SuperMemLayer(BlockLayer):
    """`SuperMemBlock`: x + narrow(relu(widen([depth(x_t), past_depth(x_{t-1})])))."""

    depth: Tensor  # (C, 1, 7, 7), over x_t
    past_depth: Tensor  # (C, 1, 7, 7), over x_{t-1}
    widen: Tensor  # (4C, 2C, 1, 1)
    widen_bias: Tensor
    narrow: Tensor  # (C, 4C, 1, 1)


@dataclass(frozen=True, kw_only=True)
class PoolLayer(Layer):
    """`TPool` and the stride-2 3x3 behind it: one 3x3 with stride 2 over ``stride`` frames stacked on channels."""

    weight: Tensor  # (out, stride·in, 3, 3)
    stride: int

    def output(self, size: Size) -> Size:
        return Size(size.frames // self.stride, self.weight.shape[0], -(-size.height // 2), -(-size.width // 2))


@dataclass(frozen=True, kw_only=True)
class GrowLayer(Layer):
    """Upsample, `TGrow` and the 3x3 behind it: a 2x2 convolution with padding 1 to (phase row i, phase column j,
    frame, channel) outputs; phase (i, j) is cropped at [i:i+H, j:j+W] and lands on the pixels (2y+i, 2x+j).
    """

    weight: Tensor  # (2·2·frames·out, in, 2, 2)
    frames: int
    relu: bool = False
    slope: float = 0.0

    def output(self, size: Size) -> Size:
        channels = self.weight.shape[0] // (4 * self.frames)
        return Size(size.frames * self.frames, channels, 2 * size.height, 2 * size.width)


def output_size(layers: Sequence[Layer], size: Size) -> Size:
    """What comes out of the last of these layers when frames of this size go into the first."""
    for layer in layers:
        size = layer.output(size)
    return size


def fold_layers(network: nn.Sequential) -> list[Layer]:
    """The folded layers that compute what a stack of the family's modules computes."""
    modules: list[nn.Module] = list(network)
    layers: list[Layer] = []
    while modules:
        layer, used = _fold_first(modules)
        layers.append(layer)
        modules = modules[used:]
    return layers


def _fold_first(modules: list[nn.Module]) -> tuple[Layer, int]:
    """(the folded layer that begins with the first of these modules, how many modules it stands for)."""
    module = modules[0]
    if isinstance(module, Clamp):
        return ClampLayer(), 1
    if isinstance(module, MemBlock | WideMemBlock):
        return _fold_two_frame_block(module), 1
    if isinstance(module, SuperMemBlock):
        return _fold_super_block(module), 1
    if isinstance(module, TPool):
        # A 1x1 (mid, s·in) followed by a 3x3 (out, mid) is a 3x3 (out, s·in).
        folded = torch.einsum("omyx,mc->ocyx", _conv(modules, 1).weight, module.conv.weight[:, :, 0, 0])
        return PoolLayer(weight=folded, stride=module.stride), 2
    if isinstance(module, Upsample):
        weight, frames = grow_weight(modules[1])
        relu, slope = _activation(modules, 3)
        folded = grow_into_conv(weight, _conv(modules, 2).weight, frames)
        if module.enabled:
            return GrowLayer(weight=split_phases(folded), frames=frames, relu=relu, slope=slope), 3 + relu
        return ConvLayer(weight=folded.flatten(0, 1), bias=None, relu=relu, slope=slope, frames=frames), 3 + relu
    if isinstance(module, TGrow):  # of a super decoder: alone before a block, one with the last 3x3 at the end
        weight, frames = grow_weight(module)
        if len(modules) != 2:
            return ConvLayer(weight=weight, bias=None, frames=frames), 1
        last = _conv(modules, 1)
        assert last.bias is not None
        folded = grow_into_conv(weight, last.weight, frames)
        return ConvLayer(weight=folded.flatten(0, 1), bias=last.bias.repeat(frames), frames=frames), 2
    conv, (relu, slope) = _conv(modules, 0), _activation(modules, 1)
    shuffle = relu and len(modules) > 2 and isinstance(modules[2], nn.PixelShuffle)
    folded_conv = ConvLayer(weight=conv.weight, bias=conv.bias, relu=relu, slope=slope, shuffle=shuffle)
    return folded_conv, 1 + relu + shuffle


def _conv(modules: Sequence[nn.Module], place: int) -> nn.Conv2d:
    module = modules[place]
    assert isinstance(module, nn.Conv2d), f"{type(module).__name__}, where a convolution was expected"
    return module


def _activation(modules: Sequence[nn.Module], place: int) -> tuple[bool, float]:
    """(whether a module is a ReLU, its slope below zero)."""
    module = modules[place] if place < len(modules) else None
    return isinstance(module, nn.ReLU | nn.LeakyReLU), slope_of(module)


def slope_of(activation: nn.Module | None) -> float:
    return activation.negative_slope if isinstance(activation, nn.LeakyReLU) else 0.0


def _fold_two_frame_block(block: MemBlock | WideMemBlock) -> TwoFrameLayer:
    convs = [module for module in block.conv if isinstance(module, nn.Conv2d)]
    weights: dict[str, Any] = {}
    for name, conv in zip(("first", "second", "third", "fourth"), convs, strict=False):
        weights |= {name: conv.weight, f"{name}_bias": conv.bias}
    # The first one, over [x_t, x_{t-1}], becomes two over one frame each, one below the other.
    weights["first"] = torch.cat(weights["first"].chunk(2, dim=1))
    weights["first_bias"] = torch.cat([weights["first_bias"], torch.zeros_like(weights["first_bias"])])
    kind = WideMemLayer if isinstance(block, WideMemBlock) else MemLayer
    return kind(slope=slope_of(block.activation), **weights)


def _fold_super_block(block: SuperMemBlock) -> SuperMemLayer:
    depth, widen, narrow = (_conv(list(block.conv), i) for i in (0, 1, 3))
    assert widen.bias is not None
    channels = narrow.weight.shape[0]
    return SuperMemLayer(
        depth=depth.weight[:channels],
        past_depth=depth.weight[channels:],
        widen=widen.weight,
        widen_bias=widen.bias,
        narrow=narrow.weight,
        slope=slope_of(block.conv[2]),
    )


def grow_weight(grow: nn.Module) -> tuple[Tensor, int]:
    """(the 1x1 weight that is in use, how many frames it makes of one)."""
    assert isinstance(grow, TGrow)
    weight = grow.conv.weight
    if grow.last_only:
        return weight[-weight.shape[1] :], 1
    return weight, grow.stride


def grow_into_conv(grow: Tensor, conv: Tensor, frames: int) -> Tensor:
    """A 1x1 (frames·mid, in) followed, frame by frame, by a 3x3 (out, mid): (frames, out, in, 3, 3)."""
    per_frame = grow[:, :, 0, 0].unflatten(0, (frames, -1))
    return torch.einsum("omyx,fmc->focyx", conv, per_frame)


def split_phases(weight_FOIHW: Tensor) -> Tensor:
    """A 3x3 on the doubled grid as one 2x2 on the small grid: (frames, out, in, 3, 3) -> (4·frames·out, in, 2, 2).

    An output pixel of row phase 0 sees the small rows y-1 (tap 0) and y (taps 1 and 2), one of phase 1 the rows y
    (taps 0 and 1) and y+1 (tap 2); columns alike.
    """
    top, middle, bottom = weight_FOIHW.unbind(3)
    rows = torch.stack([torch.stack([top, middle + bottom], 3), torch.stack([top + middle, bottom], 3)])
    left, center, right = rows.unbind(5)  # rows: phase row, frames, out, in, tap row, taps 0..2
    taps = torch.stack([torch.stack([left, center + right], 5), torch.stack([left + center, right], 5)], 1)
    return taps.flatten(0, 3)


def join_phases(weight: Tensor) -> Tensor:
    """A 3x3 over pixels (out, in, 3, 3) as a 2x2 over cells of phases: (out·2·2, 2·2·in, 2, 2).

    Phase (i, j) of cell (y, x) is pixel (2y-i, 2x-j): `GrowLayer`'s convolution before it is cropped makes these cells.
    The outputs (row, column) at (y, x) are the pixels (2y+row, 2x+column), and they read the cells y..y+1, x..x+1.
    """
    outputs, inputs = weight.shape[:2]
    joined = weight.new_zeros(outputs, 2, 2, 2, 2, inputs, 2, 2)  # out, row, column; phase row, column, in; cell
    for row, column, y, x in itertools.product((0, 1), (0, 1), (0, 1, 2), (0, 1, 2)):
        down, right = row + y, column + x  # the pixel that this tap reads, from the upper left one of the four cells
        joined[:, row, column, 1 - down % 2, 1 - right % 2, :, down // 2, right // 2] = weight[:, :, y, x]
    return joined.flatten(3, 5).flatten(0, 2)


def map_weights(layers: Sequence[Layer], change: Callable[[Tensor], Tensor]) -> list[Layer]:
    """The same layers with every weight and bias replaced by ``change(it)``."""
    weights = [{name: one for name, one in vars(layer).items() if isinstance(one, Tensor)} for layer in layers]
    changes: list[dict[str, Any]] = [{name: change(one) for name, one in few.items()} for few in weights]
    return [replace(layer, **few) for layer, few in zip(layers, changes, strict=True)]


def channels_last(weight: Tensor) -> Tensor:
    """Convolution weights in the memory order that NHWC convolutions read; biases as they are."""
    return weight.contiguous(memory_format=torch.channels_last) if weight.ndim == 4 else weight
