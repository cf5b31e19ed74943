"""The launcher of several processes: exit codes that say what happened, and signals that arrive once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import still_alive


def start(script: str) -> subprocess.Popen[str]:
    """The launcher around a shell script that stands for torchrun and its ranks."""
    command = [sys.executable, "-m", "tinyvae.training.launch", "bash", "-c", script]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("exit 0", 0, ""),
        ("exit 7", 7, ""),
        ("kill -KILL $$", 137, ""),
        ('printf "2\\nno such file\\n" > "$TINYVAE_EXIT_NOTE"; exit 1', 2, "tinyvae: error: no such file\n"),
        (
            'printf "138\\n\\n" > "$TINYVAE_EXIT_NOTE"; exit 1',
            138,
            f"stopped by {signal.Signals(10).name}; go on with --resume latest\n",
        ),
    ],
    ids=["complete", "a failure", "killed", "a mistake", "a signal to one rank"],
)
def test_the_exit_code_is_that_of_the_run(script: str, code: int, says: str) -> None:
    launcher = start(script)
    _, said = launcher.communicate(timeout=60)
    assert (launcher.returncode, said) == (code, says)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_is_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    launcher = start(
        f"trap 'echo told >> {tmp_path}/told' {name}; touch {tmp_path}/ready; "
        f"while [ ! -e {tmp_path}/end ]; do sleep 0.05; done; exit 1"
    )
    wait_for(tmp_path / "ready")
    time.sleep(0.2)
    for _ in range(2):  # in a moment: one order
        launcher.send_signal(number)
    wait_for(tmp_path / "told")
    (tmp_path / "end").touch()
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number and f"stopped by {number.name}" in said
    assert (tmp_path / "told").read_text() == "told\n"


def test_a_second_signal_ends_every_process_at_once(tmp_path: Path) -> None:
    launcher = start(f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/pid; touch {tmp_path}/ready; wait; wait")
    wait_for(tmp_path / "ready")
    time.sleep(0.2)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 143 and "SIGTERM received again: stopping at once" in said
    assert still_alive([int((tmp_path / "pid").read_text())]) == []
