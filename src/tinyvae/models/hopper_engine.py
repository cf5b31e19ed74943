"""Runs folded steps with the Hopper kernels: one launch per convolution, nothing between the launches.

Frames travel as BHWC (B = N·T, contiguous), fp16 or bf16. A memory block remembers its last input frame, as in the
plain network. The last two steps of a decoder (to full resolution, then to the image) go over a few frames at a time,
because their 64-channel frames at full resolution are what fills the memory of the plain network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.models import nvrtc
from tinyvae.models.fold import ConvStep, GrowStep, MemStep, PoolStep, SoftClampStep, Step, channels_last, map_weights
from tinyvae.models.hopper_conv import (
    FirstWeights,
    ImageWeights,
    TileWeights,
    conv_tiles,
    first_conv,
    image_conv,
    pack_first_weights,
    pack_image_weights,
    pack_tile_weights,
)
from tinyvae.models.library_conv import PatchConv, conv_relu

FULL_SIZE_BYTES = 192 * 2**20
"""How much the 64-channel frames at full resolution may take at once; always at least one input frame's worth."""

LIBRARY_CHANNELS: frozenset[int] = frozenset({64, 128})
"""Channel counts of memory blocks whose second and third convolution cuDNN does, with its own fused bias, residual and
ReLU: there cuDNN wins 0.3 ms of 11.4 (64 channels) and 0.3 more (128), nothing at 256 (480x720x49 on an H200;
`benchmarks/speed_codec.py --library_channels` compares)."""

HopperMemory = list[Tensor | None]
"""One entry per step: BHWC frames (one per video, or those that wait for partners), None before the first chunk."""


@dataclass(frozen=True, kw_only=True)
class _LibraryWeights:
    """Of a convolution that cuDNN does: OIHW in channels_last memory, and the bias in the same precision."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class _MemWeights:
    first: TileWeights
    second: TileWeights | _LibraryWeights
    third: TileWeights | _LibraryWeights


def why_not_hopper(steps: list[Step], dtype: torch.dtype, device: torch.device) -> str | None:
    """None where the kernels can run these steps, else the reason in words."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels are for fp16 and bf16, the model is {dtype}"
    for step in steps:
        if isinstance(step, MemStep) and step.second.shape[0] % 64:
            return f"{step.second.shape[0]} channels is no multiple of 64"
        if isinstance(step, GrowStep) and step.weight.shape[0] // (4 * step.frames) % 64:
            return f"{step.weight.shape[0] // (4 * step.frames)} channels is no multiple of 64"
        if not isinstance(step, MemStep | GrowStep | ConvStep | PoolStep | SoftClampStep):
            return "a super decoder has no kernel of its own"
    return nvrtc.why_unavailable()


class HopperStack:
    """An encoder or decoder as kernel launches. ``patch_size`` belongs to the image side of the stack."""

    def __init__(self, steps: list[Step], *, patch_size: int) -> None:
        self._steps = map_weights(steps, channels_last)
        self._patch_size = patch_size
        self._is_encoder = any(isinstance(step, PoolStep) for step in steps)
        self._dtype = cast(ConvStep, steps[0] if self._is_encoder else steps[-1]).weight.dtype
        self._packed = [self._pack(place) for place in range(len(steps))]

    def run(self, frames_NTCHW: Tensor, memory: HopperMemory | None) -> tuple[Tensor, HopperMemory]:
        """One chunk of a video; frames NTCHW in, NTCHW out, and the memory for the next chunk.

        An image may have another precision; ``memory`` is used up (see `VideoCodec.encode_chunk`).
        """
        num_videos = frames_NTCHW.shape[0]
        old: HopperMemory = [None] * len(self._steps) if memory is None else memory
        new: HopperMemory = [None] * len(self._steps)
        # Weights and frames have one dtype already.
        with torch.cuda.device(frames_NTCHW.device), torch.autocast("cuda", enabled=False):
            x, begin = self._enter(frames_NTCHW, old)
            for place in range(begin, len(self._steps)):
                step = self._steps[place]
                if isinstance(step, PoolStep):
                    x, new[place] = self._whole_groups(x, old[place], step, num_videos)
                    if x.shape[0] == 0:
                        new[place + 1 :] = old[place + 1 :]
                        return x.new_empty(num_videos, 0, 0, 0, 0), new
                    x = _library_conv(x, step.weight, None, stride=2)
                elif isinstance(step, MemStep):
                    new[place] = x.unflatten(0, (num_videos, -1))[:, -1].clone()
                    stacked = self._stacking_after(place, old, x.shape[0] // num_videos)
                    x = self._mem_block(place, x, old, num_videos, stacked)
                elif self._ends_in_image(place):
                    return self._grow_into_image(place, x).unflatten(0, (num_videos, -1)), new
                elif isinstance(step, GrowStep):
                    x = conv_tiles(x, cast(TileWeights, self._packed[place]), frames_per_video=1, relu=step.relu)
                else:
                    x = self._conv(place, x)
        return self._leave(x).unflatten(0, (num_videos, -1)), new

    # how the steps are packed

    def _pack(self, place: int) -> object:
        step = self._steps[place]
        if isinstance(step, MemStep):
            channels = step.second.shape[0]
            first = torch.cat([step.first[:channels], step.first[channels:]], dim=1)
            by_library = channels in LIBRARY_CHANNELS
            # What a pooling step follows must come out with frames side by side, which cuDNN cannot do.
            before_pool = place + 1 < len(self._steps) and isinstance(self._steps[place + 1], PoolStep)
            return _MemWeights(
                first=pack_tile_weights(first, step.first_bias[:channels], sources=2),
                second=_pack_3x3(step.second, step.second_bias, by_library),
                third=_pack_3x3(step.third, step.third_bias, by_library and not before_pool),
            )
        if isinstance(step, GrowStep):
            return pack_tile_weights(step.weight, None, grown=step.frames)
        if isinstance(step, ConvStep):
            outputs, inputs = step.weight.shape[:2]
            if place == 0 and self._is_encoder:
                return self._pack_first(step)
            if place == len(self._steps) - 1 and inputs == 64 and outputs == 3 * self._patch_size**2:
                assert step.bias is not None
                return pack_image_weights(step.weight, step.bias, self._patch_size)
            if outputs % (64 * step.frames) == 0 and inputs % 64 == 0 and step.weight.shape[-1] == 3:
                return pack_tile_weights(step.weight, step.bias, grown=step.frames)
        return None

    def _pack_first(self, step: ConvStep) -> FirstWeights | dict[int, PatchConv]:
        if step.weight.shape[:2] == (64, 3):
            assert step.bias is not None
            return pack_first_weights(step.weight, step.bias)
        pool = self._steps[1]
        assert isinstance(pool, PoolStep)
        patch = self._patch_size
        return {stacked: PatchConv.of(step, patch_size=patch, stacked=stacked) for stacked in {1, pool.stride}}

    # the steps

    def _enter(self, frames_NTCHW: Tensor, memory: HopperMemory) -> tuple[Tensor, int]:
        """NTCHW -> BHWC, and the step to go on with: an encoder's first convolution reads the image itself."""
        flat = frames_NTCHW.flatten(0, 1)
        if not self._is_encoder:
            return flat.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1), 0
        stacked = self._stacking_after(0, memory, frames_NTCHW.shape[1])
        pool = cast(PoolStep, self._steps[1])
        if stacked == pool.stride:
            return self._image_into_pool(flat.contiguous(), pool), 2
        return self._first_conv(flat.contiguous(), stacked), 1

    def _first_conv(self, image_BCHW: Tensor, stacked: int) -> Tensor:
        first = self._packed[0]
        image_BCHW = image_BCHW.to(self._dtype)
        if isinstance(first, FirstWeights):
            return first_conv(image_BCHW, first, stacked=stacked)
        return cast(dict[int, PatchConv], first)[stacked](image_BCHW).permute(0, 2, 3, 1).contiguous()

    def _image_into_pool(self, image_BCHW: Tensor, pool: PoolStep) -> Tensor:
        """The first two steps of an encoder, a few frames at a time."""
        frames, patch = image_BCHW.shape[0], self._patch_size
        height, width = image_BCHW.shape[2] // patch, image_BCHW.shape[3] // patch
        # Beside its full-size frames a slice has its image cast and laid out in patches.
        channels = pool.weight.shape[1] + 2 * pool.stride * 3 * patch**2
        full_bytes = height * width * channels * self._dtype.itemsize
        group = max(1, FULL_SIZE_BYTES // full_bytes) * pool.stride
        shape = (frames // pool.stride, -(-height // 2), -(-width // 2), pool.weight.shape[0])
        out = torch.empty(shape, dtype=self._dtype, device=image_BCHW.device)
        for start in range(0, frames, group):
            full = self._first_conv(image_BCHW[start : start + group], pool.stride)
            made = _library_conv(full, pool.weight, None, stride=2)
            del full  # before the next one is made
            out[start // pool.stride : start // pool.stride + made.shape[0]] = made
        return out

    def _leave(self, x_BHWC: Tensor) -> Tensor:
        return x_BHWC.permute(0, 3, 1, 2).contiguous()

    def _stacking_after(self, place: int, memory: HopperMemory, num_frames: int) -> int:
        """How many frames the step behind ``place`` wants side by side: only whole groups, none waiting."""
        following = self._steps[place + 1] if place + 1 < len(self._steps) else None
        if not isinstance(following, PoolStep) or memory[place + 1] is not None or num_frames % following.stride:
            return 1
        return following.stride

    def _whole_groups(
        self, x: Tensor, waiting: Tensor | None, step: PoolStep, num_videos: int
    ) -> tuple[Tensor, Tensor | None]:
        """(frames grouped on channels, the frames N·rest HWC that wait for partners); what comes grouped stays."""
        if x.shape[3] == step.weight.shape[1]:
            return x, None
        video = x.unflatten(0, (num_videos, -1))
        if waiting is not None:
            video = torch.cat([waiting, video], dim=1)
        whole = video.shape[1] // step.stride * step.stride
        rest = video[:, whole:].clone() if whole < video.shape[1] else None
        groups = video[:, :whole].reshape(-1, step.stride, *x.shape[1:])
        return groups.permute(0, 2, 3, 1, 4).flatten(3), rest

    def _mem_block(self, place: int, x: Tensor, memory: HopperMemory, num_videos: int, stacked: int) -> Tensor:
        weights = cast(_MemWeights, self._packed[place])
        frames, (_, height, width, channels) = x.shape[0] // num_videos, x.shape
        hidden = conv_tiles(x, weights.first, frames_per_video=frames, past_NHWC=memory[place], relu=True)
        memory[place] = None
        if isinstance(weights.second, _LibraryWeights):
            deeper = _library_conv_relu(hidden, weights.second)
        else:
            deeper = conv_tiles(hidden, weights.second, frames_per_video=frames, relu=True)
        if isinstance(weights.third, _LibraryWeights):
            del hidden  # its memory is what the result takes
            return _library_conv_relu(deeper, weights.third, residual_BHWC=x)
        # The first hidden frames are no longer needed: the result takes their place.
        out = hidden.view(-1, height, width, channels * stacked)
        return conv_tiles(
            deeper, weights.third, frames_per_video=frames, residual_BHWC=x, relu=True, stacked=stacked, out=out
        )

    def _conv(self, place: int, x: Tensor) -> Tensor:
        step, packed = self._steps[place], self._packed[place]
        if isinstance(step, SoftClampStep):
            return torch.tanh(x / 3) * 3
        assert isinstance(step, ConvStep)
        if isinstance(packed, ImageWeights):
            return self._image(packed, x)
        if isinstance(packed, TileWeights):
            return conv_tiles(x, packed, frames_per_video=1, relu=step.relu)
        assert step.frames == 1 and not step.shuffle
        made = _library_conv(x, step.weight, step.bias)
        return torch.relu_(made) if step.relu else made

    def _image(self, packed: ImageWeights, x: Tensor) -> Tensor:
        """The last convolution without an upsampling step before it (spatial previews); BHWC out, so a view."""
        frames, height, width, _ = x.shape
        patch = self._patch_size
        image = torch.empty(frames, 3, height * patch, width * patch, dtype=x.dtype, device=x.device)
        image_conv(x, packed, image)
        return image.permute(0, 2, 3, 1)

    def _ends_in_image(self, place: int) -> bool:
        return (
            place == len(self._steps) - 2
            and isinstance(self._steps[place], GrowStep)
            and isinstance(self._packed[place + 1], ImageWeights)
        )

    def _grow_into_image(self, place: int, x: Tensor) -> Tensor:
        """The last two steps, a few frames at a time; B3HW."""
        step, patch = cast(GrowStep, self._steps[place]), self._patch_size
        grow, image = cast(TileWeights, self._packed[place]), cast(ImageWeights, self._packed[place + 1])
        frames, height, width, _ = x.shape
        shape = (frames * step.frames, 3, 2 * height * patch, 2 * width * patch)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        full_bytes = step.frames * 4 * height * width * grow.channels_out * x.element_size()
        group = min(frames, max(1, FULL_SIZE_BYTES // full_bytes))
        full = torch.empty(
            group * step.frames, 2 * height, 2 * width, grow.channels_out, dtype=x.dtype, device=x.device
        )
        for start in range(0, frames, group):
            part = x[start : start + group]
            here = full[: part.shape[0] * step.frames]
            conv_tiles(part, grow, frames_per_video=1, relu=step.relu, out=here)
            image_conv(here, image, out[start * step.frames : start * step.frames + here.shape[0]])
        return out


def _pack_3x3(weight: Tensor, bias: Tensor, by_library: bool) -> TileWeights | _LibraryWeights:
    if by_library:
        return _LibraryWeights(weight=weight.contiguous(memory_format=torch.channels_last), bias=bias)
    return pack_tile_weights(weight, bias)


def _library_conv_relu(x_BHWC: Tensor, weights: _LibraryWeights, residual_BHWC: Tensor | None = None) -> Tensor:
    """3x3 convolution, bias, residual and ReLU as one cuDNN call, BHWC in and out."""
    residual = None if residual_BHWC is None else residual_BHWC.permute(0, 3, 1, 2)
    made = conv_relu(x_BHWC.permute(0, 3, 1, 2), weights.weight, weights.bias, residual=residual)
    return made.permute(0, 2, 3, 1).contiguous()


def _library_conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1) -> Tensor:
    """cuDNN on channels_last memory, BHWC in and out."""
    made = F.conv2d(x_BHWC.permute(0, 3, 1, 2), weight, bias, stride=stride, padding=weight.shape[-1] // 2)
    return made.permute(0, 2, 3, 1).contiguous()
