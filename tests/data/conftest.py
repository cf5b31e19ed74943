"""What the data tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_videos import write_video


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve files: ten of 96x64 with 30 frames, one with 5 frames, one of 48x32. Treat as read-only."""
    folder = tmp_path_factory.mktemp("videos")
    for number in range(10):
        write_video(folder / f"clip_{number:02}.mp4", seed=number)
    write_video(folder / "sub" / "short.mp4", frames=5, seed=10)
    write_video(folder / "sub" / "small.mp4", width=48, height=32, seed=11)
    return folder
