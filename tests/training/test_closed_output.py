"""Nobody reads what a run says any more: a pipe whose reader ends, a terminal that closes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.tiny_runs import arguments_for
from tinyvae.training.guards import SignalWatch

ENDLESS: dict[str, object] = {
    "max_train_steps": 100_000, "validation_steps": 0, "checkpointing_steps": 0, "log_every": 1,
}  # fmt: skip


def last_step(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(process: subprocess.Popen[bytes], run: Path, step: int, *, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while last_step(run) < step:
        assert process.poll() is None, f"ended with {process.returncode} at step {last_step(run)}"
        assert time.monotonic() < deadline, f"only at step {last_step(run)}"
        time.sleep(0.05)


def assert_nothing_was_lost(run: Path) -> None:
    (saved,) = run.glob("emergency_checkpoint-*")
    assert saved.name == f"emergency_checkpoint-{last_step(run)}"


def test_a_pipe_whose_reader_ends_ends_nothing(clips: Path, tmp_path: Path) -> None:
    """As in ``tinyvae train ... 2>&1 | head -1``. The run goes on, and SIGTERM still saves it."""
    run = tmp_path / "run"
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "tinyvae", "train", *arguments_for(clips, run, **ENDLESS)]
    process = subprocess.Popen(words, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        wait_for_step(process, run, 1)
        assert os.read(reader, 10)
        os.close(reader)
        wait_for_step(process, run, last_step(run) + 50)
        wait_for_text(run / "train.log", "can no longer be written (Broken pipe); the run goes on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    finally:
        process.kill()
    assert_nothing_was_lost(run)
    text = (run / "train.log").read_text()
    assert text.count("can no longer be written") == 1, "once, however much is written there"
    assert f"step {last_step(run)} of 100000" in text and "the run ends: SIGTERM" in text


def wait_for_text(file: Path, text: str, *, timeout_s: float = 30) -> None:
    """The bar speaks every ten seconds where it is no terminal's."""
    deadline = time.monotonic() + timeout_s
    while text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.1)


def test_the_signal_thread_outlives_a_closed_pipe(clips: Path, tmp_path: Path) -> None:
    """Its own message is the first thing that finds the pipe closed: the run is saved all the same."""
    run = tmp_path / "run"
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "tinyvae", "train", *arguments_for(clips, run, **ENDLESS)]
    process = subprocess.Popen(words, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        wait_for_step(process, run, 1)
        os.close(reader)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    finally:
        process.kill()
    assert_nothing_was_lost(run)


def test_a_terminal_that_closes_saves_and_ends(clips: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    terminal, inside = os.openpty()
    words = [sys.executable, "-m", "tinyvae", "train", *arguments_for(clips, run, **ENDLESS)]
    process = subprocess.Popen(["setsid", "--ctty", *words], stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    try:
        wait_for_step(process, run, 3)
        os.close(terminal)
        assert process.wait(30) == 129
    finally:
        process.kill()
    assert_nothing_was_lost(run)
    assert "the run ends: SIGHUP" in (run / "train.log").read_text()


@pytest.mark.parametrize(("by_nohup", "heard"), [(True, 0), (False, signal.SIGHUP)])
def test_nohup_is_obeyed(by_nohup: bool, heard: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    watch = SignalWatch()
    try:
        watch.hold()
        for _ in range(2):  # kernel and shell both tell of one closed terminal
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.4)
        assert watch.received == heard
    finally:
        watch.close()
        signal.signal(signal.SIGHUP, before)
