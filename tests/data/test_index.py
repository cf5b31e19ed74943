"""The index file: what is stored, what survives a kill, and what is refused."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.small_indexes import build, index_of
from tinyvae.data.index import MAGIC, SPLITS, IndexJournal, IndexRow, is_index, open_index
from tinyvae.errors import MissingFileError, UserError
from tinyvae.storage import Url
from tinyvae.video.decode import probe_video


def test_rows_hold_what_the_probe_found(video_folder: Path, tmp_path: Path) -> None:
    index = build(video_folder, tmp_path / "i.tvi").index
    assert len(index) == 12 and index.num_bad == 0 and not index.has_splits
    row = index.row(index.find("sub/small.mp4"))
    assert (row.frames, row.width, row.height, row.codec, row.ok) == (30, 48, 32, "h264", True)
    assert row.fps == pytest.approx(24.0)
    assert row.file_bytes == (video_folder / row.path).stat().st_size
    assert index.info(row) == probe_video(video_folder / row.path, thorough=False)
    assert index.find("sub/none.mp4") is None


def test_a_killed_build_keeps_its_rows_and_a_torn_row_is_dropped(tmp_path: Path) -> None:
    output = tmp_path / "i.tvi"
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tinyvae.data.index import IndexJournal, IndexRow\n"
        "journal = IndexJournal(Path(sys.argv[1]))\n"
        "for n in range(600): journal.append(IndexRow(path=f'{n}.mp4', frames=n, codec='h264'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(output)], check=False)
    with open(output.with_name("i.tvi.new-rows"), "ab") as rows:
        rows.write(b"half a row")
    journal = IndexJournal(output)
    assert journal.resumed is not None and 500 <= len(journal.resumed) < 600, "all but the buffer"
    assert journal.resumed.row(journal.resumed.find("499.mp4")).frames == 499
    journal.close()


def test_only_one_process_builds_an_index(tmp_path: Path) -> None:
    journal = IndexJournal(tmp_path / "i.tvi")
    with pytest.raises(UserError, match="another process is building"):
        IndexJournal(tmp_path / "i.tvi")
    journal.close()
    IndexJournal(tmp_path / "i.tvi").close()


def test_the_journal_is_removed_before_another_build_may_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first build would remove the journal of the second."""
    journal, removed, unlink = IndexJournal(tmp_path / "i.tvi"), [], Path.unlink

    def locked_unlink(file: Path, missing_ok: bool = False) -> None:
        with pytest.raises(UserError, match="another process is building"):
            IndexJournal(tmp_path / "i.tvi")
        removed.append(file.name)
        unlink(file, missing_ok=missing_ok)

    journal.append(IndexRow(path="a.mp4"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", locked_unlink)
        journal.finish({"data_root": str(tmp_path), "source": ""})
    assert removed == ["i.tvi.new-rows", "i.tvi.new-text", "i.tvi.resume", "i.tvi.lock"]


def test_an_index_travels_by_pickle_and_to_another_root(video_folder: Path, tmp_path: Path) -> None:
    index = build(video_folder, tmp_path / "i.tvi").index
    moved = tmp_path / "moved"
    shutil.copytree(video_folder, moved)
    there = pickle.loads(pickle.dumps(open_index(tmp_path / "i.tvi", moved)))
    assert there.full_path(there.row(0)).is_relative_to(moved) and there.fingerprint == index.fingerprint


def test_what_is_no_index_is_refused(video_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "i.tvi"
    build(video_folder, output)
    for nothing in (tmp_path / "none.tvi", tmp_path, output / "deep.tvi", Url("memory://none.tvi")):
        with pytest.raises(MissingFileError, match=f"there is no index at {nothing}; .* DATA --output {nothing}"):
            open_index(nothing)
    with open(output, "r+b") as stream:
        stream.truncate(output.stat().st_size - 1)
    with pytest.raises(UserError, match="cut off"):
        open_index(output)
    for header in ("{}", "[]", "?"):
        output.write_bytes(MAGIC + header.encode())
        with pytest.raises(UserError, match=r"the header of the index .* is broken"):
            open_index(output)
    other = tmp_path / "mine.txt"
    other.write_text("my notes")
    assert not is_index(other)
    with pytest.raises(UserError, match="not an index"):
        open_index(other)
    with pytest.raises(UserError, match="not overwritten"):
        build(video_folder, other)
    assert other.read_text() == "my notes"
    with pytest.raises(UserError, match="not overwritten"):
        build(video_folder, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="lists no video"):
        build(tmp_path / "empty", tmp_path / "e.tvi")


def test_columns_are_read_in_chunks_and_row_numbers_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyvae.data.index.CHUNK_ROWS", 64)
    rows = (IndexRow(path=f"d/{n}.mp4", reason="r" * (n % 7 == 0), frames=n) for n in range(500))
    index = index_of(tmp_path, *rows)
    frames = np.concatenate([rows["frames"] for _, rows in index.chunks()])
    assert [index.row(number).frames for number in range(500)] == frames.tolist()
    assert {row.frames for row in index.bad_rows()} == set(range(0, 500, 7)) and index.num_bad == 72
    assert all(index.row(index.find(f"d/{number}.mp4")).frames == number for number in range(500))


def test_the_fingerprint_is_that_of_older_versions(tmp_path: Path) -> None:
    """Checkpoints hold it: another one would say that the data of a resumed run has changed."""
    rows = []
    for number in range(40):
        split, reason = SPLITS[number % 4], "cut off" * (number % 9 == 0)
        texts = {"path": f"d/{number}.mp4", "split": split, "reason": reason}
        rows.append(IndexRow(**texts, frames=number, file_bytes=number**2, width=64))
    assert index_of(tmp_path, *rows).fingerprint == "f4e76379e795cf029a4af419d8e0c5fd"
