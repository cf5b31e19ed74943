"""The last growing layer and the image convolution behind it as one kernel on Hopper GPUs: to RGB, or to patches of 2x2
or 4x4 pixels.

`grow_image.cu` (RGB) and `grow_patches.cu` hold and explain the kernels, `grow_cells.cu` what they share. Everything
here is fp16 or bf16 on a device of compute capability 9.0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines import fold
from tinyvae.engines.hopper_kernels import MAX_SHARED_BYTES, TILES_THREADS, WEIGHT_TILE, share_rows, thread_channels
from tinyvae.engines.nvrtc import Launch, load_kernel, processors

CELLS = 64  # a strip is this many cells wide and makes one quad less
ROW_BYTES = (CELLS + 1) * 128  # of a row of small pixels in shared memory
SEAM_BYTES = 384  # what the warps of a warpgroup tell their neighbors: 2 warpgroups · 4 warps · 12 values of 4 bytes
BARRIER_BYTES = 256
FEWEST_ROWS = 4  # of a block of `grow_patches`, because it computes one more for each part of a strip
PATCH_SIZES = (1, 2, 4)
TOGETHER = {2: 2, 4: 1}  # neighboring output columns in one product of `grow_patches`: its columns are 256 at most


@dataclass(frozen=True, kw_only=True)
class GrowImageWeights:
    """Weights of both layers, packed as the kernel reads them."""

    packed: Tensor  # [frame made of one][whole tiles of weights]
    bias: Tensor  # fp32
    grown: int  # output frames per input frame
    patch_size: int
    slope: float  # of the ReLU between the layers below zero


def pack_weights(grow: fold.GrowLayer, image: fold.ConvLayer) -> GrowImageWeights:
    """Both layers' weights for `grow_image`: 64 channels in and between, 3·patch² out."""
    assert fits(grow, image) and image.bias is not None
    patch = math.isqrt(len(image.weight) // 3)
    phases = grow.weight.reshape(4, grow.frames, 64, 8, 8, 4)  # phase, frame, out, chunk, in, tap
    if patch == 1:
        second = _pack_quads(image.weight)
    else:
        phases = phases[:, :, thread_channels().to(phases.device)]  # a thread writes 16 bytes to shared memory
        second = _pack_output_rows(image.weight, patch)
    first = phases.permute(1, 5, 3, 0, 2, 4).flatten(1)
    packed = torch.cat([first, second.flatten().expand(grow.frames, -1)], dim=1)
    filled = F.pad(packed, (0, weight_tiles(patch) * 64 * 64 - packed.shape[1]))
    return GrowImageWeights(
        packed=filled.contiguous(),
        bias=image.bias.float().contiguous(),
        grown=grow.frames,
        patch_size=patch,
        slope=grow.slope,
    )


def _pack_quads(weight: Tensor) -> Tensor:
    """Of RGB, for `grow_image.cu`: [8-channel chunk of four phases][48 columns][8 inputs]."""
    joined = fold.join_phases(weight).reshape(3, 4, 256, 4)  # RGB, output pixel of a quad, in, quad
    # A thread has two neighboring columns of each eight: its twelve are one output pixel of the four quads.
    return joined.permute(3, 0, 1, 2).reshape(6, 2, 4, 256).transpose(1, 2).reshape(48, 32, 8).transpose(0, 1)


def _pack_output_rows(weight: Tensor, patch: int) -> Tensor:
    """Of patches, for `grow_patches.cu`: [horizontal tap][chunk][output row above, beside, below][column][8 inputs]."""
    column, together = torch.arange(12 * patch, device=weight.device), TOGETHER[patch]
    # A thread has two neighboring columns of each eight: they are three lines of a patch, every fourth one.
    lane, own = column % 8 // 2, column // 8 * 2 + column % 2
    line, odd = (own // patch * 4 + lane) // together, lane % together
    # From the leftmost pixel that the output columns together read, an odd one has its taps one pixel later.
    taps = torch.arange(together + 2, device=weight.device) - odd[:, None] + together - 1
    filled = F.pad(weight, (together - 1, together - 1))
    ordered = filled[(line * patch + own % patch)[:, None], :, :, taps]  # column, tap, in, row
    # A pixel row meets the output row above with the lowest of its taps.
    return ordered.flip(3).reshape(-1, together + 2, 8, 8, 3).permute(1, 2, 4, 0, 3)


def weight_tiles(patch: int) -> int:
    """Tiles of weights of one output frame: 16 of the growing layer, then those of the image convolution."""
    image_bytes = 48 * 256 * 2 if patch == 1 else (TOGETHER[patch] + 2) * 64 * 36 * patch * 2
    return 16 + -(-image_bytes // WEIGHT_TILE)


def fits(grow: fold.Layer, image: fold.Layer) -> bool:
    """Whether a kernel can compute these two layers."""
    return (
        isinstance(grow, fold.GrowLayer)
        and isinstance(image, fold.ConvLayer)
        and grow.weight.shape[:2] == (256 * grow.frames, 64)
        and grow.relu
        and image.weight.shape in [(3 * patch**2, 64, 3, 3) for patch in PATCH_SIZES]
    )


def grow_image(x_BHWC: Tensor, weights: GrowImageWeights, out: Tensor) -> None:
    """Frames of 64 channels to the image, pixel-shuffled; ``out`` is (B·grown)3(2H·patch)(2W·patch), contiguous,
    written in full."""
    frames, height, width, channels = x_BHWC.shape
    assert channels == 64 and x_BHWC.is_contiguous() and x_BHWC.dtype == weights.packed.dtype == out.dtype
    scale = 2 * weights.patch_size
    assert out.shape == (frames * weights.grown, 3, scale * height, scale * width) and out.is_contiguous()
    launch = _launch(
        x_BHWC.dtype == torch.bfloat16,
        x_BHWC.device.index,
        (frames, height, width),
        weights.grown,
        weights.patch_size,
        weights.slope,
    )
    launch(x_BHWC, weights.packed, weights.bias, out)


@functools.lru_cache(maxsize=64)
def _launch(
    bfloat: bool, device_index: int, video: tuple[int, int, int], grown: int, patch: int, slope: float
) -> Launch:
    values, blocks = cut_work(*video, grown, patch, processors=processors(device_index))
    constants, shared_bytes = room(patch)
    name = "grow_image" if patch == 1 else "grow_patches"
    kernel = load_kernel(
        ("instructions.cu", "grow_cells.cu", f"{name}.cu"),
        name,
        device_index,
        threads=TILES_THREADS,
        shared_bytes=shared_bytes,
        BFLOAT=int(bfloat),
        SLOPE=slope,
        CELLS=CELLS,
        WEIGHT_TILE=WEIGHT_TILE,
        WEIGHT_TILES=weight_tiles(patch),
        **constants,
    )
    return Launch(kernel, 4, values, blocks=blocks)


def room(patch: int) -> tuple[dict[str, int], int]:
    """(the constants of one of the kernels alone, bytes of shared memory)."""
    weights = weight_tiles(patch) * WEIGHT_TILE
    if patch == 1:
        ring = 4  # rows of small pixels for each warpgroup: two in use, two on their way
        shared_bytes = weights + 2 * ring * ROW_BYTES + SEAM_BYTES + BARRIER_BYTES
        return {"PRODUCT_N": 256, "RING": ring, "SEAM_BYTES": SEAM_BYTES}, shared_bytes
    ring = 3  # two rows in use, one on its way
    fixed = weights + ring * ROW_BYTES + BARRIER_BYTES + 4 * 3 * patch**2
    pixel_rows = min(3, (MAX_SHARED_BYTES - fixed) // (2 * ROW_BYTES))  # full-size rows between the two warpgroups
    constants = {"PATCH": patch, "TOGETHER": TOGETHER[patch], "PIXEL_ROWS": pixel_rows, "BARRIER_BYTES": BARRIER_BYTES}
    return {"PRODUCT_N": 128, "RING": ring, **constants}, fixed + pixel_rows * 2 * ROW_BYTES


def cut_work(frames: int, height: int, width: int, grown: int, patch: int, *, processors: int) -> tuple[list[int], int]:
    """(the kernel's numbers, blocks): each output frame of one has the same number of blocks. The rows of all strips
    are cut into equal shares: for RGB one for each of a block's two warpgroups, for patches one for each block."""
    rows = -(-frames * (width + 1) // (CELLS - 1)) * height
    takers, fewest = (2, 1) if patch == 1 else (1, FEWEST_ROWS)
    share, blocks = share_rows(rows, takers, processors // grown, fewest=fewest)
    return [frames, height, width, grown, rows, share], grown * blocks
