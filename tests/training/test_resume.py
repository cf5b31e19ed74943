"""A run that is stopped and resumed is the run that was never stopped, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from faults import SignalInStep
from tiny_runs import SERAENA, arguments_for, launch, run_differences, train_here

from tinyvae.cli import main, run
from tinyvae.errors import UserError

KEEP_ALL = {"checkpoints_total_limit": 99}


def stop_at_3(clips: Path, run: Path, **changes: object) -> None:
    """Three steps of a run of six, as if the job had been killed then; the schedule knows of six."""
    train_here(arguments_for(clips, run, **changes))
    for later in ("checkpoint-6", "final_model.pth", "final_model.safetensors"):
        path = run / later
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            path.unlink()


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "muon", "gradient_accumulation_steps": 2}], ids=["adamw", "muon"]
)
def test_six_steps_are_three_and_three(clips: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """In the middle of an epoch (6 files, 2 clips a step), of a log line, and between two validations."""
    train_here(arguments_for(clips, tmp_path / "whole", **changes))
    stop_at_3(clips, tmp_path / "halves", **changes)
    train_here(arguments_for(clips, tmp_path / "halves", resume_from_checkpoint="latest", **changes))
    assert run_differences(tmp_path / "whole", tmp_path / "halves", 6) == []


def test_with_seraena_and_its_buffer(clips: Path, tmp_path: Path) -> None:
    changes = {**SERAENA, "max_train_steps": 4, "checkpointing_steps": 2, "seraena_start": 1}
    train_here(arguments_for(clips, tmp_path / "whole", **changes))
    halves = launch(
        arguments_for(clips, tmp_path / "halves", **changes), tmp_path, prepare=SignalInStep(rank=0, call=2)
    )
    assert halves.wait() == [143], halves.both_logs()
    assert not (tmp_path / "halves/checkpoint-2").exists()
    train_here(arguments_for(clips, tmp_path / "halves", resume_from_checkpoint="latest", **changes))
    assert run_differences(tmp_path / "whole", tmp_path / "halves", 4) == []


def test_a_difference_would_be_seen(clips: Path, tmp_path: Path) -> None:
    """The comparison itself: another seed differs in weights, moments and lines."""
    train_here(arguments_for(clips, tmp_path / "a", max_train_steps=2, checkpointing_steps=2))
    train_here(arguments_for(clips, tmp_path / "b", max_train_steps=2, checkpointing_steps=2, seed=7))
    found = run_differences(tmp_path / "a", tmp_path / "b", 2)
    for part in ("/model/", "/average/", "/engine/optimizers/", "metrics.jsonl", "best_model"):
        assert any(part in place for place in found), f"no difference in {part}: {found}"


@pytest.fixture(scope="module")
def finished(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with two run folders: 12:00 with checkpoints 1 and 2, 13:00 with 1, 2 and 3."""
    experiment = tmp_path_factory.mktemp("experiment")
    for hour, steps in ((12, 2), (13, 3)):
        run = experiment / f"run_2026-11-15_{hour}-00-00"
        train_here(
            arguments_for(clips, run, max_train_steps=steps, checkpointing_steps=1, validation_steps=0, **KEEP_ALL)
        )
    return experiment


def resumed(finished: Path, clips: Path, form: str, *, steps: int = 4, **changes: object) -> str:
    """Resume with the time-stamped output folder; where the log says it went on from."""
    pattern = finished / "run_%Y-%m-%d_%H-%M-%S"
    changes = {"checkpointing_steps": 0, "validation_steps": 0, "max_train_steps": steps, **KEEP_ALL, **changes}
    run = train_here(arguments_for(clips, pattern, resume_from_checkpoint=form, **changes)).folder
    lines = [line for line in (run / "train.log").read_text().splitlines() if "resumed from" in line]
    shutil.rmtree(run / f"checkpoint-{steps}")
    return lines[-1].split("resumed from ")[1].replace(str(finished) + "/run_2026-11-15_", "")


def test_the_model_in_a_checkpoint_states_its_step(finished: Path) -> None:
    (run,) = finished.glob("run_*_12-*")
    stated = {c.name: json.loads((c / "config.json").read_text())["training_step"] for c in run.glob("checkpoint-*")}
    assert stated == {"checkpoint-1": 1, "checkpoint-2": 2}


def test_forms_of_resume(finished: Path, clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = finished / "run_2026-11-15_12-00-00"
    assert resumed(finished, clips, "latest") == "13-00-00/checkpoint-3 at step 3"
    assert resumed(finished, clips, "checkpoint-2") == "13-00-00/checkpoint-2 at step 2"
    assert resumed(finished, clips, str(older / "checkpoint-1")) == "12-00-00/checkpoint-1 at step 1"
    assert resumed(finished, clips, str(older)) == "12-00-00/checkpoint-2 at step 2"
    monkeypatch.chdir(older)  # a path relative to the shell's folder
    assert resumed(finished, clips, "../run_2026-11-15_12-00-00/checkpoint-1") == "12-00-00/checkpoint-1 at step 1"


@pytest.mark.parametrize("form", ["checkpoint-77", "/no/such/checkpoint-2", "latest"])
def test_a_missing_checkpoint_is_an_error(
    clips: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run_%Y-%m-%d_%H-%M-%S"
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments_for(clips, output, resume_from_checkpoint=form)])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("tinyvae: error: resume_from_checkpoint is") and "Traceback" not in message
    assert list(tmp_path.iterdir()) == [], "never a fresh start"


def test_a_run_folder_without_resume_is_not_written_over(finished: Path, clips: Path) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        train_here(arguments_for(clips, finished / "run_2026-11-15_12-00-00"))


def test_changed_settings_are_refused_with_a_list(finished: Path, clips: Path) -> None:
    with pytest.raises(UserError) as refused:
        resumed(finished, clips, "latest", n_frames=8, random_flip=False)
    assert "n_frames: 4 -> 8" in str(refused.value) and "random_flip: True -> False" in str(refused.value)
    pattern = finished / "run_%Y-%m-%d_%H-%M-%S"
    words = arguments_for(clips, pattern, n_frames=8, random_flip=False, resume_from_checkpoint="latest")
    with pytest.raises(UserError, match="n_frames: 4 -> 8"):  # before many processes are started for it
        run(["check", words[0], "--quick", *words[1:]])
    allowed = resumed(finished, clips, "latest", n_frames=8, allow_changed_settings=True)
    assert allowed == "13-00-00/checkpoint-3 at step 3"
    with pytest.raises(UserError, match="another network"):
        resumed(finished, clips, "latest", model_width=0.25, allow_changed_settings=True)


def test_a_refused_resume_leaves_the_run_as_it_was(clips: Path, tmp_path: Path) -> None:
    run = tmp_path / "run_2026-11-15_12-00-00"
    changes: dict[str, object] = {"validation_steps": 0, "checkpointing_steps": 1, "log_every": 1, **KEEP_ALL}
    train_here(arguments_for(clips, run, max_train_steps=3, **changes))
    left = {file.name: file.read_bytes() for file in run.iterdir() if file.suffix in (".json", ".jsonl")}
    assert len(left["metrics.jsonl"].splitlines()) == 3
    for wrong in ({"n_frames": 8}, {"model_width": 0.25, "allow_changed_settings": True}):
        with pytest.raises(UserError):
            resumed(tmp_path, clips, "checkpoint-1", **wrong)
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.suffix in (".json", ".jsonl")} == left


def test_another_optimiser_starts_its_moments_anew(finished: Path, clips: Path) -> None:
    assert resumed(finished, clips, "latest", optimizer="muon", allow_changed_settings=True).endswith("step 3")
    log = (finished / "run_2026-11-15_13-00-00/train.log").read_text()
    assert "the moments of muon start anew" in log


def test_a_changed_learning_rate_is_used_and_said(finished: Path, clips: Path) -> None:
    resumed(finished, clips, "latest", learning_rate=0.5e-4, lr_scheduler="constant", log_every=1)
    run = finished / "run_2026-11-15_13-00-00"
    assert "learning_rate: 0.001 -> 5e-05" in (run / "train.log").read_text()
    assert '"train/learning_rate": 5e-05' in (run / "metrics.jsonl").read_text().splitlines()[-1]


def test_the_data_may_lie_elsewhere_but_must_be_the_same(finished: Path, clips: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(clips, tmp_path / "moved", copy_function=shutil.copy2)
    assert resumed(finished, moved, "latest").endswith("step 3")
    (moved / "clip_0.mp4").unlink()
    with pytest.raises(UserError, match="list of training files"):
        resumed(finished, moved, "latest")


def test_damaged_checkpoints_are_passed_over(finished: Path, clips: Path) -> None:
    run = finished / "run_2026-11-15_13-00-00"
    good = (run / "checkpoint-3/training_state.pt").read_bytes()
    try:
        for damage in (good[:-100], good[:5000] + bytes([good[5000] ^ 1]) + good[5001:]):
            (run / "checkpoint-3/training_state.pt").write_bytes(damage)
            assert resumed(finished, clips, "latest") == "13-00-00/checkpoint-2 at step 2"
            assert "passing over a damaged checkpoint" in (run / "train.log").read_text()
            with pytest.raises(UserError, match="cannot resume from"):
                resumed(finished, clips, "checkpoint-3")
    finally:
        (run / "checkpoint-3/training_state.pt").write_bytes(good)


def test_an_early_stop_stays_one(clips: Path, tmp_path: Path) -> None:
    """A run that was killed after its early stop, before its last files: it ends, instead of training on."""
    changes = {"validation_steps": 1, "early_stopping_patience": 1, "learning_rate": 1e-9, "ema_decay": 0.0}
    changes |= {"metric_for_best_model": "psnr", "lr_warmup_steps": 0, "weight_decay": 0.9}
    first = train_here(arguments_for(clips, tmp_path / "run", **changes))
    assert first.progress.step < 6, "the run was meant to stop early"
    (tmp_path / "run/final_model.pth").unlink()
    again = train_here(arguments_for(clips, tmp_path / "run", resume_from_checkpoint="latest", **changes))
    assert again.progress.step == first.progress.step
    assert "this run had stopped early" in (tmp_path / "run/train.log").read_text()
    assert (tmp_path / "run/final_model.pth").exists()
