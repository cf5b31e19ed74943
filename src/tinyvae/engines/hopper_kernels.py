"""The Hopper kernels `conv_tiles` and `image_conv` as functions on tensors: packed weights in, frames NTHWC flattened
to BHWC in and out; and what the other Hopper kernels share with them.

`hopper.cu` holds and explains the two. Everything here is fp16 or bf16 on a device of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tinyvae.engines.nvrtc import Kernel, Launch, int_fields, load_kernel, processors

FILES = ("instructions.cu", "hopper.cu")
TILE_HEIGHTS = (32, 30, 24, 16)
FLAT_HEIGHTS: tuple[int, ...] = (16, 8)
"""Tiles of these heights leave no processor idle where there are few frames, and load weights more often. Without them
taew2_2 takes 1.15 times as long on an H200 to decode by pushes of three latents."""
LAUNCH_CYCLES = 5000  # what one launch more costs
HALO_ROW_CYCLES = 190  # of one row of a halo: 32 rows take 3.5 µs
CYCLE_BYTES = 3000  # which the L2 cache gives all processors of an H200 together in one cycle
MAX_SHARED_BYTES = 232_448  # what one block may have on sm_90

HALO_W = 10  # a tile is 8 pixels wide, with one more on each side
WEIGHT_TILE = 64 * 64 * 2  # bytes of one tap, 64 channels in, 64 out
STAGING_BYTES = 8 * 1024  # 1 KiB for each computing warp's way out
BARRIER_BYTES = 256
TILES_THREADS = 3 * 128  # one loading and two computing warpgroups
IMAGE_SIDE = 18  # a tile of `image_conv` is 16 pixels wide and tall, with one more on each side


class _Shape(ctypes.Structure):
    """The kernel's ``Shape``, field by field."""

    _fields_ = int_fields(
        "frames_per_video frames height width channels_in channels_out sources blocks taps grown stacked split_pixels "
        "weight_stages tiles_x tiles_y tiles relu grouped"
    )


class TileWork(NamedTuple):
    """What a launch of `conv_tiles` computes."""

    frames: int  # of the input
    height: int
    width: int
    blocks: int  # of 64 outputs
    taps: int
    split_pixels: bool  # the two computing warpgroups take two tiles; else two blocks of outputs

    def jobs(self, tile_h: int) -> int:
        """Two tiles of one block of outputs each, or one tile of two blocks."""
        tiles = -(-self.width // 8) * -(-self.height // tile_h) * self.frames
        return -(-tiles // 2) * self.blocks if self.split_pixels else tiles * self.blocks // 2


@dataclass(frozen=True, kw_only=True)
class TileWeights:
    """Weights of one `conv_tiles` call, packed as the kernel reads them."""

    packed: Tensor  # [output block][input slice][tap][8-channel chunk][64 outputs][8 inputs]
    bias: Tensor | None  # fp32
    channels_in: int  # of one frame
    channels_out: int  # of one output frame
    sources: int  # 2: the convolution also sees the frame before
    taps: int  # 9 or 4
    grown: int = 1  # output frames per input frame
    grouped: bool = False  # a block of 64 outputs sees the 64 inputs at its own place only

    @property
    def steps(self) -> int:
        """Of a job: 64 inputs and one tap each."""
        return self.packed.shape[1] * self.taps

    def work(self, x_BHWC: Tensor) -> TileWork:
        """What a launch over these frames computes."""
        frames, height, width, _ = x_BHWC.shape
        blocks = self.packed.shape[0]
        # Blocks of different groups have no pixels in common.
        return TileWork(frames, height, width, blocks, self.taps, self.grouped or blocks % 2 == 1)


def pack_tile_weights(
    weight: Tensor, bias: Tensor | None, *, sources: int = 1, grown: int = 1, groups: int = 1
) -> TileWeights:
    """``weight`` is (out, sources·in, 3, 3), or (4·grown·out, in, 2, 2) with the phases of `fold.split_phases`, or
    (64·groups, 64, 3, 3) for groups of 64 channels."""
    outputs, inputs, taps = weight.shape[0], weight.shape[1], weight.shape[2] * weight.shape[3]
    assert outputs % 64 == 0 and inputs % (64 * sources) == 0, "channels must be multiples of 64"
    assert groups == 1 or (outputs, inputs, sources, taps, grown) == (64 * groups, 64, 1, 9, 1)
    split = weight.reshape(outputs // 64, 64, inputs // 64, 8, 8, taps)
    return TileWeights(
        packed=split.permute(0, 2, 5, 3, 1, 4).contiguous(),
        bias=None if bias is None else bias.float().contiguous(),
        channels_in=inputs * groups // sources,
        channels_out=outputs // grown // (4 if taps == 4 else 1),
        sources=sources,
        taps=taps,
        grown=grown,
        grouped=groups > 1,
    )


def conv_tiles(
    x_BHWC: Tensor,
    weights: TileWeights,
    *,
    frames_per_video: int = 1,
    past_NHWC: Tensor | None = None,
    residual_BHWC: Tensor | None = None,
    relu: bool = False,
    slope: float = 0.0,
    stacked: int = 1,
    out: Tensor | None = None,
    last_NHWC: Tensor | None = None,
) -> Tensor:
    """Convolution, bias, residual and ReLU in one pass. Phases (2x2 weights) make a doubled grid.

    ``slope`` is that of the ReLU below zero: not 0 is LeakyReLU. Weights over two frames need ``frames_per_video``;
    ``past_NHWC`` stands before the first frame of each video (None: zeros). ``stacked`` puts that many consecutive
    output frames side by side into a pixel's channels, as a pooling layer needs them. Into ``last_NHWC`` goes a copy of
    each video's last frame, of the residual's if there is one, for the next chunk of a stream.
    """
    frames, height, width, channels = x_BHWC.shape
    assert channels == weights.channels_in and x_BHWC.is_contiguous() and x_BHWC.dtype == weights.packed.dtype
    scale = 2 if weights.taps == 4 else 1
    shape = (frames * weights.grown // stacked, height * scale, width * scale, weights.channels_out * stacked)
    if out is None:
        out = torch.empty(shape, dtype=x_BHWC.dtype, device=x_BHWC.device)
    assert out.shape == shape and out.is_contiguous()
    assert last_NHWC is None or (last_NHWC.is_contiguous() and last_NHWC.shape[1:] == x_BHWC.shape[1:])
    parts = [(x_BHWC, past_NHWC, residual_BHWC, out, last_NHWC, frames_per_video)]
    # Two launches can share the frames of one video, or frames that need no other one.
    if frames_per_video == frames or (weights.sources == 1 and last_NHWC is None):
        count = processors(x_BHWC.device.index)
        first = first_frames(weights.work(x_BHWC), weights.steps, stacked, processors=count)
        if first < frames:
            others = frames - first
            residuals = (None, None) if residual_BHWC is None else residual_BHWC.split([first, others])
            outs = out.split([first * weights.grown // stacked, others * weights.grown // stacked])
            parts = [
                (x_BHWC[:first], past_NHWC, residuals[0], outs[0], None, first),
                (x_BHWC[first:], x_BHWC[first - 1 : first], residuals[1], outs[1], last_NHWC, others),
            ]
    for x, past, residual, made, last, length in parts:
        launch = _tiles_launch(
            x.dtype == torch.bfloat16,
            x.device.index,
            weights.work(x),
            (weights.channels_in, weights.channels_out, weights.sources, weights.grown, weights.grouped),
            weights.steps,
            length,
            stacked,
            relu,
            slope,
        )
        launch(x, past if weights.sources == 2 else None, weights.packed, weights.bias, residual, made, last)
    return out


@functools.lru_cache(maxsize=256)
def _tiles_launch(
    bfloat: bool,
    device_index: int,
    work: TileWork,
    convolution: tuple[int, int, int, int, bool],
    steps: int,
    frames_per_video: int,
    stacked: int,
    relu: bool,
    slope: float,
) -> Launch:
    """How the work of one `conv_tiles` call is cut up."""
    channels_in, channels_out, sources, grown, grouped = convolution
    count = processors(device_index)
    tile_h = choose_tile_height(work, processors=count)
    tiles_x, tiles_y = -(-work.width // 8), -(-work.height // tile_h)
    halo_bytes = (HALO_W * (tile_h + 2) + 1) * 128
    halos, weight_sets = (4, 1) if work.split_pixels else (2, 2)
    stage_bytes, fixed = WEIGHT_TILE * weight_sets, STAGING_BYTES + BARRIER_BYTES + halo_bytes * halos
    # No more stages than a job has steps: the warpgroup that runs ahead must not get two jobs ahead.
    stages = min(8, steps, (MAX_SHARED_BYTES - fixed) // stage_bytes)
    shape = _Shape(
        frames_per_video, work.frames, work.height, work.width, channels_in, channels_out, sources, work.blocks,
        work.taps, grown, stacked, int(work.split_pixels), stages, tiles_x, tiles_y, tiles_x * tiles_y * work.frames,
        int(relu), int(grouped),
    )  # fmt: skip
    for flat_h in FLAT_HEIGHTS:  # compiled now, so that a later chunk of fewer frames need not wait
        _tiles_kernel(bfloat, device_index, slope, flat_h)
    kernel = _tiles_kernel(bfloat, device_index, slope, tile_h)
    blocks = min(work.jobs(tile_h), count)
    return Launch(kernel, 7, [shape], blocks=blocks, shared_bytes=fixed + stages * stage_bytes)


def _tiles_kernel(bfloat: bool, device_index: int, slope: float, tile_h: int) -> Kernel:
    return load_kernel(
        FILES,
        "conv_tiles",
        device_index,
        threads=TILES_THREADS,
        shared_bytes=MAX_SHARED_BYTES,
        PRODUCT_N=8 * tile_h,
        BFLOAT=int(bfloat),
        SLOPE=slope,
        HALO_W=HALO_W,
        WEIGHT_TILE=WEIGHT_TILE,
        STAGING_BYTES=STAGING_BYTES,
        BARRIER_BYTES=BARRIER_BYTES,
    )


def choose_tile_height(work: TileWork, *, processors: int) -> int:
    """The tile height with which the busiest processor needs the fewest cycles; the largest of equals."""
    heights = dict.fromkeys((best_tile_height(work.height), *FLAT_HEIGHTS))
    return min(heights, key=lambda tile_h: tile_cycles(work, tile_h, processors=processors))


def best_tile_height(height: int) -> int:
    """The tile height that computes the fewest rows outside the image; the larger of equals."""
    return min(TILE_HEIGHTS, key=lambda tile_h: -(-height // tile_h) * tile_h)


def tile_cycles(work: TileWork, tile_h: int, *, processors: int) -> float:
    """Cycles of the busiest processor for one step of all its tiles.

    A step multiplies 64 channels of one tap for two blocks of outputs or two tiles; meanwhile the weights of the next
    step and a part of the next halo come from the L2 cache.
    """
    jobs = work.jobs(tile_h)
    halos, weight_sets = (2, 1) if work.split_pixels else (1, 2)
    loaded = WEIGHT_TILE * weight_sets + halos * HALO_W * (tile_h + 2) * 128 / work.taps
    loading = max(min(jobs, processors) * loaded / CYCLE_BYTES, halos * HALO_ROW_CYCLES * (tile_h + 2) / work.taps)
    return -(-jobs // processors) * max(32 * tile_h, loading)


@functools.lru_cache(maxsize=256)
def first_frames(work: TileWork, steps: int, multiple: int, *, processors: int) -> int:
    """How many frames a first launch takes: all, or as many as keep every processor busy to the end, if a second launch
    with flatter tiles for the others ends a tenth earlier. ``multiple``: frames that stay together."""

    def cycles(frames: int) -> float:
        part = work._replace(frames=frames)
        return tile_cycles(part, choose_tile_height(part, processors=processors), processors=processors)

    frames, jobs = work.frames, work.jobs(best_tile_height(work.height))
    first = jobs // processors * processors * frames // jobs // multiple * multiple
    if not 0 < first < frames:
        return frames
    apart = cycles(first) + cycles(frames - first) + LAUNCH_CYCLES / steps
    return first if apart < 0.9 * cycles(frames) else frames


@dataclass(frozen=True, kw_only=True)
class ImageWeights:
    """Weights of the last convolution: matrix fragments as the kernel reads them."""

    packed: Tensor
    bias: Tensor
    channels_out: int
    patch_size: int


def pack_image_weights(weight: Tensor, bias: Tensor, patch_size: int) -> ImageWeights:
    """``weight`` is (3·patch², 64, 3, 3)."""
    outputs = weight.shape[0]
    tiles = -(-outputs // 8)
    padded = weight.new_zeros(tiles * 8, 64, 9)
    padded[:outputs] = weight.flatten(2)
    packed = _fragments(padded.permute(2, 1, 0).reshape(9 * 64, tiles * 8))
    return ImageWeights(packed=packed, bias=bias.float().contiguous(), channels_out=outputs, patch_size=patch_size)


def image_conv(x_BHWC: Tensor, weights: ImageWeights, out: Tensor) -> None:
    """64 channels to the image, pixel-shuffled; ``out`` is B3HW, contiguous, written in full."""
    frames, height, width, channels = x_BHWC.shape
    patch = weights.patch_size
    assert channels == 64 and out.shape == (frames, 3, height * patch, width * patch) and out.is_contiguous()
    launch = _image_launch(
        weights.channels_out, patch, x_BHWC.dtype == torch.bfloat16, x_BHWC.device.index, frames, height, width
    )
    launch(x_BHWC, weights.packed, weights.bias, out)


@functools.lru_cache(maxsize=64)
def _image_launch(
    channels_out: int, patch: int, bfloat: bool, device_index: int, frames: int, height: int, width: int
) -> Launch:
    tiles_x, tiles_y = -(-width // 16), -(-height // 16)
    shared_bytes = IMAGE_SIDE**2 * 128 + 36 * 256 * -(-channels_out // 8)
    constants = {"OUT": channels_out, "PATCH": patch, "BFLOAT": int(bfloat), "SIDE": IMAGE_SIDE}
    kernel = load_kernel(FILES, "image_conv", device_index, threads=128, shared_bytes=shared_bytes, **constants)
    return Launch(kernel, 4, [height, width, tiles_x, tiles_y], blocks=tiles_x * tiles_y * frames)


def thread_channels() -> Tensor:
    """The channel of each of 64 matrix columns: those of a thread become neighbors, so that it writes 16 bytes."""
    columns = torch.arange(64)
    tile, column = columns // 8, columns % 8
    return tile // 4 * 32 + column // 2 * 8 + tile % 4 * 2 + column % 2


def _fragments(weight_KN: Tensor) -> Tensor:
    """(K, N) as B fragments of m16n8k16: [k step][n tile][lane][k0, k0+1, k0+8, k0+9], column = lane // 4."""
    k, n = weight_KN.shape
    split = weight_KN.reshape(k // 16, 2, 4, 2, n // 8, 8)  # k step, upper half, lane % 4, pair, n tile, lane // 4
    return split.permute(0, 4, 5, 2, 1, 3).contiguous()


def share_rows(rows: int, takers: int, processors: int, *, fewest: int = 1) -> tuple[int, int]:
    """(rows of a taker, blocks) of a kernel that goes row by row: a block has ``takers``, and each gets ``fewest`` rows
    or more. With four instead of one, `conv_rows` makes a taeltx_2 encoder 1.16 times as slow on an H200."""
    share = max(fewest, -(-rows // (takers * processors)))
    return share, -(-rows // (takers * share))
