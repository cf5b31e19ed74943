"""Small real videos and small models for the tests of evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinyvae import TAEHV, save_model
from tinyvae.data.write import VideoWriter

WriteVideo = Callable[..., Path]


@pytest.fixture
def write_video(tmp_path: Path) -> WriteVideo:
    """Writes a moving pattern as H.264: ``write_video("a.mp4", frames=17, height=48, width=64)``."""

    def write(
        name: str, *, frames: int = 17, height: int = 48, width: int = 64, fps: float = 24, seed: int = 0
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        t = torch.arange(frames).view(-1, 1, 1, 1)
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        waves = [torch.sin((x + 2 * t + 11 * seed) / 9 + c) + torch.cos((y - t) / (7 + c)) for c in range(3)]
        clip_TCHW = (120 + 45 * torch.cat(waves, dim=1)).clamp(0, 255).to(torch.uint8)
        pixel_format = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        with VideoWriter(path, fps=fps, height=height, width=width, crf=12, pixel_format=pixel_format) as writer:
            writer.write(clip_TCHW)
        return path

    return write


@pytest.fixture
def small_model_file(tmp_path: Path) -> Path:
    """A taehv of the smallest width, with fresh weights, in a file that states its variant."""
    torch.manual_seed(5)
    model = TAEHV("taehv", width=0.125)
    with torch.no_grad():
        model.decoder[-1].bias.fill_(0.5)
    path = tmp_path / "models" / "small.safetensors"
    save_model(model, path)
    return path
