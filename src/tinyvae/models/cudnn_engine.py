"""Runs folded steps with cuDNN's fused convolutions: nothing is compiled, sizes and lengths may change at every call.

For CUDA cards and networks that the Hopper kernels do not serve. Frames travel as BCHW (B = N·T) in channels_last
memory; a memory block remembers its last input frame, a super block its last frame after the depthwise convolution.
What lies between two memory blocks goes over a few frames at a time: at full resolution it would fill the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.models.blocks import whole_groups
from tinyvae.models.fold import (
    ConvStep,
    GrowStep,
    MemStep,
    PoolStep,
    SoftClampStep,
    Step,
    SuperMemStep,
    channels_last,
    map_weights,
)
from tinyvae.models.folded_run import (
    CUDA_CHANNEL_MULTIPLE,
    as_bchw,
    as_bhwc,
    copy_pixels,
    dense,
    frames_per_slice,
    independent_steps,
    interleave_phases,
    spread_frames,
    stack_frames,
)
from tinyvae.models.library_conv import (
    PatchConv,
    conv_relu,
    two_frame_conv_relu,
    write_image,
)

CudnnMemory = list[Tensor | None]
"""One entry per step: the last frame N1CHW of a memory block (N1HWC of a super block), the frames NTCHW that wait to be
pooled, or None before the first chunk."""


@dataclass(frozen=True, kw_only=True)
class _ImageConv:
    """The last convolution of a decoder: outputs filled up to a multiple of 8; its bias comes with the writing."""

    weight: Tensor
    bias: Tensor
    frames: int


class CudnnStack:
    """An encoder or decoder as cuDNN calls. ``patch_size`` belongs to the image side of the stack."""

    def __init__(self, steps: Sequence[Step], *, patch_size: int) -> None:
        self._steps = map_weights([_rows_of_patches_together(step) for step in steps], channels_last)
        self._patch_size = patch_size
        self._is_encoder = any(isinstance(step, PoolStep) for step in steps)
        ends_at_image = self._steps[0 if self._is_encoder else -1]
        assert isinstance(ends_at_image, ConvStep)
        self._dtype = ends_at_image.weight.dtype
        most = max(step.weight.shape[0] for step in self._steps if isinstance(step, ConvStep | GrowStep))
        self._zeros = ends_at_image.weight.new_zeros(most)  # for cuDNN, which wants a bias
        self._over_time = {
            place: _two_frame_weight(step) for place, step in enumerate(self._steps) if isinstance(step, MemStep)
        }
        self._first = self._pack_first() if self._is_encoder else None
        self._image = None if self._is_encoder else _pack_image(self._steps[-1])

    def run(self, frames_NTCHW: Tensor, memory: CudnnMemory | None) -> tuple[Tensor, CudnnMemory]:
        """One chunk of a video; frames NTCHW in, NTCHW out, and the memory for the next chunk.

        An image may have another precision; ``memory`` is used up (see `VideoCodec.encode_chunk`).
        """
        with torch.autocast("cuda", enabled=False):  # weights and frames have one dtype already
            return self._run(frames_NTCHW, [None] * len(self._steps) if memory is None else memory)

    def _run(self, frames_NTCHW: Tensor, old: CudnnMemory) -> tuple[Tensor, CudnnMemory]:
        num_videos = frames_NTCHW.shape[0]
        new: CudnnMemory = [None] * len(old)
        x = frames_NTCHW.flatten(0, 1)
        x = x.contiguous() if self._is_encoder else x.contiguous(memory_format=torch.channels_last)
        place = 0
        while place < len(self._steps):
            step = self._steps[place]
            length = independent_steps(self._steps[place:], old[place:], x.shape[0] // num_videos)
            if length:
                x = self._slice_by_slice(place, place + length, x)
                place += length
                continue
            if isinstance(step, PoolStep):
                video, new[place] = whole_groups(x.unflatten(0, (num_videos, -1)), old[place], step.stride)
                if video.shape[1] == 0:
                    new[place + 1 :] = old[place + 1 :]
                    return video, new
                x = _pool(step, video.flatten(0, 1).contiguous(memory_format=torch.channels_last))
            elif isinstance(step, MemStep):
                x, new[place] = self._mem_block(place, x, old, num_videos)
            else:
                assert isinstance(step, SuperMemStep)
                x, new[place] = _super_mem_block(step, x, old[place], num_videos)
            old[place] = None
            place += 1
        return x.contiguous().unflatten(0, (num_videos, -1)), new

    # memory blocks

    def _mem_block(self, place: int, x: Tensor, memory: CudnnMemory, num_videos: int) -> tuple[Tensor, Tensor]:
        step = self._steps[place]
        assert isinstance(step, MemStep)
        channels = x.shape[1]
        last = x.unflatten(0, (num_videos, -1))[:, -1:].clone()
        bias = step.first_bias[:channels]
        past, memory[place] = memory[place], None
        hidden = two_frame_conv_relu(x, self._over_time[place], bias, past_N1CHW=past, num_videos=num_videos)
        del past
        deeper = conv_relu(hidden, step.second, step.second_bias)
        del hidden  # its memory is what the result takes
        return conv_relu(deeper, step.third, step.third_bias, residual=x), last

    # what lies between them

    def _slice_by_slice(self, place: int, end: int, x: Tensor) -> Tensor:
        scale = self._patch_size if self._is_encoder and place == 0 else 1
        pixels = x.shape[2] // scale * (x.shape[3] // scale)
        group = frames_per_slice(self._steps[place:end], pixels, self._dtype.itemsize, x.device)
        if self._image is not None and end == len(self._steps):
            return self._into_image(place, x, group)
        if group >= x.shape[0]:
            return self._through(place, end, x)
        out: Tensor | None = None
        done = 0
        for part in x.split(group):
            made = self._through(place, end, part)
            if out is None:
                total = made.shape[0] * x.shape[0] // part.shape[0]
                out = torch.empty_like(made[:1].expand(total, -1, -1, -1), memory_format=torch.channels_last)
            out[done : done + made.shape[0]] = made
            done += made.shape[0]
        assert out is not None
        return out

    def _through(self, place: int, end: int, x: Tensor) -> Tensor:
        if self._first is not None and place == 0:
            frame_by_frame, side_by_side = self._first
            first = side_by_side if end > 1 else frame_by_frame  # the pooling behind it is part of the slice, or not
            x, place = first(x.to(self._dtype)), 1
        for step in self._steps[place:end]:
            x = self._simple_step(step, x)
        return x

    def _into_image(self, place: int, x: Tensor, group: int) -> Tensor:
        """The last steps of a decoder; the image (N·T)3HW is written slice by slice."""
        assert self._image is not None
        image, patch = self._image, self._patch_size
        out: Tensor | None = None
        done = 0
        for part in x.split(group):
            last = self._through(place, len(self._steps) - 1, part)
            made = F.conv2d(last, image.weight, padding=1)
            del last
            frames = made.shape[0] * image.frames
            if out is None:
                total = frames * x.shape[0] // part.shape[0]
                out = x.new_empty(total, 3, made.shape[2] * patch, made.shape[3] * patch)
            write_image(made, image.bias, patch, image.frames, out[done : done + frames])
            done += frames
            del made  # before the next one is made
        assert out is not None
        return out

    def _simple_step(self, step: Step, x: Tensor) -> Tensor:
        """A step without a past: (N·T)CHW -> (N·T')C'H'W'."""
        if isinstance(step, SoftClampStep):
            return torch.tanh(x / 3) * 3
        if isinstance(step, PoolStep):
            return _pool(step, x)
        if isinstance(step, GrowStep):
            phases = self._conv(x, step.weight, None, relu=step.relu)
            return interleave_phases(phases, step.frames, x.shape[2], x.shape[3])
        assert isinstance(step, ConvStep)
        made = self._conv(x, step.weight, step.bias, relu=step.relu)
        if step.shuffle:
            rows = as_bhwc(made).unflatten(3, (2, 2, -1)).permute(0, 1, 3, 2, 4, 5)  # see _rows_of_patches_together
            made = as_bchw(dense(rows).flatten(3, 4).flatten(1, 2))
        return spread_frames(made, step.frames)

    def _conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
        if not relu:
            return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
        return conv_relu(x, weight, self._zeros[: weight.shape[0]] if bias is None else bias)

    def _pack_first(self) -> tuple[PatchConv, PatchConv]:
        """The first convolution frame by frame, and with frames side by side for the pooling behind it."""
        step, pool, patch = self._steps[0], self._steps[1], self._patch_size
        assert isinstance(step, ConvStep) and isinstance(pool, PoolStep)
        return (
            PatchConv.of(step, patch_size=patch, stacked=1),
            PatchConv.of(step, patch_size=patch, stacked=pool.stride),
        )


def _pool(step: PoolStep, x: Tensor) -> Tensor:
    return F.conv2d(stack_frames(x, step), step.weight, stride=2, padding=1)


def _super_mem_block(step: SuperMemStep, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """Writes its result over ``x``."""
    channels = x.shape[1]
    then = as_bhwc(_depthwise(x, step.past_depth)).unflatten(0, (num_videos, -1))
    last = then[:, -1:].clone()
    both = then.new_empty(*then.shape[:-1], 2 * channels)
    copy_pixels(both[:, 1:, ..., channels:], then[:, :-1])
    both[:, :1, ..., channels:] = 0 if past is None else past
    del then  # its memory is what the next results take
    both = both.flatten(0, 1)
    copy_pixels(both[..., :channels], as_bhwc(_depthwise(x, step.depth)))
    wide = conv_relu(both.permute(0, 3, 1, 2), step.widen, step.widen_bias)
    del both
    out = as_bhwc(x).contiguous()
    out.view(-1, channels).addmm_(as_bhwc(wide).reshape(-1, wide.shape[1]), step.narrow.flatten(1).T)
    return out.permute(0, 3, 1, 2), last


def _depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """cuDNN's fast kernel is for eight frames and more: with seven each takes three times as long (H200, cuDNN 9)."""
    frames, fast = x.shape[0], 8
    filled = F.pad(x, (0, 0, 0, 0, 0, 0, 0, fast - frames)) if 3 <= frames < fast else x
    return F.conv2d(filled, weight, padding=3, groups=x.shape[1])[:frames]


def _two_frame_weight(step: MemStep) -> Tensor:
    """(2C, C, 3, 3), the half for x_t first, as (C, C, 2, 3, 3) over x_{t-1} and x_t."""
    now, then = step.first.chunk(2)
    return torch.stack([then, now], dim=2).contiguous(memory_format=torch.channels_last_3d)


def _rows_of_patches_together(step: Step) -> Step:
    """Outputs of a step that shuffles pixels in the order (row, column, channel): its copies then move whole pixels."""
    if not (isinstance(step, ConvStep) and step.shuffle):
        return step
    assert step.bias is not None
    ordered = step.weight.unflatten(0, (-1, 2, 2)).movedim(0, 2).flatten(0, 2)
    return replace(step, weight=ordered, bias=step.bias.unflatten(0, (-1, 2, 2)).movedim(0, 2).flatten())


def _pack_image(step: Step) -> _ImageConv:
    assert isinstance(step, ConvStep) and step.bias is not None and not (step.relu or step.shuffle)
    filled = F.pad(step.weight, (0, 0, 0, 0, 0, 0, 0, -step.weight.shape[0] % CUDA_CHANNEL_MULTIPLE))
    return _ImageConv(weight=filled.contiguous(memory_format=torch.channels_last), bias=step.bias, frames=step.frames)
