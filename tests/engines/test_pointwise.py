"""Bias, residual and activation behind a convolution: torch's way, and how the kernel's work is cut up.

tests/gpu/test_gpu_pointwise.py compares the kernel itself with torch.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tinyvae.engines import pointwise
from tinyvae.engines.nvrtc import KernelBuildError
from tinyvae.engines.pointwise import THREADS, finish, grid_blocks


@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (2, 8, 3, 4, 5)])
def test_written_over_its_input(shape: tuple[int, ...], slope: float) -> None:
    made, other, bias = torch.randn(shape), torch.randn(shape), torch.randn(8)
    biased = made + bias.view(8, *(1,) * (len(shape) - 2))
    for residual, total in ((None, biased), (other, biased + other)):
        mine = made.clone()
        assert finish(mine, bias, residual, slope) is mine
        torch.testing.assert_close(mine, F.leaky_relu(total, slope))


@pytest.mark.parametrize("words_per_pixel", [1, 8, 9, 96, 128, 200])
@pytest.mark.parametrize("pixels", [1, 77, 100_000])
def test_all_threads_together_step_over_whole_pixels(pixels: int, words_per_pixel: int) -> None:
    most = 1056
    blocks = grid_blocks(pixels * words_per_pixel, words_per_pixel, most)
    assert blocks * THREADS % words_per_pixel == 0
    assert blocks <= most + words_per_pixel
    assert blocks * THREADS >= min(pixels * words_per_pixel, most * THREADS)


def test_a_kernel_that_cannot_be_made_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise KernelBuildError("libnvrtc could not be opened; tried libnvrtc.so.")

    monkeypatch.setattr(pointwise, "load_kernel", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    pointwise._kernel.cache_clear()
    with pytest.warns(UserWarning, match=r"could not be made here \(libnvrtc could not be opened") as seen:
        for _ in range(2):
            assert pointwise._launch(0, torch.float16, 0.2, 80, 8) is None
            pointwise._launch.cache_clear()
    assert len(seen) == 1
    pointwise._kernel.cache_clear()
