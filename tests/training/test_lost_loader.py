"""A loader process killed with ``kill -9``: fresh ones take over, and the run is bit-equal to an undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import still_alive
from tests.training.faults import _around_losses
from tests.training.tiny_runs import SERAENA, arguments_for, launch, run_differences, train_here
from tinyvae.data.clip_reading import Clips
from tinyvae.training import checkpoint, validation

WORKERS: dict[str, object] = {"dataloader_num_workers": 2, "prefetch_factor": 1, "gradient_accumulation_steps": 2}


TRAINING, VALIDATION = 0, -1  # places of workers: those of the validation start last, and end after the first one


def kill_a_worker(place: int) -> None:
    """And stay in Python for a moment: torch's own handler would raise right here."""
    workers = sorted(psutil.Process().children(), key=lambda worker: (worker.create_time(), worker.pid))
    assert len(workers) >= 2, workers
    workers[place].kill()
    assert still_alive([workers[place]]) == []
    for _ in range(30):
        time.sleep(0.01)
    print("killed a worker", flush=True)


class KillWorker:
    """Kill a loader process of one rank at the given call of something that the run does."""

    def __init__(self, where: str, call: int, *, rank: int = 0, place: int = TRAINING) -> None:
        self.where, self.call, self.rank, self.place = where, call, rank, place

    def __call__(self, rank: int) -> None:
        if rank != self.rank:
            return
        calls = []

        def before(function: Callable[..., Any]) -> Callable[..., Any]:
            def killing(*arguments: Any, **options: Any) -> Any:
                calls.append(1)
                if len(calls) == self.call:
                    kill_a_worker(self.place)
                return function(*arguments, **options)

            return killing

        if self.where == "step":
            _around_losses(lambda number, compute, clips: before(compute)())
        elif self.where == "save":
            checkpoint._write_state = before(checkpoint._write_state)
        else:
            validation.Scorer.measure = before(validation.Scorer.measure)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("where", "call", "place"),
    [
        ("step", 4, TRAINING),
        pytest.param("step", 1, TRAINING, marks=pytest.mark.slow),
        pytest.param("step", 1, VALIDATION, marks=pytest.mark.slow),
        pytest.param("save", 1, TRAINING, marks=pytest.mark.slow),
        pytest.param("validation", 2, TRAINING, marks=pytest.mark.slow),
    ],
)
def test_the_run_goes_on_bit_for_bit(
    clips: Path, tmp_path: Path, undisturbed: Path, where: str, call: int, place: int
) -> None:
    run = tmp_path / "run"
    running = launch(arguments_for(clips, run, **WORKERS), tmp_path, prepare=KillWorker(where, call, place=place))
    running.ends_with(0)
    assert "killed a worker" in running.log() and "Traceback" not in running.log()
    text = (run / "train.log").read_text()
    assert text.count("a process that loads clips was killed") == 1 and "going on with fresh ones" in text
    assert run_differences(undisturbed, run, 6) == []


class PoisonedClip:
    """Whoever reads the clip at this position is killed, each time, as by a machine whose memory is full."""

    def __init__(self, position: int, *, rank: int = 0) -> None:
        self.position, self.rank = position, rank

    def __call__(self, rank: int) -> None:
        read = Clips.__getitems__

        def deadly(clips: Clips, positions: list[int]) -> Any:
            if clips.training and self.position in positions:
                os.kill(os.getpid(), signal.SIGKILL)
            return read(clips, positions)

        if rank == self.rank:
            Clips.__getitems__ = deadly  # type: ignore[method-assign]


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run_saved(clips: Path, tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    running = launch(arguments_for(clips, run, **WORKERS), tmp_path, prepare=PoisonedClip(13)).ends_with(2)
    assert "processes that load clips were killed 3 times in a row" in running.log()
    assert "use fewer --dataloader_num_workers" in running.log() and "Traceback" not in running.log()
    assert (run / "emergency_checkpoint-3").is_dir()
    train_here(arguments_for(clips, run, **WORKERS, resume_from_checkpoint="latest"))
    assert run_differences(undisturbed, run, 6) == []


# two ranks

PAIR: dict[str, object] = {**WORKERS, "train_batch_size": 1, **SERAENA}


@pytest.fixture(scope="module")
def undisturbed_pair(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    arguments = arguments_for(clips, folder / "run", **{**PAIR, "dataloader_num_workers": 0})
    launch(arguments, folder, ranks=2).ends_with(0, 0)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rank"), [("step", 0), ("step", 1), ("save", 1)])
def test_two_ranks_go_on_bit_for_bit(
    clips: Path, tmp_path: Path, undisturbed_pair: Path, where: str, rank: int
) -> None:
    run = tmp_path / "run"
    fault = KillWorker(where, 4 if where == "step" else 1, rank=rank)
    running = launch(arguments_for(clips, run, **PAIR), tmp_path, ranks=2, prepare=fault).ends_with(0, 0)
    assert "going on with fresh ones" in running.log(rank) and "Traceback" not in running.both_logs()
    assert run_differences(undisturbed_pair, run, 6) == []


@pytest.mark.slow
def test_two_ranks_end_together_where_workers_of_one_die_again_and_again(
    clips: Path, tmp_path: Path, undisturbed_pair: Path
) -> None:
    run = tmp_path / "run"
    running = launch(arguments_for(clips, run, **PAIR), tmp_path, ranks=2, prepare=PoisonedClip(9, rank=1))
    running.ends_with(2, 2)  # no machine starts it again
    assert "killed 3 times in a row" in running.log(1) and "killed 3 times in a row" in running.log(0)
    assert (run / "emergency_checkpoint-2/rank_00001.pt").is_file()
    launch(arguments_for(clips, run, **PAIR, resume_from_checkpoint="latest"), tmp_path, ranks=2).ends_with(0, 0)
    assert run_differences(undisturbed_pair, run, 6) == []
