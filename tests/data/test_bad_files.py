"""Bad files are named once, written down once, and too many stop the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tinyvae.data.clip_reading import BadFile, BadFileLog, BadFileWatch
from tinyvae.data.index import STATUS_BAD, STATUS_OK, open_index
from tinyvae.data.index_writer import IndexJournal, IndexRecord
from tinyvae.errors import UserError

BROKEN = BadFile(path="a ü.mp4", reason='cut "off"')
OTHER = BadFile(path="b.mp4", reason="no frames")


def lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def test_each_file_is_written_once_by_several_ranks_and_after_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "run" / "bad_files.jsonl"
    first_rank, second_rank = BadFileLog(file), BadFileLog(file)
    first_rank.add(BROKEN)
    second_rank.add(BROKEN, OTHER)
    first_rank.add(OTHER, BROKEN)
    BadFileLog(file).add(BROKEN, OTHER)
    assert lines(file) == [{"path": bad.path, "reason": bad.reason} for bad in (BROKEN, OTHER)]


def test_a_line_cut_by_a_kill_is_survived(tmp_path: Path) -> None:
    file = tmp_path / "bad_files.jsonl"
    BadFileLog(file).add(OTHER)
    with open(file, "a") as out:
        out.write('{"path": "a')
    BadFileLog(file).add(BROKEN, OTHER)
    assert [line["path"] for line in lines(file)] == [OTHER.path, BROKEN.path]


def test_the_bad_files_of_an_index_are_written(tmp_path: Path) -> None:
    journal = IndexJournal(tmp_path / "i.tvi")
    for number in range(5):
        status = STATUS_BAD if number < 2 else STATUS_OK
        journal.append(IndexRecord(path=f"{number}.mp4", status=status, reason="empty" * (number < 2)))
    journal.finish({"data_root": str(tmp_path), "source": ""})
    file = tmp_path / "bad_files.jsonl"
    assert BadFileLog(file).add_index(open_index(tmp_path / "i.tvi")) == 2
    assert sorted(line["path"] for line in lines(file)) == ["0.mp4", "1.mp4"]


def test_the_watch_names_each_file_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = BadFileWatch(limit=0.5)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.see((BROKEN,), 10)
    assert [record.getMessage() for record in caplog.records] == ['bad file a ü.mp4 skipped: cut "off"']
    assert watch.num_bad_tries == 3 and watch.num_tries == 30 and watch.named == {BROKEN.path: BROKEN.reason}


def test_the_watch_stops_a_run_above_the_limit_and_only_then() -> None:
    watch = BadFileWatch(limit=0.05)
    watch.see((BROKEN, OTHER), 40)  # 5 % of 40, but too early to judge
    watch.see((), 24)
    watch.see((), 36)  # 2 of 100
    watch.see((BROKEN, OTHER, BROKEN), 3)  # 5 of 103: 4.9 %
    with pytest.raises(UserError, match=r"6 of 104 clips .*5\.8%.*limit of 5\.0%.*'a ü\.mp4'.*bad_file_limit"):
        watch.see((OTHER,), 1)
