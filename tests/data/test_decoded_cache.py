"""The cache of decoded files gives the frames of the file, keeps its bound, and notices a replaced file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tinyvae.data import decoded_cache
from tinyvae.data.clip_settings import ClipSettings
from tinyvae.data.decode import VideoInfo, probe_video, read_frames
from tinyvae.data.decoded_cache import DecodedCache
from tinyvae.data.geometry import CropWindow
from tinyvae.data.index_build import open_or_build_index
from tinyvae.data.loader import make_train_loader
from tinyvae.data.splits import split
from tinyvae.data.write import VideoWriter
from tinyvae.errors import UnreadableVideoError


def write_video(path: Path, *, seed: int = 0, frames: int = 12) -> Path:
    pixels = torch.randint(0, 256, (frames, 3, 8, 12), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    large = pixels.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    with VideoWriter(path, fps=24, width=96, height=64, overwrite=True) as writer:
        writer.write(large)
    return path


def whole(cache: DecodedCache, video: Path, info: VideoInfo | None = None) -> torch.Tensor | None:
    """Every frame, uncut."""
    info = info or probe_video(video)
    window = CropWindow(top=0, left=0, height=info.height, width=info.width)
    return cache.clip(video, info, range(info.frames), window, timeout_s=30)


def test_frames_are_those_of_the_file_and_survive_a_second_look(tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4")
    cache = DecodedCache(tmp_path / "cache", max_gb=1)
    expected = read_frames(video, range(12))
    for _ in range(2):
        cached = whole(cache, video)
        assert cached is not None and torch.equal(cached, expected)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("frame_indices", [(0,), (11,), (2, 5, 8), (3, 4, 5, 6)])
def test_a_window_is_cut_where_the_file_would_be(tmp_path: Path, frame_indices: tuple[int, ...]) -> None:
    video = write_video(tmp_path / "a.mp4")
    cache, info = DecodedCache(tmp_path / "cache", max_gb=1), probe_video(video)
    for top, left, height, width in ((0, 0, 64, 96), (63, 95, 1, 1), (7, 13, 40, 50), (0, 46, 64, 50)):
        cut = CropWindow(top=top, left=left, height=height, width=width)
        cached = cache.clip(video, info, frame_indices, cut, timeout_s=30)
        expected = read_frames(video, frame_indices)[..., top : top + height, left : left + width]
        assert cached is not None and torch.equal(cached, expected)


def test_no_room_means_none_and_nothing_left_behind(tmp_path: Path) -> None:
    videos = [write_video(tmp_path / f"{n}.mp4", seed=n) for n in range(2)]
    room_for_one = 1.5 * 12 * 3 * 64 * 96 / 2**30
    cache = DecodedCache(tmp_path / "cache", max_gb=room_for_one)
    assert whole(cache, videos[0]) is not None
    assert whole(cache, videos[1]) is None
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_replaced_file_is_decoded_anew(tmp_path: Path) -> None:
    cache = DecodedCache(tmp_path / "cache", max_gb=1)
    old, new = (whole(cache, write_video(tmp_path / "a.mp4", seed=seed)) for seed in (1, 2))
    assert old is not None and new is not None and not torch.equal(old, new)


def test_a_file_that_breaks_its_index_entry_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4")
    wrong = replace(probe_video(video), frames=13)
    with pytest.raises(UnreadableVideoError, match="gave 12 frames, in the index 13"):
        whole(DecodedCache(tmp_path / "cache", max_gb=1), video, wrong)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("resize", [False, True])
def test_batches_are_the_same_with_and_without(tmp_path: Path, resize: bool) -> None:
    (tmp_path / "videos").mkdir()
    for n in range(4):
        write_video(tmp_path / "videos" / f"{n}.mp4", seed=n)
    index = open_or_build_index(tmp_path / "videos", cache_dir=tmp_path, show_progress_bar=False)
    plain = ClipSettings(height=32, width=40, n_frames=4, max_frame_delta=2, random_resize=resize)
    cached = replace(plain, decoded_cache_gb=1.0, decoded_cache_dir=tmp_path / "cache")
    train, _ = split(index, plain, train_split=1.0)
    loaders = [iter(make_train_loader(train, settings, batch_size=3)) for settings in (plain, cached)]
    for _ in range(4):
        first, second = (next(loader) for loader in loaders)
        assert first.names == second.names and torch.equal(first.frames, second.frames)
    assert list((tmp_path / "cache").glob("*.rgb"))


def test_a_copy_that_is_cut_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    video = write_video(tmp_path / "a.mp4")
    cache = DecodedCache(tmp_path / "cache", max_gb=1)
    whole(cache, video)
    (copy,) = (tmp_path / "cache").iterdir()
    copy.write_bytes(copy.read_bytes()[:-1])
    monkeypatch.setattr(decoded_cache, "_has_size", lambda file, size: True)  # it was whole a moment ago
    with pytest.raises(UnreadableVideoError, match=r"\.rgb: this decoded copy became shorter .*delete it"):
        whole(cache, video)
