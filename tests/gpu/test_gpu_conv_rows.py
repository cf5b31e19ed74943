"""The row kernel on a GPU against float64 and the tile kernel; test_gpu_engines.py has whole networks with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.gpu_codecs import FLOOR, SHORT, error, needs_hopper
from tinyvae.engines import conv_rows, hopper_kernels


@pytest.fixture(autouse=True)
def only_on_hopper() -> None:
    needs_hopper()


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize(
    ("videos", "frames", "height", "width"),
    [(1, 1, 1, 1), (2, 3, 37, 29), (1, 2, 5, 64), (3, 2, 9, 72), (2, 13, 60, 90), (1, 26, 240, 360)],
)
def test_conv_rows_against_conv_tiles(
    videos: int, frames: int, height: int, width: int, sources: int, dtype: torch.dtype
) -> None:
    """As near to float64 as the kernel that it replaces, every value written, and the same bits each time."""
    torch.manual_seed(height)
    shape = (videos * frames, height, width, 64)
    x, residual = (torch.randn(shape, device="cuda").to(dtype) for _ in "ab")
    past = torch.randn(videos, *shape[1:], device="cuda").to(dtype) if videos > 1 else None
    weight = (torch.randn(64, 64 * sources, 3, 3, device="cuda") / (576 * sources) ** 0.5).to(dtype)
    bias = torch.randn(64, device="cuda").to(dtype)
    stacked = 2 if sources == 1 and frames % 2 == 0 else 1
    how: dict[str, Any] = {"frames_per_video": frames, "past_NHWC": past, "relu": True, "stacked": stacked}
    how["residual_BHWC"] = residual if sources == 1 else None
    rows = conv_rows.pack_row_weights(weight, bias)
    out, again = (torch.full_like(x, torch.nan).view(-1, height, width, 64 * stacked) for _ in "ab")
    made = conv_rows.conv_rows(x, rows, out=out, **how)
    for _ in range(20):
        assert torch.equal(made, conv_rows.conv_rows(x, rows, out=again.fill_(torch.nan), **how))
    apart = hopper_kernels.conv_tiles(x, hopper_kernels.pack_tile_weights(weight, bias, sources=sources), **how)
    assert error(made, apart.double()) < FLOOR[dtype] * 2
    few = min(len(x), 6) // stacked * stacked
    exact = exact_conv(x[:few], weight, bias, past, frames) + (residual[:few].double() if sources == 1 else 0)
    side_by_side = torch.relu(exact).unflatten(0, (-1, stacked)).permute(0, 2, 3, 1, 4).flatten(3)
    errors = [error(frames_made[: len(side_by_side)], side_by_side) for frames_made in (made, apart)]
    assert errors[0] < 1.05 * max(errors[1], FLOOR[dtype])
    leaky = conv_rows.conv_rows(x, rows, **{**how, "slope": 0.2, "stacked": 1})[:few]
    assert error(leaky, F.leaky_relu(exact, 0.2)) < FLOOR[dtype] * 2


def exact_conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor, past_NHWC: Tensor | None, frames: int) -> Tensor:
    """The convolution in float64 through torch, BHWC; ``frames`` of each video."""
    flat = x_BHWC.double().permute(0, 3, 1, 2)
    if weight.shape[1] == 128:
        before = torch.cat([torch.zeros_like(flat[:1]), flat[:-1]])
        starts = before[::frames]
        starts.copy_(torch.zeros_like(starts) if past_NHWC is None else past_NHWC[: len(starts)].permute(0, 3, 1, 2))
        flat = torch.cat([flat, before], 1)
    return F.conv2d(flat, weight.double(), bias.double(), padding=1).permute(0, 2, 3, 1)
