"""3x3 convolutions of 64 channels over one frame or two, row by row, on Hopper GPUs.

`conv_rows.cu` holds and explains the kernel. Everything here is fp16 or bf16 on a device of compute capability 9.0.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyvae.engines.hopper_kernels import TILES_THREADS, WEIGHT_TILE, share_rows, thread_channels
from tinyvae.engines.nvrtc import Launch, int_fields, load_kernel, processors

COLUMN = 8  # pixels; a step of a warpgroup takes eight columns
ROW_BYTES = (8 * (COLUMN + 2) + 1) * 128  # of a step's input row in shared memory
RING = {1: 7, 2: 2}  # steps in shared memory for each warpgroup, by the number of frames
ON_THE_WAY = {1: 2, 2: 0}  # of these the newest, whose copies are not waited for
BIAS_AND_BARRIER_BYTES = 512
ALONE_TURNS = 1.5
"""What a step of a warpgroup costs that has its processor alone, in turns of two that share one: nobody multiplies
while it writes. Measured on an H200."""


class _Rows(ctypes.Structure):
    """The kernel's ``Rows``, field by field."""

    _fields_ = [
        *int_fields("frames_per_video frames height width columns stacked rows share members"),
        ("slope", ctypes.c_float),
    ]


@dataclass(frozen=True, kw_only=True)
class RowWeights:
    """Weights of one `conv_rows` call, packed as the kernel reads them."""

    packed: Tensor  # [frame][horizontal tap][8-channel chunk][output row above, beside, below][64 outputs][8 inputs]
    bias: Tensor  # fp32

    @property
    def sources(self) -> int:
        """2: the convolution also sees the frame before."""
        return self.packed.shape[0]


def pack_row_weights(weight: Tensor, bias: Tensor) -> RowWeights:
    """``weight`` is (64, 64, 3, 3), or (64, 128, 3, 3): the frame's own inputs, then those of the frame before."""
    outputs, inputs = weight.shape[:2]
    assert outputs == 64 and inputs in (64, 128) and weight.shape[2:] == (3, 3)
    ordered = weight[thread_channels().to(weight.device)]
    # An input row meets the output row above with the lowest of its taps.
    split = ordered.flip(2).reshape(64, inputs // 64, 8, 8, 3, 3)  # out, frame, chunk, in, row, horizontal tap
    return RowWeights(packed=split.permute(1, 5, 2, 4, 0, 3).contiguous(), bias=bias.float().contiguous())


def conv_rows(
    x_BHWC: Tensor,
    weights: RowWeights,
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
    """Convolution, bias, residual and ReLU in one pass; arguments and result as in `hopper_kernels.conv_tiles`."""
    frames, height, width, channels = x_BHWC.shape
    assert channels == 64 and x_BHWC.is_contiguous() and x_BHWC.dtype == weights.packed.dtype
    assert frames % frames_per_video == 0 and frames % stacked == 0
    assert weights.sources == 1 or residual_BHWC is None, "the kernel over two frames has no residual"
    shape = (frames // stacked, height, width, 64 * stacked)
    if out is None:
        out = torch.empty(shape, dtype=x_BHWC.dtype, device=x_BHWC.device)
    assert out.shape == shape and out.is_contiguous()
    launch = _launch(
        x_BHWC.dtype == torch.bfloat16,
        x_BHWC.device.index,
        (frames, height, width, frames_per_video),
        weights.sources,
        stacked,
        slope if relu else 1.0,
    )
    past = past_NHWC if weights.sources == 2 else None
    assert last_NHWC is None or (weights.sources == 2 and last_NHWC.is_contiguous()), "only the kernel over two frames"
    launch(x_BHWC, past, weights.packed, weights.bias, residual_BHWC, out, last_NHWC)
    return out


@functools.lru_cache(maxsize=256)
def _launch(
    bfloat: bool, device_index: int, video: tuple[int, int, int, int], sources: int, stacked: int, slope: float
) -> Launch:
    frames, height, width, frames_per_video = video
    columns, rows, members, share, blocks = cut_work(frames, height, width, processors=processors(device_index))
    values = _Rows(frames_per_video, frames, height, width, columns, stacked, rows, share, members, slope)
    kernel = load_kernel(
        ("instructions.cu", "conv_rows.cu"),
        "conv_rows",
        device_index,
        threads=TILES_THREADS,
        shared_bytes=shared_bytes(sources),
        PRODUCT_N=192,
        BFLOAT=int(bfloat),
        SOURCES=sources,
        RING=RING[sources],
        ON_THE_WAY=ON_THE_WAY[sources],
        WEIGHT_TILE=WEIGHT_TILE,
    )
    return Launch(kernel, 7, [values], blocks=blocks)


def cut_work(frames: int, height: int, width: int, *, processors: int) -> tuple[int, int, int, int, int]:
    """(columns of a frame, rows of all strips, warpgroups of a block that have rows, rows of each of them, blocks)."""
    columns = -(-width // COLUMN)
    rows = -(-frames * columns // 8) * height
    (share, blocks), (alone, alone_blocks) = (share_rows(rows, members, processors) for members in (2, 1))
    if ALONE_TURNS * (alone + 2) < 2 * (share + 2):  # each computes up to two rows more
        return columns, rows, 1, alone, alone_blocks
    return columns, rows, 2, share, blocks


def shared_bytes(sources: int) -> int:
    """Weights, two rings of steps, bias and barriers."""
    return sources * (9 * WEIGHT_TILE + 2 * RING[sources] * ROW_BYTES) + BIAS_AND_BARRIER_BYTES
