"""Colour and blur on the device: against plain formulas, equal for all frames, per sample, nothing when off."""

from __future__ import annotations

import math

import pytest
import torch

from tinyvae.data.augment import blur, color_matrices, jitter_color, to_model_input
from tinyvae.data.clip import UNCHANGED, ColorAndBlur

GREY = torch.tensor([0.299, 0.587, 0.114])


def rows(*changes: ColorAndBlur) -> torch.Tensor:
    return torch.tensor(changes)


def clips(n: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, 3, 24, 32), dtype=torch.uint8)


def test_without_augmentation_the_input_is_bytes_over_255() -> None:
    frames = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16).expand(1, 1, 3, 16, 16)
    out = to_model_input(frames, rows(ColorAndBlur()))
    assert out.dtype == torch.float32 and out.min() == 0.0 and out.max() == 1.0
    assert torch.equal(out, frames.float() / 255)
    with pytest.raises(AssertionError, match="twice"):
        to_model_input(out, rows(ColorAndBlur()))


def test_jitter_is_brightness_contrast_and_saturation_in_order() -> None:
    frames = clips(1).float() / 255 * 0.5 + 0.2  # inside [0, 1] after the changes, so that nothing is clamped
    change = ColorAndBlur(brightness=1.1, contrast=0.9, saturation=1.2)
    bright = frames * 1.1
    mean_grey = (bright * GREY.view(3, 1, 1)).sum(2).mean()
    contrasted = (bright - mean_grey) * 0.9 + mean_grey
    grey = (contrasted * GREY.view(3, 1, 1)).sum(2, keepdim=True)
    expected = (grey + (contrasted - grey) * 1.2).clamp(0, 1)
    torch.testing.assert_close(jitter_color(frames, rows(change)[:, :4]), expected, atol=1e-5, rtol=0)


def test_hue_keeps_luma_and_grey_and_turns_red_towards_green() -> None:
    matrix, _ = color_matrices(torch.tensor([[1.0, 1.0, 1.0, 0.08]]))
    torch.testing.assert_close(GREY @ matrix[0], GREY, atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix[0] @ torch.ones(3), torch.ones(3), atol=1e-5, rtol=0)
    red = matrix[0] @ torch.tensor([0.5, 0.3, 0.3])
    back, _ = color_matrices(torch.tensor([[1.0, 1.0, 1.0, -0.08]]))
    torch.testing.assert_close(back[0] @ red, torch.tensor([0.5, 0.3, 0.3]), atol=1e-5, rtol=0)
    full_turn, _ = color_matrices(torch.tensor([[1.0, 1.0, 1.0, 1.0]]))
    torch.testing.assert_close(full_turn[0], torch.eye(3), atol=1e-5, rtol=0)


def test_each_sample_has_its_own_numbers_and_its_frames_share_them() -> None:
    frames = clips(3)
    frames[:, 1:] = frames[:, :1]
    changes = rows(ColorAndBlur(brightness=0.9, hue=0.05), ColorAndBlur(), ColorAndBlur(contrast=1.1, blur_sigma=1.5))
    out = to_model_input(frames, changes)
    for sample in range(3):
        torch.testing.assert_close(
            out[sample : sample + 1],
            to_model_input(frames[sample : sample + 1], changes[sample : sample + 1]),
            atol=1e-5,
            rtol=0,
        )
        # One number at most apart in float: the same arithmetic on the same frame.
        assert all(torch.allclose(out[sample, 0], frame, atol=1e-6) for frame in out[sample])
    assert out.min() >= 0 and out.max() <= 1
    assert not torch.allclose(out[0], out[1])


def test_blur_is_a_gaussian() -> None:
    point = torch.zeros(1, 1, 1, 41, 41)
    point[..., 20, 20] = 1.0
    sigma = 1.7
    out = blur(point, torch.tensor([sigma]))[0, 0, 0]
    assert out.sum() == pytest.approx(1.0, abs=1e-5)
    distance = torch.arange(41.0) - 20
    variance = (out.sum(0) * distance**2).sum()
    assert math.sqrt(variance) == pytest.approx(sigma, rel=0.02)
    torch.testing.assert_close(out, out.T)
    flat = torch.full((1, 2, 3, 16, 16), 0.7)
    torch.testing.assert_close(blur(flat, torch.tensor([2.0])), flat)


def test_blur_of_one_sample_leaves_the_others_as_they_are() -> None:
    frames = clips(2).float() / 255
    out = blur(frames, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(out[0], frames[0])
    assert out[1].var() < 0.5 * frames[1].var()
    tiny = torch.rand(1, 1, 3, 2, 2)
    assert blur(tiny, torch.tensor([5.0])).shape == tiny.shape


def test_one_layout_whatever_is_drawn() -> None:
    """A compiled step is compiled again, for minutes, when the layout of its input changes."""
    frames = torch.randint(0, 256, (2, 3, 3, 16, 24), dtype=torch.uint8)
    draws = torch.tensor([UNCHANGED, UNCHANGED])
    jitter, sharp = torch.tensor([1.1, 0.9, 1.2, 0.05, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.5])
    for drawn in (draws, jitter.expand(2, 5), sharp.expand(2, 5), torch.stack([jitter, sharp])):
        assert to_model_input(frames, drawn).is_contiguous()
