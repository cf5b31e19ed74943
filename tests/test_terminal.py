"""What commands write: bars that are lines in a file, streams whose reader is gone, amounts in words.

Whole runs without readers are in ``training/test_closed_output.py``.
"""

from __future__ import annotations

import io
import os
import sys

import pytest

from tinyvae import terminal
from tinyvae.terminal import LastingStream, bytes_in_words, count_of, duration_in_words, outlive_readers, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, leave: bool) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(total=5, desc="encode", unit="frame", leave=leave) as bar:
        for number in range(5):
            bar.set_postfix_str(f"part {number}")
            bar.update()
    return stream.getvalue()


def test_a_file_gets_whole_lines_and_the_last_is_at_100_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, io.StringIO(), leave=True)
    lines = text.splitlines()
    assert "\r" not in text and text.endswith("\n") and len(lines) == 2
    assert lines[0].startswith("encode:   0%") and "100%" in lines[1] and "5/5" in lines[1] and "part 4" in lines[1]


def test_a_line_is_due_every_so_often_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "SECONDS_PER_LINE", 0.0)
    assert len(shown(monkeypatch, io.StringIO(), leave=True).splitlines()) == 7, "the first, each of five, the last"
    assert len(shown(monkeypatch, io.StringIO(), leave=False).splitlines()) == 7, "it took longer than no time"


def test_short_work_under_a_passing_bar_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), leave=False) == ""


def test_a_terminal_has_a_moving_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), leave=True)
    assert text.count("\r") >= 2 and text.count("\n") == 1


def test_a_stream_without_a_reader_takes_everything(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        lasting = LastingStream(stream)
        print("heard", file=lasting)
        assert os.read(reader, 100) == b"heard\n"
        os.close(reader)
        for _ in range(3):
            print("lost", file=lasting, flush=True)
        os.write(writer, b"a C library's words\n")
    (record,) = caplog.records
    assert "can no longer be written (Broken pipe); the run goes on" in record.getMessage()


def test_the_standard_streams_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stderr
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    outlive_readers()
    wrapped = sys.stderr
    outlive_readers()
    assert sys.stderr is wrapped and isinstance(wrapped, LastingStream)
    assert wrapped.encoding == before.encoding and wrapped.isatty() == before.isatty()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.351, "0.35 s"),
        (57, "57 s"),
        (130, "2.2 min"),
        (3000, "50 min"),
        (9771.87, "2.7 hours"),
        (86_400, "24 hours"),
        (200_000, "2.3 days"),
        (86_400 * 300, "300 days"),
        (86_400 * 11_310, "31 years"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration_in_words(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5_000_000, "4.77 MiB"),
        (1010 * 2**20, "0.99 GiB"),
        (139 * 2**30, "139 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(count: int, words: str) -> None:
    assert bytes_in_words(count) == words


def test_counted_things() -> None:
    assert [count_of(n, "clip") for n in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
