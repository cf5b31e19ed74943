"""The engine of cuDNN's fused convolutions: convolution, bias, residual and ReLU in one call. LeakyReLU is not among
them: there cuDNN does the convolution, and `pointwise` the rest in one pass.

torch adds the bias in a second pass over the result, and a ReLU in a third: at 64 channels that doubles the time (0.27
against 0.14 ms, eight frames of 240x360, fp16, H200). This engine is for CUDA cards and networks that the Hopper
kernels do not serve; sizes and lengths may change at every call. Where cuDNN refuses a shape, torch's own operators
compute that convolution, and a warning says so once. A super block's depthwise convolutions have a kernel of their own.

Frames travel as BCHW (B = N·T) in channels_last memory, fp16, bf16 or fp32. A memory block carries its last input frame
N1CHW, a super block its last frame N1HWC after the depthwise convolution.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines import depthwise, eager, fold, nvrtc
from tinyvae.engines.pointwise import finish
from tinyvae.engines.stack import Stack, State, slice_bytes


@functools.cache
def why_not_cudnn(dtype: torch.dtype, device: torch.device) -> str | None:
    """None where cuDNN's fused convolutions run, else the reason in words; tried once per device and dtype."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return try_convolutions(dtype, device)


def try_convolutions(dtype: torch.dtype, device: torch.device) -> str | None:
    """None if cuDNN runs one small convolution of each kind, else the reason in words."""
    x = torch.ones(2, 64, 4, 4, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    bias = torch.ones(64, dtype=dtype, device=device)
    over_time = torch.stack([weight, weight], dim=2).contiguous(memory_format=torch.channels_last_3d)
    try:
        _fused_conv(x, weight, bias, (1, 1), x)
        _fused_conv(x, weight, bias, (1, 1), None)
        _fused_conv(x.unflatten(0, (1, -1)).transpose(1, 2), over_time, bias, (1, 1, 1), None)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # cuDNN has no kernel for this card and dtype
        return f"cuDNN's fused convolutions do not run in {dtype} on this card ({str(error).splitlines()[0]})"
    return None


REFUSALS = (
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_BAD_PARAM",
    "CUDNN_STATUS_ARCH_MISMATCH",
    "unable to find an engine",
    "Unable to find a valid cuDNN algorithm",
)
"""What torch's errors say where cuDNN has no kernel for a shape. Other errors (memory, a broken launch) stay errors."""

_refused: set[tuple[object, ...]] = set()  # what cuDNN refused in this process: it is not asked again


@functools.cache
def fuses_groups(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN has fused convolutions over groups of channels; tried once per device and dtype."""
    x = torch.ones(2, 128, 4, 4, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(128, 64, 3, 3, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    try:
        _fused_conv(x, weight, x.new_ones(128), (1, 1), x)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # cuDNN has no such kernel for this card and dtype
        return False
    return True


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, ...], residual: Tensor | None, *, slope: float = 0.0
) -> Tensor:
    """relu(convolution + bias + residual), 2-D or 3-D, with stride 1: by cuDNN, or by torch for a shape that cuDNN
    refuses. ``slope`` is that of the ReLU below zero; not 0 is LeakyReLU, which cuDNN does not have inside. A weight
    with fewer inputs than ``x`` has channels is over groups of channels."""
    if slope or (weight.shape[1] != x.shape[1] and not fuses_groups(x.dtype, x.device)):
        return _plain_conv(x, weight, bias, padding, residual, slope)
    if not _refused:  # on most machines always: the host is often the limit, so nothing is looked up
        key = None
    elif (key := _shape_key(x, weight)) in _refused:
        return _plain_conv(x, weight, bias, padding, residual, slope)
    try:
        return _fused_conv(x, weight, bias, padding, residual)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in REFUSALS):
            raise
        reason = str(error).splitlines()[0]
    _refused.add(key or _shape_key(x, weight))
    frames, taps = "x".join(map(str, x.shape)), "x".join(map(str, weight.shape))
    what = f"cuDNN refuses a convolution of {frames} by {taps} in {x.dtype} ({reason})"
    warnings.warn(f"{what}; torch's own operators compute this shape, slower and with the same result.", stacklevel=2)
    return _plain_conv(x, weight, bias, padding, residual, slope)


def _shape_key(x: Tensor, weight: Tensor) -> tuple[object, ...]:
    return x.device, x.dtype, x.shape, weight.shape


def _fused_conv(x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, ...], residual: Tensor | None) -> Tensor:
    ones, groups = (1,) * len(padding), x.shape[1] // weight.shape[1]
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, ones, padding, ones, groups)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, ones, padding, ones, groups)


def _plain_conv(
    x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, ...], residual: Tensor | None, slope: float
) -> Tensor:
    conv: Callable[..., Tensor] = F.conv2d if x.ndim == 4 else F.conv3d
    layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    made = conv(x, weight, padding=padding, groups=x.shape[1] // weight.shape[1])
    return finish(made.contiguous(memory_format=layout), bias, residual, slope)


def conv_relu(
    x_BCHW: Tensor, weight: Tensor, bias: Tensor, *, residual: Tensor | None = None, slope: float = 0.0
) -> Tensor:
    """relu(convolution + bias + residual) on the same grid; a 2x2 ``weight`` makes one row and one column more. More in
    `convolve`."""
    return convolve(x_BCHW, weight, bias, (weight.shape[2] // 2, weight.shape[3] // 2), residual, slope=slope)


def two_frame_conv_relu(
    x_BCHW: Tensor, weight: Tensor, bias: Tensor, *, past_N1CHW: Tensor | None, num_videos: int, slope: float = 0.0
) -> Tensor:
    """relu of a 3x3 or 1x1 over each frame and the one before it, with a weight of `over_two_frames`. ``past_N1CHW``
    stands before the first frame of each video (None: zeros)."""
    video = x_BCHW.unflatten(0, (num_videos, -1))
    num_frames = video.shape[1]
    # For one video at its start the padding of cuDNN makes the zeros. It also makes one frame too many at the end.
    by_padding = past_N1CHW is None and num_videos == 1
    if not by_padding:
        before = torch.zeros_like(video[:, :1]) if past_N1CHW is None else past_N1CHW
        video = torch.cat([before.permute(0, 1, 3, 4, 2), video.permute(0, 1, 3, 4, 2)], dim=1).permute(0, 1, 4, 2, 3)
    frames, before_first = video.transpose(1, 2), 1 if by_padding else 0
    padding = (before_first, *(side // 2 for side in weight.shape[3:]))
    made = convolve(frames, weight, bias, padding, None, slope=slope)
    return made.transpose(1, 2)[:, :num_frames].flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class PatchConv:
    """The first convolution of an encoder with its ReLU, from image frames; inputs filled up to a multiple of 8.

    ``stacked`` frames go through block-diagonal weights and come out side by side, as the pooling layer behind needs
    them: to copy the result, the largest tensor of the network, would cost more.
    """

    weight: Tensor  # (stacked · out, filled inputs, 3, 3), channels_last
    bias: Tensor
    patch_size: int
    stacked: int
    slope: float

    @classmethod
    def of(cls, layer: fold.ConvLayer, *, patch_size: int, stacked: int) -> PatchConv:
        assert layer.relu and layer.frames == 1 and not layer.shuffle
        side_by_side = eager.stacked_first(layer, stacked)
        assert side_by_side.bias is not None
        weight = side_by_side.weight
        filled = F.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % eager.CUDA_CHANNEL_MULTIPLE))
        return cls(
            weight=fold.channels_last(filled),
            bias=side_by_side.bias,
            patch_size=patch_size,
            stacked=stacked,
            slope=layer.slope,
        )

    def __call__(self, image_BCHW: Tensor) -> Tensor:
        """Images (B·stacked)3HW, contiguous, to B(stacked·out)(H/patch)(W/patch)."""
        patch, stacked = self.patch_size, self.stacked
        frames, colors, height, width = image_BCHW.shape
        used, filled = stacked * colors * patch**2, self.weight.shape[1]
        laid_out = image_BCHW.new_empty(frames // stacked, height // patch, width // patch, filled)
        laid_out[..., used:] = 0
        # Channels are (frame, color, row in the patch, column in the patch), in the order of pixel_unshuffle.
        split = image_BCHW.reshape(-1, stacked, colors, height // patch, patch, width // patch, patch)
        laid_out[..., :used].unflatten(3, (stacked, colors, patch, patch)).copy_(split.permute(0, 3, 5, 1, 2, 4, 6))
        return conv_relu(laid_out.permute(0, 3, 1, 2), self.weight, self.bias, slope=self.slope)


class CudaStack(Stack):
    """What the two engines for CUDA cards share."""

    def run(self, frames_NTCHW: Tensor, state: State | None, **parts: bool) -> tuple[Tensor, State]:
        with _ready(frames_NTCHW):
            return super().run(frames_NTCHW, state, **parts)

    def head(self, frames_NTCHW: Tensor) -> Tensor:
        with _ready(frames_NTCHW):
            return super().head(frames_NTCHW)

    def image(self, x: Tensor, num_videos: int) -> Tensor:
        with _ready(x):
            return super().image(x, num_videos)

    def pooled_first(self, stop: int) -> int:
        """How many frames an encoder's first convolution puts side by side: as many as the pooling layer behind takes,
        if that is one of the layers before ``stop``, else 1."""
        return cast(fold.PoolLayer, self.layers[1]).stride if stop > 1 else 1

    def patch_convs(self) -> dict[int, PatchConv]:
        """An encoder's first convolution by cuDNN, for each number of frames that it puts side by side."""
        counts = {1, self.pooled_first(2)}
        return {count: PatchConv.of(self.at_image, patch_size=self.patch_size, stacked=count) for count in counts}

    def grid(self, start: int, x: Tensor) -> tuple[int, int, int]:
        patch = self.patch_size if self.is_encoder and start == 0 else 1
        return x.shape[1] * patch**2, x.shape[2] // patch, x.shape[3] // patch

    def empty(self, stop: int, size: fold.Size, x: Tensor) -> Tensor:
        """BHWC, and an image B3HW."""
        shape = (size.frames, size.height, size.width, size.channels)
        if self.ends_in_image(stop):
            shape = (size.frames, 3, size.height * self.patch_size, size.width * self.patch_size)
        return torch.empty(shape, dtype=self.dtype, device=x.device)


@contextlib.contextmanager
def _ready(x: Tensor) -> Iterator[None]:
    # Our kernels run on the current device. Weights and frames have one dtype already.
    with torch.cuda.device_of(x), torch.autocast("cuda", enabled=False), nvrtc.early_launches():
        yield


class CudnnStack(CudaStack):
    """An encoder or decoder as cuDNN calls; the images may have another precision."""

    def __init__(self, layers: Sequence[fold.Layer], *, patch_size: int) -> None:
        super().__init__([_order_patches(layer) for layer in layers], patch_size=patch_size)
        at_image = self.at_image
        assert at_image.bias is not None
        most = max(layer.weight.shape[0] for layer in self.layers if isinstance(layer, fold.ConvLayer | fold.GrowLayer))
        self._zeros = at_image.weight.new_zeros(most)  # a bias for cuDNN where a layer has none
        self._over_time: dict[int, Tensor] = {}
        self._super: dict[int, SuperWeights] = {}
        for place, layer in enumerate(self.layers):
            if isinstance(layer, fold.TwoFrameLayer):
                self._over_time[place] = over_two_frames(layer)
            elif isinstance(layer, fold.SuperMemLayer):
                self._super[place] = SuperWeights.of(layer)
        if self.is_encoder:
            self._first = self.patch_convs()
        else:  # the outputs filled up to a multiple of 8; the bias is added while the image is written
            more = -at_image.weight.shape[0] % eager.CUDA_CHANNEL_MULTIPLE
            self._image_weight = fold.channels_last(F.pad(at_image.weight, (0, 0, 0, 0, 0, 0, 0, more)))

    def enter(self, frames_NTCHW: Tensor, state: State) -> Tensor:
        x = frames_NTCHW.flatten(0, 1)
        return x.contiguous() if self.is_encoder else x.contiguous(memory_format=torch.channels_last)

    def empty(self, stop: int, size: fold.Size, x: Tensor) -> Tensor:
        room = super().empty(stop, size, x)
        return room if self.ends_in_image(stop) else room.permute(0, 3, 1, 2)

    def write(self, start: int, stop: int, x: Tensor, out: Tensor) -> None:
        if not self.ends_in_image(stop):
            return super().write(start, stop, x, out)
        last = self.at_image
        assert last.bias is not None
        made = F.conv2d(self.compute(start, stop - 1, x), self._image_weight, padding=1)
        write_image(made, last.bias, self.patch_size, last.frames, out)

    def block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        layer = self.layers[place]
        if isinstance(layer, fold.SuperMemLayer):
            return _super_mem_block(self._super[place], x, state[place], num_videos)
        assert isinstance(layer, fold.TwoFrameLayer)
        last, slope = x.unflatten(0, (num_videos, -1))[:, -1:].clone(), layer.slope
        bias = layer.first_bias[: x.shape[1]]
        past, state[place] = state[place], None
        hidden = two_frame_conv_relu(
            x, self._over_time[place], bias, past_N1CHW=past, num_videos=num_videos, slope=slope
        )
        del past
        deeper = conv_relu(hidden, layer.second, layer.second_bias, slope=slope)
        del hidden  # the result takes its memory
        if not isinstance(layer, fold.WideMemLayer):
            return conv_relu(deeper, layer.third, layer.third_bias, residual=x, slope=slope), last
        deeper = conv_relu(deeper, layer.third, layer.third_bias, slope=slope)
        return conv_relu(deeper, layer.fourth, layer.fourth_bias, residual=x, slope=slope), last

    def compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        if self.is_encoder and start == 0:
            x, start = self._first[self.pooled_first(stop)](x.to(self.dtype)), 1
        for layer in self.layers[start:stop]:
            x = self._layer(layer, x)
        return x

    def _layer(self, layer: fold.Layer, x: Tensor) -> Tensor:
        if isinstance(layer, fold.ClampLayer | fold.PoolLayer):
            return eager.compute_layer(layer, x)
        if isinstance(layer, fold.GrowLayer):
            phases = self._conv(x, layer.weight, None, relu=layer.relu, slope=layer.slope)
            return eager.interleave_phases(phases, layer.frames, x.shape[2], x.shape[3])
        assert isinstance(layer, fold.ConvLayer)
        made = self._conv(x, layer.weight, layer.bias, relu=layer.relu, slope=layer.slope)
        if layer.shuffle:
            rows = eager.as_bhwc(made).unflatten(3, (2, 2, -1)).permute(0, 1, 3, 2, 4, 5)  # see _order_patches
            made = eager.as_bchw(eager.dense(rows).flatten(3, 4).flatten(1, 2))
        return eager.spread_frames(made, layer.frames)

    def _conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool, slope: float) -> Tensor:
        if not relu:
            return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2)
        return conv_relu(x, weight, self._zeros[: weight.shape[0]] if bias is None else bias, slope=slope)


def write_image(made_BCHW: Tensor, bias: Tensor, patch_size: int, frames: int, image_BCHW: Tensor) -> None:
    """Put a last convolution's result, bias still to be added, into its image (B·frames)3HW, pixel-shuffled. Its
    channels are (frame, color, row in the patch, column in the patch), perhaps followed by filling."""
    batch, _, height, width = made_BCHW.shape
    shape = (frames, 3, patch_size, patch_size)
    grown = image_BCHW.view(batch, frames, 3, height, patch_size, width, patch_size).permute(0, 1, 2, 4, 6, 3, 5)
    # BHWC, because a slice of channels is then still a plain view.
    values = eager.as_bhwc(made_BCHW)[..., : bias.shape[0]].unflatten(3, shape).permute(0, 3, 4, 5, 6, 1, 2)
    torch.add(values, bias.view(*shape, 1, 1), out=grown)


@dataclass(frozen=True, kw_only=True)
class SuperWeights:
    """A super block's layer, with what is made of its weights once: the host is often the limit."""

    layer: fold.SuperMemLayer
    bands: Tensor | None  # for our own depthwise kernel; None: cuDNN computes them
    narrow: Tensor  # (4C, C)

    @classmethod
    def of(cls, layer: fold.SuperMemLayer) -> SuperWeights:
        own = depthwise.why_not_depthwise(layer.depth.dtype, layer.depth.device) is None
        bands = depthwise.pack_bands(layer.depth, layer.past_depth) if own else None
        return cls(layer=layer, bands=bands, narrow=layer.narrow.flatten(1).T)


def _super_mem_block(weights: SuperWeights, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """Writes its result over ``x``. The widened frames, four times as many values, are made in slices."""
    layer, out = weights.layer, eager.as_bhwc(x).contiguous()
    frames, height, width, channels = out.shape
    if weights.bands is None or out.numel() > depthwise.MOST_VALUES:
        both, last = two_depthwise(layer, out.permute(0, 3, 1, 2), past, num_videos)
    else:
        before = None if past is None else past.flatten(0, 1)
        both, last = depthwise.super_depthwise(out, weights.bands, num_videos=num_videos, past_NHWC=before)
        last = last.unsqueeze(1)
    wide_channels = weights.narrow.shape[0]
    fit = slice_bytes(x.device) // (wide_channels * height * width * out.element_size())
    slices = -(-frames // max(1, fit))
    parts = [(out, both)] if slices == 1 else list(zip(out.chunk(slices), both.chunk(slices), strict=True))
    for here, pair in parts:
        wide = conv_relu(pair.permute(0, 3, 1, 2), layer.widen, layer.widen_bias, slope=layer.slope)
        here.view(-1, channels).addmm_(eager.as_bhwc(wide).reshape(-1, wide_channels), weights.narrow)
        del wide  # the next slice takes its memory
    return out.permute(0, 3, 1, 2), last


def two_depthwise(layer: fold.SuperMemLayer, x: Tensor, past: Tensor | None, num_videos: int) -> tuple[Tensor, Tensor]:
    """`depthwise.super_depthwise` by cuDNN: (both side by side BHW(2C), ``past_depth`` of the last frame N1HWC)."""
    channels = x.shape[1]
    then = eager.as_bhwc(_depthwise(x, layer.past_depth)).unflatten(0, (num_videos, -1))
    last = then[:, -1:].clone()
    both = then.new_empty(*then.shape[:-1], 2 * channels)
    eager.copy_pixels(both[:, 1:, ..., channels:], then[:, :-1])
    both[:, :1, ..., channels:] = 0 if past is None else past
    del then  # the next results take its memory
    both = both.flatten(0, 1)
    eager.copy_pixels(both[..., :channels], eager.as_bhwc(_depthwise(x, layer.depth)))
    return both, last


def _depthwise(x: Tensor, weight: Tensor) -> Tensor:
    """cuDNN has a fast kernel for eight frames and more; with seven each takes three times as long (H200, cuDNN 9)."""
    frames, fast = x.shape[0], 8
    filled = F.pad(x, (0, 0, 0, 0, 0, 0, 0, fast - frames)) if 3 <= frames < fast else x
    return F.conv2d(filled, weight, padding=3, groups=x.shape[1])[:frames]


def over_two_frames(layer: fold.TwoFrameLayer) -> Tensor:
    """The first convolution of a block as one over x_{t-1} and x_t: of (2C, C, 3, 3), the half for x_t first, it makes
    (C, C, 2, 3, 3), and of a 1x1 (C, C, 2, 1, 1)."""
    now, then = layer.first.chunk(2)
    return torch.stack([then, now], dim=2).contiguous(memory_format=torch.channels_last_3d)


def _order_patches(layer: fold.Layer) -> fold.Layer:
    """A layer that shuffles pixels, with its outputs as (row, column, channel), so that copies move whole pixels."""
    if not (isinstance(layer, fold.ConvLayer) and layer.shuffle):
        return layer
    assert layer.bias is not None
    ordered = layer.weight.unflatten(0, (-1, 2, 2)).movedim(0, 2).flatten(0, 2)
    return replace(
        layer, weight=fold.channels_last(ordered), bias=layer.bias.unflatten(0, (-1, 2, 2)).movedim(0, 2).flatten()
    )
