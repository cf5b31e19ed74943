"""The kernel for bias, residual and activation on a GPU against float32."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.gpu_codecs import FLOOR
from tinyvae.engines import pointwise


@pytest.mark.parametrize("dtype", list(FLOOR))
@pytest.mark.parametrize(
    ("channels", "pixels"), [(64, (3, 5, 7)), (72, (2, 3, 3)), (1024, (2, 4, 5)), (8, (9, 333, 41))]
)
def test_the_pointwise_kernel(channels: int, pixels: tuple[int, ...], dtype: torch.dtype) -> None:
    """It rounds once, so it is what float32 gives, rounded; large results go round the grid many times."""
    assert pointwise._kernel(torch.cuda.current_device(), dtype, 0.2) is not None
    for slope in (0.0, 0.2):
        made, other = (torch.randn(*pixels, channels, device="cuda").to(dtype).movedim(-1, 1) for _ in range(2))
        bias = torch.randn(channels, device="cuda").to(dtype)
        biased = made.float() + bias.float()[:, None, None]
        for residual, total in ((None, biased), (other, biased + other.float())):
            mine = made.clone()
            pointwise.finish(mine, bias, residual, slope)
            expected = torch.nn.functional.leaky_relu(total, slope).to(dtype)
            torch.testing.assert_close(mine, expected, atol=1e-6, rtol=1e-6)
