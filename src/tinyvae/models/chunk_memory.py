"""How much memory a chunk of a stream takes, by count, and so how many latents a stream runs at once.

Counted are the frames that are alive together at the widest place of a stack, what the stream remembers before and
after the chunk, and the result. Nothing is run for it: the numbers follow from the shapes of the folded steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinyvae.models.fold import ConvStep, GrowStep, MemStep, PoolStep, SoftClampStep, Step, SuperMemStep
from tinyvae.models.variants import VariantSpec

Engine = Literal["hopper", "cudnn", "eager"]

STREAM_BYTES = 608 * 2**20
"""What a chunk may take beside its input."""
MOST_LATENTS = 4096
FEW_LATENTS = 4
"""On an H200 shorter chunks feel what each one costs in itself, 0.2 to 0.7 ms; to have so many latents in a chunk of
large frames, a stream may take twice as much."""

BLOCK_COPIES = 3
"""How often a memory block's frames are alive at once, its input among them."""
SUPER_BLOCK_COPIES: dict[Engine, int] = {"cudnn": 7, "eager": 10}
"""The same of a super block: input, two side by side, four widened; in the eager engine also both depthwise results and
one of them shifted."""
SLICE_COPIES: dict[Engine, int] = {"hopper": 1, "cudnn": 2, "eager": 2}
"""How often a slice's widest frames are alive at once, what is made of them among them."""


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Frames between two steps: how many, of how many pixels and channels."""

    count: float
    pixels: int
    channels: int

    @property
    def values(self) -> float:
        return self.count * self.pixels * self.channels


def chunk_latents(bytes_of: Callable[[int], int], *, few_cost_time: bool) -> int:
    """Latents of a chunk, at least 1; ``bytes_of`` says what a chunk of so many takes."""
    fits = bisect_right(range(1, MOST_LATENTS + 1), STREAM_BYTES, key=bytes_of)
    if few_cost_time and fits < FEW_LATENTS:
        fits = bisect_right(range(1, FEW_LATENTS + 1), 2 * STREAM_BYTES, key=bytes_of)
    return max(1, fits)


def joined_latents(chunk_latents: int) -> int:
    """How many latents of a chunk may be joined of several pushes, which copies their frames."""
    return max(1, 2 * chunk_latents // 3)


def chunk_bytes(
    steps: Sequence[Step],
    spec: VariantSpec,
    engine: Engine,
    *,
    num_latents: int,
    latent_pixels: int,
    element_size: int,
    slice_bytes: int,
) -> int:
    """Most bytes alive at once while a stack runs a chunk of one video in the middle of a stream.

    ``slice_bytes``: what the widest frames of a slice take, where frames between two memory blocks run in slices.
    """

    def values(count: int) -> float:
        return _values_alive(steps, spec, engine, count, latent_pixels, slice_bytes / element_size)

    alive = values(num_latents)
    if any(isinstance(step, PoolStep) for step in steps):
        joined = joined_latents(num_latents)
        image = joined * spec.time_factor * 64 * latent_pixels * spec.image_channels
        alive = max(alive, values(joined) + image)
    return round(alive * element_size)


def _values_alive(
    steps: Sequence[Step],
    spec: VariantSpec,
    engine: Engine,
    num_latents: int,
    latent_pixels: int,
    slice_size: float,
) -> float:
    """`chunk_bytes` in values, of a chunk that is not joined."""
    is_encoder = any(isinstance(step, PoolStep) for step in steps)
    frames = Frames(count=num_latents, pixels=latent_pixels, channels=spec.latent_channels)
    if is_encoder:
        count = num_latents * spec.time_factor
        frames = Frames(count=count, pixels=64 * latent_pixels, channels=spec.image_channels)
    peak, remembered, laid_out = 0.0, 0.0, 0.0
    if is_encoder:
        # A taeh3 push is joined with frames that waited, and gets zeros before it.
        laid_out = 3 * frames.values if spec.frame_rule == "chunked" else 0.0
        if engine == "eager":  # which casts the whole push, and lays it out anew
            laid_out += frames.values
            peak = frames.values
    runs = list(_runs(steps))
    for place, run in enumerate(runs):
        if isinstance(run[0], MemStep | SuperMemStep):
            copies = BLOCK_COPIES if isinstance(run[0], MemStep) else SUPER_BLOCK_COPIES[engine]
            one = frames.values / frames.count
            remembered += one
            alive = copies * frames.values + one  # this block's frame before, and the next one's
        else:
            sizes = _sizes(run, frames)
            alive = _whole(run, sizes, engine)
            slice_values = max(slice_size, _smallest_slice(run, sizes))
            if is_encoder and place == 0 and engine != "eager":
                alive = _from_image(run, sizes, slice_values, engine)
            elif engine != "hopper" or (not is_encoder and place == len(runs) - 1 and len(run) > 1):
                alive = min(alive, sizes[0].values + sizes[-1].values + SLICE_COPIES[engine] * slice_values)
            frames = sizes[-1]
        peak = max(peak, alive)
    results = 3 if spec.frame_rule == "chunked" else 2  # laid out, perhaps chosen from, and clamped
    peak = max(peak, results * frames.values)
    # Of every block the frame before the chunk is there until it has run, then that for the next chunk.
    return peak + remembered + laid_out


def _runs(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Memory blocks one by one, and what lies between two of them together."""
    run: list[Step] = []
    for step in steps:
        if isinstance(step, MemStep | SuperMemStep):
            if run:
                yield run
            yield [step]
            run = []
        else:
            run.append(step)
    if run:
        yield run


def _sizes(run: Sequence[Step], frames: Frames) -> list[Frames]:
    """The frames before, between and behind the steps of a run."""
    sizes = [frames]
    for step in run:
        assert not isinstance(step, MemStep | SuperMemStep)
        if isinstance(step, PoolStep):
            frames = Frames(count=frames.count / step.stride, pixels=frames.pixels // 4, channels=step.weight.shape[0])
        elif not isinstance(step, SoftClampStep):
            scale = 4 if isinstance(step, GrowStep) or step.shuffle else 1
            channels = step.weight.shape[0] // (step.frames * scale)
            frames = Frames(count=frames.count * step.frames, pixels=frames.pixels * scale, channels=channels)
        sizes.append(frames)
    return sizes


def _from_image(run: Sequence[Step], sizes: Sequence[Frames], slice_values: float, engine: Engine) -> float:
    """Values alive at once in an encoder's first run where the first convolution reads the image itself: its result,
    the image cast and its patches laid out for it, and what is pooled of it.
    """
    first = run[0]
    assert isinstance(first, ConvStep)
    outputs, inputs = first.weight.shape[:2]
    with_image = 1 + 2 * inputs / outputs
    if engine == "hopper":  # whose slices are cut for all three together
        return min(sizes[1].values * with_image, slice_values) + sizes[-1].values
    return min(sizes[1].values, slice_values) * with_image + sizes[-1].values


def _smallest_slice(run: Sequence[Step], sizes: Sequence[Frames]) -> float:
    """Values of the widest place when the fewest frames go through: one, or one group of what is pooled."""
    group = math.prod(step.stride for step in run if isinstance(step, PoolStep))
    return max(size.values for size in sizes) * group / sizes[0].count


def _whole(run: Sequence[Step], sizes: Sequence[Frames], engine: Engine) -> float:
    """Values alive at once in a run that is not sliced: a step's input, its output, one of them in another order."""
    peak = 2 * sizes[0].values  # the input in channels_last memory
    for step, before, after in zip(run, sizes, sizes[1:], strict=False):
        alive = before.values + after.values
        if isinstance(step, PoolStep) and (engine != "hopper" or len(run) > 1):
            alive += before.values  # frames side by side; the kernels of a memory block write them so
        elif after.pixels * after.count > before.pixels * before.count and engine != "hopper":
            alive += after.values
        peak = max(peak, alive)
    return peak
