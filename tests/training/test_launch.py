"""The launcher of several processes: exit codes that say what happened, and signals that arrive once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import HANGS_S, still_alive, wait_until
from tinyvae.training.guards import SAME_ORDER_S


def start(script: str) -> subprocess.Popen[str]:
    """The launcher around a shell script that stands for torchrun and its ranks."""
    command = [sys.executable, "-m", "tinyvae.training.launch", "bash", "-c", script]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


LAUNCH = """
import sys
from pathlib import Path
from tinyvae.training import guards, launch

hold, guards.SAME_ORDER_S = guards.SignalWatch.hold, float(sys.argv[2])

def hold_and_tell(watch):
    hold(watch)
    Path(sys.argv[1]).touch()

guards.SignalWatch.hold = hold_and_tell
sys.exit(launch.run_launcher(["bash", "-c", sys.argv[3]]))
"""


def start_and_wait(script: str, folder: Path, *, same_order_s: float = SAME_ORDER_S) -> subprocess.Popen[str]:
    """The same; the launcher passes signals on from now on, and the script has made the file ``ready``."""
    command = [sys.executable, "-c", LAUNCH, str(folder / "holds"), str(same_order_s), script]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (folder / "holds").exists() and (folder / "ready").exists())
    return launcher


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("exit 0", 0, ""),
        ("exit 7", 7, ""),
        ("kill -KILL $$", 137, ""),
        ('touch "$TINYVAE_EXIT_NOTE"; exit 1', 1, ""),
        ('printf "2\\nno such file\\n" > "$TINYVAE_EXIT_NOTE"; exit 1', 2, "tinyvae: error: no such file\n"),
        (
            'printf "138\\n\\n" > "$TINYVAE_EXIT_NOTE"; exit 1',
            138,
            f"stopped by {signal.Signals(10).name}; go on with --resume latest\n",
        ),
    ],
    ids=["complete", "a failure", "killed", "killed before its note", "a mistake", "a signal to one rank"],
)
def test_the_exit_code_is_that_of_the_run(script: str, code: int, says: str) -> None:
    launcher = start(script)
    _, said = launcher.communicate(timeout=HANGS_S)
    assert (launcher.returncode, said) == (code, says)


def test_a_launcher_that_is_not_there_is_one_sentence() -> None:
    command = [sys.executable, "-m", "tinyvae.training.launch", "acelerate", "launch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS_S)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("tinyvae: error: acelerate cannot be started (No such file or directory); install it")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_is_the_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = (
        f"trap 'echo told >> {tmp_path}/told' {name}; touch {tmp_path}/ready; "
        f"while [ ! -e {tmp_path}/end ]; do sleep 0.05; done; exit 1"
    )
    launcher = start_and_wait(script, tmp_path, same_order_s=HANGS_S)
    for _ in range(2):  # in a moment: one order
        launcher.send_signal(number)
    wait_until(lambda: (tmp_path / "told").exists())
    time.sleep(0.2)  # time for a wrong second one
    (tmp_path / "end").touch()
    _, said = launcher.communicate(timeout=HANGS_S)
    assert launcher.returncode == 128 + number and f"stopped by {number.name}" in said
    assert (tmp_path / "told").read_text() == "told\n"


def test_a_second_signal_ends_every_process_at_once(tmp_path: Path) -> None:
    script = (
        f"trap 'touch {tmp_path}/told' TERM; sleep {2 * HANGS_S:g} & echo $! > {tmp_path}/pid; "
        f"touch {tmp_path}/ready; while :; do wait; done"
    )
    launcher = start_and_wait(script, tmp_path)
    launcher.send_signal(signal.SIGTERM)
    wait_until(lambda: (tmp_path / "told").exists())
    time.sleep(SAME_ORDER_S + 0.2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=HANGS_S)
    assert launcher.returncode == 143 and "SIGTERM received again: stopping at once" in said
    assert still_alive([int((tmp_path / "pid").read_text())]) == []
