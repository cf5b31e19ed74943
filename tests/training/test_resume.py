"""A run that is stopped and resumed is the run that was never stopped, bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny_runs import (
    DECODER_ALONE,
    SERAENA,
    TWO_SIZES,
    arguments_for,
    copy_as_killed,
    differences,
    read_lines,
    run_differences,
    state_of,
    train_here,
    write_clips,
)
from tinyvae import load_model
from tinyvae.cli.main import main, run
from tinyvae.config.load import load_config
from tinyvae.config.schema import TrainConfig, to_json
from tinyvae.data.index_build import build_index
from tinyvae.errors import UserError
from tinyvae.training.build import build_model
from tinyvae.training.checkpoint import _write_manifest, _write_state, read_manifest
from tinyvae.training.resume import Progress, SavedRun, _changed_settings
from tinyvae.training.start import FinishedRun, run_training

TURNS = {"random_turn": True, "random_reverse": True, "crop_candidates": 3}
KEEP_ALL = {"checkpoints_total_limit": 99}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "muon", "gradient_accumulation_steps": 2, "gradient_checkpointing": True, **TURNS},
        {**SERAENA, **TWO_SIZES, "seraena_start": 1},
    ],
    ids=["adamw", "muon", "seraena and two sizes"],
)
def test_six_steps_are_three_and_three(clips: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    """In the middle of an epoch (6 files, 2 clips a step), of a log line, and between two validations."""
    train_here(arguments_for(clips, tmp_path / "whole", **changes))
    copy_as_killed(tmp_path / "whole", tmp_path / "halves", before=6)
    train_here(arguments_for(clips, tmp_path / "halves", resume_from_checkpoint="latest", **changes))
    assert run_differences(tmp_path / "whole", tmp_path / "halves", 6) == []


def test_a_decoder_alone_resumes_exactly_and_only_as_that(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """The encoder keeps its first weights and has no part in the optimizer; another trained part is refused."""
    changes: dict[str, object] = {
        **DECODER_ALONE,
        "teacher": teacher,
        "optimizer": "muon",
        "ema_decay": 0.9,
        "max_train_steps": 4,
        "checkpointing_steps": 2,
    }
    words = arguments_for(clips, tmp_path / "whole", **changes)
    train_here(words)
    assert "only the decoder is trained" in (tmp_path / "whole/train.log").read_text()
    copy_as_killed(tmp_path / "whole", tmp_path / "halves", before=4)
    resumed = {**changes, "resume_from_checkpoint": "latest"}
    train_here(arguments_for(clips, tmp_path / "halves", **resumed))
    assert run_differences(tmp_path / "whole", tmp_path / "halves", 4) == []
    fresh = build_model(load_config(words[0], words[1:]).config).state_dict()
    shared = state_of(tmp_path / "halves/checkpoint-4")["training_state.pt"]
    for part, is_equal in (("encoder", True), ("decoder", False)):
        for weights in (shared["model"], shared["average"]["values"]):
            names = [name for name in fresh if name.startswith(part)]
            assert all(torch.equal(weights[name], fresh[name]) for name in names) is is_equal
    held = [
        len(group["params"]) for one in shared["engine"]["optimizers"]["optimizers"] for group in one["param_groups"]
    ]
    assert sum(held) == sum(name.startswith("decoder") for name in fresh)
    more = {**resumed, "encoder_loss_weight": 1.0, "max_train_steps": 5}
    with pytest.raises(UserError, match="what the losses train: decoder -> encoder and decoder"):
        train_here(arguments_for(clips, tmp_path / "halves", **more))
    train_here(arguments_for(clips, tmp_path / "halves", **more, allow_changed_settings=True))
    assert "the moments of muon for encoder and decoder start from zero" in (tmp_path / "halves/train.log").read_text()


def test_a_machine_that_does_not_see_the_checkpoint_says_so(tmp_path: Path) -> None:
    """The main process found it, on storage that this one does not share."""
    with pytest.raises(UserError, match=r"checkpoint-3 is not visible here; all machines must share the storage"):
        SavedRun(tmp_path / "checkpoint-3")


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
        resumed(finished, clips, "latest", n_frames=8, random_flip=False, crop_candidates=4)
    assert "crop_candidates: 1 -> 4" in str(refused.value)
    assert "n_frames: 4 -> 8" in str(refused.value) and "random_flip: True -> False" in str(refused.value)
    with pytest.raises(UserError, match=r"latent_space: 'diffusion' -> 'vae'; activation: 'relu' -> 'leaky_relu'"):
        resumed(finished, clips, "latest", latent_space="vae", activation="leaky_relu")  # the same shapes
    pattern = finished / "run_%Y-%m-%d_%H-%M-%S"
    words = arguments_for(clips, pattern, n_frames=8, random_flip=False, resume_from_checkpoint="latest")
    with pytest.raises(UserError, match="n_frames: 4 -> 8"):  # before many processes are started for it
        run(["check", words[0], "--quick", *words[1:]])
    allowed = resumed(finished, clips, "latest", n_frames=8, allow_changed_settings=True)
    assert allowed == "13-00-00/checkpoint-3 at step 3"
    with pytest.raises(UserError, match="another network"):
        resumed(finished, clips, "latest", model_width=0.25, allow_changed_settings=True)


def test_a_setting_that_is_younger_than_the_checkpoint_had_its_default() -> None:
    saved = {key: value for key, value in json.loads(to_json(TrainConfig())).items() if key != "crop_candidates"}
    assert _changed_settings(saved, TrainConfig()) == ([], [])
    assert _changed_settings(saved, TrainConfig(crop_candidates=4)) == (["crop_candidates: 1 -> 4"], [])


def tree_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path -> time of the last change (of folders too) and content of everything at and below a folder."""
    found = [folder, *folder.rglob("*")]
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in found
    }


def test_a_refused_resume_touches_nothing_of_the_run(clips: Path, tmp_path: Path) -> None:
    """Names, bytes and times, after every kind of refusal; also those that only the last tensor brings to light."""
    run = tmp_path / "run_2026-11-15_12-00-00"
    changes: dict[str, object] = {"validation_steps": 0, "checkpointing_steps": 1, "log_every": 1, **KEEP_ALL}
    train_here(arguments_for(clips, run, max_train_steps=3, **changes))
    (run / ".unfinished-checkpoint-9").mkdir()  # as a killed save leaves it: a resume that is accepted clears it away
    left = tree_of(run)
    assert len(left["metrics.jsonl"][1].splitlines()) == 3
    other = write_clips(tmp_path / "other", num_clips=5)
    broken = write_clips(tmp_path / "broken", num_clips=5)
    (broken / "clip_0.mp4").write_bytes(b"no video")
    wrong: list[tuple[str, dict[str, object]]] = [
        ("n_frames: 4 -> 8", {"n_frames": 8}),
        (r"resolutions: \[\] -> \['4x32x32', '4x16x16'\]", {"resolutions": "4x32x32,4x16x16"}),
        ("another network", {"model_width": 0.25, "allow_changed_settings": True}),
        ("already taken 3 steps", {"resume_from_checkpoint": "latest", "max_train_steps": 2}),
        ("list of training files", {"data_root": other}),
        ("files .* are bad", {"data_root": broken}),
        ("no file of .* can give a clip", {"height": 320, "width": 320, "allow_changed_settings": True}),
    ]
    for says, change in wrong:
        pattern = tmp_path / "run_%Y-%m-%d_%H-%M-%S"
        settings = {"resume_from_checkpoint": "checkpoint-1", "max_train_steps": 4, **changes, **change}
        with pytest.raises(UserError, match=says):
            train_here(arguments_for(clips, pattern, **settings))
        assert tree_of(run) == left, says
        assert {path.name for path in tmp_path.iterdir()} == {run.name, "latest", "other", "broken"}, says
    accepted = {**changes, "data_root": other, "resume_from_checkpoint": "checkpoint-1", "max_train_steps": 4}
    train_here(arguments_for(clips, tmp_path / "run_%Y-%m-%d_%H-%M-%S", allow_changed_settings=True, **accepted))
    names = {path.name for path in run.iterdir()}
    assert not {name for name in names if name.startswith(".")}, "neither markers nor what is unfinished stays"
    assert tree_of(run)["data_index.tvi"] != left["data_index.tvi"]


def test_another_optimiser_starts_its_moments_from_zero(finished: Path, clips: Path) -> None:
    assert resumed(finished, clips, "latest", optimizer="muon", allow_changed_settings=True).endswith("step 3")
    log = (finished / "run_2026-11-15_13-00-00/train.log").read_text()
    assert "the moments of muon start from zero" in log


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


@pytest.mark.parametrize("named", ["copy", "copy/config.json", "link"])
def test_a_run_that_is_named_goes_on_itself(finished: Path, tmp_path: Path, named: str) -> None:
    """Not the run that it was copied from, nor a newer one of the same experiment."""
    old = finished / "run_2026-11-15_12-00-00"
    shutil.copytree(old, tmp_path / "copy")
    (tmp_path / "link").symlink_to("copy")
    before = tree_of(finished)
    loaded = load_config(str(tmp_path / named), ["--resume", "latest", "--max_train_steps", "3"])
    done = run_training(loaded, command="test")
    assert done.folder == tmp_path / "copy" and done.progress.step == 3
    assert (tmp_path / "copy/checkpoint-3").is_dir()
    assert tree_of(finished) == before


def test_a_bad_file_that_was_repaired_meanwhile_stays_out(clips: Path, tmp_path: Path) -> None:
    """Nobody watches when a job is started again at night: it goes on with the files that it began with."""
    own, run_folder = shutil.copytree(clips, tmp_path / "own"), tmp_path / "run"
    (own / "clip_99.mp4").write_bytes(b"not a video")
    changes: dict[str, object] = {"bad_file_limit": 0.5, "validation_steps": 0, "checkpointing_steps": 1}
    train_here(arguments_for(own, run_folder, max_train_steps=1, **changes))
    shutil.copy2(own / "clip_0.mp4", own / "clip_99.mp4")
    changes |= {"max_train_steps": 2, "resume_from_checkpoint": "latest"}
    assert train_here(arguments_for(own, run_folder, **changes)).progress.step == 2


def test_files_that_validate_from_now_on_are_no_longer_trained_on(clips: Path, tmp_path: Path) -> None:
    """A run that never validates trains on all files where none can validate."""
    changes: dict[str, object] = {"validation_steps": 0, "validation_width": 256, "max_train_steps": 1}
    train_here(arguments_for(clips, tmp_path / "run", **changes))
    changes |= {"validation_steps": 1, "validation_width": 32, "resume_from_checkpoint": "latest"}
    with pytest.raises(UserError, match=r"list of training files \(.* or others validate now\)"):
        train_here(arguments_for(clips, tmp_path / "run", **{**changes, "max_train_steps": 2}))


def test_an_index_of_the_users_own_stays_the_index(finished: Path, clips: Path, tmp_path: Path) -> None:
    """Also one that is named like the one that a run makes."""
    own = build_index(clips, tmp_path / "data_index.tvi", num_workers=0, show_progress_bar=False).index.file
    before = own.read_bytes()
    assert resumed(finished, clips, "latest", index_path=own).endswith("step 3")
    assert own.read_bytes() == before


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


# what is refused


def test_a_run_that_would_end_before_its_checkpoint_is_refused(finished: Path, clips: Path) -> None:
    with pytest.raises(UserError, match="already taken 3 steps, and max_train_steps is 2; raise --max_train_steps"):
        resumed(finished, clips, "latest", steps=2)
    pattern = finished / "run_%Y-%m-%d_%H-%M-%S"
    words = arguments_for(clips, pattern, resume_from_checkpoint="latest", max_train_steps=2, validation_steps=0)
    with pytest.raises(UserError, match="already taken 3 steps"):
        run(["check", words[0], "--quick", *words[1:]])
    same = arguments_for(clips, finished / "run_2026-11-15_12-00-00", resume_from_checkpoint="latest", **KEEP_ALL)
    again = train_here([*same, "--max_train_steps", "2", "--validation_steps", "0"])
    assert again.progress.step == 2, "a finished run only writes its last files again"


def test_a_folder_that_holds_another_run_is_not_written_into(clips: Path, tmp_path: Path) -> None:
    changes: dict[str, object] = {"validation_steps": 0, "max_train_steps": 1, "checkpointing_steps": 1}
    for name, seed in (("one", 42), ("two", 7)):
        train_here(arguments_for(clips, tmp_path / name, seed=seed, **changes))
    left = {file.name: file.read_bytes() for file in (tmp_path / "two").iterdir() if file.is_file()}
    changes |= {"max_train_steps": 2, "resume_from_checkpoint": tmp_path / "one/checkpoint-1"}
    with pytest.raises(UserError, match=r"two already holds another run than that of .*one/checkpoint-1; choose ano"):
        train_here(arguments_for(clips, tmp_path / "two", **changes))
    words = arguments_for(clips, tmp_path / "two", **changes)
    with pytest.raises(UserError, match="two already holds another run than that of"):
        run(["check", words[0], "--quick", *words[1:]])
    assert {file.name: file.read_bytes() for file in (tmp_path / "two").iterdir() if file.is_file()} == left
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert train_here(arguments_for(clips, tmp_path / "link", **changes)).progress.step == 2, "its own, by a link"
    assert train_here(arguments_for(clips, tmp_path / "three", **changes)).progress.step == 2, "a new folder"
    (tmp_path / "one/linked").symlink_to(tmp_path / "one/checkpoint-1")
    changes |= {"resume_from_checkpoint": tmp_path / "one/linked"}
    assert train_here(arguments_for(clips, tmp_path / "one", **changes)).progress.step == 2, "a link beside it"


# best scores and the best model


BEST = {"validation_steps": 1, "checkpointing_steps": 1, "max_train_steps": 3, "learning_rate": 1e-9, "ema_decay": 0.0}
BEST |= {"lr_warmup_steps": 0, **KEEP_ALL}
"""Three validations that differ in the last digits at most: which is the best, each test says itself."""


def state_file(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "training_state.pt", weights_only=True)


def rewrite_state(checkpoint: Path, change: Callable[[dict[str, Any]], None], **facts: object) -> None:
    """Change a checkpoint's shared state and its facts, and make its manifest whole again."""
    state = state_file(checkpoint)
    change(state)
    manifest = {**(read_manifest(checkpoint) or {}), **facts}
    (checkpoint / "manifest.json").unlink()
    facts = {key: value for key, value in manifest.items() if key not in ("files", "written_at", "tinyvae_version")}
    _write_manifest(checkpoint, facts, {"training_state.pt": _write_state(checkpoint / "training_state.pt", state)})


AUTO = {**BEST, **SERAENA, "seraena_start": "auto", "seraena_patience": 2, "early_stopping_patience": 3}


@pytest.fixture(scope="module")
def unbeatable(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with a score that no later one reaches. Treat as read-only."""
    run = tmp_path_factory.mktemp("unbeatable") / "run"
    train_here(arguments_for(clips, run, **{**AUTO, "max_train_steps": 1}))

    def change(state: dict[str, Any]) -> None:
        state["progress"] |= {"best_score": 99.0, "stale_validations": 1}
        state["seraena_start"] |= {"best": 99.0, "stale_validations": 1}

    info = {"step": 1, "psnr": 99.0}
    rewrite_state(run / "checkpoint-1", change, best_model=info)
    (run / "best_model/model_info.json").write_text(json.dumps(info))
    return run


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metric_for_best_model": "ssim"}, "metric_for_best_model: psnr -> ssim"),
        (
            {"validation_n_frames": 8, "validation_height": 40, "validation_width": 40},
            "validation_n_frames: 4 -> 8; validation_height: 32 -> 40; validation_width: 32 -> 40",
        ),
        ({"num_validation_samples": 1}, "num_validation_samples: 2 -> 1"),
    ],
)
def test_scores_that_mean_something_else_are_not_compared(
    clips: Path, unbeatable: Path, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    shutil.copytree(unbeatable, tmp_path / "run")
    go_on = {**AUTO, "max_train_steps": 2, "resume_from_checkpoint": "latest"}
    run = train_here(arguments_for(clips, tmp_path / "run", **go_on, **changes))
    assert (run.progress.step, run.progress.best_step, run.progress.stale_validations) == (2, 2, 0)
    seraena = state_file(run.folder / "checkpoint-2")["seraena_start"]
    assert seraena["best"] == run.progress.best_score and seraena["stale_validations"] == 0
    assert json.loads((run.folder / "best_model/model_info.json").read_text())["step"] == 2
    lines = [line for line in (run.folder / "train.log").read_text().splitlines() if "cannot be compared" in line]
    assert len(lines) == 1 and says in lines[0]


def test_scores_that_mean_the_same_go_on(clips: Path, unbeatable: Path, tmp_path: Path) -> None:
    """The rest of the settings may change."""
    shutil.copytree(unbeatable, tmp_path / "run")
    changes = {**AUTO, "max_train_steps": 2, "validation_batch_size": 2, "num_validation_samples": 77}
    run = train_here(arguments_for(clips, tmp_path / "run", resume_from_checkpoint="latest", **changes))
    text = (run.folder / "train.log").read_text()
    assert "cannot be compared" not in text and "start again" not in text
    assert (run.progress.best_step, run.progress.best_score, run.progress.stale_validations) == (1, 99.0, 2)


PAST = {**BEST, "ema_decay": 0.5}


@pytest.fixture(scope="module")
def past(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that took each of its three validations for the best. Treat as read-only."""
    run = tmp_path_factory.mktemp("past") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "improved_by", lambda *_: True)
        return train_here(arguments_for(clips, run, **{**PAST, "learning_rate": 1e-3})).folder


def resume_past(clips: Path, checkpoint: Path, folder: Path, **changes: object) -> FinishedRun:
    """To step 3, without a validation."""
    settings = {**PAST, "validation_steps": 0, "resume_from_checkpoint": checkpoint, **changes}
    return train_here(arguments_for(clips, folder, **settings))


def history_of(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "validation_history.json")


def best_of(run: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """``model_info.json`` and the weights of ``best_model/``."""
    info = json.loads((run / "best_model/model_info.json").read_text())
    return info, torch.load(run / "best_model/model.pth", weights_only=True)


@pytest.mark.parametrize("folder", ["run", "new"])
def test_the_best_model_is_of_the_past_that_is_resumed(clips: Path, past: Path, tmp_path: Path, folder: str) -> None:
    """From checkpoint 2 of 3: the model of step 3 is of a future that did not happen, a new folder has none at all.
    Its lines, validations and the card's row of the best go up to the step that is resumed; the old run is untouched.
    """
    run = shutil.copytree(past, tmp_path / "run")
    before = tree_of(run)
    later = resume_past(clips, run / "checkpoint-2", tmp_path / folder)
    _, then, _ = history_of(past)
    info, best = best_of(later.folder)
    assert info == (read_manifest(past / "checkpoint-2") or {})["best_model"], "what it said when it was written"
    assert all(info[key] == then.get(key) for key in ("step", "psnr", "ssim", "lpips", "train_loss"))
    assert differences(best, load_model(past / "checkpoint-2/model.safetensors").state_dict()) == []
    assert {file.name for file in (later.folder / "best_model").iterdir()} >= {"config.json", "model.safetensors"}
    assert later.progress.best_step == 2 and later.progress.best_score == then["psnr"]
    assert "best_model/ is that of step 2 again" in (later.folder / "train.log").read_text()
    steps = [line["step"] for line in read_lines(later.folder / "metrics.jsonl")]
    assert set(steps) == {1, 2, 3} and sorted(steps) == steps
    assert [entry["step"] for entry in history_of(later.folder)] == [1, 2]
    assert "| 2, best |" in (later.folder / "model_card.md").read_text()
    assert folder == "run" or tree_of(run) == before


def test_a_checkpoint_of_an_older_version_names_no_best_model(clips: Path, past: Path, tmp_path: Path) -> None:
    """The ``best_model/`` beside it counts if it is of the best step; else the scores start again."""
    run = shutil.copytree(past, tmp_path / "run")
    for number in (3, 2):
        rewrite_state(run / f"checkpoint-{number}", lambda state: state.pop("scored_with"), best_model=None)
        later = resume_past(clips, run / f"checkpoint-{number}", tmp_path / f"new_{number}")
        assert later.progress.best_step == (3 if number == 3 else None)
        assert (later.folder / "best_model").exists() == (number == 3)


def test_a_best_model_without_its_checkpoint_is_copied_from_the_run(clips: Path, past: Path, tmp_path: Path) -> None:
    """Validations between checkpoints: the run that is resumed has the model, though no checkpoint of its step."""
    run = shutil.copytree(past, tmp_path / "run")
    shutil.rmtree(run / "checkpoint-3")

    def best_was_later(state: dict[str, Any]) -> None:
        state["progress"] |= {"best_step": 3, "best_score": best_of(run)[0]["psnr"]}

    rewrite_state(run / "checkpoint-2", best_was_later, best_model=best_of(run)[0])
    later = resume_past(clips, run / "checkpoint-2", tmp_path / "new")
    assert differences(best_of(later.folder), best_of(run)) == []


def test_where_the_best_model_is_gone_scores_start_again(clips: Path, past: Path, tmp_path: Path) -> None:
    run = shutil.copytree(past, tmp_path / "run")
    first = (read_manifest(run / "checkpoint-1") or {})["best_model"]

    def best_was_1(state: dict[str, Any]) -> None:
        state["progress"] |= {"best_step": 1, "best_score": first["psnr"], "stale_validations": 1}

    rewrite_state(run / "checkpoint-2", best_was_1, best_model=first)
    for fate in ("of another past", "gone"):
        if fate == "gone":
            shutil.rmtree(run / "checkpoint-1")
        else:
            rewrite_state(run / "checkpoint-1", lambda state: None, best_model={**first, "psnr": 1.0})
        changes = {"validation_steps": 1, "early_stopping_patience": 2}
        later = resume_past(clips, run / "checkpoint-2", tmp_path / fate, **changes)
        assert later.progress.best_step == 3 and best_of(later.folder)[0]["step"] == 3
        text = (later.folder / "train.log").read_text()
        assert text.count("best score and early stopping start again") == 1
