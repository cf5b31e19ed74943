"""Building an index: how it grows, what is probed again, and files that kill their process."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.data.small_indexes import build
from tests.processes import still_alive, wait_until
from tests.video.small_videos import write_video
from tinyvae.data import index_build
from tinyvae.data.annotations import VideoEntry
from tinyvae.data.index import ANY_MAGIC, VideoIndex, is_index, open_index
from tinyvae.data.index_build import build_index, open_or_build_index
from tinyvae.errors import UserError
from tinyvae.video.decode import VideoInfo, probe_video

open_or_build = functools.partial(open_or_build_index, num_workers=0, show_progress_bar=False)


def paths_of(index: VideoIndex) -> set[str]:
    return {index.row(number).path for number in range(len(index))}


def test_two_processes_give_the_same_index_as_none(video_folder: Path, tmp_path: Path) -> None:
    alone = build(video_folder, tmp_path / "a.tvi").index
    parallel = build(video_folder, tmp_path / "b.tvi", num_workers=2).index
    assert alone.fingerprint == parallel.fingerprint
    assert [alone.row(n).path for n in range(12)] == [parallel.row(n).path for n in range(12)]


def test_a_second_build_probes_only_what_is_new_changed_or_bad(tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "i.tvi"
    for number in range(3):
        write_video(data / f"{number}.mp4", frames=4, seed=number)
    (data / "bad.mp4").write_bytes(b"not a video")
    first = build(data, output)
    assert (first.num_probed, first.num_reused, first.index.num_bad) == (4, 0, 1)
    (data / "0.mp4").unlink()
    write_video(data / "1.mp4", frames=6, seed=9)
    write_video(data / "new.mp4", frames=4, seed=5)
    second = build(data, output)
    assert (second.num_probed, second.num_reused) == (3, 1)  # changed, new, bad again; one known
    assert paths_of(second.index) == {"1.mp4", "2.mp4", "bad.mp4", "new.mp4"}
    assert second.index.row(second.index.find("1.mp4")).frames == 6
    assert second.index.fingerprint != first.index.fingerprint
    # The first index object maps the replaced file and still reads its own rows.
    assert first.index.row(first.index.find("0.mp4")).frames == 4
    assert build(data, output, thorough=True).num_probed == 4, "a thorough build does not trust quick rows"
    assert build(data, output).num_probed == 1, "a quick build trusts thorough rows"


def test_bad_files_keep_their_reason(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_video(data / "good.mp4", frames=4)
    (data / "empty.mp4").touch()
    os.mkfifo(data / "pipe.mp4")
    source = tmp_path / "list.jsonl"
    names = ["good.mp4", "empty.mp4", "gone.mp4", "pipe.mp4"]
    source.write_text("".join(json.dumps({"path": f"data/{name}"}) + "\n" for name in names))
    index = build(source, tmp_path / "i.tvi").index
    reasons = {row.path: row.reason for row in index.bad_rows()}
    assert set(reasons) == {"data/empty.mp4", "data/gone.mp4", "data/pipe.mp4"}
    assert "empty" in reasons["data/empty.mp4"] and str(tmp_path) not in reasons["data/empty.mp4"]
    assert reasons["data/gone.mp4"] == "the file is not there"
    assert reasons["data/pipe.mp4"] == "not a regular file"


def info_of(path: Path, codec: str = "h264") -> VideoInfo:
    return VideoInfo(path=path, frames=7, fps=24.0, width=64, height=64, codec=codec)


def write_files(folder: Path, names: Iterable[object]) -> Path:
    """Files that no real probe could read."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.mp4").write_bytes(b"x")
    return folder


def interrupted_probe(path: Path, **options: object) -> VideoInfo:
    if path.name == "5.mp4":
        raise KeyboardInterrupt
    return info_of(path)


def test_an_interrupted_build_goes_on_where_it_was(tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "data", range(9)), tmp_path / "i.tvi"
    with pytest.raises(KeyboardInterrupt):
        build(data, output, probe=interrupted_probe)
    assert not output.exists(), "no half index is ever seen"
    probed: list[str] = []

    def later_probe(path: Path, **options: object) -> VideoInfo:
        probed.append(path.name)
        if len(probed) == 2:
            raise KeyboardInterrupt
        return info_of(path, "vp9")

    with pytest.raises(KeyboardInterrupt):
        build(data, output, probe=later_probe)  # interrupted a second time: both parts are kept
    report = build(data, output, probe=later_probe)
    assert probed == ["5.mp4", "6.mp4", "6.mp4", "7.mp4", "8.mp4"]
    assert report.num_reused == 6 and len(report.index) == 9
    assert [report.index.row(report.index.find(f"{n}.mp4")).codec for n in (0, 5, 8)] == ["h264", "vp9", "vp9"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "i.tvi"], "nothing is left behind"


def test_repeated_paths_become_one_row_and_conflicting_splits_are_refused(video_folder: Path, tmp_path: Path) -> None:
    def source(*splits: str) -> Path:
        records = [{"path": "clip_00.mp4", "split": name} for name in splits] + [{"path": "./clip_01.mp4"}]
        file = tmp_path / "list.json"
        file.write_text(json.dumps({"total": len(records), "list": records}))
        return file

    report = build(source("train", "train", "train"), tmp_path / "i.tvi", data_root=video_folder)
    assert (len(report.index), report.num_probed, report.num_duplicates) == (2, 2, 2)
    with pytest.raises(UserError, match=r"clip_00\.mp4.*different splits"):  # before a file is probed
        build(source("train", "train", "val"), tmp_path / "j.tvi", data_root=video_folder)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["i.tvi", "list.json"]


def crashing_probe(path: Path, **options: object) -> VideoInfo:
    if path.name == "3.mp4":
        os.kill(os.getpid(), signal.SIGKILL)
    if path.name == "hangs.mp4":
        time.sleep(600)
    return info_of(path)


BAD = {"3.mp4": "the decoder crashed on this file", "hangs.mp4": "probing did not end within 10 s"}


@pytest.mark.parametrize(
    "bad", [["3.mp4"], pytest.param(["3.mp4", "hangs.mp4"], marks=pytest.mark.slow)], ids=["kills", "kills and hangs"]
)
def test_a_file_that_kills_or_hangs_its_process_is_a_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: list[str]
) -> None:
    monkeypatch.setattr(index_build, "GRACE_S", 10.0)  # more than a good file's process needs on a busy machine
    data = write_files(tmp_path / "data", [*range(12), *(Path(name).stem for name in bad)])
    index = build(data, tmp_path / "i.tvi", num_workers=2, timeout_s=0.1, probe=crashing_probe).index
    assert len(index) == 11 + len(bad)
    assert {row.path: row.reason for row in index.bad_rows()} == {name: BAD[name] for name in bad}


def test_a_process_that_dies_while_the_next_batch_is_made_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool then refuses the batch itself, and not only its result."""
    write_files(tmp_path, range(40))
    new_pool, refused = index_build._new_pool, []

    def new_pool_that_breaks_once(num_workers: int, **options: bool) -> ProcessPoolExecutor:
        pool = new_pool(num_workers, **options)
        submit = pool.submit

        def submit_or_refuse(function: Callable[..., object], *arguments: object) -> object:
            if function is index_build._look_at_batch and len(refused) == 0:
                refused.append(arguments)
                raise BrokenProcessPool
            return submit(function, *arguments)

        monkeypatch.setattr(pool, "submit", submit_or_refuse)
        return pool

    monkeypatch.setattr(index_build, "_new_pool", new_pool_that_breaks_once)
    report = build(tmp_path, tmp_path / "i.tvi", num_workers=1, probe=crashing_probe, timeout_s=1.0)
    assert len(refused) == 1 and len(report.index) == 40
    assert {row.path: row.reason for row in report.index.bad_rows()} == {"3.mp4": BAD["3.mp4"]}


def probe_of_one_batch(path: Path, **options: object) -> VideoInfo:
    if path.name >= "08.mp4":
        time.sleep(600)
    return info_of(path)


def test_a_build_that_fails_ends_its_processes_at_once(tmp_path: Path) -> None:
    """Else the command would tell of the full disk, and then wait for all files that it had handed out."""
    write_files(tmp_path, (f"{number:02}" for number in range(40)))
    (tmp_path / "i.tvi.new-text").symlink_to("/dev/full")
    others = set(psutil.Process().children())
    with pytest.raises(OSError, match="No space left") as failed:
        build_index(tmp_path, tmp_path / "i.tvi", num_workers=2, probe=probe_of_one_batch)
    assert still_alive(set(psutil.Process().children()) - others) == [], failed


def slow_probe(path: Path, **options: object) -> VideoInfo:
    path.with_name(f"{os.getpid()}.pid").touch()
    time.sleep(600)
    raise AssertionError


def test_a_killed_build_leaves_no_process(tmp_path: Path) -> None:
    write_files(tmp_path, range(16))
    options = {"num_workers": 2, "probe": slow_probe}
    killed = get_context("fork").Process(target=build_index, args=(tmp_path, tmp_path / "i.tvi"), kwargs=options)
    killed.start()
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    finally:
        killed.kill()
        killed.join()
    assert still_alive([int(file.stem) for file in tmp_path.glob("*.pid")]) == []


@pytest.mark.slow
def test_the_start_of_a_fresh_process_is_not_the_files_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it takes longer than a file may take."""
    write_video(tmp_path / "a.mp4", frames=4, seed=0)
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(12)\n")  # every fresh Python begins with this
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    task = index_build.ProbeTask(VideoEntry(path="a.mp4"), tmp_path / "a.mp4", None)
    look = functools.partial(index_build._row_of, probe=probe_video, timeout_s=10.0, thorough=False)
    row, _ = index_build._probe_alone(task, look, 10.0, fork=False)
    assert (row.reason, row.frames) == ("", 4)
    monkeypatch.setattr(index_build, "START_S", 0.5)
    with pytest.raises(UserError, match=r"a new process did not start within 0\.5 s"):
        index_build._probe_alone(task, look, 10.0, fork=False)


def test_the_cached_index_is_used_until_the_source_lists_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tinyvae")
    data = tmp_path / "data"
    write_video(data / "a.mp4", frames=4)

    cache = tmp_path / "cache"
    for _ in range(2):
        assert len(open_or_build(data, cache_dir=cache)) == 1 and caplog.text.count("indexed") == 1
    write_video(data / "b.mp4", frames=4)
    assert len(open_or_build(data, cache_dir=cache)) == 2 and caplog.text.count("indexed") == 2
    assert len(open_or_build(cache / "data_index.tvi", cache_dir=tmp_path)) == 2, "an index is its own source"


def test_a_bad_file_that_was_fixed_counts_at_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The message says "fix or remove them"."""
    source = tmp_path / "list.jsonl"
    source.write_text("".join(json.dumps({"path": name}) + "\n" for name in ("a.mp4", "bad.mp4", "late.mp4")))
    write_video(tmp_path / "a.mp4", frames=4)
    (tmp_path / "bad.mp4").write_bytes(b"not a video")

    def num_bad() -> int:
        return open_or_build(source, cache_dir=tmp_path).num_bad

    with caplog.at_level("INFO", logger="tinyvae"):
        assert num_bad() == num_bad() == 2 and caplog.text.count("indexed") == 1, "nothing is probed again for nothing"
    write_video(tmp_path / "bad.mp4", frames=4)
    assert num_bad() == 1
    write_video(tmp_path / "late.mp4", frames=4)
    assert num_bad() == 0


def test_places_may_be_text(video_folder: Path, tmp_path: Path) -> None:
    places: Any = {"source": str(video_folder), "data_root": str(video_folder), "cache_dir": str(tmp_path)}
    assert len(open_or_build(**places)) == 12


def test_an_index_of_the_older_form_is_refused_by_readers_and_made_again_by_builds(
    video_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = build(video_folder, tmp_path / "data_index.tvi").index
    content = index.file.read_bytes()
    index.file.write_bytes(ANY_MAGIC + b"1" + content[8:])
    assert is_index(index.file)
    with pytest.raises(UserError, match="make it again with: tinyvae data index DATA --output"):
        open_index(index.file)
    again = open_or_build(video_folder, cache_dir=tmp_path)
    assert index.file.read_bytes()[:8] == content[:8] and again.fingerprint == index.fingerprint
    assert caplog.text.count("of another version of tinyvae; it is made again") == 1
