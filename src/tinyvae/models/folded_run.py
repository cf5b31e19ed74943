"""Runs folded steps with torch's own operators, over a whole video or chunk by chunk.

Frames travel as (N·T)CHW in channels_last memory. What a step remembers between two chunks is smaller than in the
plain network: a memory block keeps the *convolved* last frame (the part of its sum that the next frame needs), a
pooling step the frames that wait for partners. The same code serves inference and training (eager or compiled).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tinyvae.models.blocks import whole_groups
from tinyvae.models.fold import ConvStep, GrowStep, MemStep, PoolStep, SoftClampStep, Step, SuperMemStep

StepMemory = list[Tensor | None]
"""One entry per step: frames NTHWC of a memory block, NTCHW of a pooling step, or None before the first chunk."""


CUDA_CHANNEL_MULTIPLE = 8
"""Tensor cores want channels in multiples of this; otherwise cuDNN falls back to kernels several times slower."""

WORD = torch.complex128
"""The widest type there is; nothing is computed in it."""

SLICE_BYTES, CPU_SLICE_BYTES = 96 * 2**20, 16 * 2**20
"""How much the widest frames between two memory blocks may take at once, where no compiler sees the loop. On a CPU
slices that its cache can hold are also faster: decoding gains 10 to 20 %, from 4 to 32 MiB alike."""


def slice_bytes(device: torch.device) -> int:
    return CPU_SLICE_BYTES if device.type == "cpu" else SLICE_BYTES


def run_steps(
    steps: Sequence[Step], frames_NTCHW: Tensor, memory: StepMemory | None = None, *, checkpointing: bool = False
) -> tuple[Tensor, StepMemory]:
    """Run one chunk of a video; returns (output NTCHW, memory for the next chunk). See `blocks.run_layers`.

    ``memory`` is used up.
    """
    num_videos = frames_NTCHW.shape[0]
    old: StepMemory = [None] * len(steps) if memory is None else memory
    new: StepMemory = [None] * len(steps)
    recompute = checkpointing and torch.is_grad_enabled()
    x = frames_NTCHW.flatten(0, 1)
    stride = stacking_of_first(steps, frames_NTCHW, memory)
    if stride > 1:
        steps = [stacked_first(steps[0], stride), *steps[1:]]
        x = frames_NTCHW.reshape(-1, stride * x.shape[1], *x.shape[2:])
    x = x.contiguous(memory_format=torch.channels_last)
    del frames_NTCHW  # where nobody else holds it, its memory is of use
    place = 0
    while place < len(steps):
        step = steps[place]
        length = independent_steps(steps[place:], old[place:], x.shape[0] // num_videos) if may_work_in_place() else 0
        if length:
            x = _slice_by_slice(steps[place : place + length], x)
            place += length
            continue
        if isinstance(step, PoolStep) and x.shape[1] != step.weight.shape[1]:
            video, new[place] = whole_groups(x.unflatten(0, (num_videos, -1)), old[place], step.stride)
            if video.shape[1] == 0:
                new[place + 1 :] = old[place + 1 :]
                return video, new
            x = video.flatten(0, 1)
        if isinstance(step, MemStep | SuperMemStep):
            if recompute:
                x, new[place] = checkpoint(_any_mem_block, step, x, old[place], num_videos, use_reentrant=False)
            else:
                x, new[place] = _any_mem_block(step, x, old[place], num_videos)
        else:
            x = checkpoint(_simple_step, step, x, use_reentrant=False) if recompute else _simple_step(step, x)
        old[place] = None
        place += 1
    return x.unflatten(0, (num_videos, -1)), new


def independent_steps(steps: Sequence[Step], memory: StepMemory, num_frames: int) -> int:
    """How many steps from here on need nothing but the frames before them: no memory block, whole groups to pool."""
    for count, (step, waiting) in enumerate(zip(steps, memory, strict=True)):
        if isinstance(step, MemStep | SuperMemStep):
            return count
        if isinstance(step, PoolStep):
            if waiting is not None or num_frames % step.stride:
                return count
            num_frames //= step.stride
        elif not isinstance(step, SoftClampStep):
            num_frames *= step.frames
    return len(steps)


def _slice_by_slice(steps: Sequence[Step], x: Tensor) -> Tensor:
    """Independent steps over a few frames at a time: at full resolution their frames would fill the memory."""
    group = frames_per_slice(steps, x.shape[2] * x.shape[3], x.element_size(), x.device)
    if group >= x.shape[0]:
        return _through(steps, x)
    out: Tensor | None = None
    done = 0
    for part in x.split(group):
        made = _through(steps, part)
        if out is None:
            total = made.shape[0] * x.shape[0] // part.shape[0]
            out = as_bhwc(made).new_empty(total, *as_bhwc(made).shape[1:]).permute(0, 3, 1, 2)
        out[done : done + made.shape[0]] = made
        done += made.shape[0]
    assert out is not None
    return out


def _through(steps: Sequence[Step], x: Tensor) -> Tensor:
    for step in steps:
        x = _simple_step(step, x)
    return x


def frames_per_slice(steps: Sequence[Step], pixels: int, element_size: int, device: torch.device) -> int:
    """As many input frames of so many ``pixels`` as take `slice_bytes` at their widest place, in whole groups of what
    is pooled.
    """
    frames, widest, unit = 1.0, 0.0, 1
    for step in steps:
        if isinstance(step, SoftClampStep):
            continue
        if isinstance(step, PoolStep):
            unit, frames, pixels = unit * step.stride, frames / step.stride, pixels // 4
        assert not isinstance(step, MemStep | SuperMemStep)
        made = frames * pixels * step.weight.shape[0]  # of a growing step: its four phases, all its frames
        if not isinstance(step, PoolStep):
            frames *= step.frames
            pixels *= 4 if isinstance(step, GrowStep) or step.shuffle else 1
        widest = max(widest, made * element_size)
    return max(1, int(slice_bytes(device) / widest) // unit) * unit


def stacking_of_first(steps: Sequence[Step], frames_NTCHW: Tensor, memory: StepMemory | None) -> int:
    """How many frames the first convolution can take side by side on CUDA, so that the pooling behind it need not copy.

    Only for RGB, where the copy is of the largest tensor there is and the convolution costs nothing; only for whole
    groups of a fresh video.
    """
    if len(steps) < 2 or not isinstance(steps[1], PoolStep) or memory is not None or not frames_NTCHW.is_cuda:
        return 1
    fits = frames_NTCHW.shape[1] % steps[1].stride == 0 and frames_NTCHW.shape[2] == 3
    return steps[1].stride if fits else 1


def stacked_first(step: Step, frames: int) -> ConvStep:
    """The first convolution over ``frames`` frames stacked on channels: block-diagonal weights."""
    assert isinstance(step, ConvStep) and step.bias is not None
    rows = [F.pad(step.weight, (0, 0, 0, 0, i * step.weight.shape[1], (frames - 1 - i) * step.weight.shape[1]))
            for i in range(frames)]  # fmt: skip
    return replace(step, weight=torch.cat(rows), bias=step.bias.repeat(frames))


def _simple_step(step: Step, x: Tensor) -> Tensor:
    """A step without a past: (N·T)CHW -> (N·T')C'H'W'."""
    if isinstance(step, SoftClampStep):
        return torch.tanh(x / 3) * 3
    if isinstance(step, ConvStep):
        return _conv(step, x)
    if isinstance(step, PoolStep):
        return F.conv2d(stack_frames(x, step), step.weight, stride=2, padding=1)
    assert isinstance(step, GrowStep)
    grown = _grow_in_place(step, x) if may_work_in_place() else _grow(step, x)
    return _relu(grown) if step.relu else grown


def may_work_in_place() -> bool:
    """Eager inference: nobody needs the values that are written over, and no compiler fuses the passes for us."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def _relu(x: Tensor) -> Tensor:
    return torch.relu_(x) if may_work_in_place() else torch.relu(x)


def _conv(step: ConvStep, x: Tensor) -> Tensor:
    made = aligned_conv(x, step.weight, step.bias, multiple=CUDA_CHANNEL_MULTIPLE if x.is_cuda else 1)
    if step.relu:
        made = _relu(made)
    if step.shuffle:
        made = F.pixel_shuffle(made, 2).contiguous(memory_format=torch.channels_last)
    return spread_frames(made, step.frames)


def aligned_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *, multiple: int) -> Tensor:
    """A convolution that keeps the grid, its channels filled up to multiples of ``multiple``.

    Tensor cores want that of NHWC convolutions; cuDNN would otherwise fall back to a kernel several times slower
    for the 3-channel image, forward and backward.
    """
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


def stack_frames(x: Tensor, step: PoolStep) -> Tensor:
    """(N·T)CHW -> (N·T/s)(s·C)HW, channels_last; what comes stacked already stays."""
    if x.shape[1] == step.weight.shape[1]:
        return x
    groups = as_bhwc(x).unflatten(0, (-1, step.stride)).movedim(1, 3)
    return as_bchw(dense(groups).flatten(3))


def spread_frames(x: Tensor, frames: int) -> Tensor:
    """(N·T)(frames·C)HW -> (N·T·frames)CHW, channels_last."""
    if frames == 1:
        return x
    return as_bchw(dense(as_bhwc(x).unflatten(3, (frames, -1)).movedim(3, 1)).flatten(0, 1))


def as_bhwc(x: Tensor) -> Tensor:
    """Slices of channels, frames and rows are taken of this view, not of BCHW: the backward pass of a slice makes a
    tensor in the plain order of its dimensions, which for BCHW is not channels_last, and every convolution behind it
    would copy its gradient into channels_last first (9 of 50 ms of a training step on an H200).
    """
    return x.permute(0, 2, 3, 1)


def as_bchw(x: Tensor) -> Tensor:
    return x.contiguous().permute(0, 3, 1, 2)


def _grow(step: GrowStep, x: Tensor) -> Tensor:
    _, _, h, w = x.shape
    phases = as_bhwc(F.conv2d(x, step.weight, padding=1)).unflatten(3, (2, 2, step.frames, -1))
    rows = [torch.stack([phases[:, i : i + h, j : j + w, i, j] for j in (0, 1)], dim=3) for i in (0, 1)]
    grown = torch.stack(rows, dim=2)  # B H i W j frame C
    return as_bchw(grown.movedim(5, 1).flatten(4, 5).flatten(2, 3).flatten(0, 1))


def _grow_in_place(step: GrowStep, x: Tensor) -> Tensor:
    """`_grow` that writes each phase straight to its pixels."""
    return interleave_phases(F.conv2d(x, step.weight, padding=1), step.frames, x.shape[2], x.shape[3])


def interleave_phases(phases_BCHW: Tensor, frames: int, height: int, width: int) -> Tensor:
    """The 2x2 phases of a `GrowStep` on their pixels: (B·frames)C(2H)(2W), channels_last."""
    phases = as_bhwc(phases_BCHW).unflatten(3, (2, 2, frames, -1))
    grown = phases.new_empty(phases.shape[0], frames, 2 * height, 2 * width, phases.shape[-1])
    target, source = in_words(grown, phases)
    for i in (0, 1):
        for j in (0, 1):
            target[:, :, i::2, j::2] = source[:, i : i + height, j : j + width, i, j].movedim(3, 1)
    return grown.flatten(0, 1).permute(0, 3, 1, 2)


def dense(x: Tensor) -> Tensor:
    """``x`` with its channels last, contiguous."""
    if x.is_contiguous() or not may_work_in_place():
        return x.contiguous()
    made = x.new_empty(x.shape)
    copy_pixels(made, x)
    return made


def copy_pixels(target: Tensor, source: Tensor) -> None:
    """Copy what has its channels last."""
    target, source = in_words(target, source)
    target.copy_(source)


def in_words(*tensors: Tensor) -> list[Tensor]:
    """Tensors with their channels last as words of 16 bytes, where all fit: a GPU moves strided data value by value,
    in words three times as fast.
    """
    return [x.view(WORD) for x in tensors] if all(_fits_words(x) for x in tensors) else list(tensors)


def _fits_words(x: Tensor) -> bool:
    values = WORD.itemsize // x.element_size()
    lengths = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    knows_words = x.device.type in ("cpu", "cuda", "meta")  # not every device has so wide a type
    return knows_words and x.stride(-1) == 1 and all(length % values == 0 for length in lengths)


def _any_mem_block(
    step: MemStep | SuperMemStep, x: Tensor, past: Tensor | None, num_videos: int
) -> tuple[Tensor, Tensor]:
    if isinstance(step, SuperMemStep):
        return _super_mem_block(step, x, past, num_videos)
    return _mem_block(step, x, past, num_videos)


def _mem_block(step: MemStep, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    if may_work_in_place():
        return _mem_block_in_place(step, x, past, num_videos)
    now, then = as_bhwc(F.conv2d(x, step.first, step.first_bias, padding=1)).chunk(2, dim=3)
    shifted, last = _shift(then, past, num_videos)
    hidden = as_bchw(torch.relu(now + shifted))
    hidden = torch.relu(F.conv2d(hidden, step.second, step.second_bias, padding=1))
    return torch.relu(F.conv2d(hidden, step.third, step.third_bias, padding=1) + x), last


def _mem_block_in_place(step: MemStep, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """`_mem_block` with two dense convolutions for its first and every pointwise pass in place."""
    channels = x.shape[1]
    hidden = F.conv2d(x, step.first[:channels], step.first_bias[:channels], padding=1)
    then = as_bhwc(F.conv2d(x, step.first[channels:], padding=1)).unflatten(0, (num_videos, -1))
    video = as_bhwc(hidden).unflatten(0, (num_videos, -1))
    video[:, 1:] += then[:, :-1]
    if past is not None:
        video[:, :1] += past
    last = then[:, -1:].clone()
    del then, video  # their memory is what the next results take
    hidden = F.conv2d(hidden.relu_(), step.second, step.second_bias, padding=1).relu_()
    out = F.conv2d(hidden, step.third, step.third_bias, padding=1)
    return out.add_(x).relu_(), last


def _super_mem_block(step: SuperMemStep, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    channels = x.shape[1]
    now = F.conv2d(x, step.depth, padding=3, groups=channels)
    then = F.conv2d(x, step.past_depth, padding=3, groups=channels)
    shifted, last = _shift(as_bhwc(then), past, num_videos)
    wide = F.conv2d(as_bchw(torch.cat([as_bhwc(now), shifted], dim=3)), step.widen, step.widen_bias)
    return x + F.conv2d(_relu(wide), step.narrow), last


def _shift(x_BHWC: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """(each frame's predecessor BHWC, the last frame N1HWC to remember)."""
    video = x_BHWC.unflatten(0, (num_videos, -1))
    first = torch.zeros_like(video[:, :1]) if past is None else past
    shifted = torch.cat([first, video[:, :-1]], dim=1).flatten(0, 1)
    return shifted, video[:, -1:].clone()
