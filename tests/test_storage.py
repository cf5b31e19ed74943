"""Files behind URLs: fetched once, whole, within a limit, with the same frames; what goes wrong is one sentence."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import fsspec
import pytest
import torch

from tests.data.small_indexes import build
from tests.remote_storage import SECRET_KEY, ShelfFileSystem, s3_server
from tests.training.test_golden_losses import write_teacher
from tests.training.test_latents import live
from tests.training.tiny_runs import arguments_for, run_differences, train_here, write_clips
from tinyvae import storage
from tinyvae.cache_folder import GIB
from tinyvae.cli.main import main, run
from tinyvae.data import ClipSettings, make_train_loader, open_index, split
from tinyvae.data.latent_store import LatentStore
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import find_clips, frame_chunks, measure_clip
from tinyvae.storage import (
    FileVersion,
    StorageError,
    UnreachableStorageError,
    Url,
    file_cache,
    list_files,
    local_file,
    place_of,
    upload,
    version_of,
    without_secrets,
    writing,
)

SETTINGS = ClipSettings(height=32, width=40, n_frames=5, max_frame_delta=2)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(storage.CACHE_DIR_VARIABLE, str(tmp_path / "fetched"))
    monkeypatch.setenv(storage.CACHE_GB_VARIABLE, "1")
    monkeypatch.setattr(storage, "RETRY_WAITS_S", (0.0, 0.0, 0.0))
    return tmp_path / "fetched"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Url:
    """A URL folder with three files, whose fetches are in ``fetches``."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.mp4").write_bytes(name.encode() * 1000)
    monkeypatch.setattr(ShelfFileSystem, "LOG", tmp_path / "fetches")
    monkeypatch.setattr(ShelfFileSystem, "FAULTS", 0)
    return Url(f"shelf://{folder}")


def fetches(tmp_path: Path) -> list[str]:
    log = tmp_path / "fetches"
    return log.read_text().split() if log.exists() else []


# URLs


def test_a_url_keeps_its_slashes_and_a_path_stays_a_path() -> None:
    url = place_of("S3://bucket/videos/")
    assert isinstance(url, Url) and str(url) == "s3://bucket/videos"
    clip = url / "sea/a.mp4"
    assert str(clip) == "s3://bucket/videos/sea/a.mp4" and (clip.name, clip.suffix) == ("a.mp4", ".mp4")
    assert str(clip.parent) == "s3://bucket/videos/sea" and str(Url("memory://") / "a") == "memory://a"
    assert place_of("videos/a.mp4") == Path("videos/a.mp4") and place_of("file:///v/a.mp4") == Path("/v/a.mp4")
    assert place_of(url) is url and pickle.loads(pickle.dumps(url)) == url
    assert isinstance(place_of("hf://datasets/me/it@main/a.mp4"), Url)


@pytest.mark.parametrize(
    "text",
    [
        "ftp://me:hunter2@host/videos",
        "https://bucket.host/list.json?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2",
        "https://host/list.json?v=1&sig=hunter2",
    ],
)
def test_a_url_with_credentials_is_refused_and_they_are_not_shown(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="given with a password, key or signature") as refused:
        place_of(text)
    assert "hunter2" not in str(refused.value) and "hunter2" not in without_secrets(f"no answer from {text!r}.")
    for words in (["train", "scratch", "--data_root", text], ["data", "index", text, "--output", "i.tvi"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr()
        assert ended.value.code == 2 and "hunter2" not in said.err + said.out and "docs/object-storage.md" in said.err


# fetching


def test_a_file_is_fetched_once_and_again_when_it_changes(shelf: Url, tmp_path: Path) -> None:
    for _ in range(2):
        assert local_file(shelf / "a.mp4").read_bytes() == b"a" * 1000
    assert fetches(tmp_path) == ["a.mp4"] and oct(file_cache().folder.stat().st_mode)[-3:] == "700"
    (tmp_path / "shelf" / "a.mp4").write_bytes(b"x" * 1000)
    os.utime(tmp_path / "shelf" / "a.mp4", (1, 1))
    assert local_file(shelf / "a.mp4").read_bytes() == b"x" * 1000 and local_file(shelf / "a.mp4").suffix == ".mp4"


def fetch_all(url: Url) -> list[bytes]:
    return [local_file(url / f"{name}.mp4").read_bytes() for name in "abcab"]


def test_processes_that_want_the_same_file_fetch_it_once(shelf: Url, tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("fork")) as pool:
        results = list(pool.map(fetch_all, [shelf] * 6))
    assert results == [[name.encode() * 1000 for name in "abcab"]] * 6
    assert sorted(fetches(tmp_path)) == ["a.mp4", "b.mp4", "c.mp4"]


def test_the_limit_holds_and_the_longest_unused_file_goes(
    shelf: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(storage.CACHE_GB_VARIABLE, str(2500 / GIB))
    monkeypatch.setattr(storage, "IN_USE_S", 1000.0)  # longer than this test may take
    first, second = (local_file(shelf / name) for name in ("a.mp4", "b.mp4"))
    assert file_cache().notes() == []
    for file, age_s in ((first, 2000), (second, 3000)):
        os.utime(file, (time.time() - age_s,) * 2)
    third = local_file(shelf / "c.mp4")
    assert first.exists() and third.exists() and not second.exists()
    (note,) = file_cache().notes()
    assert "makes room" in note.text
    local_file(shelf / "a.mp4")
    local_file(shelf / "b.mp4")  # the others were used a moment ago: they stay, and the user is told
    assert first.exists() and third.exists() and "is full: file_cache_gb" in file_cache().notes()[0].text


def test_a_file_of_another_size_is_not_kept(shelf: Url, cache_folder: Path) -> None:
    with pytest.raises(OSError, match="1000 bytes there but had 999 when") as fault:
        local_file(shelf / "a.mp4", FileVersion(999, version_of(shelf / "a.mp4").tag))
    assert fault.value.errno == errno.ESTALE and not list(cache_folder.glob("*.mp4"))


def test_a_passing_fault_is_tried_again_and_a_lasting_one_is_one_sentence_without_secrets(
    shelf: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShelfFileSystem, "FAULTS", 3)
    assert local_file(shelf / "a.mp4").read_bytes() == b"a" * 1000 and len(fetches(tmp_path)) == 4
    monkeypatch.setattr(ShelfFileSystem, "FAULTS", 99)
    with pytest.raises(UnreachableStorageError, match=r"b.mp4 cannot be reached \(https://storage/a went away\)"):
        local_file(shelf / "b.mp4")
    with pytest.raises(FileNotFoundError, match="it is not there"):
        local_file(shelf / "none.mp4")


def test_a_cache_that_cannot_be_written_is_a_sentence(
    shelf: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(storage.CACHE_DIR_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"cannot be written .*name another file_cache_dir"):
        local_file(shelf / "a.mp4")
    monkeypatch.setenv(storage.CACHE_GB_VARIABLE, "much")
    with pytest.raises(UserError, match="TINYVAE_FILE_CACHE_GB must be a number"):
        file_cache()


def test_what_is_uploaded_is_listed_and_fetched(tmp_path: Path) -> None:
    folder = Url("memory://uploads")
    with writing(folder / "sub/b.json", "w") as stream:
        json.dump([1], stream)
    (tmp_path / "a.bin").write_bytes(b"abc")
    upload(tmp_path / "a.bin", folder / "a.bin")
    assert [(name, version.size) for name, version in list_files(folder)] == [("a.bin", 3), ("sub/b.json", 3)]
    assert dict(list_files(folder))["a.bin"] == version_of(folder / "a.bin")
    assert folder.is_dir() and (folder / "a.bin").is_file() and not (folder / "c").exists()
    with pytest.raises(RuntimeError), writing(folder / "c", "w"):
        raise RuntimeError("a failure before the end")
    assert not (folder / "c").exists()


# what is missing


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"s3:// needs the package 's3fs'.*pip install 'tinyvae\[s3\]'"):
        Url("s3://bucket/a").exists()
    with pytest.raises(UserError, match="nothing://b/a cannot be opened"):
        Url("nothing://b/a").exists()


def test_the_hub_is_asked_by_its_own_library_and_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfFileSystem

    def no_network(*place: object, **how: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    url = Url("hf://datasets/owner/name/videos")
    system, path = storage._open_system(url)
    assert isinstance(system, HfFileSystem) and path == "datasets/owner/name/videos"
    with pytest.raises(UnreachableStorageError, match=r"storage of hf://.* cannot be reached .*; check the network"):
        url.exists()


# videos


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("videos"), num_clips=5)


@pytest.fixture
def remote_videos(videos: Path) -> Iterator[Url]:
    system = fsspec.filesystem("memory")
    system.put(f"{videos}/", "/videos/", recursive=True)
    system.pipe_file("/videos/.hidden/x.mp4", b"no video")
    system.pipe_file("/videos/read_me.txt", b"no video")
    yield Url("memory://videos")
    system.rm("/videos", recursive=True)


@pytest.mark.parametrize("decoded_cache_gb", [0.0, 1.0])
def test_batches_are_those_of_the_local_files(
    videos: Path, remote_videos: Url, tmp_path: Path, decoded_cache_gb: float
) -> None:
    settings = ClipSettings(
        height=32, width=40, n_frames=5, max_frame_delta=2,
        decoded_cache_gb=decoded_cache_gb, decoded_cache_dir=tmp_path / "decoded",
    )  # fmt: skip
    upload(build(remote_videos, tmp_path / "remote.tvi", num_workers=2).index.file, remote_videos / "i.tvi")
    remote, local = open_index(remote_videos / "i.tvi"), build(videos, tmp_path / "local.tvi").index
    assert remote.fingerprint == local.fingerprint and remote.num_bad == 0 and len(remote) == 5
    assert pickle.loads(pickle.dumps(remote)).data_root == remote_videos
    sides = [split(index, settings, train_split=1.0)[0] for index in (remote, local)]
    shutil.rmtree(tmp_path / "fetched")  # the workers fetch, each with a file system of its own
    loaders = [iter(make_train_loader(side, settings, batch_size=2, num_workers=2)) for side in sides]
    for ours, theirs in islice(zip(*loaders, strict=True), 6):
        assert ours.names == theirs.names and torch.equal(ours.frames, theirs.frames)
    for loader in loaders:
        loader.close()  # type: ignore[attr-defined]


def test_an_index_is_kept_and_only_what_is_new_is_probed(remote_videos: Url, tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    output = build(remote_videos, tmp_path / "i.tvi").index.file
    system.pipe_file("/videos/new.mp4", system.cat_file("/videos/clip_1.mp4"))
    report = build(remote_videos, output)
    assert (report.num_probed, report.num_reused) == (1, 5)
    lines = [{"path": "clip_0.mp4"}, {"path": "memory://videos/clip_1.mp4"}, {"path": "gone.mp4"}]
    system.pipe_file("/videos/list.jsonl", "\n".join(map(json.dumps, lines)).encode())
    listed = build(remote_videos / "list.jsonl", tmp_path / "j.tvi").index
    assert len(listed) == 3 and [row.reason for row in listed.bad_rows()] == ["the file is not there"]
    system.pipe_file("/videos/bad.jsonl", b'{"path": "../clip_1.mp4"}')
    with pytest.raises(UserError, match=r"bad.jsonl, line 1: .* leaves the data root memory://videos"):
        build(remote_videos / "bad.jsonl", tmp_path / "k.tvi")


def test_a_file_that_is_gone_is_a_bad_file_and_a_storage_that_is_gone_ends_the_run(
    remote_videos: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, _ = split(build(remote_videos, tmp_path / "i.tvi").index, SETTINGS, train_split=1.0)
    shutil.rmtree(tmp_path / "fetched")
    fsspec.filesystem("memory").rm("/videos/clip_2.mp4")
    loader = make_train_loader(train, SETTINGS, batch_size=2)
    for batch in islice(iter(loader), 4):
        assert "clip_2.mp4" not in batch.names
    assert loader.bad_files.named == {"clip_2.mp4": "cannot be read: it is not there"}

    def gone(*arguments: object, **more: object) -> None:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", gone)
    shutil.rmtree(tmp_path / "fetched")
    with pytest.raises(UserError, match=r"^the storage of memory://videos/clip_\d.mp4 cannot be reached \(nobody"):
        next(iter(make_train_loader(train, SETTINGS, batch_size=2)))


def test_an_evaluation_reads_the_same_frames_and_names_the_url(videos: Path, remote_videos: Url) -> None:
    fsspec.filesystem("memory").pipe_file("/videos/broken.mp4", b"no video")
    clips, local = find_clips(remote_videos), find_clips(videos)
    assert [clip.name for clip in clips] == ["broken.mp4", *(clip.name for clip in local)]
    parts = [measure_clip(clip, max_frames=6, size=(16, 24)) for clip in (clips[1], local[0])]
    ours, theirs = (torch.cat(list(frame_chunks(part, chunk_frames=4))) for part in parts)
    assert torch.equal(ours, theirs)
    with pytest.raises(UserError, match=r"^memory://videos/broken.mp4: not a readable video"):
        measure_clip(clips[0], max_frames=6, size=None)


# a real S3 server


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(
    server: tuple[dict[str, str], subprocess.Popen[bytes]], videos: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Url]:
    for name, value in server[0].items():
        monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3")
    if not system.exists("bucket"):
        system.mkdir("bucket")
        system.put(f"{videos}/", "bucket/videos/", recursive=True)
    yield Url("s3://bucket/videos")
    system.clear_instance_cache()


@pytest.mark.slow
def test_a_run_on_s3_is_the_run_on_local_files_and_shows_no_secret(s3: Url, videos: Path, tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 2, "decoded_cache_gb": 0}
    train_here(arguments_for(videos, tmp_path / "local", **options))
    train_here(arguments_for(s3, tmp_path / "remote", **options))  # type: ignore[arg-type]
    assert run_differences(tmp_path / "local", tmp_path / "remote", 6) == []
    assert json.loads((tmp_path / "remote" / "config.json").read_text())["data_root"] == "s3://bucket/videos"
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET_KEY.encode() not in file.read_bytes(), file


@pytest.mark.slow
def test_a_file_that_changed_on_s3_is_a_bad_file_until_it_is_indexed_again(
    s3: Url, videos: Path, tmp_path: Path
) -> None:
    upload(videos / "clip_0.mp4", s3.parent / "changing/a.mp4")
    upload(videos / "clip_1.mp4", s3.parent / "changing/b.mp4")
    index = build(s3.parent / "changing", tmp_path / "i.tvi").index
    shutil.rmtree(tmp_path / "fetched")
    upload(videos / "clip_2.mp4", s3.parent / "changing/a.mp4")
    train, _ = split(index, SETTINGS, train_split=1.0)
    loader = make_train_loader(train, SETTINGS, batch_size=1)
    assert {name for batch in islice(iter(loader), 6) for name in batch.names} == {"b.mp4"}
    assert "when it was listed or indexed; run `tinyvae data index`" in loader.bad_files.named["a.mp4"]
    report = build(s3.parent / "changing", tmp_path / "i.tvi")
    assert (report.num_probed, report.num_reused) == (1, 1)


@pytest.mark.slow
def test_wrong_places_on_s3_are_one_sentence(
    s3: Url, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said_of(place: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["data", "index", place, "--output", str(tmp_path / "i.tvi")])
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 2 and said.count("\n") == 0 and SECRET_KEY not in said
        return said

    assert "s3://no-such-bucket/videos does not exist" in said_of("s3://no-such-bucket/videos")
    assert "s3://bucket/nothing does not exist" in said_of("s3://bucket/nothing")
    assert "Invalid bucket name" in said_of("s3://no bucket/videos")
    fsspec.filesystem("s3").clear_instance_cache()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "there are no credentials for s3://bucket/videos" in said_of("s3://bucket/videos")


@pytest.mark.slow
def test_an_index_and_a_latent_store_are_made_on_s3_and_trained_from(s3: Url, videos: Path, tmp_path: Path) -> None:
    assert run(["data", "index", str(s3), "--output", str(s3.parent / "videos.tvi")]) == 0
    index = {"index_path": s3.parent / "videos.tvi", "data_root": "none"}
    teacher, store = write_teacher(tmp_path / "teacher"), s3.parent / "latents"
    words = live(videos, tmp_path / "made", teacher, **index)
    assert run(["latents", *words, "--clips", "8", "--dtype", "float32", "--output", str(store)]) == 0
    opened = LatentStore.open(store)
    opened.check_complete()
    assert opened.num_clips == 8 and opened.num_bytes > 0
    train_here(live(videos, tmp_path / "live", teacher))
    train_here(live(videos, tmp_path / "stored", teacher, latent_store=store, **index))
    assert run_differences(tmp_path / "live", tmp_path / "stored", 4) == []
    with pytest.raises(UserError, match="holds 8 clips and cannot grow behind a URL"):
        LatentStore.create(store, opened.facts, num_clips=9)


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_with_one_sentence(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with s3_server() as (environment, _):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        system.mkdir("bucket")
        system.put(f"{videos}/", "bucket/videos/", recursive=True)
        index = build(Url("s3://bucket/videos"), tmp_path / "i.tvi").index.file
        shutil.rmtree(tmp_path / "fetched")
    words = arguments_for(videos, tmp_path / "run", index_path=index, data_root="none", dataloader_num_workers=2)
    with pytest.raises(SystemExit) as ended:
        main(["train", *words])
    assert ended.value.code == 2
    said = capfd.readouterr().err
    assert "the storage of s3://bucket/videos/clip_" in said and "cannot be reached" in said and "Traceback" not in said
    fsspec.filesystem("s3").clear_instance_cache()
