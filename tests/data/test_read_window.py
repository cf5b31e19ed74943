"""Reading a window of a picture gives exactly the pixels of the whole picture, whatever the format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.video.small_videos import write_video
from tinyvae.video.decode import probe_video, read_frames

FORMATS = [
    "frame_index.mp4", "hevc_10bit.mp4", "gray.mp4", "odd_dims_yuv444.mp4", "odd_dims_vp9.webm", "rotated_90.mp4",
    "range_full.mp4", "range_limited.mp4", "mjpeg_fullrange.avi", "av1.mp4",
]  # fmt: skip


def assert_windows_are_exact(path: Path) -> None:
    info = probe_video(path, thorough=False)
    numbers = (3, 5, 8)
    whole = read_frames(path, numbers, info=info)
    draw = random.Random(0)
    for _ in range(12):
        height, width = draw.randint(1, info.height), draw.randint(1, info.width)
        top, left = draw.randint(0, info.height - height), draw.randint(0, info.width - width)
        part = read_frames(path, numbers, info=info, window=(top, left, height, width))
        assert torch.equal(part, whole[..., top : top + height, left : left + width])


def test_a_window_is_exactly_that_part_of_the_picture(tmp_path: Path) -> None:
    assert_windows_are_exact(write_video(tmp_path / "a.mp4", frames=10, width=322, height=182))


@pytest.mark.parametrize("name", FORMATS)
def test_windows_of_every_format(shared: Path, name: str) -> None:
    assert_windows_are_exact(shared / "data" / "hostile" / name)


def test_frames_are_written_where_the_caller_wants_them(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", frames=10)
    batch = torch.zeros((2, 3, 3, 32, 48), dtype=torch.uint8)
    frames = read_frames(path, (1, 2, 3), window=(8, 16, 32, 48), out=batch[1])
    assert frames.data_ptr() == batch[1].data_ptr() and batch[0].sum() == 0
    assert torch.equal(batch[1], read_frames(path, (1, 2, 3))[..., 8:40, 16:64])
    with pytest.raises(AssertionError, match="out does not fit"):
        read_frames(path, (1, 2), window=(8, 16, 32, 48), out=batch[1])
