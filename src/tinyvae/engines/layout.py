"""Frames in channels_last memory: views of them, and copies that move whole pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from tinyvae.engines.fold import PoolLayer

WORD = torch.complex128
"""The widest type there is; nothing is computed in it."""


def may_work_in_place() -> bool:
    """Whether this is inference without a compiler: nobody needs old values, and no compiler fuses passes for us."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def as_bhwc(x: Tensor) -> Tensor:
    """Take slices of channels, frames and rows from this view, not from BCHW.

    The backward pass of a slice makes a tensor in the plain order of its dimensions. For BCHW that is not
    channels_last, and every convolution behind it would first copy its gradient (9 of 50 ms of a training step on an
    H200).
    """
    return x.permute(0, 2, 3, 1)


def as_bchw(x: Tensor) -> Tensor:
    return x.contiguous().permute(0, 3, 1, 2)


def stack_frames(x: Tensor, pool: PoolLayer) -> Tensor:
    """(N·T)CHW -> (N·T/s)(s·C)HW, channels_last. Frames that are stacked already stay as they are."""
    if x.shape[1] == pool.weight.shape[1]:
        return x
    groups = as_bhwc(x).unflatten(0, (-1, pool.stride)).movedim(1, 3)
    return as_bchw(dense(groups).flatten(3))


def spread_frames(x: Tensor, frames: int) -> Tensor:
    """(N·T)(frames·C)HW -> (N·T·frames)CHW, channels_last."""
    if frames == 1:
        return x
    return as_bchw(dense(as_bhwc(x).unflatten(3, (frames, -1)).movedim(3, 1)).flatten(0, 1))


def interleave_phases(phases_BCHW: Tensor, frames: int, height: int, width: int) -> Tensor:
    """The 2x2 phases of a `GrowLayer` on their pixels: (B·frames)C(2H)(2W), channels_last."""
    phases = as_bhwc(phases_BCHW).unflatten(3, (2, 2, frames, -1))
    grown = phases.new_empty(phases.shape[0], frames, 2 * height, 2 * width, phases.shape[-1])
    target, source = in_words(grown, phases)
    for i in (0, 1):
        for j in (0, 1):
            target[:, :, i::2, j::2] = source[:, i : i + height, j : j + width, i, j].movedim(3, 1)
    return grown.flatten(0, 1).permute(0, 3, 1, 2)


def dense(x: Tensor) -> Tensor:
    """``x``, whose last dimension is the channels, as a contiguous tensor."""
    if x.is_contiguous() or not may_work_in_place():
        return x.contiguous()
    made = x.new_empty(x.shape)
    copy_pixels(made, x)
    return made


def copy_pixels(target: Tensor, source: Tensor) -> None:
    """Copy tensors whose last dimension is the channels."""
    target, source = in_words(target, source)
    target.copy_(source)


def in_words(*tensors: Tensor) -> list[Tensor]:
    """Tensors whose last dimension is the channels, as words of 16 bytes where all of them allow it.

    A GPU moves strided data value by value; in words it is three times as fast.
    """
    return [x.view(WORD) for x in tensors] if all(_fits_words(x) for x in tensors) else list(tensors)


def _fits_words(x: Tensor) -> bool:
    values = WORD.itemsize // x.element_size()
    lengths = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    knows_words = x.device.type in ("cpu", "cuda", "meta")  # not every device has such a wide type
    return knows_words and x.stride(-1) == 1 and all(length % values == 0 for length in lengths)
