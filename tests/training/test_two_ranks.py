"""Two processes, a fault in one of them: nobody hangs, nobody drifts, and the job ends with a sentence."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import HANGS_S
from tests.training.faults import Both, HeldStep, KeepWeights, NanLoss, OutOfMemory, OutOfMemoryInSeraena
from tests.training.tiny_runs import (
    DECODER_ALONE,
    SERAENA,
    TWO_SIZES,
    Launch,
    arguments_for,
    differences,
    launch,
    read_lines,
    run_differences,
    state_of,
    train_here,
)
from tinyvae.cli.main import main
from tinyvae.data.loader import TrainLoader, ValidationLoader
from tinyvae.errors import UserError
from tinyvae.training.clips import RunData
from tinyvae.training.engine import Engine

pytestmark = pytest.mark.slow


def two_ranks(clips: Path, folder: Path, *faults: Any, **changes: object) -> Launch:
    arguments = arguments_for(clips, folder / "run", **{"train_batch_size": 2, "log_every": 1, **changes})
    return launch(arguments, folder, ranks=2, prepare=Both(KeepWeights(folder), *faults))


def assert_ranks_equal(folder: Path) -> None:
    both = [torch.load(folder / f"weights_of_rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert differences(*both) == []


def test_resume_on_two_ranks_with_seraena(clips: Path, tmp_path: Path) -> None:
    """Killed after step 3 of 6, in mid-epoch, with accumulation; and all ranks hold one discriminator."""
    changes = {**SERAENA, "gradient_accumulation_steps": 2, "train_batch_size": 1, **TWO_SIZES}
    two_ranks(clips, tmp_path / "whole", **changes).ends_with(0, 0)
    assert_ranks_equal(tmp_path / "whole")
    killed = two_ranks(clips, tmp_path / "killed", HeldStep(tmp_path / "never", call=7), **changes)
    killed.wait_for("checkpoint-3")
    killed.wait_for("call 7")
    killed.signal(signal.SIGKILL)
    killed.ends_with(-9, -9)
    two_ranks(clips, tmp_path / "killed", **changes, resume_from_checkpoint="latest").ends_with(0, 0)
    assert run_differences(tmp_path / "whole/run", tmp_path / "killed/run", 6) == []


def resume_on_first_rank(words: list[str]) -> None:
    main([*words, "--resume", "latest"] if os.environ["RANK"] == "0" else words)


def test_the_main_process_decides_whether_the_run_resumes(clips: Path, tmp_path: Path) -> None:
    """A second machine may not see a fresh checkpoint yet: its launcher then asks for no resume."""
    changes: dict[str, object] = {"max_train_steps": 2, "checkpointing_steps": 1, "validation_steps": 0}
    arguments = arguments_for(clips, tmp_path / "run", **changes)
    train_here([*arguments, "--max_train_steps", "1"])
    resumed = launch(arguments, tmp_path, ranks=2, entry=resume_on_first_rank).ends_with(0, 0)
    assert "resumed from" in resumed.log() and (tmp_path / "run/checkpoint-2").is_dir()


@pytest.mark.parametrize("ranks", [2, 8])
def test_from_one_rank_to_many_and_back(clips: Path, tmp_path: Path, ranks: int) -> None:
    """Weights, moments, scores, discriminator and data position go on; the log says what does not."""
    run = tmp_path / "run"
    one: dict[str, object] = {**SERAENA, "checkpointing_steps": 2, "validation_steps": 2}
    train_here(arguments_for(clips, run, **one, max_train_steps=2))
    changes: dict[str, object] = {"train_batch_size": 1, "max_train_steps": 4, "resume_from_checkpoint": "latest"}
    many = launch(arguments_for(clips, run, **{**one, **changes}), tmp_path, ranks=ranks, prepare=KeepWeights(tmp_path))
    assert many.wait(2 * HANGS_S) == [0] * ranks, many.both_logs()
    weights = [torch.load(tmp_path / f"weights_of_rank_{rank}.pt", weights_only=True) for rank in range(ranks)]
    assert all(differences(weights[0], other) == [] for other in weights[1:])
    assert f"with 1 process(es) and the run goes on with {ranks}: weights, optimizer, schedule, data" in many.log()
    last = train_here(arguments_for(clips, run, **one, resume_from_checkpoint="latest"))
    assert last.progress.step == 6 and last.progress.samples_seen == 2 * 2 + 2 * ranks + 2 * 2
    assert [state_of(run / f"checkpoint-{step}")["training_state.pt"]["seraena"]["steps"] for step in (4, 6)] == [4, 6]


def test_ranks_share_the_gradient_of_one(clips: Path, tmp_path: Path) -> None:
    """Without Seraena two ranks of one clip give the weights of one rank of two, up to rounding."""
    changes: dict[str, object] = {"max_train_steps": 3, "epsilon": 1e-3, **TWO_SIZES}
    train_here(arguments_for(clips, tmp_path / "one", **changes))
    two_ranks(clips, tmp_path, train_batch_size=1, **changes).ends_with(0, 0)
    one, two = (
        state_of(run / "checkpoint-3")["training_state.pt"]["model"] for run in (tmp_path / "one", tmp_path / "run")
    )
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_a_decoder_alone_on_two_ranks(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """The encoder does not run: its weights stay equal on both ranks, and the run is that of one process."""
    changes = {**DECODER_ALONE, "teacher": teacher, "train_batch_size": 1}
    two_ranks(clips, tmp_path, **changes).ends_with(0, 0)
    assert_ranks_equal(tmp_path)
    train_here(arguments_for(clips, tmp_path / "alone", **{**changes, "train_batch_size": 2}))
    both = [torch.load(tmp_path / run / "final_model.pth", weights_only=True) for run in ("run", "alone")]
    for name, value in both[0].items():
        torch.testing.assert_close(value, both[1][name], rtol=1e-4, atol=1e-5)
        assert not name.startswith("encoder") or torch.equal(value, both[1][name])


class NanFrames:
    """One rank's decoder makes NaN frames in one step: Seraena must not learn from them on any rank."""

    def __call__(self, rank: int) -> None:
        from tinyvae.training.task import TrainingTask

        if rank == 1:
            student, calls = TrainingTask._student, []

            def nan_once(self: TrainingTask, *arguments: Any) -> Any:
                decoded, *rest = student(self, *arguments)
                calls.append(1)
                return (decoded * float("nan") if len(calls) == 3 else decoded, *rest)

            TrainingTask._student = nan_once  # type: ignore[method-assign]


def test_nan_frames_on_one_rank_with_seraena(clips: Path, tmp_path: Path) -> None:
    two_ranks(clips, tmp_path, NanFrames(), **SERAENA, max_train_steps=4).ends_with(0, 0)
    assert_ranks_equal(tmp_path)
    state = state_of(tmp_path / "run/checkpoint-4")["training_state.pt"]
    assert state["progress"]["skipped_steps"] == 1 and state["seraena"]["steps"] == 3
    (line,) = [line for line in (tmp_path / "run/train.log").read_text().splitlines() if "skipped:" in line]
    assert "process 1:" in line and "process 0:" not in line


def test_too_many_nans_end_the_run_with_a_diagnosis(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, NanLoss(rank=1, calls=range(2, 99)), max_skipped_steps=3).ends_with(2, 2)
    for rank in (0, 1):
        assert "3 steps in a row had a loss or gradient that is not finite" in running.log(rank)
        assert "Traceback" not in running.log(rank)


@pytest.mark.parametrize(
    "fault",
    [
        OutOfMemory(rank=1, calls=(3,)),
        OutOfMemoryInSeraena(rank=1, calls=(2,), after_exchange=False),
        OutOfMemoryInSeraena(rank=0, calls=(3,), after_exchange=True),
    ],
    ids=["before Seraena", "in Seraena before its exchange", "in Seraena after its exchange"],
)
def test_out_of_memory_on_one_rank_makes_all_retry(clips: Path, tmp_path: Path, fault: Any) -> None:
    """With accumulation the other rank is on its way to an exchange that the failed one will not reach."""
    changes = {**SERAENA, "gradient_accumulation_steps": 2, "max_train_steps": 3}
    running = two_ranks(clips, tmp_path, fault, **changes).ends_with(0, 0)
    assert_ranks_equal(tmp_path)
    for rank in (0, 1):
        assert running.log(rank).count("micro-batches in 2 parts") == 1
    state = state_of(tmp_path / "run/checkpoint-3")["training_state.pt"]
    assert state["seraena"]["steps"] == 6, "a failed attempt leaves no discriminator step behind"
    assert state["progress"]["skipped_steps"] == 0


def test_out_of_memory_with_one_clip_stops_all_with_a_checkpoint(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, OutOfMemory(rank=1, calls=range(3, 99)), **SERAENA, validation_steps=0)
    running.ends_with(2, 2)
    for rank in (0, 1):
        assert "out of memory with a single clip" in running.log(rank) and "Traceback" not in running.log(rank)
    assert (tmp_path / "run/emergency_checkpoint-2/rank_00001.pt").is_file()


class NoMoreClips:
    """The storage of one rank goes away after two batches."""

    def __call__(self, rank: int) -> None:
        read = TrainLoader.__iter__

        def two_batches(self: TrainLoader) -> Any:
            for number, batch in enumerate(read(self)):
                if number == 2 and rank == 1:
                    raise UserError("not one of 64 files could be read")
                yield batch

        TrainLoader.__iter__ = two_batches  # type: ignore[method-assign]


def test_a_rank_without_data_stops_all_with_a_checkpoint(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, NoMoreClips(), **SERAENA, validation_steps=0)
    running.ends_with(2, 2)  # no machine starts it again
    assert all("not one of 64 files could be read" in running.log(rank) for rank in (0, 1))
    assert (tmp_path / "run/emergency_checkpoint-2").is_dir()


def test_a_killed_rank_ends_the_job_in_seconds(clips: Path, tmp_path: Path) -> None:
    held = HeldStep(tmp_path / "never", call=3, rank=1)
    running = two_ranks(clips, tmp_path, held, nccl_timeout=900)
    running.wait_for("call 3", rank=1)
    running.signal(signal.SIGKILL, 1)
    running.ends_with(1, -9)  # long before nccl_timeout
    assert "with the others: another process of this run has stopped." in running.log()
    assert "docs/troubleshooting.md#a-lost-process" in running.log()
    assert "Traceback" not in running.log() and "Watchdog" not in running.log()


def test_a_silent_rank_ends_the_job_at_the_configured_timeout(clips: Path, tmp_path: Path) -> None:
    """A peer that lives but says nothing: its connection stays open, so only the timeout can tell."""
    held = HeldStep(tmp_path / "never", call=3, rank=1)
    running = two_ranks(clips, tmp_path, held, nccl_timeout=30, validation_steps=0)
    running.wait_for("call 3", rank=1)
    running.signal(signal.SIGSTOP, 1)
    running.processes[0].join(HANGS_S)
    running.kill()
    assert running.processes[0].exitcode == 1, running.both_logs()
    assert "has not answered within 30 s (nccl_timeout): it hangs" in running.log() and "Traceback" not in running.log()


class ShowTimeouts:
    """Print the timeout of every process group."""

    def __call__(self, rank: int) -> None:
        prepare = Engine.prepare

        def show(engine: Engine, *arguments: Any) -> None:
            for group in (dist.group.WORLD, engine._messages):
                backend = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
                print("timeout", int(backend.options._timeout.total_seconds()), flush=True)
            prepare(engine, *arguments)

        Engine.prepare = show  # type: ignore[method-assign]


def test_every_group_has_the_configured_timeout(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, ShowTimeouts(), nccl_timeout=77, max_train_steps=1, validation_steps=0)
    running.ends_with(0, 0)
    assert running.log().count("timeout 77") == 2


def test_a_mistake_is_told_by_every_rank(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, resume_from_checkpoint="latest").ends_with(2, 2)
    for rank in (0, 1):
        assert "there is no intact checkpoint" in running.log(rank) and "Traceback" not in running.log(rank)


def test_validation_out_of_memory_on_one_rank(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, OomInValidation()).ends_with(2, 2)
    for rank in (0, 1):
        assert "out of memory in validation; the run is saved" in running.log(rank)
    assert (tmp_path / "run/emergency_checkpoint-2").is_dir()


class OomInValidation:
    def __call__(self, rank: int) -> None:
        from tinyvae.training import validation

        if rank == 1:

            def fail(*arguments: object) -> None:
                raise torch.OutOfMemoryError("injected")

            validation.Scorer.measure = fail  # type: ignore[method-assign]


class GoneValidationClips:
    """After the start, this many of the first validation clips are deleted."""

    def __init__(self, num_gone: int) -> None:
        self.num_gone = num_gone

    def __call__(self, rank: int) -> None:
        build = RunData.validation_loader

        def build_and_delete(data: RunData, engine: Engine) -> Any:
            for row in data.validation.rows[: self.num_gone]:
                data.validation.index.full_path(data.validation.index.row(int(row))).unlink(missing_ok=True)
            return build(data, engine)

        RunData.validation_loader = build_and_delete  # type: ignore[method-assign]


def test_one_bad_validation_clip_is_left_out_on_any_number_of_ranks(clips: Path, tmp_path: Path) -> None:
    """The first rank of two is left without a clip."""
    frozen = {"learning_rate": 1e-30, "ema_decay": 0.0, "max_train_steps": 2, "train_batch_size": 1}
    histories = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        shutil.copytree(clips, folder / "clips")
        arguments = arguments_for(folder / "clips", folder / "run", **frozen)
        launch(arguments, folder, ranks=ranks, prepare=GoneValidationClips(1)).ends_with(*[0] * ranks)
        histories.append(read_lines(folder / "run/validation_history.json"))
    ((of_one,), (of_two,)) = histories
    assert of_one["num_clips"] == of_two["num_clips"] == 1
    assert of_two["psnr"] == pytest.approx(of_one["psnr"], rel=1e-6)


def test_no_validation_clip_at_all_stops_all_with_a_checkpoint(clips: Path, tmp_path: Path) -> None:
    shutil.copytree(clips, tmp_path / "clips")
    running = two_ranks(tmp_path / "clips", tmp_path, GoneValidationClips(2), checkpointing_steps=100).ends_with(2, 2)
    said = [next(line for line in running.log(rank).splitlines() if "not one" in line) for rank in (0, 1)]
    assert said[0] == said[1] and "the first was" in said[0] and "No such file" in said[0]
    assert (tmp_path / "run/emergency_checkpoint-2").is_dir()


class ValidationLoaderFails:
    """The validation loader of one rank cannot go on."""

    def __call__(self, rank: int) -> None:
        def fail(self: ValidationLoader) -> Any:
            raise UserError("shared memory is full")
            yield

        if rank == 1:
            ValidationLoader.__iter__ = fail  # type: ignore[method-assign]


def test_a_validation_loader_that_fails_on_one_rank_stops_all_with_a_checkpoint(clips: Path, tmp_path: Path) -> None:
    running = two_ranks(clips, tmp_path, ValidationLoaderFails(), checkpointing_steps=100)
    running.ends_with(2, 2)  # no machine starts it again
    assert all("shared memory is full" in running.log(rank) for rank in (0, 1))
    assert (tmp_path / "run/emergency_checkpoint-2").is_dir()
