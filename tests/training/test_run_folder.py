"""Which folder a run gets, that it has it alone, and what is left of a run that never began."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from tests.training.faults import HeldStep
from tests.training.tiny_runs import arguments_for, launch, train_here
from tinyvae import TAEHV, load_model, save_model
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training import run_folder as place_module
from tinyvae.training.run_folder import MARKER, RunPlace, earlier_run_folders, point_latest_at

SHORT = {"validation_steps": 0, "max_train_steps": 1, "checkpointing_steps": 1}
TIMED = "run_%Y-%m-%d_%H-%M-%S"


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_second_start_into_a_folder_in_use_is_refused_at_once(clips: Path, tmp_path: Path) -> None:
    """A new run and a resume, while the first one trains; after kill -9 of it the resume goes on."""
    run = tmp_path / "run"
    words = {"max_train_steps": 40, "checkpointing_steps": 1, "validation_steps": 0}
    step = HeldStep(tmp_path / "never", call=3)
    with launch(arguments_for(clips, run, **words), tmp_path / "logs", prepare=step) as first:
        first.wait_for("call 3")
        assert (run / MARKER).exists()
        before = {name for name in names(run) if "checkpoint" not in name}
        for more in ({}, {"resume_from_checkpoint": "latest"}):
            with pytest.raises(UserError, match=rf"another run writes to {run} \(process \d+, since"):
                train_here(arguments_for(clips, run, **words, **more))
        assert {name for name in names(run) if "checkpoint" not in name} == before
        assert first.processes[0].is_alive()
    assert (run / MARKER).exists(), "nobody was left to remove it"
    done = len([name for name in names(run) if name.startswith("checkpoint-")])
    again = {**words, "max_train_steps": done + 3, "resume_from_checkpoint": "latest"}
    assert train_here(arguments_for(clips, run, **again)).progress.step == done + 3
    assert not (run / MARKER).exists()


def test_two_starts_in_one_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(output_dir=tmp_path / TIMED)
    now = datetime.now()

    class Clock:
        """Three looks at the clock in the same second, then the next one."""

        looks = 0

        @classmethod
        def now(cls) -> datetime:
            cls.looks += 1
            return now if cls.looks <= 3 else datetime(2030, 1, 1)

    monkeypatch.setattr(place_module, "datetime", Clock)
    one, other = RunPlace(config, None), RunPlace(config, None)
    assert one.folder != other.folder and other.folder.name.startswith("run_2030-01-01")
    one.leave()
    other.leave()
    assert names(tmp_path) == set(), "nothing was written, so nothing stays"


def test_a_copied_checkpoint_does_not_make_a_run_folder_of_where_it_lies(clips: Path, tmp_path: Path) -> None:
    run = train_here(arguments_for(clips, tmp_path / "run", **SHORT)).folder
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(run / "checkpoint-1", checkpoints / "checkpoint-1")
    save_model(TAEHV("taehv", width=0.25), checkpoints / "released.pth")
    before = names(checkpoints)
    changes = {**SHORT, "max_train_steps": 2, "resume_from_checkpoint": checkpoints / "checkpoint-1"}
    later = train_here(arguments_for(clips, tmp_path / "output" / TIMED, **changes))
    assert later.progress.step == 2 and later.folder.parent == tmp_path / "output"
    assert names(checkpoints) == before
    assert load_model(checkpoints / "released.pth", variant="taehv").spec.width == 0.25
    assert f"{checkpoints} is no run's folder" in (later.folder / "train.log").read_text()
    within = train_here(arguments_for(clips, tmp_path / TIMED, **{**changes, "resume_from_checkpoint": run}))
    assert within.folder == run, "a run's own checkpoint goes on in its folder"


def test_latest_leads_to_the_newest_run(clips: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    first = train_here(arguments_for(clips, output / "run_2026-01-01_00-00-00", **SHORT)).folder
    assert os.readlink(output / "latest") == first.name, "relative, so that the whole folder can be moved"
    second = train_here(arguments_for(clips, output / TIMED, **SHORT)).folder
    assert (output / "latest").resolve() == second.resolve()
    assert earlier_run_folders(output / TIMED) == [second, first], "the link is no run of its own"
    more = {**SHORT, "max_train_steps": 2, "resume_from_checkpoint": output / "latest" / "checkpoint-1"}
    resumed = train_here(arguments_for(clips, output / TIMED, **more))
    assert resumed.folder == second and resumed.progress.step == 2
    back = {**more, "resume_from_checkpoint": first}
    assert train_here(arguments_for(clips, output / TIMED, **back)).folder == first
    assert os.readlink(output / "latest") == first.name, "the newest is the one that was started last"
    assert names(output) == {first.name, second.name, "latest"}


def test_latest_is_left_alone_where_it_is_not_ours_or_links_do_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "latest").mkdir()
    point_latest_at(run)
    assert (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()
    (tmp_path / "latest").rmdir()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    point_latest_at(run)
    assert names(tmp_path) == {"run"}


def test_latest_is_made_for_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # nobody's
    (tmp_path / "run").mkdir()
    point_latest_at(tmp_path / "run")
    assert os.readlink(tmp_path / "latest") == "run"


@pytest.mark.parametrize(
    "wrong", [{"height": 320, "width": 320}, {"train_split": 0.99, "num_validation_samples": 1, "n_frames": 4000}]
)
def test_a_run_that_never_began_leaves_no_log_and_no_config(
    clips: Path, tmp_path: Path, wrong: dict[str, object]
) -> None:
    with pytest.raises(UserError):
        train_here(arguments_for(clips, tmp_path / "run", **wrong))
    assert not tmp_path.joinpath("run").exists() or names(tmp_path / "run") <= {"data_index.tvi", "data_index.tvi.lock"}
    with pytest.raises(UserError):
        train_here(arguments_for(clips, tmp_path / "timed" / TIMED, **wrong))
    assert not tmp_path.joinpath("timed").exists() or names(tmp_path / "timed") == set(), "nobody comes back to it"
    assert not (tmp_path / "latest").is_symlink()


def test_a_folder_without_anything_goes(tmp_path: Path) -> None:
    config = TrainConfig(output_dir=tmp_path / "run")
    RunPlace(config, None).leave()
    assert names(tmp_path) == set()
    (tmp_path / "run").mkdir()
    RunPlace(config, None).leave()
    assert names(tmp_path) == {"run"}, "it was there before"


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=r"writing to .*file.* failed \(.*\); check its space"):
            RunPlace(TrainConfig(output_dir=output), None)


def test_the_config_of_a_model_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": "tinyvae-model"}))
    assert not place_module.is_run_folder(tmp_path)
    (tmp_path / "config.json").write_text("{ torn")
    assert not place_module.is_run_folder(tmp_path)
