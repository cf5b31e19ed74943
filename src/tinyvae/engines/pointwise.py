"""Bias, residual and activation in one pass over a convolution's result, for what no convolution has inside.

cuDNN's fused convolutions have ReLU inside, not LeakyReLU, and torch needs a pass for each of the three: it reads and
writes the result up to three times. ``pointwise.cu`` does it once. It needs NVRTC, which comes with every CUDA build of
torch; without it torch's own operators do the same in more passes.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.engines.nvrtc import Kernel, KernelBuildError, Launch, load_kernel, processors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WORD_BYTES, THREADS = 16, 256
MOST_WORDS = 2**31 - 1  # of one launch
BLOCKS_PER_PROCESSOR = 8  # as many as run at once


def finish(made: Tensor, bias: Tensor, residual: Tensor | None, slope: float) -> Tensor:
    """activation(``made`` + ``bias`` + ``residual``), written over ``made``.

    ``made`` and ``residual`` are frames or videos, BCHW or NCTHW; the kernel takes them with the channels last in
    memory, in fp16, bf16 or fp32. ``bias`` has one value per channel in the same precision. ``slope`` is that of the
    ReLU below zero, 0 to 1.
    Example: ``finish(F.conv2d(x, weight, padding=1), bias, x, 0.2)``.
    """
    pixels, others = made.movedim(1, -1), None if residual is None else residual.movedim(1, -1)
    pixel_bytes = made.shape[1] * made.element_size()
    fits = pixel_bytes % WORD_BYTES == 0 and made.nbytes // WORD_BYTES <= MOST_WORDS
    is_dense = pixels.is_contiguous() and (others is None or others.is_contiguous())
    if made.is_cuda and made.dtype in DTYPES and fits and is_dense:
        words, per_pixel = made.nbytes // WORD_BYTES, pixel_bytes // WORD_BYTES
        if (launch := _launch(made.device.index, made.dtype, slope, words, per_pixel)) is not None:
            assert bias.dtype == made.dtype and bias.is_contiguous() and bias.data_ptr() % WORD_BYTES == 0
            with torch.cuda.device(made.device):
                launch(made, bias, residual)
            return made
    made.add_(bias.view(-1, *(1,) * (made.ndim - 2)))
    if residual is not None:
        made.add_(residual)
    return F.leaky_relu_(made, slope) if slope else made.relu_()


@functools.lru_cache(maxsize=256)
def _launch(device_index: int, dtype: torch.dtype, slope: float, words: int, words_per_pixel: int) -> Launch | None:
    if (kernel := _kernel(device_index, dtype, slope)) is None:
        return None
    blocks = grid_blocks(words, words_per_pixel, BLOCKS_PER_PROCESSOR * processors(device_index))
    return Launch(kernel, 3, [words, words_per_pixel], blocks=blocks)


def grid_blocks(words: int, words_per_pixel: int, most: int) -> int:
    """About ``most`` blocks or fewer: a number with which all threads together have whole pixels."""
    unit = words_per_pixel // math.gcd(THREADS, words_per_pixel)
    return -(-min(most, -(-words // THREADS)) // unit) * unit


@functools.cache
def _kernel(device_index: int, dtype: torch.dtype, slope: float) -> Kernel | None:
    """None where it cannot be compiled."""
    assert 0 <= slope < 1, "a LeakyReLU is the larger of v and slope · v"
    constants = {"BITS": 8 * dtype.itemsize, "BFLOAT": int(dtype == torch.bfloat16), "SLOPE": slope}
    try:
        files = ("instructions.cu", "pointwise.cu")
        return load_kernel(files, "pointwise", device_index, threads=THREADS, **constants)
    except KernelBuildError as reason:
        what = f"the kernel for activations could not be made here ({str(reason).rstrip('.')})"
        warnings.warn(f"{what}; torch's own operators compute them, slower and with the same result.", stacklevel=2)
        return None
