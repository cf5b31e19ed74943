"""Least squares: the right patches, and weights that unseen pixels confirm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tinyvae.convert.fit import draw_pixels, fit_conv, patches_of, solve_ridge


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (3, 2)])
@torch.no_grad()
def test_patches_are_what_a_convolution_sees(kernel: int, stride: int) -> None:
    conv = nn.Conv2d(3, 5, kernel, stride=stride, padding=kernel // 2)
    x = torch.randn(2, 3, 8, 6)
    made = conv(x)
    frame, row, column = pixels = draw_pixels(made, 20)
    found = nn.functional.linear(patches_of(x, conv, pixels), conv.weight.flatten(1), conv.bias)
    torch.testing.assert_close(found, made[frame, :, row, column], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_convolution_is_found_again() -> None:
    torch.manual_seed(0)
    x, wanted, conv = torch.randn(4, 3, 12, 12), nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
    frame, row, column = pixels = draw_pixels(x, 400)
    patches = patches_of(x, conv, pixels)
    fit_conv(conv, patches, (wanted(x) - conv(x))[frame, :, row, column])
    assert (conv.weight - wanted.weight).norm() < 1e-2 * wanted.weight.norm()
    assert (conv.bias - wanted.bias).norm() < 1e-2  # type: ignore[operator]


def test_noise_changes_nothing_much() -> None:
    """More weights than pixels, and nothing to learn: what some pixels say, the others do not confirm."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 200, generator=generator), torch.randn(64, 8, generator=generator)
    made = torch.randn(64, 200, generator=generator) @ solve_ridge(inputs, targets)
    assert made.norm() < 0.5 * targets.norm()
