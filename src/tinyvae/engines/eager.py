"""The engine of torch's own operators, for CPUs, for cards without cuDNN's fused convolutions, and for training.

Frames travel as (N·T)CHW in channels_last memory. A memory block carries its *convolved* last frame N1HWC, a pooling
layer the frames NTCHW that wait for partners. The same code runs with or without torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, autocast, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tinyvae.engines import fold
from tinyvae.engines.stack import Stack, State, slice_bytes

CUDA_CHANNEL_MULTIPLE = 8  # for tensor cores; with other channel counts cuDNN is several times slower
WORD = torch.complex128  # the widest type there is; nothing is computed in it


def run_folded(
    network: nn.Sequential, frames_NTCHW: Tensor, state: State | None, *, checkpointing: bool
) -> tuple[Tensor, State]:
    """`blocks.run_layers` in folded form, for training: the weights are folded in each step. The states differ."""
    # Folded in the precision of the parameters; autocast then casts them once, like any other weight.
    with autocast(frames_NTCHW.device.type, enabled=False):
        layers = fold.fold_layers(network)
    stack = EagerStack(layers, patch_size=None, checkpointing=checkpointing)
    # A copy of the list, because a stack empties its state.
    return stack.run(frames_NTCHW, None if state is None else list(state))


class EagerStack(Stack):
    """An encoder or decoder by torch's operators. With ``patch_size=None`` it takes and gives patches, not images; with
    ``checkpointing`` the backward pass computes activations again instead of keeping them."""

    writes_image = False

    def __init__(self, layers: Sequence[fold.Layer], *, patch_size: int | None, checkpointing: bool = False) -> None:
        super().__init__(layers, patch_size=patch_size or 1)
        self._has_images = patch_size is not None
        self._checkpointing = checkpointing

    def enter(self, frames_NTCHW: Tensor, state: State) -> Tensor:
        if self._has_images and self.is_encoder:
            frames_NTCHW = frames_NTCHW.to(self.dtype)
            if self.patch_size > 1:  # at patch size 1 a shuffle would only be a copy
                frames_NTCHW = F.pixel_unshuffle(frames_NTCHW, self.patch_size)
        stacked = self.stacking_of_first(frames_NTCHW, state)
        x = frames_NTCHW.reshape(-1, stacked * frames_NTCHW.shape[2], *frames_NTCHW.shape[3:])
        return x.contiguous(memory_format=torch.channels_last)

    def stacking_of_first(self, frames_NTCHW: Tensor, state: State) -> int:
        """How many frames the first convolution takes side by side on CUDA, so that the pooling layer need not copy
        them: only RGB frames, where the copy is large and the convolution cheap."""
        fits = frames_NTCHW.is_cuda and frames_NTCHW.shape[2] == 3
        return self.stacked_for(1, state, frames_NTCHW.shape[1]) if fits else 1

    def leave(self, x: Tensor) -> Tensor:
        return super().leave(x) if self._has_images else x

    def block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        return self._call(_block, self.layers[place], x, state[place], num_videos)

    def compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        for layer in self.layers[start:stop]:
            x = self._call(compute_layer, layer, x)
        return x

    def slice_room(self, start: int, stop: int, x: Tensor) -> float | None:
        return slice_bytes(x.device) / x.element_size() if may_work_in_place() else None

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._checkpointing and torch.is_grad_enabled():
            return checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)


def stacked_first(layer: fold.ConvLayer, frames: int) -> fold.ConvLayer:
    """The first convolution over ``frames`` frames stacked on channels: block-diagonal weights."""
    assert layer.bias is not None
    inputs = layer.weight.shape[1]
    rows = [F.pad(layer.weight, (0, 0, 0, 0, i * inputs, (frames - 1 - i) * inputs)) for i in range(frames)]
    return replace(layer, weight=torch.cat(rows), bias=layer.bias.repeat(frames))


def compute_layer(layer: fold.Layer, x: Tensor) -> Tensor:
    """A layer without a state: (N·T)CHW -> (N·T')C'H'W'."""
    if isinstance(layer, fold.ClampLayer):
        return torch.tanh(x / 3) * 3
    if isinstance(layer, fold.ConvLayer):
        return _conv(layer, x)
    if isinstance(layer, fold.PoolLayer):
        return F.conv2d(stack_frames(x, layer), layer.weight, stride=2, padding=1)
    assert isinstance(layer, fold.GrowLayer)
    phases = F.conv2d(x, layer.weight, padding=1)
    grow = interleave_phases if may_work_in_place() else _stack_phases
    grown = grow(phases, layer.frames, *x.shape[2:])
    return activate(grown, layer.slope) if layer.relu else grown


def activate(x: Tensor, slope: float) -> Tensor:
    """ReLU, or LeakyReLU where ``slope`` is not 0; over ``x`` where that is allowed."""
    if slope:
        return F.leaky_relu(x, slope, inplace=may_work_in_place())
    return torch.relu_(x) if may_work_in_place() else torch.relu(x)


def _conv(layer: fold.ConvLayer, x: Tensor) -> Tensor:
    if x.shape[1] != layer.weight.shape[1]:
        layer = stacked_first(layer, x.shape[1] // layer.weight.shape[1])
    made = aligned_conv(x, layer.weight, layer.bias, multiple=CUDA_CHANNEL_MULTIPLE if x.is_cuda else 1)
    if layer.relu:
        made = activate(made, layer.slope)
    if layer.shuffle:
        made = F.pixel_shuffle(made, 2).contiguous(memory_format=torch.channels_last)
    return spread_frames(made, layer.frames)


def aligned_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *, multiple: int) -> Tensor:
    """A convolution that keeps the grid, with channels filled up to multiples of ``multiple``."""
    outputs, inputs = weight.shape[:2]
    padding = weight.shape[-1] // 2
    more_out, more_in = -outputs % multiple, -inputs % multiple
    if not (more_out or more_in):
        return F.conv2d(x, weight, bias, padding=padding)
    weight = F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))
    if bias is not None:
        bias = F.pad(bias, (0, more_out))
    if more_in:
        x = F.pad(x, (0, 0, 0, 0, 0, more_in)).contiguous(memory_format=torch.channels_last)
    return as_bhwc(F.conv2d(x, weight, bias, padding=padding))[..., :outputs].permute(0, 3, 1, 2)


def _stack_phases(phases_BCHW: Tensor, frames: int, height: int, width: int) -> Tensor:
    """`interleave_phases` without writing in place, for training and compilers."""
    phases = as_bhwc(phases_BCHW).unflatten(3, (2, 2, frames, -1))
    rows = [torch.stack([phases[:, i : i + height, j : j + width, i, j] for j in (0, 1)], dim=3) for i in (0, 1)]
    grown = torch.stack(rows, dim=2)  # B H i W j frame C
    return as_bchw(grown.movedim(5, 1).flatten(4, 5).flatten(2, 3).flatten(0, 1))


def _block(layer: fold.Layer, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    if isinstance(layer, fold.SuperMemLayer):
        return _super_mem_block(layer, x, past, num_videos)
    assert isinstance(layer, fold.TwoFrameLayer)
    first_half = _two_frame_conv_in_place if may_work_in_place() else _two_frame_conv
    hidden, last = first_half(layer, x, past, num_videos)
    hidden = activate(hidden, layer.slope)
    if isinstance(layer, fold.WideMemLayer):
        hidden = F.conv2d(hidden, layer.second, layer.second_bias, padding=1, groups=layer.groups)
        hidden = F.conv2d(activate(hidden, layer.slope), layer.third, layer.third_bias)
        out = F.conv2d(activate(hidden, layer.slope), layer.fourth, layer.fourth_bias, padding=1, groups=layer.groups)
    else:
        hidden = F.conv2d(hidden, layer.second, layer.second_bias, padding=1)
        out = F.conv2d(activate(hidden, layer.slope), layer.third, layer.third_bias, padding=1)
    return activate(out.add_(x) if may_work_in_place() else out + x, layer.slope), last


def _two_frame_conv(
    layer: fold.TwoFrameLayer, x: Tensor, past: Tensor | None, num_videos: int
) -> tuple[Tensor, Tensor]:
    """(the first convolution of a block, over each frame and the one before; what to carry)."""
    made = F.conv2d(x, layer.first, layer.first_bias, padding=layer.first.shape[-1] // 2)
    now, then = as_bhwc(made).chunk(2, dim=3)
    shifted, last = _shift(then, past, num_videos)
    return as_bchw(now + shifted), last


def _two_frame_conv_in_place(
    layer: fold.TwoFrameLayer, x: Tensor, past: Tensor | None, num_videos: int
) -> tuple[Tensor, Tensor]:
    """The same with two dense convolutions and the sum in place."""
    channels, padding = x.shape[1], layer.first.shape[-1] // 2
    hidden = F.conv2d(x, layer.first[:channels], layer.first_bias[:channels], padding=padding)
    then = as_bhwc(F.conv2d(x, layer.first[channels:], padding=padding)).unflatten(0, (num_videos, -1))
    video = as_bhwc(hidden).unflatten(0, (num_videos, -1))
    video[:, 1:] += then[:, :-1]
    if past is not None:
        video[:, :1] += past
    return hidden, then[:, -1:].clone()


def _super_mem_block(
    layer: fold.SuperMemLayer, x: Tensor, past: Tensor | None, num_videos: int
) -> tuple[Tensor, Tensor]:
    channels = x.shape[1]
    now = F.conv2d(x, layer.depth, padding=3, groups=channels)
    then = F.conv2d(x, layer.past_depth, padding=3, groups=channels)
    shifted, last = _shift(as_bhwc(then), past, num_videos)
    wide = F.conv2d(as_bchw(torch.cat([as_bhwc(now), shifted], dim=3)), layer.widen, layer.widen_bias)
    return x + F.conv2d(activate(wide, layer.slope), layer.narrow), last


def _shift(x_BHWC: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """(the frame before each frame, BHWC; the last frame N1HWC to carry)."""
    video = x_BHWC.unflatten(0, (num_videos, -1))
    first = torch.zeros_like(video[:, :1]) if past is None else past
    return torch.cat([first, video[:, :-1]], dim=1).flatten(0, 1), video[:, -1:].clone()


# frames in channels_last memory: views of them, and copies that move whole pixels


def may_work_in_place() -> bool:
    """Whether this is inference without a compiler: no backward pass needs old values, no compiler joins passes."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def as_bhwc(x: Tensor) -> Tensor:
    """The view to take slices from. The gradient of a slice of BCHW is not channels_last, and every convolution then
    copies it first (9 of 50 ms of a training step on an H200)."""
    return x.permute(0, 2, 3, 1)


def as_bchw(x: Tensor) -> Tensor:
    return x.contiguous().permute(0, 3, 1, 2)


def stack_frames(x: Tensor, pool: fold.PoolLayer) -> Tensor:
    """(N·T)CHW -> (N·T/s)(s·C)HW, channels_last. Frames that are stacked already stay as they are."""
    if x.shape[1] == pool.weight.shape[1]:
        return x
    groups = as_bhwc(x).unflatten(0, (-1, pool.stride)).movedim(1, 3)
    return as_bchw(dense(groups).flatten(3))


def spread_frames(x: Tensor, frames: int) -> Tensor:
    """(N·T)(frames·C)HW -> (N·T·frames)CHW, channels_last."""
    if frames == 1:
        return x
    return as_bchw(dense(as_bhwc(x).unflatten(3, (frames, -1)).movedim(3, 1)).flatten(0, 1))


def interleave_phases(phases_BCHW: Tensor, frames: int, height: int, width: int) -> Tensor:
    """The 2x2 phases of a `GrowLayer` on their pixels: (B·frames)C(2H)(2W), channels_last."""
    phases = as_bhwc(phases_BCHW).unflatten(3, (2, 2, frames, -1))
    grown = phases.new_empty(phases.shape[0], frames, 2 * height, 2 * width, phases.shape[-1])
    target, source = in_words(grown, phases)
    for i in (0, 1):
        for j in (0, 1):
            target[:, :, i::2, j::2] = source[:, i : i + height, j : j + width, i, j].movedim(3, 1)
    return grown.flatten(0, 1).permute(0, 3, 1, 2)


def dense(x: Tensor) -> Tensor:
    """``x``, whose last dimension is the channels, as a contiguous tensor."""
    if x.is_contiguous() or not may_work_in_place():
        return x.contiguous()
    made = x.new_empty(x.shape)
    copy_pixels(made, x)
    return made


def copy_pixels(target: Tensor, source: Tensor) -> None:
    """Copy tensors whose last dimension is the channels."""
    target, source = in_words(target, source)
    target.copy_(source)


def in_words(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose last dimension is the channels, as words of 16 bytes where all of them allow it: a GPU copies
    strided data three times as fast in words as value by value."""
    return [x.view(WORD) for x in tensors] if all(_fits_words(x) for x in tensors) else list(tensors)


def _fits_words(x: Tensor) -> bool:
    values = WORD.itemsize // x.element_size()
    lengths = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    knows_words = x.device.type in ("cpu", "cuda", "meta")  # not every device has such a wide type
    return knows_words and x.stride(-1) == 1 and all(length % values == 0 for length in lengths)
