"""The one loop over folded layers. Every engine runs its chunks of a video through it.

The layers are cut into runs. A memory block is a run of its own, because it needs the frame before each frame. In the
layers between two blocks no frame depends on another one, so their run may go slice by slice, a few frames at a time:
at full resolution all frames together would fill the memory. What a stream carries from one chunk to the next is its
*state*: a memory block keeps something of its last frame, a pooling layer the frames that wait for partners.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines.fold import BlockLayer, ConvLayer, GrowLayer, Layer, PoolLayer, Size, output_size
from tinyvae.models.blocks import State, whole_groups

SLICE_BYTES, CPU_SLICE_BYTES = 96 * 2**20, 16 * 2**20
"""Bytes for the widest frames of a slice. On a CPU decoding is 10 to 20 % faster if slices fit into the cache."""


def slice_bytes(device: torch.device) -> int:
    return CPU_SLICE_BYTES if device.type == "cpu" else SLICE_BYTES


class Stack(ABC):
    """An encoder or a decoder. An engine is a subclass that says how frames lie in memory and how layers compute."""

    writes_image = True  # whether `write` puts the last slices of a decoder straight into the image

    def __init__(self, layers: Sequence[Layer], *, patch_size: int) -> None:
        self.layers = layers
        self.patch_size = patch_size
        self.is_encoder = any(isinstance(layer, PoolLayer) for layer in layers)
        self._runs = cut_runs(layers)
        self._widest: dict[tuple[int, int], tuple[float, int]] = {}  # results of `widest_values`, by start and stop

    def run(
        self, frames_NTCHW: Tensor, state: State | None, *, with_head: bool = True, with_image: bool = True
    ) -> tuple[Tensor, State]:
        """One chunk of a video: (frames NTCHW, the state for the next chunk). ``state`` is used up.

        T may be 0 while a pooling layer waits for partners; the layers behind it have not run then. The layers at the
        image can be left out: an encoder then takes what `head` made, and `image` makes a decoder's frames.
        """
        num_videos, num_frames = frames_NTCHW.shape[:2]
        old: State = [None] * len(self.layers) if state is None else state
        new: State = [None] * len(self.layers)
        x = self.enter(frames_NTCHW, old) if with_head else frames_NTCHW.flatten(0, 1)
        del frames_NTCHW  # where nobody else holds it, its memory is free now
        runs = self._runs[0 if with_head else 1 : None if with_image else -1]
        for start, stop, is_block, grown, pooled in runs:
            if is_block:
                x, new[start] = self.block(start, x, old, num_videos)
                old[start] = None
                continue
            pool = stop - 1
            if pooled and (old[pool] is not None or num_frames % pooled):
                if start < pool:
                    x = self._run_layers(start, pool, x, num_videos * num_frames)
                video, new[pool] = whole_groups(x.unflatten(0, (num_videos, -1)), old[pool], pooled)
                old[pool], num_frames = None, video.shape[1]
                if num_frames == 0:
                    new[stop:] = old[stop:]
                    return video, new
                x = self.compute(pool, stop, video.flatten(0, 1))
                del video
            else:
                x = self._run_layers(start, stop, x, num_videos * num_frames)
            num_frames = num_frames * grown // (pooled or 1)
        return (self._finish(x, num_videos) if with_image else x), new

    def _finish(self, x: Tensor, num_videos: int) -> Tensor:
        return self.leave(x).unflatten(0, (num_videos, -1))

    def head(self, frames_NTCHW: Tensor) -> Tensor:
        """What an encoder's first run makes of frames that it pools whole: N and T, then the engine's own layout."""
        num_videos, num_frames = frames_NTCHW.shape[:2]
        start, stop, *_ = self._runs[0]
        x = self.enter(frames_NTCHW, [None] * len(self.layers))
        return self._run_layers(start, stop, x, num_videos * num_frames).unflatten(0, (num_videos, -1))

    def image(self, x: Tensor, num_videos: int) -> Tensor:
        """Frames NTCHW of what `run` made without the image."""
        start, stop, *_ = self._runs[-1]
        return self._finish(self._run_layers(start, stop, x, x.shape[0]), num_videos)

    def head_is_smaller(self, shape: torch.Size, state: State | None) -> bool:
        """Whether this is an encoder whose first run makes fewer values of a chunk NTCHW, and keeps no frames."""
        _, stop, *_, pooled = self._runs[0]
        num_videos, num_frames, channels, height, width = shape
        if not pooled or num_frames % pooled or (state is not None and state[stop - 1] is not None):
            return False
        patch = self.patch_size
        size = Size(num_videos * num_frames, channels * patch**2, height // patch, width // patch)
        return output_size(self.layers[:stop], size).values < size.values

    def image_is_larger(self, shape: torch.Size) -> bool:
        """Whether this is a decoder whose last run makes more values of a chunk NTCHW than it takes."""
        if not self.ends_in_image(len(self.layers)):
            return False
        start = self._runs[-1][0]
        size = output_size(self.layers[:start], Size(shape[0] * shape[1], *shape[2:]))
        return output_size(self.layers[start:], size).values > size.values

    def stacked_for(self, place: int, state: State, num_frames: int) -> int:
        """How many frames layer ``place`` wants side by side on channels: those that it pools, if no frames wait for
        partners, now or after these frames; else 1."""
        layer = self.layers[place] if place < len(self.layers) else None
        if not isinstance(layer, PoolLayer) or state[place] is not None or num_frames % layer.stride:
            return 1
        return layer.stride

    def _run_layers(self, start: int, stop: int, x: Tensor, num_frames: int) -> Tensor:
        """Layers without a state over ``num_frames`` frames in all, slice by slice where that is needed."""
        room = self.slice_room(start, stop, x)
        if room is None:
            return self.compute(start, stop, x)
        channels, height, width = self.grid(start, x)
        widest, unit = self.widest(start, stop, channels)
        group = max(1, int(min(room / (widest * height * width), num_frames))) * unit
        is_whole, is_image = group >= num_frames, self.ends_in_image(stop)
        if is_whole and not is_image:
            return self.compute(start, stop, x)
        size = output_size(self.layers[start:stop], Size(num_frames, channels, height, width))
        out = self.empty(stop, size, x)
        if is_whole:
            self.write(start, stop, x, out)
            return out
        done = 0
        for part in x.split(group * x.shape[0] // num_frames):  # x may hold several frames in its channels
            count = part.shape[0] * out.shape[0] // x.shape[0]
            self.write(start, stop, part, out[done : done + count])
            done += count
        return out

    @property
    def at_image(self) -> ConvLayer:
        """An encoder's first layer, or a decoder's last."""
        return cast(ConvLayer, self.layers[0 if self.is_encoder else -1])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of all frames except images."""
        return self.at_image.weight.dtype

    def widest(self, start: int, stop: int, channels: int) -> tuple[float, int]:
        """`widest_values` of layers ``start`` to ``stop``, which take ``channels``; counted once."""
        if (start, stop) not in self._widest:
            self._widest[start, stop] = widest_values(self.layers[start:stop], channels)
        return self._widest[start, stop]

    def ends_in_image(self, stop: int) -> bool:
        """Whether the layers before ``stop`` end in the image, which this engine writes slice by slice."""
        return self.writes_image and not self.is_encoder and stop == len(self.layers)

    def write(self, start: int, stop: int, x: Tensor, out: Tensor) -> None:
        """`compute` into ``out``."""
        out.copy_(self.compute(start, stop, x))

    # An engine provides these. x is (N·T) frames in the engine's own layout.

    @abstractmethod
    def enter(self, frames_NTCHW: Tensor, state: State) -> Tensor:
        """The frames in the engine's layout."""

    @abstractmethod
    def block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        """A memory block: (result, what it carries). It may remove ``state[place]`` to free its memory early."""

    @abstractmethod
    def compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        """Layers ``start`` to ``stop``, none of them with a state."""

    # And these, if its frames are not (N·T)CHW in channels_last memory, or its slices differ.

    def slice_room(self, start: int, stop: int, x: Tensor) -> float | None:
        """How many values the widest frames of a slice of this run may have; None: `compute` takes the whole run."""
        return slice_bytes(x.device) / self.dtype.itemsize

    def leave(self, x: Tensor) -> Tensor:
        """Latents or images (N·T)CHW, contiguous, of the last result."""
        has_patches = not (self.is_encoder or self.writes_image or self.patch_size == 1)
        return (F.pixel_shuffle(x, self.patch_size) if has_patches else x).contiguous()

    def grid(self, start: int, x: Tensor) -> tuple[int, int, int]:
        """Channels, height and width of a frame before layer ``start``."""
        return x.shape[1], x.shape[2], x.shape[3]

    def empty(self, stop: int, size: Size, x: Tensor) -> Tensor:
        """Room for a result of this size behind layer ``stop`` - 1, on the device of ``x``."""
        return x.new_empty(size.frames, size.height, size.width, size.channels).permute(0, 3, 1, 2)


def cut_runs(layers: Sequence[Layer]) -> list[tuple[int, int, bool, int, int]]:
    """Runs as (start, stop, whether it is a memory block, frames made of one, frames pooled into one or 0).

    A pooling layer is the last of its run. These are plain loops because torch.compile reads them too.
    """
    runs = []
    start, grown = 0, 1
    for place, layer in enumerate(layers):
        is_block = isinstance(layer, BlockLayer)
        if is_block and start < place:
            runs.append((start, place, False, grown, 0))
            start, grown = place, 1
        if isinstance(layer, ConvLayer | GrowLayer):
            grown *= layer.frames
        if is_block or isinstance(layer, PoolLayer) or place == len(layers) - 1:
            runs.append((start, place + 1, is_block, grown, layer.stride if isinstance(layer, PoolLayer) else 0))
            start, grown = place + 1, 1
    return runs


def widest_values(layers: Sequence[Layer], channels: int) -> tuple[float, int]:
    """(values that one pixel of the smallest slice has at the widest place of these layers, frames of that slice): one
    frame, or the frames that the last layer pools."""
    last, side = layers[-1], 64
    unit = last.stride if isinstance(last, PoolLayer) else 1
    size, widest = Size(unit, channels, side, side), 0
    for layer in layers:
        size = layer.output(size)
        widest = max(widest, size.values)
    return widest / side**2, unit
