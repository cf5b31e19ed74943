"""The first convolution of an encoder, row by row from the image, on Hopper GPUs.

`first_rows.cu` holds and explains the kernel. Everything here is fp16 or bf16 on a device of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines.hopper_kernels import WEIGHT_TILE, share_rows, thread_channels
from tinyvae.engines.nvrtc import Launch, int_fields, load_kernel, processors

COLUMN = 16  # patches; a warpgroup takes four columns at a time
FEWEST_ROWS = 4  # of a warpgroup, because it loads two more
WARPGROUPS = {1: 4, 2: 4, 4: 3}  # of a block, by the size of a patch
AHEAD = {1: 5, 2: 5, 4: 1}  # rows of patches that a warp loads before it needs them; three more are in use
STEPS = {1: 1, 2: 3, 4: 9}  # of a product with a row of patches, 16 values each
LINE_BYTES = {1: 80, 2: 96, 4: 160}  # of an image row of a column; at 64 two of the three colors would share banks


class _First(ctypes.Structure):
    """The kernel's ``First``, field by field."""

    _fields_ = [*int_fields("frames height width columns stacked rows share"), ("slope", ctypes.c_float)]


@dataclass(frozen=True, kw_only=True)
class FirstRowWeights:
    """Weights of one `first_rows` call, packed as the kernel reads them."""

    packed: Tensor  # [row of patches: above, beside, below][step][upper half][64 outputs][8 k values]
    bias: Tensor  # fp32
    patch_size: int


def fits(weight: Tensor, patch_size: int) -> bool:
    """Whether the kernel can compute a first convolution with this weight (OIHW, after a pixel-unshuffle)."""
    return patch_size in WARPGROUPS and weight.shape == (64, 3 * patch_size**2, 3, 3)


def pack_weights(weight: Tensor, bias: Tensor, patch_size: int) -> FirstRowWeights:
    """``weight`` is (64, 3·patch², 3, 3), its inputs (color, row in the patch, column in the patch)."""
    assert fits(weight, patch_size)
    patch = patch_size
    ordered = weight[thread_channels().to(weight.device)]
    split = ordered.reshape(64, 3, patch, patch, 3, 3).permute(4, 1, 2, 5, 3, 0)  # dy, color, row, dx, column, out
    runs = split.flatten(3, 4)  # dy, color, row, value of a run, out
    # A step has 16 values, (upper half, thread, pair): where each comes from says the kernel's `read_step`.
    if patch == 1:  # thread: color; half and pair: value
        filled = F.pad(runs[:, :, 0], (0, 0, 0, 1, 0, 1))
        steps = filled.reshape(3, 1, 4, 2, 2, 64).permute(0, 1, 3, 2, 4, 5)
    elif patch == 2:  # half: row; thread and pair: value
        steps = F.pad(runs, (0, 0, 0, 2)).reshape(3, 3, 2, 4, 2, 64)
    else:  # thread: row; half and pair: value of a third of a run
        steps = runs.reshape(3, 3, 4, 3, 2, 2, 64).permute(0, 1, 3, 4, 2, 5, 6).flatten(1, 2)
    packed = steps.flatten(3, 4).transpose(3, 4).contiguous()
    return FirstRowWeights(packed=packed, bias=bias.float().contiguous(), patch_size=patch)


def first_rows(image_BCHW: Tensor, weights: FirstRowWeights, *, stacked: int = 1, slope: float = 0.0) -> Tensor:
    """Images B3HW (contiguous; W a multiple of 8 and of the patch, H of the patch) to (B/stacked)(H/patch)(W/patch)
    (stacked·64): pixel-unshuffle, convolution, bias and ReLU. ``slope`` and ``stacked`` as in `conv_tiles`.

    Example: ``first_rows(torch.rand(4, 3, 480, 736, device="cuda").half(), weights, stacked=2)`` is (2, 240, 368, 128)
    for a patch of 2.
    """
    (frames, colors, height, width), patch = image_BCHW.shape, weights.patch_size
    assert colors == 3 and image_BCHW.is_contiguous() and image_BCHW.dtype == weights.packed.dtype
    assert height % patch == width % patch == width % 8 == frames % stacked == image_BCHW.data_ptr() % 16 == 0
    grid = (height // patch, width // patch)
    out = image_BCHW.new_empty(frames // stacked, *grid, 64 * stacked)
    bfloat, index = image_BCHW.dtype == torch.bfloat16, image_BCHW.device.index
    launch = _launch(patch, bfloat, index, (frames, *grid), stacked, slope)
    launch(image_BCHW, weights.packed, weights.bias, out)
    return out


@functools.lru_cache(maxsize=64)
def _launch(
    patch: int, bfloat: bool, device_index: int, video: tuple[int, int, int], stacked: int, slope: float
) -> Launch:
    columns, rows, share, blocks = cut_work(*video, patch, processors=processors(device_index))
    kernel = load_kernel(
        ("instructions.cu", "first_rows.cu"),
        "first_rows",
        device_index,
        threads=128 * WARPGROUPS[patch],
        shared_bytes=shared_bytes(patch),
        PRODUCT_N=128,  # for the shared functions of kernels with Hopper's matrix instruction
        WEIGHT_TILE=WEIGHT_TILE,
        BFLOAT=int(bfloat),
        PATCH=patch,
        AHEAD=AHEAD[patch],
        LINE_BYTES=LINE_BYTES[patch],
    )
    values = _First(*video, columns, stacked, rows, share, slope)
    return Launch(kernel, 4, [values], blocks=blocks)


def cut_work(frames: int, height: int, width: int, patch: int, *, processors: int) -> tuple[int, int, int, int]:
    """(columns of a frame, rows of all strips, rows of a warpgroup, blocks); height and width in patches."""
    columns = -(-width // COLUMN)
    rows = -(-frames * columns // 4) * height
    return columns, rows, *share_rows(rows, WARPGROUPS[patch], processors, fewest=FEWEST_ROWS)


def shared_bytes(patch: int) -> int:
    """Weights, and a ring of rows of patches for each warp."""
    return 3 * STEPS[patch] * 2048 + 4 * WARPGROUPS[patch] * (3 + AHEAD[patch]) * 3 * patch * LINE_BYTES[patch]
