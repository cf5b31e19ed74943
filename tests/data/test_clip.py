"""Windows have the clip's shape and place; cutting gives exactly the clip's size from the right pixels."""

from __future__ import annotations

import pytest
import torch

from tinyvae.data.clip import ClipSettings, CropWindow, centre_window, cut_clip, random_window

SETTINGS = ClipSettings(height=64, width=96, n_frames=1)
NATIVE = ClipSettings(height=64, width=96, n_frames=1, random_resize=False)


def coordinates(height: int, width: int) -> torch.Tensor:
    """Two frames whose red is the row and whose green is the column, as bytes."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([y, x, torch.zeros_like(y)]).to(torch.uint8).expand(2, 3, height, width)


def test_a_native_crop_is_exactly_the_pixels_of_its_window() -> None:
    frames = coordinates(200, 250)
    window = random_window(200, 250, NATIVE, (1, 2, 3))
    assert (window.height, window.width) == (64, 96)
    clip = cut_clip(frames, window, 64, 96, flip=False)
    assert torch.equal(clip, frames[..., window.top : window.top + 64, window.left : window.left + 96])
    assert torch.equal(cut_clip(frames, window, 64, 96, flip=True), clip.flip(-1))


def test_random_resized_windows_span_all_scales_and_keep_the_shape() -> None:
    windows = [random_window(256, 256, SETTINGS, (key,)) for key in range(400)]
    widths = [window.width for window in windows]
    assert min(widths) < 100 and max(widths) > 250
    assert all(abs(window.height / window.width - 64 / 96) < 0.01 for window in windows)


def test_centre_windows() -> None:
    assert centre_window(240, 320, SETTINGS) == CropWindow(top=13, left=0, height=213, width=320)
    assert centre_window(240, 320, NATIVE) == CropWindow(top=88, left=112, height=64, width=96)
    assert centre_window(64, 96, SETTINGS) == CropWindow(top=0, left=0, height=64, width=96)


def test_scaling_down_averages_and_keeps_position() -> None:
    frames = coordinates(192, 240)
    clip = cut_clip(frames, CropWindow(top=20, left=30, height=128, width=192), 64, 96, flip=False)
    assert clip.shape == (2, 3, 64, 96) and clip.dtype == torch.uint8
    inner = clip[0, :, 2:-2, 2:-2].float()
    expected_rows = 20 + 2 * torch.arange(2, 62) + 0.5
    assert (inner[0] - expected_rows[:, None]).abs().max() <= 1.0
    expected_columns = 30 + 2 * torch.arange(2, 94) + 0.5
    assert (inner[1] - expected_columns[None]).abs().max() <= 1.0


def test_scaling_is_antialiased() -> None:
    stripes = (torch.arange(512) % 2 * 255).to(torch.uint8).expand(1, 3, 512, 512)
    clip = cut_clip(stripes, CropWindow(top=0, left=0, height=512, width=512), 64, 64, flip=False)
    assert (clip.float() - 127.5).abs().max() < 6, "one-pixel stripes become grey, not moire"


def test_all_frames_of_a_clip_are_cut_alike() -> None:
    frame = torch.randint(0, 256, (1, 3, 150, 200), dtype=torch.uint8)
    clip = cut_clip(frame.expand(4, -1, -1, -1), CropWindow(top=3, left=5, height=100, width=150), 64, 96, flip=True)
    assert all(torch.equal(clip[0], other) for other in clip)


def test_upscaling_needs_to_be_asked_for() -> None:
    with pytest.raises(AssertionError, match="smaller than the clip"):
        centre_window(63, 96, SETTINGS)
    upscaling = ClipSettings(height=64, width=96, n_frames=1, allow_upscale=True)
    window = random_window(32, 60, upscaling, (0,))
    assert (window.height, window.width) == (32, 48)
    clip = cut_clip(coordinates(32, 60), window, 64, 96, flip=False)
    assert clip.shape == (2, 3, 64, 96)
