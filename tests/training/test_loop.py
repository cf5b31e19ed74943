"""The loop where a step cannot be computed: whatever the user can fix ends the run on all ranks, saved."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.training.faults import _around_losses
from tests.training.tiny_runs import SERAENA, arguments_for, launch, read_lines, train_here
from tinyvae.errors import UserError
from tinyvae.teachers import TeacherError
from tinyvae.training import validation
from tinyvae.training.loop import seconds_running
from tinyvae.training.task import StepLosses, TrainingTask
from tinyvae.training.validation import ValidationResult


class TeacherFails:
    """The teacher of one rank makes latents that are not finite, in its second step."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: Any, num_clips: int) -> StepLosses:
            if rank == self.rank and number == 2:
                raise TeacherError("the teacher made latents that are not finite")
            return compute()

        _around_losses(change)


def test_a_teacher_that_fails_stops_the_run_and_loses_nothing(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingTask, "losses", TrainingTask.losses)  # put back after the test
    TeacherFails(rank=0)(0)
    with pytest.raises(TeacherError, match="not finite"):
        train_here(arguments_for(clips, tmp_path / "run", validation_steps=0))
    assert (tmp_path / "run/emergency_checkpoint-1").is_dir()
    assert "the run ends: the teacher made latents" in (tmp_path / "run/train.log").read_text()


@pytest.mark.slow
def test_a_teacher_that_fails_on_one_rank_stops_all_with_a_checkpoint(clips: Path, tmp_path: Path) -> None:
    settings = {**SERAENA, "validation_steps": 0, "train_batch_size": 1}
    arguments = arguments_for(clips, tmp_path / "run", **settings)
    running = launch(arguments, tmp_path, ranks=2, prepare=TeacherFails(rank=1))
    running.ends_with(2, 2)  # no machine starts it again
    assert all("the teacher made latents that are not finite" in running.log(rank) for rank in (0, 1))
    assert (tmp_path / "run/emergency_checkpoint-1").is_dir()


@pytest.mark.slow
def test_early_stopping_ends_both_ranks_with_the_scores_of_one(clips: Path, tmp_path: Path) -> None:
    """Frozen weights: the clips of a validation shared by two ranks score what one rank scores on all of them."""
    frozen = {"learning_rate": 1e-30, "ema_decay": 0.0, "early_stopping_patience": 1, "validation_steps": 1}
    alone = train_here(arguments_for(clips, tmp_path / "one", **frozen))
    launch(arguments_for(clips, tmp_path / "two", train_batch_size=1, **frozen), tmp_path, ranks=2).ends_with(0, 0)
    assert alone.progress.step == 2
    stops, histories = (
        [json.loads((tmp_path / run / name).read_text()) for run in ("one", "two")]
        for name in ("early_stop_info.json", "validation_history.json")
    )
    assert [stop["step"] for stop in stops] == [2, 2]
    for of_one, of_two in zip(*histories, strict=True):
        assert of_one["num_clips"] == of_two["num_clips"] == 2
        for name in ("psnr", "psnr_std", "ssim", "ssim_std"):
            assert of_two[name] == pytest.approx(of_one[name], rel=1e-6), name


def test_a_validation_without_a_score_ends_the_run_saved(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = ValidationResult(metrics={"psnr": math.nan}, num_clips=1, shown=[])
    monkeypatch.setattr(validation, "validate", lambda *arguments, **options: nothing)
    with pytest.raises(UserError, match="validation at step 2 gave no psnr"):
        train_here(arguments_for(clips, tmp_path / "run", checkpointing_steps=100))
    assert (tmp_path / "run/emergency_checkpoint-2").is_dir()


def test_early_stopping_ends_the_run_and_a_resume_keeps_to_it(clips: Path, tmp_path: Path) -> None:
    """It says why. After a kill a resume writes the last files, and a larger patience makes it go on. The steps before
    the stop are logged, and only once."""
    run = tmp_path / "run"
    frozen = {"learning_rate": 1e-30, "ema_decay": 0.0, "early_stopping_patience": 2, "validation_steps": 2}
    arguments = arguments_for(clips, run, max_train_steps=12, **frozen)

    def logged_steps() -> list[int]:
        return [line["step"] for line in read_lines(run / "metrics.jsonl") if "train/loss" in line]

    assert train_here(arguments).progress.step == 6, "the first validation is the best, two more bring nothing"
    assert logged_steps() == [1, 4, 6]
    text = (run / "train.log").read_text()
    assert "(best psnr)" in text and " at step 2)" in text and "stopping early: no better psnr in 2 validations" in text
    info = json.loads((run / "early_stop_info.json").read_text())
    assert (info["best_step"], info["patience"], info["validations_without_improvement"]) == (2, 2, 2)
    (run / "final_model.pth").unlink()
    resume = ["--resume_from_checkpoint", "latest"]
    assert train_here([*arguments, *resume]).progress.step == 6
    assert "this run had stopped early" in (run / "train.log").read_text() and (run / "final_model.pth").exists()
    assert logged_steps() == [1, 4, 6]
    on = train_here([*arguments, *resume, "--early_stopping_patience", "5", "--max_train_steps", "9"])
    assert (on.progress.step, on.progress.best_step) == (9, 2) and logged_steps() == [1, 4, 6, 8, 9]
    assert not (run / "early_stop_info.json").exists(), "the run went on, yet the file says that it stopped"


def test_a_batch_too_small_for_seraena_is_refused_before_the_first_step(clips: Path, tmp_path: Path) -> None:
    small = {"height": 8, "width": 8, "train_batch_size": 1, "seraena_start": 3, "validation_steps": 0}
    with pytest.raises(UserError, match="cannot normalize a batch of one 8x8 image"):
        train_here(arguments_for(clips, tmp_path / "run", **SERAENA, **small))
    assert list((tmp_path / "run").glob("*checkpoint-*")) == []


def test_seconds_since_the_start_of_the_process() -> None:
    started = psutil.Process().create_time()  # the time of the boot in it is cut to a second
    before, running, after = time.time() - started, seconds_running(), time.time() - started
    assert before - 1.1 < running < after + 0.1
