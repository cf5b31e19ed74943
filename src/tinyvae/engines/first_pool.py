"""The first convolution of an encoder and the pooling layer behind it as one kernel on Hopper GPUs.

`first_pool.cu` holds and explains the kernel. Everything here is fp16 or bf16 on a device of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyvae.engines import first_rows, fold
from tinyvae.engines.hopper_kernels import TILES_THREADS, WEIGHT_TILE, share_rows, thread_channels
from tinyvae.engines.nvrtc import Launch, int_fields, load_kernel, processors

STRIP = {1: 60, 2: 62}  # pooled pixels, by the size of a patch: their image rows begin at a multiple of 16 bytes
AHEAD = {1: 5, 2: 1}  # rows of patches that are loaded before they are needed; three more are in use
HIDDEN_BYTES = 8 * 130 * 16  # of a hidden row in shared memory
FEWEST_ROWS = 2  # pooled rows of a block, because it may make a hidden row more
BARRIER_BYTES = 32


class _Pool(ctypes.Structure):
    """The kernel's ``Pool``, field by field."""

    _fields_ = [*int_fields("pairs height width strips rows share"), ("slope", ctypes.c_float)]


@dataclass(frozen=True, kw_only=True)
class FirstPoolWeights:
    """Weights of both layers, packed as the kernel reads them."""

    packed: Tensor  # of the pooling layer, then of the first convolution; one after the other
    bias: Tensor  # fp32
    patch_size: int


def fits(first: fold.Layer, pool: fold.Layer, patch_size: int) -> bool:
    """Whether the kernel can compute these two layers. With patches of 4 their weights would fill shared memory."""
    return (
        isinstance(first, fold.ConvLayer)
        and isinstance(pool, fold.PoolLayer)
        and patch_size in STRIP
        and first_rows.fits(first.weight, patch_size)
        and first.bias is not None
        and first.relu
        and (pool.weight.shape, pool.stride) == ((64, 128, 3, 3), 2)
    )


def pack_weights(first: fold.ConvLayer, pool: fold.PoolLayer, patch_size: int) -> FirstPoolWeights:
    """Both layers' weights for `first_pool`."""
    assert fits(first, pool, patch_size) and first.bias is not None
    ordered = pool.weight[thread_channels().to(pool.weight.device)]
    split = ordered.reshape(64, 2, 8, 8, 3, 3).permute(1, 5, 2, 4, 0, 3)  # frame, tap, chunk, row, out, in
    even, odd = split[:, :, :, 1], split[:, :, :, [2, 0]]
    begin = first_rows.pack_weights(first.weight, first.bias, patch_size)
    packed = torch.cat([torch.cat([even.flatten(1), odd.flatten(1)], dim=1).flatten(), begin.packed.flatten()])
    return FirstPoolWeights(packed=packed, bias=begin.bias, patch_size=patch_size)


def first_pool(image_BCHW: Tensor, weights: FirstPoolWeights, *, slope: float = 0.0) -> Tensor:
    """Images B3HW (contiguous, B even, H and W multiples of 8) to (B/2)(H/2/patch)(W/2/patch)64: the first convolution
    with its ReLU, then the pooling layer over pairs of frames. ``slope`` as in `conv_tiles`.

    Example: ``first_pool(torch.rand(4, 3, 480, 736, device="cuda").half(), weights)`` is (2, 120, 184, 64) for a patch
    of 2.
    """
    (frames, colors, height, width), patch = image_BCHW.shape, weights.patch_size
    assert colors == 3 and image_BCHW.is_contiguous() and image_BCHW.dtype == weights.packed.dtype
    assert frames % 2 == height % 8 == width % 8 == image_BCHW.data_ptr() % 16 == 0
    video = (frames // 2, height // patch, width // patch)
    out = image_BCHW.new_empty(video[0], video[1] // 2, video[2] // 2, 64)
    launch = _launch(patch, image_BCHW.dtype == torch.bfloat16, image_BCHW.device.index, video, slope)
    launch(image_BCHW, weights.packed, weights.bias, out)
    return out


@functools.lru_cache(maxsize=64)
def _launch(patch: int, bfloat: bool, device_index: int, video: tuple[int, int, int], slope: float) -> Launch:
    strips, rows, share, blocks = cut_work(*video, patch, processors=processors(device_index))
    kernel = load_kernel(
        ("instructions.cu", "first_rows.cu", "first_pool.cu"),
        "first_pool",
        device_index,
        threads=TILES_THREADS,
        shared_bytes=shared_bytes(patch),
        PRODUCT_N=128,
        WEIGHT_TILE=WEIGHT_TILE,
        BFLOAT=int(bfloat),
        PATCH=patch,
        AHEAD=AHEAD[patch],
        STRIP=STRIP[patch],
    )
    values = _Pool(*video, strips, rows, share, slope)
    return Launch(kernel, 4, [values], blocks=blocks)


def cut_work(pairs: int, height: int, width: int, patch: int, *, processors: int) -> tuple[int, int, int, int]:
    """(strips of a frame, pooled rows of all strips, pooled rows of a block, blocks); height and width in patches."""
    strips = -(-width // (2 * STRIP[patch]))
    rows = pairs * strips * (height // 2)
    return strips, rows, *share_rows(rows, 1, processors, fewest=FEWEST_ROWS)


def shared_bytes(patch: int) -> int:
    """Weights of both layers, a hidden row of both frames, two rings of rows of patches, barriers."""
    line_bytes = (16 * patch + 2) * 16
    rings = 2 * (3 + AHEAD[patch]) * 3 * patch * line_bytes
    return 18 * WEIGHT_TILE + 3 * first_rows.STEPS[patch] * 2048 + 2 * HIDDEN_BYTES + rings + BARRIER_BYTES
