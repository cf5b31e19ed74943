"""Which channels of a network belong together, and how much each of them matters.

Channels fall into groups that are kept or removed together: the stream of a stage (all blocks add to it), the channels
inside one block, and those between two convolutions. A group has the name of the layer that makes it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from tinyvae.models.blocks import MemBlock, SuperMemBlock, TGrow, TPool
from tinyvae.models.taehv import TAEHV


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where the channels of a group lie on one side of a convolution: ``outer`` times one after another (frames), and
    each of them ``inner`` times in a row (the four pixels of a pixel-shuffle)."""

    group: str
    outer: int = 1
    inner: int = 1

    def by_channel(self, values: Tensor) -> Tensor:
        """Values of this axis, summed for each channel of the group."""
        return values.view(self.outer, -1, self.inner).sum((0, 2))

    def places(self, kept: Tensor, size: int) -> Tensor:
        """The places of the kept channels on an axis of ``size``."""
        channels = size // (self.outer * self.inner)
        starts = torch.arange(self.outer).view(-1, 1, 1) * channels + kept.view(1, -1, 1)
        return (starts * self.inner + torch.arange(self.inner)).flatten()


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One convolution and the groups of its channels; None where they all stay (images, latents, depthwise inputs)."""

    conv: str  # its name in the network
    out: Axis | None
    into: Axis | None
    adds: bool = False  # whether the outputs are added to the stream that its block got


def find_conv(model: nn.Module, name: str) -> nn.Conv2d:
    """The convolution of this name."""
    conv = model.get_submodule(name)
    assert isinstance(conv, nn.Conv2d), name
    return conv


def plan_cuts(stack: nn.Sequential, side: str) -> list[Cut]:
    """Every convolution of a stack, in the order in which they run, with the groups of its channels."""
    cuts: list[Cut] = []
    stream: Axis | None = None
    layers: list[nn.Module] = list(stack)
    for place, layer in enumerate(layers):
        name = f"{side}.{place}"
        if isinstance(layer, MemBlock):
            assert stream is not None
            first, second = Axis(group=f"{name}.conv.0"), Axis(group=f"{name}.conv.2")
            cuts.append(Cut(conv=f"{name}.conv.0", out=first, into=replace(stream, outer=2)))
            cuts.append(Cut(conv=f"{name}.conv.2", out=second, into=first))
            cuts.append(Cut(conv=f"{name}.conv.4", out=stream, into=second, adds=True))
        elif isinstance(layer, SuperMemBlock):
            assert stream is not None
            both, wide = replace(stream, outer=2), Axis(group=f"{name}.conv.1")
            cuts.append(Cut(conv=f"{name}.conv.0", out=both, into=None))
            cuts.append(Cut(conv=f"{name}.conv.1", out=wide, into=both))
            cuts.append(Cut(conv=f"{name}.conv.3", out=stream, into=wide, adds=True))
        elif isinstance(layer, TPool):
            assert stream is not None
            cuts.append(Cut(conv=f"{name}.conv", out=Axis(group=name), into=replace(stream, outer=layer.stride)))
            stream = Axis(group=name)
        elif isinstance(layer, TGrow):
            cuts.append(Cut(conv=f"{name}.conv", out=Axis(group=name, outer=layer.stride), into=stream))
            stream = Axis(group=name)
        elif isinstance(layer, nn.Conv2d):
            is_shuffled = any(isinstance(after, nn.PixelShuffle) for after in layers[place + 1 : place + 3])
            made = None if place == len(layers) - 1 else Axis(group=name, inner=4 if is_shuffled else 1)
            cuts.append(Cut(conv=name, out=made, into=stream))
            stream = None if made is None else replace(made, inner=1)
    return cuts


def makes(cut: Cut, group: str) -> bool:
    """Whether a convolution makes channels of a group; a depthwise one only passes them on."""
    return cut.out is not None and cut.out.group == group and (cut.into is not None or cut.conv == group)


def turn_linear_pairs(model: TAEHV) -> None:
    """Turn the channels between the 1x1 of a `TPool` or `TGrow` and the convolution right behind it, so that the first
    channels hold as much of the product of the two as channels can. The network computes the same as before."""
    for stack in (model.encoder, model.decoder):
        layers = list(stack)
        for narrow, conv in pairwise(layers):
            if not (isinstance(narrow, TPool | TGrow) and isinstance(conv, nn.Conv2d)):
                continue
            frames = narrow.stride if isinstance(narrow, TGrow) else 1
            middle = conv.in_channels
            first = narrow.conv.weight.double()[:, :, 0, 0].unflatten(0, (frames, middle)).movedim(1, 0).flatten(1)
            second = conv.weight.double().movedim(1, 3).flatten(0, 2)  # (outputs and taps, middle)
            left, values, right = torch.linalg.svd(second @ first, full_matrices=False)
            left, values, right = left[:, :middle], values[:middle].sqrt(), right[:middle]
            assert len(values) == middle, "fewer inputs or outputs than channels between them"
            taps = (left * values).unflatten(0, (conv.out_channels, *conv.kernel_size)).movedim(3, 1)
            conv.weight.copy_(taps)
            turned = (right * values[:, None]).unflatten(1, (frames, -1)).movedim(0, 1).flatten(0, 1)
            narrow.conv.weight.copy_(turned[:, :, None, None])


def channel_scores(model: TAEHV, cuts: Sequence[Cut], energies: dict[str, Tensor]) -> dict[str, Tensor]:
    """How much each channel of each group matters to the convolutions that read it: its energy times the squared norm
    of the weights that it meets, as a share of all channels; summed over those convolutions.

    ``energies``: the mean square of each input of a convolution. Where there is none, the squared norm of the weights
    that make the channel stands for it.
    """
    scores: dict[str, Tensor] = {}
    groups = dict.fromkeys(cut.out.group for cut in cuts if cut.out is not None)
    for group in groups:
        made = [cut for cut in cuts if makes(cut, group)]
        guess = torch.stack(
            [cut.out.by_channel(_output_norms(find_conv(model, cut.conv))) for cut in made if cut.out]
        ).sum(0)
        total = torch.zeros_like(guess)
        for cut in cuts:
            if cut.into is None or cut.into.group != group:
                continue
            met = find_conv(model, cut.conv).weight.square().sum((0, 2, 3))
            if cut.conv in energies:
                share = cut.into.by_channel(energies[cut.conv] * met)
            else:
                share = guess * cut.into.by_channel(met)
            total += share / share.sum().clamp_min(1e-30)
        scores[group] = total
    return scores


def _output_norms(conv: nn.Conv2d) -> Tensor:
    norms = conv.weight.square().sum((1, 2, 3))
    return norms if conv.bias is None else norms + conv.bias.square()
