"""The last growing layer and the RGB convolution behind it as one kernel on Hopper GPUs.

`grow_image.cu` holds and explains the kernel. Everything here is fp16 or bf16 on a device of compute capability 9.0.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyvae.engines import fold
from tinyvae.engines.hopper_kernels import TILES_THREADS, WEIGHT_TILE, share_rows
from tinyvae.engines.nvrtc import Launch, load_kernel, processors

CELLS = 64  # a strip is this many cells wide and makes one quad less
RING = 4  # rows of small pixels in shared memory for each warpgroup: two in use, two on their way
WEIGHT_TILES = 19  # 16 of the growing layer for one output frame, 3 of the image convolution
SEAM_BYTES = 384  # what the warps of a warpgroup tell their neighbors: 2 warpgroups · 4 warps · 12 values of 4 bytes
BARRIER_BYTES = 256
SHARED_BYTES = WEIGHT_TILES * WEIGHT_TILE + 2 * RING * (CELLS + 1) * 128 + SEAM_BYTES + BARRIER_BYTES


@dataclass(frozen=True, kw_only=True)
class GrowImageWeights:
    """Weights of both layers, packed as the kernel reads them."""

    packed: Tensor  # [frame made of one][WEIGHT_TILES tiles]
    bias: Tensor  # fp32, RGB
    grown: int  # output frames per input frame


def pack_weights(grow: fold.GrowLayer, image: fold.ConvLayer) -> GrowImageWeights:
    """Both layers' weights for `grow_image`: 64 channels in and between, ReLU between, RGB out."""
    assert fits(grow, image) and image.bias is not None
    phases = grow.weight.reshape(4, grow.frames, 64, 8, 8, 4)  # phase, frame, out, chunk, in, tap
    first = phases.permute(1, 5, 3, 0, 2, 4).flatten(1)
    joined = fold.join_phases(image.weight).reshape(3, 4, 256, 4)  # RGB, output pixel of a quad, in, quad
    # A thread has two neighboring columns of each eight: its twelve are one output pixel of the four quads.
    columns = joined.permute(3, 0, 1, 2).reshape(6, 2, 4, 256).transpose(1, 2).reshape(48, 32, 8)
    second = columns.transpose(0, 1).flatten().expand(grow.frames, -1)
    packed = torch.cat([first, second], dim=1).contiguous()
    return GrowImageWeights(packed=packed, bias=image.bias.float().contiguous(), grown=grow.frames)


def fits(grow: fold.Layer, image: fold.Layer) -> bool:
    """Whether the kernel can compute these two layers. With 12 image channels its weights would fill shared memory."""
    return (
        isinstance(grow, fold.GrowLayer)
        and isinstance(image, fold.ConvLayer)
        and grow.weight.shape[:2] == (256 * grow.frames, 64)
        and image.weight.shape == (3, 64, 3, 3)
        and grow.relu
        and grow.slope == 0
    )


def grow_image(x_BHWC: Tensor, weights: GrowImageWeights, out: Tensor) -> None:
    """Frames of 64 channels to the image; ``out`` is (B·grown)3(2H)(2W), contiguous, written in full."""
    frames, height, width, channels = x_BHWC.shape
    assert channels == 64 and x_BHWC.is_contiguous() and x_BHWC.dtype == weights.packed.dtype == out.dtype
    assert out.shape == (frames * weights.grown, 3, 2 * height, 2 * width) and out.is_contiguous()
    launch = _launch(x_BHWC.dtype == torch.bfloat16, x_BHWC.device.index, frames, height, width, weights.grown)
    launch(x_BHWC, weights.packed, weights.bias, out)


@functools.lru_cache(maxsize=64)
def _launch(bfloat: bool, device_index: int, frames: int, height: int, width: int, grown: int) -> Launch:
    values, blocks = cut_work(frames, height, width, grown, processors=processors(device_index))
    kernel = load_kernel(
        ("instructions.cu", "grow_image.cu"),
        "grow_image",
        device_index,
        threads=TILES_THREADS,
        shared_bytes=SHARED_BYTES,
        waits=True,
        PRODUCT_N=256,
        BFLOAT=int(bfloat),
        CELLS=CELLS,
        RING=RING,
        SEAM_BYTES=SEAM_BYTES,
        WEIGHT_TILE=WEIGHT_TILE,
        WEIGHT_TILES=WEIGHT_TILES,
    )
    return Launch(kernel, 4, values, blocks=blocks, shared_bytes=SHARED_BYTES)


def cut_work(frames: int, height: int, width: int, grown: int, *, processors: int) -> tuple[list[int], int]:
    """(the kernel's numbers, blocks): each output frame of one has the same number of blocks, each block two warpgroups
    with equal shares of the rows of all strips."""
    strips = -(-width // (CELLS - 1))
    rows = frames * strips * height
    share, blocks = share_rows(rows, processors // grown)
    return [height, width, grown, strips, rows, share], grown * blocks
