"""The engine of the Hopper kernels: one launch per convolution, nothing between the launches.

Frames travel as BHWC (B = N·T, contiguous), fp16 or bf16; an encoder's images are B3HW until its first convolution. A
memory block carries its last input frame NHWC. Only the layers at the image run slice by slice, if they are not one
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines import conv_rows, first_pool, first_rows, fold, grow_image, nvrtc
from tinyvae.engines import hopper_kernels as kernels
from tinyvae.engines.cudnn import CudaStack, PatchConv, conv_relu, over_two_frames, two_frame_conv_relu
from tinyvae.engines.eager import compute_layer
from tinyvae.engines.stack import State

CHANNELS = 64  # the kernels take multiples of this many
SLICE_BYTES = 192 * 2**20  # for the 64-channel frames at full resolution of one slice
CUDNN_CHANNELS: frozenset[int] = frozenset({128})
"""In memory blocks with these channel counts cuDNN does the second and third convolution: 0.131 instead of 0.172 ms at
128 channels, nothing at 256 (480x720x49 on an H200; `benchmarks/speed_engines.py --engines hopper hopper:cudnn=128,256`
compares). Not with LeakyReLU: cuDNN's calls have ReLU inside. Blocks with 64 channels go row by row, all three."""


@dataclass(frozen=True, kw_only=True)
class _CudnnWeights:
    """Of a convolution with ReLU that cuDNN does: OIHW in channels_last memory, and the bias in the same precision."""

    weight: Tensor
    bias: Tensor


_ConvWeights = kernels.TileWeights | conv_rows.RowWeights | _CudnnWeights


@dataclass(frozen=True, kw_only=True)
class _MemWeights:
    """Of a memory block."""

    first: kernels.TileWeights | conv_rows.RowWeights  # over two frames
    second: _ConvWeights
    third: _ConvWeights


@dataclass(frozen=True, kw_only=True)
class _WideWeights:
    """Of a wide block: cuDNN does the 1x1 convolutions, the kernels those over groups of 64 channels."""

    first: _CudnnWeights  # over two frames
    second: kernels.TileWeights
    third: _CudnnWeights
    fourth: kernels.TileWeights


def why_not_hopper(layers: Sequence[fold.Layer], dtype: torch.dtype, device: torch.device) -> str | None:
    """None where the kernels can run these layers, else the reason in words."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels are for fp16 and bf16, the model is {dtype}"
    for layer in layers:
        if isinstance(layer, fold.MemLayer) and layer.second.shape[0] % CHANNELS:
            return f"{layer.second.shape[0]} channels is no multiple of {CHANNELS}"
        if isinstance(layer, fold.GrowLayer) and layer.weight.shape[0] // (4 * layer.frames) % CHANNELS:
            return f"{layer.weight.shape[0] // (4 * layer.frames)} channels is no multiple of {CHANNELS}"
        if isinstance(layer, fold.WideMemLayer) and (layer.second.shape[0] % 64 or layer.second.shape[1] != 64):
            return f"{layer.second.shape[0]} channels in {layer.groups} groups are no groups of 64"
        if isinstance(layer, fold.SuperMemLayer):
            return "there are no Hopper kernels for super decoders"
    return nvrtc.why_unavailable()


class HopperStack(CudaStack):
    """An encoder or decoder as kernel launches; the images may have another precision."""

    def __init__(self, layers: Sequence[fold.Layer], *, patch_size: int) -> None:
        super().__init__(layers, patch_size=patch_size)
        # One slope for every launch, also where no activation follows: another one would be another kernel to compile.
        self._slope = max(getattr(layer, "slope", 0.0) for layer in layers)
        assert 0 <= self._slope < 1, "for the kernels a LeakyReLU is the larger of v and slope · v"
        self._packed = [self._pack(place) for place in range(len(layers))]

    def enter(self, frames_NTCHW: Tensor, state: State) -> Tensor:
        flat = frames_NTCHW.flatten(0, 1)
        if self.is_encoder:  # the first convolution reads the image itself, 16 bytes at a time
            image = flat.contiguous()
            return image if image.data_ptr() % 16 == 0 else image.clone()
        return flat.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)

    def leave(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2).contiguous() if self.is_encoder else x

    def slice_room(self, start: int, stop: int, x: Tensor) -> float | None:
        if self.ends_in_image(stop):
            # One kernel for both layers keeps nothing at full size but the image.
            joined = isinstance(self._packed[-1], grow_image.GrowImageWeights)
            return math.inf if joined else SLICE_BYTES / self.dtype.itemsize
        if not (self.is_encoder and start == 0 and stop > 1) or self._joins_pool():
            return None
        # Beside its full-size frames a slice has its image, cast and laid out in patches.
        outputs, inputs = self.at_image.weight.shape[:2]
        return SLICE_BYTES / self.dtype.itemsize * outputs / (outputs + 2 * inputs)

    def grid(self, start: int, x: Tensor) -> tuple[int, int, int]:
        return super().grid(start, x) if self.is_encoder and start == 0 else (x.shape[3], x.shape[1], x.shape[2])

    def write(self, start: int, stop: int, x: Tensor, out: Tensor) -> None:
        if not self.ends_in_image(stop):
            return super().write(start, stop, x, out)
        image = self._packed[-1]
        if isinstance(image, grow_image.GrowImageWeights):
            assert start == stop - 2, "a memory block stands before the last growing layer"
            grow_image.grow_image(x, image, out)
        elif isinstance(image, kernels.ImageWeights):
            kernels.image_conv(self.compute(start, stop - 1, x), image, out)
        else:
            out.copy_(F.pixel_shuffle(self.compute(start, stop, x).permute(0, 3, 1, 2), self.patch_size))

    def block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        if isinstance(self.layers[place], fold.WideMemLayer):
            return self._wide_block(place, x, state, num_videos)
        weights = cast(_MemWeights, self._packed[place])
        last, keep = _keep_last(x, num_videos)
        hidden = self._conv(x, weights.first, past_NHWC=state[place], **keep)
        state[place] = None
        deeper = self._conv(hidden, weights.second)
        if isinstance(weights.third, _CudnnWeights):
            del hidden  # the result takes its memory
            return self._conv(deeper, weights.third, residual_BHWC=x), last
        _, height, width, channels = x.shape
        stacked = self.stacked_for(place + 1, state, x.shape[0] // num_videos)
        # The first hidden frames are no longer needed: the result takes their place.
        out = hidden.view(-1, height, width, channels * stacked)
        return self._conv(deeper, weights.third, residual_BHWC=x, stacked=stacked, out=out), last

    def _wide_block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        weights = cast(_WideWeights, self._packed[place])
        last, keep = _keep_last(x, num_videos)
        past, state[place] = state[place], None
        past = None if past is None else past.permute(0, 3, 1, 2)[:, None]
        hidden = two_frame_conv_relu(
            x.permute(0, 3, 1, 2),
            weights.first.weight,
            weights.first.bias,
            past_N1CHW=past,
            num_videos=num_videos,
            slope=self._slope,
        )
        del past
        hidden = self._conv(hidden.permute(0, 2, 3, 1).contiguous(), weights.second)
        hidden = self._conv(hidden, weights.third)
        return self._conv(hidden, weights.fourth, residual_BHWC=x, **keep), last

    def _conv(self, x: Tensor, weights: _ConvWeights, *, relu: bool = True, **how: Any) -> Tensor:
        """A convolution by the kernel that reads these weights. Ours take the same arguments, cuDNN's has ReLU always
        and the residual alone."""
        if isinstance(weights, _CudnnWeights):
            return _cudnn_conv_relu(x, weights, slope=self._slope, **how)
        compute: Callable[..., Tensor] = kernels.conv_tiles
        if isinstance(weights, conv_rows.RowWeights):
            compute = conv_rows.conv_rows
        return compute(x, weights, relu=relu, slope=self._slope, **how)

    def compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        if self.is_encoder and start == 0 and stop > 1 and self._joins_pool():
            joined = cast(first_pool.FirstPoolWeights, self._packed[1])
            x, start = first_pool.first_pool(x.to(self.dtype), joined, slope=self._slope), 2
        elif self.is_encoder and start == 0:
            x, start = self._first_conv(x, self.pooled_first(stop)), 1
        for place in range(start, stop):
            x = self._layer(self.layers[place], self._packed[place], x)
        return x

    def _joins_pool(self) -> bool:
        """Whether an encoder's first two layers are one kernel, which keeps nothing between them."""
        return isinstance(self._packed[1], first_pool.FirstPoolWeights)

    def _first_conv(self, image_BCHW: Tensor, stacked: int) -> Tensor:
        first = self._packed[0]
        image_BCHW = image_BCHW.to(self.dtype)
        if isinstance(first, first_rows.FirstRowWeights):
            return first_rows.first_rows(image_BCHW, first, stacked=stacked, slope=self._slope)
        return cast(dict[int, PatchConv], first)[stacked](image_BCHW).permute(0, 2, 3, 1).contiguous()

    def _layer(self, layer: fold.Layer, packed: object, x: Tensor) -> Tensor:
        if isinstance(packed, kernels.TileWeights):
            return self._conv(x, packed, relu=cast(fold.ConvLayer | fold.GrowLayer, layer).relu)
        if isinstance(layer, fold.PoolLayer):
            if x.shape[3] != layer.weight.shape[1]:
                x = x.unflatten(0, (-1, layer.stride)).permute(0, 2, 3, 1, 4).flatten(3)
            return _cudnn_conv(x, layer.weight, None, stride=2)
        if isinstance(layer, fold.ClampLayer):
            return compute_layer(layer, x)
        assert isinstance(layer, fold.ConvLayer) and layer.frames == 1 and not layer.shuffle
        if layer.relu:
            assert layer.bias is not None, "a layer without a bias grows frames: the kernels do it"
            return self._conv(x, _CudnnWeights(weight=layer.weight, bias=layer.bias))
        return _cudnn_conv(x, layer.weight, layer.bias)

    def _pack(self, place: int) -> object:
        """What the kernels read of a layer; None where cuDNN does it."""
        layer = self.layers[place]
        if isinstance(layer, fold.MemLayer):
            return self._pack_block(place, layer)
        if isinstance(layer, fold.WideMemLayer):
            return _pack_wide_block(layer)
        if place == 1 and first_pool.fits(self.layers[0], layer, self.patch_size):
            return first_pool.pack_weights(self.at_image, cast(fold.PoolLayer, layer), self.patch_size)
        if isinstance(layer, fold.GrowLayer):
            return kernels.pack_tile_weights(layer.weight, None, grown=layer.frames)
        if not isinstance(layer, fold.ConvLayer):
            return None
        outputs, inputs = layer.weight.shape[:2]
        if place == 0 and self.is_encoder:
            return self._pack_first(layer)
        if place == len(self.layers) - 1 and grow_image.fits(self.layers[-2], layer):
            return grow_image.pack_weights(cast(fold.GrowLayer, self.layers[-2]), layer)
        if place == len(self.layers) - 1 and inputs == 64 and outputs == 3 * self.patch_size**2:
            assert layer.bias is not None
            return kernels.pack_image_weights(layer.weight, layer.bias, self.patch_size)
        if outputs % (64 * layer.frames) == 0 and inputs % 64 == 0 and layer.weight.shape[-1] == 3:
            return kernels.pack_tile_weights(layer.weight, layer.bias, grown=layer.frames)
        return None

    def _pack_block(self, place: int, layer: fold.MemLayer) -> _MemWeights:
        channels = layer.second.shape[0]
        first, bias = torch.cat(layer.first.chunk(2), dim=1), layer.first_bias[:channels]
        if channels == 64:
            return _MemWeights(
                first=conv_rows.pack_row_weights(first, bias),
                second=conv_rows.pack_row_weights(layer.second, layer.second_bias),
                third=conv_rows.pack_row_weights(layer.third, layer.third_bias),
            )
        by_cudnn = channels in CUDNN_CHANNELS and not layer.slope
        # Before a pooling layer the result has its frames side by side, which cuDNN cannot do.
        before_pool = place + 1 < len(self.layers) and isinstance(self.layers[place + 1], fold.PoolLayer)
        return _MemWeights(
            first=kernels.pack_tile_weights(first, bias, sources=2),
            second=_pack_3x3(layer.second, layer.second_bias, by_cudnn),
            third=_pack_3x3(layer.third, layer.third_bias, by_cudnn and not before_pool),
        )

    def _pack_first(self, layer: fold.ConvLayer) -> first_rows.FirstRowWeights | dict[int, PatchConv]:
        assert layer.bias is not None
        if first_rows.fits(layer.weight, self.patch_size):
            return first_rows.pack_weights(layer.weight, layer.bias, self.patch_size)
        return self.patch_convs()


def _pack_wide_block(layer: fold.WideMemLayer) -> _WideWeights:
    channels, groups = layer.second.shape[0], layer.groups
    return _WideWeights(
        first=_CudnnWeights(weight=over_two_frames(layer), bias=layer.first_bias[:channels]),
        second=kernels.pack_tile_weights(layer.second, layer.second_bias, groups=groups),
        third=_CudnnWeights(weight=layer.third, bias=layer.third_bias),
        fourth=kernels.pack_tile_weights(layer.fourth, layer.fourth_bias, groups=groups),
    )


def _pack_3x3(weight: Tensor, bias: Tensor, by_cudnn: bool) -> kernels.TileWeights | _CudnnWeights:
    if by_cudnn:
        return _CudnnWeights(weight=weight, bias=bias)
    return kernels.pack_tile_weights(weight, bias)


def _keep_last(x_BHWC: Tensor, num_videos: int) -> tuple[Tensor, dict[str, Any]]:
    """(the last frame of each video NHWC, what tells a block's kernel to copy it there)."""
    last = x_BHWC.unflatten(0, (num_videos, -1))[:, -1]
    kept = last.new_empty(last.shape)
    return kept, {"last_NHWC": kept, "frames_per_video": x_BHWC.shape[0] // num_videos}


def _cudnn_conv_relu(
    x_BHWC: Tensor, weights: _CudnnWeights, *, residual_BHWC: Tensor | None = None, slope: float
) -> Tensor:
    """Convolution, bias, residual and ReLU as one cuDNN call, BHWC in and out; ``slope`` as in `conv_relu`."""
    residual = None if residual_BHWC is None else residual_BHWC.permute(0, 3, 1, 2)
    made = conv_relu(x_BHWC.permute(0, 3, 1, 2), weights.weight, weights.bias, residual=residual, slope=slope)
    return made.permute(0, 2, 3, 1).contiguous()


def _cudnn_conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1) -> Tensor:
    """cuDNN on channels_last memory, BHWC in and out."""
    made = F.conv2d(x_BHWC.permute(0, 3, 1, 2), weight, bias, stride=stride, padding=weight.shape[-1] // 2)
    return made.permute(0, 2, 3, 1).contiguous()
