"""The launchers with real processes on the CPU: they train and resume, signals save the run, a terminal that closes,
nohup, and output that nobody reads."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import HANGS_S, free_port, still_alive, wait_until
from tests.test_launchers import H100, RECOVERY
from tests.training.tiny_runs import arguments_for, write_clips
from tinyvae.training.guards import SAME_ORDER_S

pytestmark = pytest.mark.slow

ENDLESS = ["--max_train_steps", "100000", "--validation_steps", "0"]


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return arguments_for(write_clips(tmp_path / "clips"), tmp_path / "run", max_train_steps=4, log_every=1)


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "USE_CPU": "1", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), **more}


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[bytes]:
    """What it says is in ``folder/log``."""
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            words, env=environment(**more), cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def start_and_wait(folder: Path, *words: str, **more: str) -> subprocess.Popen[bytes]:
    """The same; the run has taken a step."""
    process = start(folder, *words, **more)
    wait_until(lambda: is_training(folder), shows=(folder / "log").read_text)
    return process


def is_training(folder: Path) -> bool:
    return (folder / "run" / "metrics.jsonl").exists()


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all that it started."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def assert_saved(folder: Path) -> None:
    assert list((folder / "run").glob("emergency_checkpoint-*/manifest.json")), (folder / "log").read_text()


def run_to_the_end(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment(), cwd=folder, capture_output=True, text=True, timeout=HANGS_S, check=False
    )


def test_two_processes_train_resume_and_tell_mistakes_once(tmp_path: Path, settings: list[str]) -> None:
    done = run_to_the_end(tmp_path, str(H100), "2", *settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the run is in") == 1
    manifest = json.loads((tmp_path / "run" / "checkpoint-4" / "manifest.json").read_text())
    assert manifest["world_size"] == 2 and manifest["engine"] == "plain"
    again = run_to_the_end(tmp_path, str(H100), "2", *settings, "--max_train_steps", "6", "--resume", "latest")
    assert again.returncode == 0 and "resumed from" in again.stderr, again.stderr
    wrong = run_to_the_end(tmp_path, str(H100), "2", *settings, "--n_frames", "6")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    (tmp_path / "clips" / "clip_0.mp4").unlink()
    other_files = run_to_the_end(tmp_path, str(H100), "2", *settings, "--max_train_steps", "8", "--resume", "latest")
    assert other_files.returncode == 2, other_files.stderr
    last = other_files.stderr.splitlines()[-1]  # not buried under torchrun's words
    assert "the list of training files" in last and "--allow_changed_settings" in last


def test_two_launchers_on_loopback_are_two_machines(tmp_path: Path, settings: list[str]) -> None:
    port, nodes = str(free_port()), []
    for node in ("1", "0"):
        (tmp_path / node).mkdir()
        more = {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1", "NNODES": "2", "RANK": node}
        nodes.append(start(tmp_path / node, str(H100), "1", *settings, **more))
    assert [node.wait(HANGS_S) for node in nodes] == [0, 0], [(tmp_path / n / "log").read_text() for n in "01"]
    manifest = json.loads((tmp_path / "run" / "checkpoint-4" / "manifest.json").read_text())
    assert manifest["world_size"] == 2


# signals

WATCHED = """
import os
from pathlib import Path
from tinyvae.training import guards

hold = guards.SignalWatch.hold

def hold_and_tell(watch):
    hold(watch)
    Path(os.environ["HOLDS"], str(os.getpid())).touch()

guards.SignalWatch.hold = hold_and_tell
if "SAME_ORDER_S" in os.environ:
    guards.SAME_ORDER_S = guards.SAME_ORDER_BY_TORCHRUN_S = float(os.environ["SAME_ORDER_S"])
"""


def watched(folder: Path, **more: str) -> dict[str, str]:
    """More environment: each process leaves a file in ``folder/holds`` when it takes a signal as an order to save.

    ``SAME_ORDER_S``: for so long a signal that comes again is the same order, however late a busy machine sends it.
    """
    (folder / "holds").mkdir()
    (folder / "python").mkdir()
    (folder / "python" / "sitecustomize.py").write_text(WATCHED)  # every fresh Python begins with this
    path = os.pathsep.join([str(folder / "python"), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "HOLDS": str(folder / "holds"), **more}


def test_a_signal_to_the_launcher_alone_saves_and_exits_by_convention(tmp_path: Path, settings: list[str]) -> None:
    process = start_and_wait(tmp_path, str(H100), "2", *settings, *ENDLESS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS_S) == 143, (tmp_path / "log").read_text()
    assert_saved(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_scheduler_that_tells_every_process_of_the_job(
    tmp_path: Path, settings: list[str], number: signal.Signals
) -> None:
    """As Slurm and systemd do. Each launcher hands it on besides, so a rank hears it two or three times: one order."""
    more = watched(tmp_path, SAME_ORDER_S=str(HANGS_S))
    process = start_and_wait(tmp_path, str(RECOVERY), "2", *settings, *ENDLESS, **more)
    everybody = family(process)
    assert len(everybody) == 5, "recovery, launcher, accelerate and two ranks"
    for one in everybody:
        one.send_signal(number)
    assert process.wait(HANGS_S) == 128 + number, (tmp_path / "log").read_text()
    assert_saved(tmp_path)
    assert "again: stopping at once" not in (tmp_path / "log").read_text()


def test_a_signal_to_one_rank_alone_is_the_launchers_exit_code(tmp_path: Path, settings: list[str]) -> None:
    """torchrun says 1 for it, which would read as a failure."""
    process = start_and_wait(tmp_path, str(H100), "2", *settings, *ENDLESS)
    (accelerate,) = psutil.Process(process.pid).children()
    accelerate.children()[-1].send_signal(signal.SIGUSR1)
    assert process.wait(HANGS_S) == 128 + signal.SIGUSR1, (tmp_path / "log").read_text()
    assert_saved(tmp_path)


def test_a_second_signal_to_the_launcher_ends_everybody_at_once(tmp_path: Path, settings: list[str]) -> None:
    """Also where there is no pgrep, as on slim images."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "basename", "grep", "sort"):
        (tools / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    more = watched(tmp_path, PATH=f"{Path(sys.executable).parent}:{tools}")
    long_step = [*ENDLESS, "--gradient_accumulation_steps", "4000"]
    process = start(tmp_path, str(H100), "2", *settings, *long_step, **more)
    wait_until(lambda: len(list((tmp_path / "holds").iterdir())) == 3, shows=log.read_text)  # launcher, two ranks
    everybody = family(process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM received: finishing" in log.read_text(), shows=log.read_text)
    time.sleep(SAME_ORDER_S + 0.2)
    assert process.poll() is None, "a step takes minutes here"
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS_S) == 143, log.read_text()
    assert still_alive(everybody) == []


# a terminal that closes, nohup, and output that nobody reads


@pytest.mark.parametrize(
    ("words", "num_processes"),
    [([str(H100), "1"], 1), ([str(RECOVERY), "2"], 5)],
    ids=["launcher, one process", "recovery, two processes"],
)
def test_a_terminal_that_closes_leaves_a_saved_run_and_no_orphan(
    tmp_path: Path, settings: list[str], words: list[str], num_processes: int
) -> None:
    """Typed into an interactive shell, as over ssh: the kernel tells shell and job, the shell tells the job again."""
    terminal, inside = os.openpty()
    shell = subprocess.Popen(
        ["setsid", "--ctty", "bash", "--norc", "-i"],
        env=environment(), cwd=tmp_path, stdin=inside, stdout=inside, stderr=inside,
    )  # fmt: skip
    os.close(inside)
    os.write(terminal, f"{shlex.join([*words, *settings, *ENDLESS])} 2>log; echo $? >code\n".encode())
    try:
        wait_until(lambda: is_training(tmp_path))
        everybody = family(shell)[1:]
        assert len(everybody) == num_processes
        os.close(terminal)
        assert still_alive(everybody) == []
    finally:
        shell.kill()
        shell.wait()
    assert_saved(tmp_path)
    assert "again: stopping at once" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_hangup_ends_the_launcher_with_129(tmp_path: Path, settings: list[str], processes: str) -> None:
    process = start_and_wait(tmp_path, str(H100), processes, *settings, *ENDLESS)
    everybody = family(process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(HANGS_S) == 129, (tmp_path / "log").read_text()
    assert_saved(tmp_path)
    assert still_alive(everybody) == []
    assert (tmp_path / "log").read_text().count("stopped by SIGHUP") == 1, "said once"


def test_nohup_goes_on_when_every_process_is_told(tmp_path: Path, settings: list[str]) -> None:
    log, metrics = tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    process = start_and_wait(tmp_path, "nohup", str(H100), "2", *settings, *ENDLESS)
    everybody = family(process)
    assert len(everybody) == 4, "launcher, accelerate and two ranks"
    for one in everybody:
        one.send_signal(signal.SIGHUP)
    lines = len(metrics.read_text().splitlines())
    wait_until(lambda: len(metrics.read_text().splitlines()) > lines + 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS_S) == 143, log.read_text()
    assert_saved(tmp_path)
    assert "SIGHUP received" not in log.read_text()
    assert log.read_text().count("stopped by SIGTERM") == 1 and "\r" not in log.read_text()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_reader_that_ends_ends_nothing(tmp_path: Path, settings: list[str], processes: str) -> None:
    """As in ``./train_taehv_h100.sh ... 2>&1 | head -1``."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [str(H100), processes, *settings, *ENDLESS], env=environment(), cwd=tmp_path, stdout=writer, stderr=writer
    )
    os.close(writer)
    assert os.read(reader, 10)
    os.close(reader)
    try:
        wait_until(lambda: is_training(tmp_path))
        everybody = family(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS_S) == 143
        assert still_alive(everybody) == []
    finally:
        process.kill()
    assert list((tmp_path / "run").glob("emergency_checkpoint-*/manifest.json"))
