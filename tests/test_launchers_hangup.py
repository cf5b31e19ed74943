"""The launchers when the terminal closes, under nohup, and when nobody reads their output: real starts on the CPU."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.processes import HANGS_S, free_port, still_alive, wait_until
from tests.test_launchers import H100, RECOVERY, real_environment, settings

__all__ = ["settings"]  # the fixture
pytestmark = pytest.mark.slow

ENDLESS = ["--max_train_steps", "100000", "--validation_steps", "0"]


def is_training(run: Path) -> bool:
    return (run / "metrics.jsonl").exists()


def saved(run: Path) -> list[Path]:
    return list(run.glob("emergency_checkpoint-*/manifest.json"))


@pytest.mark.parametrize(
    ("words", "num_processes"),
    [([str(H100), "1"], 1), ([str(RECOVERY), "2"], 5)],
    ids=["launcher, one process", "recovery, two processes"],
)
def test_a_terminal_that_closes_leaves_a_saved_run_and_no_orphan(
    tmp_path: Path, settings: list[str], words: list[str], num_processes: int
) -> None:
    """Typed into an interactive shell, as over ssh: the kernel tells shell and job, the shell tells the job again."""
    run = tmp_path / "run"
    terminal, inside = os.openpty()
    shell = subprocess.Popen(
        ["setsid", "--ctty", "bash", "--norc", "-i"],
        env=real_environment(free_port()), cwd=tmp_path, stdin=inside, stdout=inside, stderr=inside,
    )  # fmt: skip
    os.close(inside)
    os.write(terminal, f"{shlex.join([*words, *settings, *ENDLESS])} 2>log; echo $? >code\n".encode())
    try:
        wait_until(lambda: is_training(run))
        everybody = psutil.Process(shell.pid).children(recursive=True)
        assert len(everybody) == num_processes
        os.close(terminal)
        assert still_alive(everybody) == []
    finally:
        shell.kill()
        shell.wait()
    assert saved(run), (tmp_path / "log").read_text()
    assert "again: stopping at once" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_hangup_ends_the_launcher_with_129(tmp_path: Path, settings: list[str], processes: str) -> None:
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [str(H100), processes, *settings, *ENDLESS],
            env=real_environment(free_port()), cwd=tmp_path, stdout=stream, stderr=stream,
        )  # fmt: skip
        wait_until(lambda: is_training(tmp_path / "run"))
        everybody = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGHUP)
        assert process.wait(HANGS_S) == 129, log.read_text()
    assert saved(tmp_path / "run") and still_alive(everybody) == []
    assert log.read_text().count("stopped by SIGHUP") == 1, "said once"


def test_nohup_goes_on_when_every_process_is_told(tmp_path: Path, settings: list[str]) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    with log.open("w") as stream:
        process = subprocess.Popen(
            ["nohup", str(H100), "2", *settings, *ENDLESS],
            env=real_environment(free_port()), cwd=tmp_path, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(lambda: is_training(run))
        everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(everybody) == 4, "launcher, accelerate and two ranks"
        for one in everybody:
            one.send_signal(signal.SIGHUP)
        lines = len((run / "metrics.jsonl").read_text().splitlines())
        wait_until(lambda: len((run / "metrics.jsonl").read_text().splitlines()) > lines + 5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 143, log.read_text()
    assert saved(run) and "SIGHUP received" not in log.read_text()
    assert log.read_text().count("stopped by SIGTERM") == 1 and "\r" not in log.read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_reader_that_ends_ends_nothing(tmp_path: Path, settings: list[str], processes: str) -> None:
    """As in ``./train_taehv_h100.sh ... 2>&1 | head -1``."""
    run = tmp_path / "run"
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [str(H100), processes, *settings, *ENDLESS],
        env=real_environment(free_port()), cwd=tmp_path, stdout=writer, stderr=writer,
    )  # fmt: skip
    os.close(writer)
    assert os.read(reader, 10)
    os.close(reader)
    try:
        wait_until(lambda: is_training(run))
        everybody = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 143
        assert saved(run) and still_alive(everybody) == []
    finally:
        process.kill()
