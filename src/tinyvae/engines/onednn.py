"""The engine of oneDNN's fused convolutions, for x86 CPUs: convolution, bias, sum and ReLU in one call.

Three things make it faster than torch's own operators. The sums of a memory block (the frame before, the residual) and
its ReLUs happen inside the convolutions. No result is large: glibc takes fresh memory from the system for every tensor
of more than 32 MiB, and to get the pages takes eight times as long as to fill them. So memory blocks go over their
input a few frames at a time, and the layers between them in bands of rows. And the last growing layer and the image
convolution are one function (`grow_image_of`).

Frames travel as (N·T)CHW in channels_last memory, float32 or bfloat16. A memory block carries its *convolved* last
frame NCHW, a pooling layer the frames NTCHW that wait for partners.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines import eager, fold
from tinyvae.engines.stack import Stack, State, slice_bytes

FEWEST_ROWS = 8  # of a band; the rows beside it are computed twice


@functools.cache
def why_not_onednn(dtype: torch.dtype, device: torch.device) -> str | None:
    """None where oneDNN's fused convolutions run and pay, else the reason in words; tried once per dtype."""
    if device.type != "cpu":
        return f"the model is on {device.type}"
    if not torch.backends.mkldnn.is_available() or platform.machine().lower() not in ("x86_64", "amd64"):
        return "this torch has no oneDNN for x86 CPUs"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"on a CPU oneDNN's fused convolutions are for float32 and bfloat16, not {dtype}"
    if dtype == torch.bfloat16 and not has_bfloat16():
        return "this CPU has no instructions for bfloat16 (avx512_bf16), and float32 is faster here"
    return try_convolutions(dtype)


def has_bfloat16() -> bool:
    """Whether the CPU multiplies in bfloat16, and this torch can tell."""
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return asked is not None and asked()


def try_convolutions(dtype: torch.dtype) -> str | None:
    """None if oneDNN runs one small convolution of each kind, else the reason in words."""
    x = torch.ones(1, 16, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    try:
        conv = Conv.of(torch.ones(16, 16, 3, 3, dtype=dtype), torch.ones(16, dtype=dtype), relu=True)
        conv.add_to(x, conv(x))
    except (RuntimeError, AttributeError) as error:  # another torch, another CPU
        return f"oneDNN's fused convolutions do not run in {dtype} here ({str(error).splitlines()[0]})"
    return None


@dataclass(frozen=True, kw_only=True)
class Conv:
    """A convolution with its activation: BCHW in channels_last memory to the same."""

    weight: Tensor  # channels_last
    bias: Tensor | None
    padding: int
    stride: int = 1
    groups: int = 1
    relu: bool = False
    slope: float = 0.0

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Conv:
        """``weight`` and ``slope`` as in `fold`; ``how``: the fields from ``stride`` on."""
        # Not packed in advance: the order that oneDNN wants depends on the size, and a wrong one makes a call six times
        # as long.
        return cls(weight=fold.channels_last(weight), bias=bias, padding=weight.shape[-1] // 2, **how)

    def __call__(self, x: Tensor) -> Tensor:
        name = "none" if not self.relu else "leaky_relu" if self.slope else "relu"
        scalars = [self.slope] if name == "leaky_relu" else []
        return torch.ops.mkldnn._convolution_pointwise(x, self.weight, self.bias, *self._geometry, name, scalars, "")

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """The activation of (``total`` + the convolution of ``x``), written over ``total``."""
        name = "relu" if self.relu and not self.slope else None  # behind a sum oneDNN has no LeakyReLU
        torch.ops.mkldnn._convolution_pointwise_(
            total, x, self.weight, self.bias, *self._geometry, "add", None, name, [], None
        )
        return F.leaky_relu_(total, self.slope) if self.relu and self.slope else total

    @property
    def _geometry(self) -> tuple[list[int], list[int], list[int], int]:
        return [self.padding] * 2, [self.stride] * 2, [1, 1], self.groups


@dataclass(frozen=True, kw_only=True)
class Block:
    """A memory block over a few frames of one video; its result is written over ``x``."""

    past: Conv  # of x_{t-1}; what a stream carries
    present: Conv
    middle: tuple[Conv, ...]
    last: Conv  # adds x_t

    widest: ClassVar[int] = 1  # the largest tensor inside, in sizes of x

    def __call__(self, x: Tensor, before: Tensor) -> Tensor:
        """Returns what `past` made of the last frame. ``before``, 1CHW, is that of the frame before these; it is used
        up."""
        then = self.past(x)
        hidden = self.present.add_to(_shifted(before, then), x)
        for conv in self.middle:
            hidden = conv(hidden)
        self.last.add_to(x, hidden)
        return then if len(then) == 1 else then[-1:].clone()


@dataclass(frozen=True, kw_only=True)
class SuperBlock:
    """The same for the super decoders."""

    past: Conv
    present: Conv
    widen: Conv  # of [present, past]
    narrow: Conv  # adds x_t

    widest: ClassVar[int] = 4

    def __call__(self, x: Tensor, before: Tensor) -> Tensor:
        then = self.past(x)
        # Two convolutions and a sum take 1.1 times as long as to join the channels.
        self.narrow.add_to(x, self.widen(torch.cat([self.present(x), _shifted(before, then)], dim=1)))
        return then if len(then) == 1 else then[-1:].clone()


def _shifted(before: Tensor, then: Tensor) -> Tensor:
    """The frame before each frame. A single one is given away: the next call writes over it."""
    return before if len(then) == 1 else torch.cat([before, then[:-1]])


class OnednnStack(Stack):
    """An encoder or decoder as oneDNN calls."""

    writes_image = False

    def __init__(self, layers: Sequence[fold.Layer], *, patch_size: int) -> None:
        super().__init__(layers, patch_size=patch_size)
        self._blocks: dict[int, Block | SuperBlock] = {}
        self._layers: dict[int, Callable[[Tensor], Tensor]] = {}
        for place, layer in enumerate(layers):
            if isinstance(layer, fold.BlockLayer):
                self._blocks[place] = block_of(layer)
            else:
                self._layers[place] = layer_of(layer)
        self._join_image()

    def _join_image(self) -> None:
        """Make the last growing layer and the image convolution behind it one function, where that is faster: for RGB
        (with 12 channels it takes 1.03 times as long)."""
        grow, image = self.layers[-2:]
        if isinstance(grow, fold.GrowLayer) and isinstance(image, fold.ConvLayer) and len(image.weight) == 3:
            self._layers[len(self.layers) - 2] = grow_image_of(grow, image)
            self._layers[len(self.layers) - 1] = _nothing

    def enter(self, frames_NTCHW: Tensor, state: State) -> Tensor:
        x = frames_NTCHW.flatten(0, 1).to(self.dtype)
        if self.is_encoder and self.patch_size > 1:
            x = F.pixel_unshuffle(x, self.patch_size)
        return x.contiguous(memory_format=torch.channels_last)

    def block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        block, carried = self._blocks[place], state[place]
        group = max(1, slice_bytes(x.device) // (block.widest * x[:1].nbytes))
        lasts = []
        for number, video in enumerate(x.chunk(num_videos)):
            # A copy, because a caller may go on twice from one state.
            before = torch.zeros_like(video[:1]) if carried is None else carried[number : number + 1].clone()
            for frames in video.split(group):
                before = block(frames, before)
            lasts.append(before)
        return x, lasts[0] if num_videos == 1 else torch.cat(lasts)

    def compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        """In bands of rows, where a slice of frames is still too large."""
        layers = self.layers[start:stop]
        widest, unit = self.widest(start, stop, x.shape[1])
        per_row = widest / unit * x.shape[0] * x.shape[3] * x.element_size()
        step = 2 if isinstance(layers[-1], fold.PoolLayer) else 1
        rows = max(FEWEST_ROWS, int(slice_bytes(x.device) / per_row) // step * step)
        if rows >= x.shape[2]:
            return self._compute(start, stop, x)
        size = fold.output_size(layers, fold.Size(*x.shape))
        out = self.empty(stop, size, x)
        for band, kept, target in cut_bands(layers, x.shape[2], size.height, rows):
            made = self._compute(start, stop, x[:, :, band].contiguous(memory_format=torch.channels_last))
            out[:, :, target] = made[:, :, kept]
        return out

    def _compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        for place in range(start, stop):
            x = self._layers[place](x)
        return x


def cut_bands(
    layers: Sequence[fold.Layer], height: int, height_out: int, rows: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Bands of ``rows`` rows: (the rows to read, the right rows of their result, where these belong).

    A band reads a few rows more above and below, because the results of its outer rows lack their neighbors.
    """
    halo, scale = halo_of(layers)
    for first in range(0, height, rows):
        last = min(height, first + rows)
        begin, end = max(0, first - halo), min(height, last + halo)
        target = slice(int(first * scale), height_out if last == height else int(last * scale))
        above = int(begin * scale)
        yield slice(begin, end), slice(target.start - above, target.stop - above), target


def halo_of(layers: Sequence[fold.Layer]) -> tuple[int, float]:
    """(rows that a result reads above and below its own, rows of the result for one row that is read)."""
    halo, scale, step = 0, 1.0, 1
    for layer in reversed(layers):
        if isinstance(layer, fold.PoolLayer):
            halo, scale, step = 2 * halo + 1, scale / 2, 2
        elif isinstance(layer, fold.GrowLayer):
            halo, scale = halo // 2 + 1, 2 * scale
        elif isinstance(layer, fold.ConvLayer):
            doubles = 2 if layer.shuffle else 1
            halo, scale = -(-halo // doubles) + layer.weight.shape[-1] // 2, scale * doubles
    return -(-halo // step) * step, scale


def layer_of(layer: fold.Layer) -> Callable[[Tensor], Tensor]:
    """A layer without a state as a function: (N·T)CHW -> (N·T')C'H'W'."""
    if isinstance(layer, fold.ClampLayer):
        return functools.partial(eager.compute_layer, layer)
    if isinstance(layer, fold.PoolLayer):
        weights = layer.weight.chunk(layer.stride, dim=1)
        return functools.partial(_pool, [Conv.of(weight, stride=2) for weight in weights])
    assert isinstance(layer, fold.ConvLayer | fold.GrowLayer)
    bias = layer.bias if isinstance(layer, fold.ConvLayer) else None
    conv = Conv.of(layer.weight, bias, relu=layer.relu, slope=layer.slope)
    if isinstance(layer, fold.GrowLayer):
        return functools.partial(_grow, conv, layer.frames)
    return functools.partial(_conv, conv, layer.frames, layer.shuffle)


def grow_image_of(grow: fold.GrowLayer, image: fold.ConvLayer) -> Callable[[Tensor], Tensor]:
    """A growing layer and the 3x3 behind it, for a few output channels: the phases are never put on their pixels.

    Cell (y, x) of the phases' grid, with one row and one column more than the small grid, holds the pixels of the rows
    2y-1 and 2y and the columns 2x-1 and 2x. So a 3x3 on the pixels is a 2x2 on the cells that makes 2x2 pixels. For 3
    channels oneDNN computes 16 in any case: one pixel at a time wastes 13 of them, four at a time only 4.
    """
    weights = grow.weight.unflatten(0, (2, 2, grow.frames, -1)).unbind(2)
    grows = [Conv.of(weight.flatten(0, 2), relu=grow.relu, slope=grow.slope) for weight in weights]
    bias = None if image.bias is None else image.bias.repeat_interleave(4)
    last = replace(Conv.of(fold.join_phases(image.weight), bias), padding=0)
    return functools.partial(_grow_image, grows, last)


def _grow_image(grows: list[Conv], last: Conv, x: Tensor) -> Tensor:
    made = []
    for grow in grows:
        phases = grow(x)
        cells = eager.as_bhwc(phases).unflatten(3, (2, 2, -1))
        # The pixels around the image are zeros for the 3x3.
        cells[:, 0, :, 1], cells[:, -1, :, 0], cells[:, :, 0, :, 1], cells[:, :, -1, :, 0] = 0, 0, 0, 0
        made.append(F.pixel_shuffle(last(phases), 2))
    return made[0] if len(made) == 1 else torch.stack(made, dim=1).flatten(0, 1)


def _nothing(x: Tensor) -> Tensor:
    """Of a layer that the one before it has done."""
    return x


def _pool(convs: list[Conv], x: Tensor) -> Tensor:
    if len(convs) == 1:
        return convs[0](x)
    made = []
    for frames in x.split(len(convs)):
        total = convs[0](frames[:1])
        for conv, frame in zip(convs[1:], frames[1:].split(1), strict=True):
            conv.add_to(total, frame)
        made.append(total)
    return torch.cat(made)


def _grow(conv: Conv, frames: int, x: Tensor) -> Tensor:
    return eager.interleave_phases(conv(x), frames, x.shape[2], x.shape[3])


def _conv(conv: Conv, frames: int, shuffle: bool, x: Tensor) -> Tensor:
    made = conv(x)
    if shuffle:
        made = F.pixel_shuffle(made, 2).contiguous(memory_format=torch.channels_last)
    return eager.spread_frames(made, frames)


def block_of(layer: fold.Layer) -> Block | SuperBlock:
    """A memory block's layer as calls of oneDNN."""
    if isinstance(layer, fold.SuperMemLayer):
        groups = len(layer.depth)
        return SuperBlock(
            past=Conv.of(layer.past_depth, groups=groups),
            present=Conv.of(layer.depth, groups=groups),
            widen=Conv.of(layer.widen, layer.widen_bias, relu=True, slope=layer.slope),
            narrow=Conv.of(layer.narrow),
        )
    assert isinstance(layer, fold.TwoFrameLayer)
    conv = functools.partial(Conv.of, relu=True, slope=layer.slope)
    present, past = layer.first.chunk(2)
    middle: tuple[Conv, ...]
    if isinstance(layer, fold.WideMemLayer):
        groups = layer.groups
        middle = conv(layer.second, layer.second_bias, groups=groups), conv(layer.third, layer.third_bias)
        last = conv(layer.fourth, layer.fourth_bias, groups=groups)
    else:
        middle, last = (conv(layer.second, layer.second_bias),), conv(layer.third, layer.third_bias)
    bias = layer.first_bias[: len(present)]
    return Block(past=Conv.of(past), present=conv(present, bias), middle=middle, last=last)
