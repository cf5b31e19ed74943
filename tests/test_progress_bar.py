"""A bar in a file or a pipe is lines; on a terminal it moves."""

from __future__ import annotations

import io
import sys

import pytest

from tinyvae import terminal as module
from tinyvae.terminal import progress_bar


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
    monkeypatch.setattr(module, "SECONDS_PER_LINE", 0.0)
    assert len(shown(monkeypatch, io.StringIO(), leave=True).splitlines()) == 7, "the first, each of five, the last"
    assert len(shown(monkeypatch, io.StringIO(), leave=False).splitlines()) == 7, "it took longer than no time"


def test_short_work_under_a_passing_bar_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), leave=False) == ""


def test_a_terminal_has_a_moving_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), leave=True)
    assert text.count("\r") >= 2 and text.count("\n") == 1
