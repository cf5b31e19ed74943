"""cuDNN's two fused convolutions in plain torch, so that what is around them runs without a GPU, and the layout of its
plain ones.

They make no tensors but their results, so that memory can be counted with them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

Sizes = Sequence[int]


def conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    assert dilation == (1,) * len(padding) and groups * weight.shape[1] == x.shape[1]
    assert x.dtype == weight.dtype == bias.dtype, "cuDNN takes one precision"
    conv, layout = (F.conv2d, torch.channels_last) if x.ndim == 4 else (F.conv3d, torch.channels_last_3d)
    assert weight.is_contiguous(memory_format=layout), "other weights would be laid out again at every call"
    if x.is_meta:
        return _shape_alone(x, weight, padding, layout)
    made = conv(x, weight, bias, stride=tuple(stride), padding=tuple(padding), groups=groups)
    return made.relu_().contiguous(memory_format=layout)


def conv_add_relu(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: float,
    bias: Tensor,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    assert (
        dilation == (1, 1)
        and groups * weight.shape[1] == x.shape[1]
        and x.dtype == weight.dtype == bias.dtype == z.dtype
    )
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert z.shape == (x.shape[0], weight.shape[0], *x.shape[2:])
    if x.is_meta:
        return _shape_alone(x, weight, padding, torch.channels_last)
    made = F.conv2d(x, weight, bias, stride=tuple(stride), padding=tuple(padding), groups=groups)
    return made.add_(z, alpha=alpha).relu_().contiguous(memory_format=torch.channels_last)


def _shape_alone(x: Tensor, weight: Tensor, padding: Sizes, layout: torch.memory_format) -> Tensor:
    """A result on the meta device, without the copy into ``layout`` that cuDNN does not make."""
    kernel = weight.shape[2:]
    sizes = [side + 2 * pad - taps + 1 for side, pad, taps in zip(x.shape[2:], padding, kernel, strict=True)]
    return torch.empty(x.shape[0], weight.shape[0], *sizes, dtype=x.dtype, device="meta", memory_format=layout)


def keep_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device let plain convolutions keep the channels last, as cuDNN does."""

    def keeping(real: Callable[..., Tensor], layout: torch.memory_format) -> Callable[..., Tensor]:
        def conv(x: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor:
            shape = real(x, weight, *others, **options).shape  # the result itself is gone before the next line
            return torch.empty(shape, dtype=x.dtype, device="meta", memory_format=layout)

        return conv

    monkeypatch.setattr(F, "conv2d", keeping(F.conv2d, torch.channels_last))
    monkeypatch.setattr(F, "conv3d", keeping(F.conv3d, torch.channels_last_3d))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cudnn_convolution_relu", conv_relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", conv_add_relu)
