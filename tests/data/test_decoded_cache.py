"""The cache of decoded files gives the frames of the file, keeps its bound, and notices a replaced file.

Several processes share one, and what one of them evicts another may be reading.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from tests.data.small_indexes import training_clips
from tests.processes import HANGS_S
from tests.video import small_videos
from tinyvae.cache_folder import ABANDONED_S
from tinyvae.data import decoded_cache
from tinyvae.data.clip import ClipSettings, CropWindow
from tinyvae.data.decoded_cache import DecodedCache
from tinyvae.data.loader import make_train_loader
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.storage import Url, version_of
from tinyvae.video.decode import VideoInfo, probe_video, read_frames

write_video = partial(small_videos.write_video, frames=12)


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "a.mp4")


@pytest.fixture
def cache(tmp_path: Path) -> DecodedCache:
    return DecodedCache(tmp_path / "cache", max_gb=1)


def whole(cache: DecodedCache, video: Path, info: VideoInfo | None = None) -> torch.Tensor | None:
    """Every frame, uncut."""
    info = info or probe_video(video)
    window = CropWindow(top=0, left=0, height=info.height, width=info.width)
    return cache.clip(video, info, range(info.frames), window, timeout_s=30, version=version_of(video))


def test_frames_are_those_of_the_file_and_survive_a_second_look(video: Path, cache: DecodedCache) -> None:
    expected = read_frames(video, range(12))
    for _ in range(2):
        cached = whole(cache, video)
        assert cached is not None and torch.equal(cached, expected)
        (copy,) = cache.folder.iterdir()
        assert copy.stat().st_atime > 0, "each look is a use"
        os.utime(copy, (0, copy.stat().st_mtime))


def test_a_window_is_cut_where_the_file_would_be(video: Path, cache: DecodedCache) -> None:
    info, frame_choices = probe_video(video), ((0,), (11,), (2, 5, 8), (3, 4, 5, 6))
    windows = ((0, 0, 64, 96), (63, 95, 1, 1), (7, 13, 40, 50), (0, 46, 64, 50))
    for frame_indices, window in itertools.product(frame_choices, itertools.starmap(CropWindow, windows)):
        cached = cache.clip(video, info, frame_indices, window, timeout_s=30, version=version_of(video))
        assert cached is not None and torch.equal(cached, read_frames(video, frame_indices, window=window))


COPY_GB = 12 * 3 * 64 * 96 / 2**30


def name_of(cache: DecodedCache, video: Path) -> str:
    """The name of a video's copy."""
    found = video.stat()
    return cache.place(f"{video}\0{found.st_size}\0{found.st_mtime_ns}", ".rgb").name


def copies(cache: DecodedCache) -> set[str]:
    return {file.name for file in cache.folder.iterdir()}


def test_a_video_larger_than_the_cache_means_none_and_nothing_gone_or_left_behind(tmp_path: Path) -> None:
    small, large = write_video(tmp_path / "s.mp4", frames=4), write_video(tmp_path / "l.mp4", frames=24)
    cache = DecodedCache(tmp_path / "cache", max_gb=1.5 * COPY_GB)
    assert whole(cache, small) is not None
    assert whole(cache, large) is None and cache.event == "full"
    assert copies(cache) == {name_of(cache, small)}


def test_a_run_gives_up_what_others_left_and_not_its_own(tmp_path: Path) -> None:
    """Coming back to each file equally often, it would decode a whole file each time for nothing."""
    theirs, *own = (write_video(tmp_path / f"{n}.mp4", seed=n) for n in range(4))
    whole(DecodedCache(tmp_path / "cache", max_gb=1), theirs)
    cache = DecodedCache(tmp_path / "cache", max_gb=2.5 * COPY_GB, run_start=time.time() - 10)
    os.utime(cache.folder / name_of(cache, theirs), (time.time() - 100,) * 2)
    for video in own[:2]:
        assert whole(cache, video) is not None
    assert copies(cache) == {name_of(cache, video) for video in own[:2]} and cache.event == "evicts"
    assert whole(cache, own[2]) is None and cache.event == "full"
    assert copies(cache) == {name_of(cache, video) for video in own[:2]}


def test_what_a_killed_process_left_goes_and_what_another_writes_stays(tmp_path: Path, video: Path) -> None:
    cache = DecodedCache(tmp_path / "cache", max_gb=2.5 * COPY_GB)
    cache.folder.mkdir()
    for name, seconds in (("abandoned.1.part", ABANDONED_S + 60), ("written.2.part", 1)):
        (cache.folder / name).write_bytes(bytes(12 * 3 * 64 * 96))
        os.utime(cache.folder / name, (time.time() - seconds,) * 2)
    assert whole(cache, video) is not None
    assert copies(cache) == {name_of(cache, video), "written.2.part"}


def test_a_full_disk_is_a_full_cache_and_no_bad_video(
    video: Path, cache: DecodedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    cache.folder.mkdir()
    unfinished = cache.folder / f".{name_of(cache, video)}.{'0' * 12}.part"
    unfinished.symlink_to("/dev/full")
    assert whole(cache, video) is None and cache.event == "full"
    assert copies(cache) == set()


@pytest.mark.parametrize("place", ["taken/cache", "taken/cache/deep", "/proc/none/cache"])
def test_a_cache_that_cannot_be_used_is_told_and_no_video_is_blamed(tmp_path: Path, place: str) -> None:
    write_video(tmp_path / "videos" / "a.mp4")
    (tmp_path / "taken").write_text("a file")
    settings = ClipSettings(height=32, width=40, n_frames=4, decoded_cache_gb=1.0, decoded_cache_dir=tmp_path / place)
    loader = make_train_loader(training_clips(tmp_path / "videos", settings), settings, batch_size=1)
    with pytest.raises(
        UserError, match=r"the decoded cache .*cache.* cannot be used .*; name another decoded_cache_dir"
    ):
        next(iter(loader))
    assert loader.bad_files.named == {}


def test_a_video_that_is_gone_is_not_the_caches_fault(video: Path, cache: DecodedCache) -> None:
    window = CropWindow(top=0, left=0, height=1, width=1)
    with pytest.raises(FileNotFoundError, match=r"gone\.mp4"):
        url = Url("memory://gone.mp4")
        cache.clip(url, probe_video(video), [0], window, timeout_s=30, version=version_of(video))
    assert copies(cache) == set()


def test_a_copy_that_goes_while_it_is_read_is_read_to_its_end(
    video: Path, cache: DecodedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(cache, video)
    read = decoded_cache._read_window

    def evict_first(*arguments: Any, **more: Any) -> None:
        (cache.folder / name_of(cache, video)).unlink(missing_ok=True)
        read(*arguments, **more)

    monkeypatch.setattr(decoded_cache, "_read_window", evict_first)
    cached = whole(cache, video)
    assert cached is not None and expected is not None and torch.equal(cached, expected) and copies(cache) == set()


READS = """
import random, sys, torch
from pathlib import Path
from tinyvae.video.decode import probe_video, read_frames
from tinyvae.data.decoded_cache import DecodedCache
from tinyvae.data.clip import CropWindow
from tinyvae.storage import version_of

folder, seed, max_gb = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
videos = sorted(folder.glob("*.mp4"))
expected = {video: read_frames(video, range(12)) for video in videos}
infos = {video: probe_video(video) for video in videos}
cache, draw, hits = DecodedCache(folder / "cache", max_gb=max_gb), random.Random(seed), 0
window = CropWindow(top=0, left=0, height=64, width=96)
for _ in range(200):
    video = draw.choice(videos)
    got = cache.clip(video, infos[video], range(12), window, timeout_s=30, version=version_of(video))
    hits += got is not None
    assert got is None or torch.equal(got, expected[video]), video
print(hits)
"""


@pytest.mark.slow
def test_processes_that_evict_each_others_copies_read_whole_ones(tmp_path: Path) -> None:
    """Room for two of five: most reads of one process throw out what another is about to read."""
    for n in range(5):
        write_video(tmp_path / f"{n}.mp4", seed=n)
    command = [sys.executable, "-c", READS, str(tmp_path)]
    running = [
        subprocess.Popen([*command, str(seed), str(2.5 * COPY_GB)], stdout=subprocess.PIPE, text=True)
        for seed in range(3)
    ]
    said = [process.communicate(timeout=HANGS_S)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], "each clip was whole"
    assert sum(map(int, said)) > 0, "how many copies each of them finds is for the scheduler to say"
    assert {file.suffix for file in (tmp_path / "cache").iterdir()} == {".rgb"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_that_is_full_is_told_once(tmp_path: Path, num_workers: int, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(4):
        write_video(tmp_path / "videos" / f"{n}.mp4", seed=n)
    settings = ClipSettings(
        height=32, width=40, n_frames=4, decoded_cache_gb=1.5 * COPY_GB, decoded_cache_dir=tmp_path / "cache"
    )
    train = training_clips(tmp_path / "videos", settings)
    caplog.set_level("INFO")
    batches = iter(make_train_loader(train, settings, batch_size=2, num_workers=num_workers))
    for _ in range(8):
        next(batches)
    batches.close()
    assert len(list((tmp_path / "cache").iterdir())) <= max(1, num_workers), "the first ones stay"
    told = [record.getMessage() for record in caplog.records if "decoded cache" in record.getMessage()]
    assert len(told) == 1 and str(tmp_path / "cache") in told[0] and "raise decoded_cache_gb" in told[0]


def test_a_replaced_file_is_decoded_again(tmp_path: Path, cache: DecodedCache) -> None:
    old, new = (whole(cache, write_video(tmp_path / "a.mp4", seed=seed)) for seed in (1, 2))
    assert old is not None and new is not None and not torch.equal(old, new)


def test_a_file_of_the_same_size_that_is_not_the_indexed_one_is_refused_as_without_the_cache(
    video: Path, cache: DecodedCache
) -> None:
    info, content = probe_video(video), video.read_bytes()
    assert content.count(b"x264 - core") == 1
    video.write_bytes(content.replace(b"x264 - core", b"y264 - core"))
    with pytest.raises(UnreadableVideoError, match="it has changed since it was indexed"):
        read_frames(video, [0], info=info)
    assert whole(cache, video, info) is None  # so it is read without the cache


def test_a_file_that_breaks_its_index_entry_is_refused_and_leaves_nothing(video: Path, cache: DecodedCache) -> None:
    wrong = replace(probe_video(video), frames=13)
    assert whole(cache, video, wrong) is None and cache.event == "" and copies(cache) == set()


def test_a_damaged_file_gives_the_same_clips_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips before the damage are read. The whole file is tried once."""
    for n in range(3):
        write_video(tmp_path / "videos" / f"{n}.mp4", seed=n, frames=48)
    damaged = tmp_path / "videos" / "1.mp4"
    with av.open(str(damaged)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][30]
        place, size = packet.pos, packet.size
    content = bytearray(damaged.read_bytes())
    content[place : place + size] = b"\xff" * size
    damaged.write_bytes(content)
    plain = ClipSettings(height=32, width=40, n_frames=4)
    train = training_clips(tmp_path / "videos", plain)
    assert train.index.num_bad == 0, "a quick look does not find it"
    cached = replace(plain, decoded_cache_gb=1.0, decoded_cache_dir=tmp_path / "cache")
    tried = []
    decode = decoded_cache._decode_into
    monkeypatch.setattr(decoded_cache, "_decode_into", lambda *a, **k: (tried.append(a[1].name), decode(*a, **k)))
    options: Any = {"batch_size": 3, "bad_file_limit": 0.9, "num_workers": 0}
    loaders = [make_train_loader(train, settings, **options) for settings in (plain, cached)]
    both = [list(islice(iter(loader), 30)) for loader in loaders]
    for first, second in zip(*both, strict=True):
        assert first.names == second.names and torch.equal(first.frames, second.frames)
    assert sorted(tried) == ["0.mp4", "1.mp4", "2.mp4"]
    assert any("1.mp4" in batch.names for batch in both[0]) and loaders[0].bad_files.num_bad_tries
    assert loaders[0].bad_files.num_bad_tries == loaders[1].bad_files.num_bad_tries


@pytest.mark.parametrize("candidates", [1, 4])
@pytest.mark.parametrize("resize", [False, True])
def test_batches_are_the_same_with_and_without(tmp_path: Path, resize: bool, candidates: int) -> None:
    for n in range(4):
        write_video(tmp_path / "videos" / f"{n}.mp4", seed=n)
    plain = ClipSettings(
        height=32, width=40, n_frames=4, max_frame_delta=2, random_resize=resize, crop_candidates=candidates
    )
    cached = replace(plain, decoded_cache_gb=1.0, decoded_cache_dir=tmp_path / "cache")
    train = training_clips(tmp_path / "videos", plain)
    loaders = [iter(make_train_loader(train, settings, batch_size=3)) for settings in (plain, cached)]
    for _ in range(4):
        first, second = (next(loader) for loader in loaders)
        assert first.names == second.names and torch.equal(first.frames, second.frames)
    assert list((tmp_path / "cache").glob("*.rgb"))


def test_a_copy_that_is_cut_while_it_is_read_is_named(
    video: Path, cache: DecodedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(cache, video)
    (copy,) = cache.folder.iterdir()
    copy.write_bytes(copy.read_bytes()[:-1])
    monkeypatch.setattr(decoded_cache, "open_copy", lambda file, size: file.open("rb", buffering=0))
    with pytest.raises(UnreadableVideoError, match=r"\.rgb: this decoded copy became shorter .*delete it"):
        whole(cache, video)
