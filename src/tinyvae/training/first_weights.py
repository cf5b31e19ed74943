"""How fresh weights begin: drawn from the seed, and, where a run asks for it, with a path for the colors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from tinyvae.config.schema import TrainConfig
from tinyvae.models.blocks import TGrow, TPool, TwoFrameBlock
from tinyvae.models.taehv import TAEHV

QUIET_BRANCH = 0.03  # a tenth of a dB better after 1,000 steps than 0.1; 0.01 is as good (docs/results.md)
QUIET_OUTPUT = 0.03  # what channels without a color add to the picture; 0 would stop the gradients behind them


def draw_weights(model: TAEHV, config: TrainConfig) -> None:
    """Draw fresh weights as ``config.init`` says, from ``config.seed`` alone; "torch" keeps those of the model."""
    if config.init != "torch":
        initialize_he(model, seed=config.seed)
    if config.init == "colors":
        pass_colors(model)


@torch.no_grad()
def initialize_he(model: TAEHV, *, seed: int) -> None:
    """Draw all weights from ``seed`` alone: a deviation of sqrt(2 / inputs) before a ReLU, sqrt(1 / inputs) elsewhere.

    Residual branches begin far smaller, and the output begins at mid gray.
    """
    generator = torch.Generator().manual_seed(seed)
    for conv, following, ends_branch in [*_convs(model.encoder), *_convs(model.decoder)]:
        gain = math.sqrt(2.0) if isinstance(following, nn.ReLU | nn.LeakyReLU) else 1.0
        deviation = gain * (QUIET_BRANCH if ends_branch else 1.0) / math.sqrt(conv.weight[0].numel())
        conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator) * deviation)
        if conv.bias is not None:
            conv.bias.zero_()
    output = model.decoder[-1]
    assert isinstance(output, nn.Conv2d) and output.bias is not None
    output.bias.fill_(0.5)


def _convs(stack: nn.Sequential) -> Iterator[tuple[nn.Conv2d, nn.Module | None, bool]]:
    """Each conv of a stack, the layer that follows it, and whether it is the last of a residual branch."""
    for layer, following in pairwise([*stack, None]):
        if isinstance(layer, TwoFrameBlock):
            inside = pairwise([*layer.conv, None])
            yield from ((part, after, after is None) for part, after in inside if isinstance(part, nn.Conv2d))
        elif layer is not None:
            yield from ((part, following, False) for part in layer.modules() if isinstance(part, nn.Conv2d))


@torch.no_grad()
def pass_colors(model: TAEHV) -> None:
    """Let three channels carry red, green and blue through a network that `initialize_he` has drawn.

    The encoder averages them over space and time, the decoder enlarges them again. So the first step already sees a
    coarse picture. Colors are not negative and residual branches begin quietly: activations and blocks let them pass.
    The other channels begin as they were drawn.
    """
    pixels = model.spec.patch_size**2  # channels of the image that have one color
    first, *shrinking, to_latents = _outside_of_blocks(model.encoder)
    _carry(first, 1 / pixels, columns=_next_to_each_other(pixels))
    for conv in shrinking:  # those that pool frames read the colors of each frame
        channels = conv.out_channels
        _carry(conv, channels / conv.in_channels, columns=_once_in(channels))
    from_latents, *growing, output = _outside_of_blocks(model.decoder)
    _carry(from_latents, 1 / 2)
    for conv in growing:  # 1x1 convs make frames; the 3x3 convs of super decoders make four pixels of one
        by_pixels = model.spec.decoder == "super" and conv.kernel_size == (3, 3)
        _carry(conv, 1.0, rows=_next_to_each_other(4) if by_pixels else _once_in(conv.in_channels))
    others = output.weight[:, 3:] * QUIET_OUTPUT
    _carry(output, 1.0, rows=_next_to_each_other(pixels))
    output.weight[:, 3:] = others
    assert output.bias is not None
    output.bias.zero_()
    # Colors from 0 to 1 are latents from -1 to 1, and colors again behind the first conv that can add 1/2.
    _carry(to_latents, 2.0)
    assert to_latents.bias is not None
    to_latents.bias[:3] = -1.0
    shift, count = (from_latents.bias, 3) if from_latents.bias is not None else (growing[0].bias, 12)
    assert shift is not None
    shift[:count] = 0.5


def _outside_of_blocks(stack: nn.Sequential) -> list[nn.Conv2d]:
    layers = (layer.conv if isinstance(layer, TPool | TGrow) else layer for layer in stack)
    return [layer for layer in layers if isinstance(layer, nn.Conv2d)]


def _next_to_each_other(count: int) -> list[slice]:
    """For each color its channels, where ``count`` of one color lie next to each other."""
    return [slice(color * count, (color + 1) * count) for color in range(3)]


def _once_in(channels: int) -> list[slice]:
    """For each color its channels, where the colors are the first three of ``channels``, and so on."""
    return [slice(color, None, channels) for color in range(3)]


def _carry(
    conv: nn.Conv2d, gain: float, *, rows: list[slice] | None = None, columns: list[slice] | None = None
) -> None:
    """Make the outputs ``rows`` of each color read the inputs ``columns`` of that color, and nothing else (by default
    one channel each). A conv reads its middle pixel; with a stride, the mean of the pixels that it steps over."""
    middle, stride = conv.kernel_size[0] // 2, conv.stride[0]
    taps = slice(middle, middle + stride)
    for row, column in zip(rows or _next_to_each_other(1), columns or _next_to_each_other(1), strict=True):
        conv.weight[row] = 0
        conv.weight[row, column, taps, taps] = gain / stride**2
