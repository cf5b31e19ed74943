"""Nobody reads what a run says any more: a pipe whose reader ends, a terminal that closes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.training.tiny_runs import Launch, arguments_for, launch
from tinyvae import terminal
from tinyvae.training.guards import SAME_ORDER_S, SignalWatch

ENDLESS: dict[str, object] = {
    "max_train_steps": 100_000, "validation_steps": 0, "checkpointing_steps": 0, "log_every": 1,
}  # fmt: skip


def last_step(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(started: Launch, run: Path, step: int) -> None:
    (process,) = started.processes
    wait_until(lambda: last_step(run) >= step or not process.is_alive(), shows=lambda: f"at step {last_step(run)}")
    assert process.is_alive(), f"ended with {process.exitcode} at step {last_step(run)}"


def open_streams_again() -> None:
    """As a process has them that starts at this pipe or terminal: Python's own remember that they were files."""
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))


@dataclass
class WritesToPipe:
    """A rank whose stdout and stderr are a named pipe."""

    pipe: Path
    seconds_per_line: float = 0.5

    def __call__(self, rank: int) -> None:
        writer = os.open(self.pipe, os.O_WRONLY)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        open_streams_again()
        terminal.SECONDS_PER_LINE = self.seconds_per_line


@dataclass
class AtTerminal:
    """A rank that leads a session of its own at a terminal."""

    name: str

    def __call__(self, rank: int) -> None:
        os.setsid()
        inside = os.open(self.name, os.O_RDWR)  # the first terminal that a session's leader opens is the session's
        for stream in (0, 1, 2):
            os.dup2(inside, stream)
        os.close(inside)
        open_streams_again()


@contextmanager
def run_into(pipe: WritesToPipe, clips: Path, run: Path) -> Iterator[tuple[Launch, int]]:
    """An endless run after its first step, and the reader's end of its pipe. Then SIGTERM ends it, and it is saved."""
    os.mkfifo(pipe.pipe)
    with launch(arguments_for(clips, run, **ENDLESS), run.parent, prepare=pipe) as started:
        reader = os.open(pipe.pipe, os.O_RDONLY)
        wait_for_step(started, run, 1)
        yield started, reader
        started.signal(signal.SIGTERM)
        started.ends_with(143)
    assert_nothing_was_lost(run)


def assert_nothing_was_lost(run: Path) -> None:
    (saved,) = run.glob("emergency_checkpoint-*")
    assert saved.name == f"emergency_checkpoint-{last_step(run)}"


def test_a_pipe_whose_reader_ends_ends_nothing(clips: Path, tmp_path: Path) -> None:
    """As in ``tinyvae train ... 2>&1 | head -1``. The run goes on, and SIGTERM still saves it."""
    run, log = tmp_path / "run", tmp_path / "run/train.log"
    with run_into(WritesToPipe(tmp_path / "pipe"), clips, run) as (started, reader):
        assert os.read(reader, 10)
        os.close(reader)
        told = "can no longer be written (Broken pipe); the run goes on"
        wait_until(lambda: told in log.read_text(), shows=log.read_text)
        wait_for_step(started, run, last_step(run) + 10)
    text = log.read_text()
    assert text.count("can no longer be written") == 1, "once, however much is written there"
    assert f"step {last_step(run)} of 100000" in text and "the run ends: SIGTERM" in text


def test_the_signal_thread_outlives_a_closed_pipe(clips: Path, tmp_path: Path) -> None:
    """Its own message is the first thing that finds the pipe closed: the run is saved all the same."""
    pipe = WritesToPipe(tmp_path / "pipe", seconds_per_line=600)
    with run_into(pipe, clips, tmp_path / "run") as (_, reader):
        os.close(reader)


def test_a_terminal_that_closes_saves_and_ends(clips: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    terminal_of_run, inside = os.openpty()
    with launch(arguments_for(clips, run, **ENDLESS), tmp_path, prepare=AtTerminal(os.ttyname(inside))) as started:
        wait_for_step(started, run, 3)
        os.close(inside)
        os.close(terminal_of_run)
        started.ends_with(129)
    assert_nothing_was_lost(run)
    assert "the run ends: SIGHUP" in (run / "train.log").read_text()


@pytest.mark.parametrize(("by_nohup", "heard"), [(True, 0), (False, signal.SIGHUP)])
def test_nohup_is_obeyed(by_nohup: bool, heard: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    watch = SignalWatch()
    try:
        watch.hold()
        for _ in range(2):  # kernel and shell both tell of one closed terminal, each in its own time
            os.kill(os.getpid(), signal.SIGHUP)
            wait_until(lambda: watch.received == heard)
            time.sleep(SAME_ORDER_S + 0.1)
        assert watch.received == heard
    finally:
        watch.close()
        signal.signal(signal.SIGHUP, before)
