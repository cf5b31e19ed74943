"""SIGTERM, SIGINT and SIGUSR1: finish the step, save, exit with 128 + n; and a second one ends at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import HANGS_S, still_alive, wait_until
from tests.training.faults import Both, HeldStep, SignalInStep
from tests.training.tiny_runs import SERAENA, arguments_for, launch, run_differences, train_here
from tinyvae.data.index_build import build_index
from tinyvae.training import clips as clips_module
from tinyvae.training import guards, validation
from tinyvae.training.guards import SAME_ORDER_S, SignalWatch


def resume_and_compare(clips: Path, run: Path, undisturbed: Path, **changes: object) -> None:
    train_here(arguments_for(clips, run, resume_from_checkpoint="latest", gradient_accumulation_steps=2, **changes))
    assert run_differences(undisturbed, run, 6) == []


@pytest.mark.parametrize(
    ("number", "call", "step"),
    [(signal.SIGINT, 7, 4), (signal.SIGUSR1, 12, 6)],
    ids=["SIGINT in mid-accumulation", "SIGUSR1 in the last step"],
)
def test_one_process(
    clips: Path, tmp_path: Path, undisturbed: Path, number: signal.Signals, call: int, step: int
) -> None:
    """Known failure 8 is SIGTERM before a validation."""
    run = tmp_path / "run"
    arguments = arguments_for(clips, run, gradient_accumulation_steps=2)
    running = launch(arguments, tmp_path, prepare=SignalInStep(rank=0, call=call, number=number))
    running.ends_with(128 + number)
    assert (run / f"emergency_checkpoint-{step}").is_dir()
    assert f"{number.name} received: finishing the step" in running.log()
    assert f"stopped by {number.name}; go on with --resume latest" in running.log()
    assert "Traceback" not in running.log()
    assert f"the run ends: {number.name}" in (run / "train.log").read_text()
    resume_and_compare(clips, run, undisturbed)


def test_a_second_signal_ends_at_once(clips: Path, tmp_path: Path) -> None:
    step = HeldStep(tmp_path / "never", call=1)
    running = launch(arguments_for(clips, tmp_path / "run"), tmp_path, prepare=step)
    running.wait_for("call 1")
    running.signal(signal.SIGTERM)
    running.wait_for("SIGTERM received")
    assert running.processes[0].is_alive()
    running.signal(signal.SIGINT)
    assert running.wait() == [128 + signal.SIGINT], "the step has no end: it was not waited for"
    assert not list((tmp_path / "run").glob("*checkpoint*"))


def patient(rank: int) -> None:
    """A signal counts as another one's echo for long: a busy machine may need more than 0.3 s to send it."""
    guards.SAME_ORDER_S = HANGS_S


def test_one_order_that_arrives_twice_is_not_a_second_one(clips: Path, tmp_path: Path) -> None:
    """`timeout` tells its child and then the child's group; a scheduler tells every process of the job."""
    step = HeldStep(tmp_path / "go on", call=1)
    running = launch(arguments_for(clips, tmp_path / "run"), tmp_path, prepare=Both(step, patient))
    running.wait_for("call 1")
    running.signal(signal.SIGTERM)
    running.wait_for("SIGTERM received")
    running.signal(signal.SIGTERM)
    time.sleep(0.5)  # time for a wrong end
    step.release()
    running.ends_with(143)
    assert (tmp_path / "run/emergency_checkpoint-1").is_dir()


class SignalInValidation:
    """SIGTERM before a batch of the second validation is measured."""

    def __call__(self, rank: int) -> None:
        measure, calls = validation.Scorer.measure, []

        def measure_and_signal(scorer: Any, batch: Any) -> Any:
            calls.append(1)
            if rank == 0 and len(calls) == 3:  # each validation measures two batches of a clip
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: guards._open_watches[0].received)
            print(f"measured {len(calls)}", flush=True)
            return measure(scorer, batch)

        validation.Scorer.measure = measure_and_signal  # type: ignore[method-assign]


def test_in_a_validation(clips: Path, tmp_path: Path, undisturbed: Path) -> None:
    """It is left at once, and made up for when the run is resumed."""
    run = tmp_path / "run"
    running = launch(arguments_for(clips, run, gradient_accumulation_steps=2), tmp_path, prepare=SignalInValidation())
    running.ends_with(143)
    assert "measured 3" in running.log() and "measured 4" not in running.log()
    assert (run / "emergency_checkpoint-4").is_dir()
    resume_and_compare(clips, run, undisturbed)


def slow_probe(path: Path, **options: object) -> None:
    print("probing", flush=True)
    time.sleep(2 * HANGS_S)


class SlowIndex:
    """Building the index takes for ever, in two processes of its own."""

    def __call__(self, rank: int) -> None:
        def slow(*arguments: object, **options: object) -> None:
            build_index(*arguments[:2], num_workers=2, probe=slow_probe)  # type: ignore[arg-type]

        clips_module.bring_up_to_date = slow  # type: ignore[assignment]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_before_the_first_step_there_is_nothing_to_wait_for(
    clips: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    running = launch(arguments_for(clips, tmp_path / "run"), tmp_path, prepare=SlowIndex())
    running.wait_for("probing")
    everybody = [psutil.Process(running.processes[0].pid)]
    everybody += everybody[0].children(recursive=True)
    assert len(everybody) >= 2
    running.signal(number)
    running.ends_with(code)
    if number == signal.SIGTERM:
        assert "SIGTERM received before the first step: there is nothing to save" in running.log()
    assert still_alive(everybody) == [], "no orphan waits for ever"


def test_ctrl_c_while_python_still_imports_leaves_no_traceback(clips: Path, tmp_path: Path) -> None:
    """Before there is a run there is no watch: the command line itself has to answer."""
    running = launch(arguments_for(clips, tmp_path / "run"), tmp_path, entry=interrupted).ends_with(130)
    assert "tinyvae: stopped" in running.log() and "Traceback" not in running.log()


def interrupted(words: list[str]) -> None:
    import tinyvae.cli.main

    def run(argv: object) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return 0

    tinyvae.cli.main.run = run  # type: ignore[assignment]
    tinyvae.cli.main.main(words)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_data_workers_outlive_a_signal_to_the_whole_group(clips: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Schedulers signal every process of a job; the workers must still serve the step that is being finished."""
    run = tmp_path / "run"
    arguments = arguments_for(clips, run, dataloader_num_workers=2, gradient_accumulation_steps=2, validation_steps=0)
    step = HeldStep(tmp_path / "go on", call=3)
    running = launch(arguments, tmp_path, prepare=step)
    running.wait_for("call 3")
    everybody = [psutil.Process(running.processes[0].pid)]
    everybody += everybody[0].children(recursive=True)
    assert len(everybody) == 3, "the run and its two workers"
    for process in everybody:
        process.send_signal(number)
    running.wait_for(f"{number.name} received")
    time.sleep(0.5)  # time for a wrong end
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in everybody), "the workers live on"
    step.release()
    running.ends_with(128 + number)
    assert list(run.glob("emergency_checkpoint-*"))
    assert "DataLoader worker" not in running.log()
    assert still_alive(everybody) == [], "they end with the run"


def test_the_watch_closes_although_a_worker_lives_on() -> None:
    """It was forked while the watch was open, so it has the watch's socket too."""
    watch = SignalWatch()
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(2 * HANGS_S,), daemon=True)
    worker.start()
    ending = threading.Timer(60, worker.kill)
    ending.start()
    watch.close()
    assert worker.is_alive(), "it was waited for"
    ending.cancel()
    worker.kill()
    worker.join()


# two ranks


def two_ranks(clips: Path, run: Path, *faults: SignalInStep, **changes: object) -> None:
    """Run them to their end: with faults they are stopped, else they finish."""
    arguments = arguments_for(clips, run, train_batch_size=1, gradient_accumulation_steps=2, **SERAENA, **changes)
    launch(arguments, run.parent, ranks=2, prepare=Both(*faults)).ends_with(*([143, 143] if faults else [0, 0]))


@pytest.fixture(scope="module")
def undisturbed_pair(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("pair") / "run"
    two_ranks(clips, run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
def test_a_signal_to_some_ranks_stops_all_together(
    clips: Path, tmp_path: Path, undisturbed_pair: Path, ranks: tuple[int, ...]
) -> None:
    """In the middle of an accumulation cycle, with Seraena: one agreed save, and the resumed run is bit-equal."""
    run = tmp_path / "run"
    two_ranks(clips, run, *(SignalInStep(rank=rank, call=7) for rank in ranks))
    assert (run / "emergency_checkpoint-4/rank_00001.pt").is_file()
    two_ranks(clips, run, resume_from_checkpoint="latest")
    assert run_differences(undisturbed_pair, run, 6) == []


@pytest.mark.slow
def test_a_second_signal_ends_a_rank_that_waits_for_another(clips: Path, tmp_path: Path) -> None:
    """Rank 0 waits inside a collective, where no handler of Python's runs: it can be ended all the same."""
    arguments = arguments_for(clips, tmp_path / "run", train_batch_size=1, validation_steps=0)
    held = HeldStep(tmp_path / "never", call=2, rank=1)
    running = launch(arguments, tmp_path, ranks=2, prepare=held)
    running.wait_for("call 2", rank=1)
    time.sleep(1.0)
    running.signal(signal.SIGTERM, 0)
    running.wait_for("SIGTERM received", rank=0)
    time.sleep(SAME_ORDER_S)
    running.signal(signal.SIGTERM, 0)
    running.processes[0].join(HANGS_S)
    assert running.processes[0].exitcode == 143
    running.kill()


# the launcher


def torchrun(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", "-m", "tinyvae", "train", *arguments]
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream)


def ranks_of(launcher: int) -> list[psutil.Process]:
    return psutil.Process(launcher).children()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_alone(clips: Path, tmp_path: Path, number: signal.Signals) -> None:
    """torchrun passes SIGTERM on; of SIGUSR1 and SIGKILL it dies, and its ranks notice that they are orphans."""
    run, log = tmp_path / "run", tmp_path / "log"
    changes: dict[str, object] = {"max_train_steps": 10_000, "train_batch_size": 1, "log_every": 1}
    arguments = arguments_for(clips, run, **changes, checkpointing_steps=0, validation_steps=0)
    launcher = torchrun(arguments, log)
    ranks: list[psutil.Process] = []
    try:
        wait_until(lambda: (run / "metrics.jsonl").exists() or launcher.poll() is not None, shows=log.read_text)
        assert launcher.poll() is None, log.read_text()
        ranks = ranks_of(launcher.pid)
        assert len(ranks) == 2
        launcher.send_signal(number)
        assert still_alive(ranks) == [], log.read_text()
        assert launcher.wait(HANGS_S) != 0
    finally:
        for process in (*ranks, launcher):
            if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                process.kill()
    (saved,) = run.glob("emergency_checkpoint-*")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert saved.name == f"emergency_checkpoint-{json.loads(lines[-1])['step']}", "no step is lost"
    if number != signal.SIGTERM:
        assert "the launcher has died: finishing the step, then saving" in log.read_text()
