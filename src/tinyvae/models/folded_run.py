"""Runs folded steps with torch's own operators, over a whole video or chunk by chunk.

Frames travel as (N·T)CHW in channels_last memory. What a step remembers between two chunks is smaller than in the
plain network: a memory block keeps the *convolved* last frame (the part of its sum that the next frame needs), a
pooling step the frames that wait for partners. The same code serves inference (eager or compiled) and training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tinyvae.models.blocks import _whole_groups
from tinyvae.models.fold import ConvStep, GrowStep, MemStep, PoolStep, SoftClampStep, Step, SuperMemStep

StepMemory = list[Tensor | None]
"""One entry per step: NTCHW, or None before the first chunk."""


def run_steps(
    steps: Sequence[Step], frames_NTCHW: Tensor, memory: StepMemory | None = None, *, checkpointing: bool = False
) -> tuple[Tensor, StepMemory]:
    """Run one chunk of a video; returns (output NTCHW, memory for the next chunk). See `blocks.run_layers`."""
    num_videos = frames_NTCHW.shape[0]
    old: StepMemory = [None] * len(steps) if memory is None else memory
    new: StepMemory = list(old)
    recompute = checkpointing and torch.is_grad_enabled()
    x = frames_NTCHW.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    for place, step in enumerate(steps):
        if isinstance(step, PoolStep):
            video, new[place] = _whole_groups(x.unflatten(0, (num_videos, -1)), old[place], step.stride)
            if video.shape[1] == 0:
                return video, new
            x = video.flatten(0, 1)
        if isinstance(step, MemStep | SuperMemStep):
            run_block = _mem_block if isinstance(step, MemStep) else _super_mem_block
            arguments = (step, x, old[place], num_videos)
            if recompute:
                x, new[place] = checkpoint(run_block, *arguments, use_reentrant=False)
            else:
                x, new[place] = run_block(*arguments)  # type: ignore[arg-type]
        else:
            x = checkpoint(_simple_step, step, x, use_reentrant=False) if recompute else _simple_step(step, x)
    return x.unflatten(0, (num_videos, -1)), new


def _simple_step(step: Step, x: Tensor) -> Tensor:
    """A step without a past: (N·T)CHW -> (N·T')C'H'W'."""
    if isinstance(step, SoftClampStep):
        return torch.tanh(x / 3) * 3
    if isinstance(step, ConvStep):
        return _conv(step, x)
    if isinstance(step, PoolStep):
        return F.conv2d(stack_frames(x, step.stride), step.weight, stride=2, padding=1)
    assert isinstance(step, GrowStep)
    grown = _grow(step, x)
    return torch.relu(grown) if step.relu else grown


def _conv(step: ConvStep, x: Tensor) -> Tensor:
    x = F.conv2d(x, step.weight, step.bias, padding=step.weight.shape[-1] // 2)
    if step.relu:
        x = torch.relu(x)
    if step.shuffle:
        x = F.pixel_shuffle(x, 2).contiguous(memory_format=torch.channels_last)
    return spread_frames(x, step.frames)


def stack_frames(x: Tensor, frames: int) -> Tensor:
    """(N·T)CHW -> (N·T/frames)(frames·C)HW, channels_last."""
    if frames == 1:
        return x
    _, c, h, w = x.shape
    return x.reshape(-1, frames * c, h, w).contiguous(memory_format=torch.channels_last)


def spread_frames(x: Tensor, frames: int) -> Tensor:
    """(N·T)(frames·C)HW -> (N·T·frames)CHW, channels_last."""
    if frames == 1:
        return x
    _, c, h, w = x.shape
    return x.reshape(-1, c // frames, h, w).contiguous(memory_format=torch.channels_last)


def _grow(step: GrowStep, x: Tensor) -> Tensor:
    _, _, h, w = x.shape
    phases = F.conv2d(x, step.weight, padding=1).unflatten(1, (2, 2, step.frames, -1))  # B i j frame C H+1 W+1
    rows = [torch.stack([phases[:, i, j, ..., i : i + h, j : j + w] for j in (0, 1)], dim=-1) for i in (0, 1)]
    grown = torch.stack(rows, dim=-3)  # B frame C H i W j
    grown = grown.flatten(0, 1).flatten(4, 5).flatten(2, 3)
    return grown.contiguous(memory_format=torch.channels_last)


def _mem_block(step: MemStep, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    now, then = F.conv2d(x, step.first, step.first_bias, padding=1).chunk(2, dim=1)
    hidden, last = _add_shifted(now, then, past, num_videos)
    hidden = torch.relu(F.conv2d(torch.relu(hidden), step.second, step.second_bias, padding=1))
    return torch.relu(F.conv2d(hidden, step.third, step.third_bias, padding=1) + x), last


def _super_mem_block(step: SuperMemStep, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    channels = x.shape[1]
    now = F.conv2d(x, step.depth, padding=3, groups=channels)
    then = F.conv2d(x, step.past_depth, padding=3, groups=channels)
    shifted, last = _shift(then, past, num_videos)
    wide = F.conv2d(torch.cat([now, shifted], dim=1), step.widen, step.widen_bias)
    return x + F.conv2d(torch.relu(wide), step.narrow), last


def _add_shifted(now: Tensor, then: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """(now_t + then_{t-1}, the last of ``then`` N1CHW to remember); all (N·T)CHW."""
    shifted, last = _shift(then, past, num_videos)
    return now + shifted, last


def _shift(x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """(each frame's predecessor (N·T)CHW, the last frame N1CHW to remember)."""
    video = x.unflatten(0, (num_videos, -1))
    first = torch.zeros_like(video[:, :1]) if past is None else past
    shifted = torch.cat([first, video[:, :-1]], dim=1).flatten(0, 1)
    return shifted, video[:, -1:].clone()
