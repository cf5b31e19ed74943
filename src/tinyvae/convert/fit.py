"""Weights of a pruned network, fitted by least squares to what the whole network makes of clips.

Both networks run side by side, layer by layer. Each convolution of the pruned one is fitted to make, from what the ones
before it make now, the outputs of the whole network at drawn pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae.convert.channels import Cut, find_conv
from tinyvae.models.blocks import run_layers
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import H3_CHUNK_FRAMES, H3_CHUNK_ZEROS
from tinyvae.terminal import progress_bar

Pixels = tuple[Tensor, Tensor, Tensor]
"""The frame, the row and the column of each pixel."""
FITTED_PIXELS = 16_384  # of each layer, drawn from all clips: several for each weight of an output channel
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""How strongly fitted weights may be held to the cut ones, as parts of the inputs' energy; `solve_ridge` chooses."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one side of the whole network gets of clips."""

    first_inputs: list[Tensor]  # of the first layer, for each clip NTCHW: padded, as patches, in the rule's chunks
    energies: dict[str, Tensor]  # the mean square of each input channel of a convolution, by its name


def look_at(model: TAEHV, side: str, cuts: Sequence[Cut], videos: Sequence[Tensor]) -> Seen:
    """Run frames through the encoder, or latents through the decoder, and keep what layers get."""
    first_inputs: list[Tensor] = []
    energies: dict[str, Tensor] = {}
    is_chunked = side == "encoder" and model.spec.frame_rule == "chunked"

    def add(name: str, x_BCHW: Tensor) -> None:
        energy = x_BCHW.square().mean((0, 2, 3))
        energies[name] = energies[name] + energy if name in energies else energy

    with ExitStack() as hooks:
        _before(hooks, model, f"{side}.0", lambda x_BCHW: first_inputs.append(x_BCHW.clone()))
        for cut in cuts:
            _before(hooks, model, cut.conv, partial(add, cut.conv))
        for video in videos:
            model.encode(video) if side == "encoder" else model.decode(video)
            count = len(first_inputs[-1]) // (H3_CHUNK_FRAMES + H3_CHUNK_ZEROS) if is_chunked else len(video)
            first_inputs[-1] = first_inputs[-1].unflatten(0, (count, -1))
    return Seen(first_inputs=first_inputs, energies=energies)


def _before(hooks: ExitStack, model: nn.Module, name: str, see: Callable[[Tensor], None]) -> None:
    """Let ``see`` see the input of a layer before it runs."""
    layer = model.get_submodule(name)
    hooks.callback(layer.register_forward_pre_hook(lambda _, arguments: see(arguments[0])).remove)


def fit_layers(
    whole: TAEHV,
    pruned: TAEHV,
    side: str,
    cuts: Sequence[Cut],
    kept: dict[str, Tensor],
    first_inputs: Sequence[Tensor],
    *,
    show_progress_bar: bool,
) -> None:
    """Fit the convolutions of one side of a pruned network, from the first to the last. The last one of a block also
    makes up for what its stream lacks. ``kept``: the channels of each group that are left."""
    count = -(-FITTED_PIXELS // len(first_inputs))
    in_whole, in_pruned = list(first_inputs), [video.clone() for video in first_inputs]
    places = range(len(getattr(whole, side)))
    for place in progress_bar(places, desc=f"fit {side}", unit="layer", disable=not show_progress_bar):
        name = f"{side}.{place}"
        here = [
            cut for cut in cuts if f"{cut.conv}.".startswith(f"{name}.") and find_conv(pruned, cut.conv).groups == 1
        ]
        runs = [_run_whole(whole, name, here, video, kept, num_pixels=count) for video in in_whole]
        for cut in here:
            pairs = zip(in_pruned, (wanted[cut.conv] for _, wanted in runs), strict=True)
            seen = [_sees_and_lacks(pruned, name, cut, *pair) for pair in pairs]
            fit_conv(find_conv(pruned, cut.conv), *(torch.cat(column) for column in zip(*seen, strict=True)))
        in_whole = [made for made, _ in runs]
        in_pruned = [_run_layer(pruned, name, video) for video in in_pruned]


def _run_layer(model: TAEHV, name: str, video_NTCHW: Tensor) -> Tensor:
    """One layer over a whole video."""
    return run_layers(nn.Sequential(model.get_submodule(name)), video_NTCHW)[0]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a convolution of the pruned network should give at drawn pixels of a video."""

    pixels: Pixels
    outputs: Tensor  # (pixels, kept outputs); with the stream of its block, where the convolution adds to it


def _run_whole(
    whole: TAEHV, name: str, cuts: Sequence[Cut], video_NTCHW: Tensor, kept: dict[str, Tensor], *, num_pixels: int
) -> tuple[Tensor, dict[str, Wanted]]:
    """(what a layer makes of a video, what its convolutions make, by their names)."""
    found: dict[str, Wanted] = {}
    stream_BCHW = video_NTCHW.flatten(0, 1)

    def keep(cut: Cut, _: nn.Module, __: object, made_BCHW: Tensor) -> None:
        pixels = draw_pixels(made_BCHW, num_pixels)
        frame, row, column = pixels
        outputs = made_BCHW[frame, :, row, column]
        if cut.adds:
            outputs = outputs + stream_BCHW[frame, :, row, column]
        if cut.out is not None:
            outputs = outputs[:, cut.out.places(kept[cut.out.group], outputs.shape[1])]
        found[cut.conv] = Wanted(pixels=pixels, outputs=outputs)

    with ExitStack() as hooks:
        for cut in cuts:
            hooks.callback(find_conv(whole, cut.conv).register_forward_hook(partial(keep, cut)).remove)
        return _run_layer(whole, name, video_NTCHW), found


def _sees_and_lacks(pruned: TAEHV, name: str, cut: Cut, video_NTCHW: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """(what a convolution sees at the drawn pixels, how far its outputs are there from the wanted ones)."""
    conv, (frame, row, column) = find_conv(pruned, cut.conv), wanted.pixels
    seen: list[Tensor] = []
    with ExitStack() as hooks:
        _before(hooks, pruned, cut.conv, lambda x_BCHW: seen.append(patches_of(x_BCHW, conv, wanted.pixels)))
        _run_layer(pruned, name, video_NTCHW.clone())  # a layer may write over its input
    lacks = wanted.outputs - F.linear(seen[0], conv.weight.flatten(1), conv.bias)
    if cut.adds:
        lacks = lacks - video_NTCHW.flatten(0, 1)[frame, :, row, column]
    return seen[0], lacks


def draw_pixels(x_BCHW: Tensor, count: int) -> Pixels:
    """At most ``count`` pixels; always the same ones for frames of one size."""
    frames, _, height, width = x_BCHW.shape
    drawn = torch.randperm(frames * height * width, generator=torch.Generator().manual_seed(0))[:count]
    drawn = drawn.to(x_BCHW.device)
    return drawn // (height * width), drawn // width % height, drawn % width


def patches_of(x_BCHW: Tensor, conv: nn.Conv2d, pixels: Pixels) -> Tensor:
    """What a convolution sees for these output pixels: (pixels, inputs x taps), in the order of its weights."""
    frame, row, column = pixels
    side, stride, pad = conv.kernel_size[0], conv.stride[0], conv.kernel_size[0] // 2
    padded = F.pad(x_BCHW, (pad, pad, pad, pad))
    taps = [padded[frame, :, row * stride + i, column * stride + j] for i in range(side) for j in range(side)]
    return torch.stack(taps, dim=2).flatten(1)


def fit_conv(conv: nn.Conv2d, patches: Tensor, lacking: Tensor) -> None:
    """Change a convolution by what brings its outputs nearest to what they lack: (pixels, outputs)."""
    if conv.bias is not None:
        patches = torch.cat([patches, patches.new_ones(len(patches), 1)], dim=1)
    change = solve_ridge(patches, lacking)
    weights = conv.weight[0].numel()
    conv.weight += change[:weights].T.reshape(conv.weight.shape)
    if conv.bias is not None:
        conv.bias += change[weights]


def solve_ridge(inputs: Tensor, targets: Tensor) -> Tensor:
    """The weights (inputs, targets) that map rows of inputs to rows of targets with the least square error.

    A ridge holds them to zero. It is the one of `RIDGES` with the least error on the last eighth of the rows, after a
    fit to the others; weights of zero are returned where they are better still.
    """
    last = max(1, len(inputs) // 8)
    seen, unseen = (inputs[:-last], targets[:-last]), (inputs[-last:], targets[-last:])
    gram, moment = (seen[0].T @ seen[0]).double(), (seen[0].T @ seen[1]).double()
    errors = {math.inf: unseen[1].square().sum().item()}
    for ridge in RIDGES:
        weights = _solve(gram, moment, ridge).to(inputs.dtype)
        errors[ridge] = (unseen[0] @ weights - unseen[1]).square().sum().item()
    best = min(errors, key=lambda ridge: errors[ridge])
    if math.isinf(best):
        return torch.zeros_like(moment).to(inputs.dtype)
    gram, moment = gram + unseen[0].T @ unseen[0], moment + unseen[0].T @ unseen[1]
    return _solve(gram, moment, best).to(inputs.dtype)


def _solve(gram: Tensor, moment: Tensor, ridge: float) -> Tensor:
    held = gram.clone()
    held.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(held, moment)
