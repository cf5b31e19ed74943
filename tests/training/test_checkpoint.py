"""Checkpoints that nobody can half-write: whatever happens in a save, the newest intact one is found."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyvae
from tests.training.tiny_runs import launch
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training import checkpoint
from tinyvae.training.checkpoint import (
    CheckpointWriter,
    broken_reason,
    list_checkpoints,
    newest_intact,
    read_state,
    remove_old,
    remove_unfinished,
)
from tinyvae.training.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(TrainConfig())


def save(writer: CheckpointWriter, step: int, *, emergency: bool = False, best_step: int | None = None) -> Path | None:
    """A checkpoint whose every tensor holds its step's number."""

    def write_model(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(os.urandom(1000))

    return writer.save(
        step=step,
        emergency=emergency,
        shared_state=lambda: {"step": step, "weights": torch.full((4000,), float(step))},
        rank_state={"own": torch.full((50,), float(step))},
        write_model=write_model,
        facts=lambda: {"step": step, "world_size": 1},
        best_step=best_step,
    )


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def step_of(folder: Path | None) -> int:
    assert folder is not None
    state = read_state(folder / checkpoint.SHARED_STATE)
    assert torch.equal(state["weights"], torch.full((4000,), float(state["step"])))
    return int(state["step"])


def test_a_save_is_whole_and_listed(tmp_path: Path, engine: Engine) -> None:
    writer = CheckpointWriter(tmp_path, engine, keep=None)
    folder = save(writer, 3)
    assert folder == tmp_path / "checkpoint-3" and broken_reason(folder) is None
    assert names(folder) == {"training_state.pt", "rank_00000.pt", "model.safetensors", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == names(folder) - {"manifest.json"}
    assert manifest["tinyvae_version"] == tinyvae.__version__
    assert names(tmp_path) == {"checkpoint-3"}


@pytest.mark.parametrize("file", ["training_state.pt", "rank_00000.pt", "model.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "one bit", "empty"])
def test_every_damage_is_seen_and_passed_over(tmp_path: Path, engine: Engine, file: str, damage: str) -> None:
    writer = CheckpointWriter(tmp_path, engine, keep=None)
    save(writer, 1)
    newest = save(writer, 2)
    assert newest is not None
    good = (newest / file).read_bytes()
    match damage:
        case "gone":
            (newest / file).unlink()
        case "cut":
            (newest / file).write_bytes(good[:-1])
        case "one bit":
            place = good.index(b"world_size") + 13 if file == "manifest.json" else len(good) // 2
            (newest / file).write_bytes(good[:place] + bytes([good[place] ^ 2]) + good[place + 1 :])
        case "empty":
            (newest / file).write_bytes(b"")
    found, faults = newest_intact([tmp_path])
    assert step_of(found) == 1
    assert len(faults) == 1 and "checkpoint-2" in faults[0]


def test_a_file_that_cannot_be_read_is_a_damage(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad disk must not keep a run from its older checkpoint."""
    writer = CheckpointWriter(tmp_path, engine, keep=None)
    save(writer, 1)
    save(writer, 2)
    read = checkpoint.sha256_of

    def read_from_a_bad_disk(file: Path) -> str:
        if file.parent.name == "checkpoint-2":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file)

    monkeypatch.setattr(checkpoint, "sha256_of", read_from_a_bad_disk)
    found, (fault,) = newest_intact([tmp_path])
    assert step_of(found) == 1 and fault.endswith("cannot be read: Input/output error")


def test_a_checkpoint_that_its_run_removes_meanwhile_is_passed_over(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, engine, keep=None)
    for step in (1, 2):
        save(writer, step)
    look = checkpoint.NAME.fullmatch

    class Removing:
        @staticmethod
        def fullmatch(name: str) -> object:
            shutil.rmtree(tmp_path / "checkpoint-2", ignore_errors=True)
            return look(name)

    monkeypatch.setattr(checkpoint, "NAME", Removing)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


def test_retention_keeps_the_newest_the_best_and_the_last_emergency(tmp_path: Path, engine: Engine) -> None:
    writer = CheckpointWriter(tmp_path, engine, keep=2)
    for step in range(1, 8):
        save(writer, step, emergency=step in (2, 5), best_step=3 if step >= 3 else 1)
    assert names(tmp_path) == {"checkpoint-3", "checkpoint-6", "checkpoint-7", "emergency_checkpoint-5"}
    remove_old(tmp_path, keep=None, best_step=None)
    assert len(names(tmp_path)) == 4, "without a limit nothing goes but older emergency ones"


def test_newest_is_newest_whatever_the_clock_says(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that moves to a machine whose clock is an hour behind."""
    writer = CheckpointWriter(tmp_path, engine, keep=1)
    save(writer, 10)

    class LateClock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) - timedelta(hours=1)

    monkeypatch.setattr(checkpoint, "datetime", LateClock)
    save(writer, 11)
    found, _ = newest_intact([tmp_path])
    assert step_of(found) == 11 and names(tmp_path) == {"checkpoint-11"}


def test_a_step_saved_again_never_leaves_none(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between its two renames: the one that was to be replaced is still found, and has its name back."""
    writer = CheckpointWriter(tmp_path, engine, keep=1)
    save(writer, 4, emergency=True)
    rename = Path.rename

    def killed_at_second(self: Path, target: Path) -> Path:
        if self.name.startswith(checkpoint.UNFINISHED):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_at_second)
    with pytest.raises(KeyboardInterrupt):
        save(writer, 4, emergency=True)
    monkeypatch.undo()
    found, _ = newest_intact([tmp_path])
    assert step_of(found) == 4
    remove_unfinished(tmp_path)
    assert names(tmp_path) == {"emergency_checkpoint-4"}
    save(writer, 4, emergency=True)
    assert names(tmp_path) == {"emergency_checkpoint-4"}


def test_a_failed_save_is_survived_twice(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(tmp_path, engine, keep=2)
    save(writer, 1)

    def full(folder: Path, *rest: object) -> None:
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.ERROR, logger="tinyvae"):
        monkeypatch.setattr(checkpoint, "_write_manifest", full)
        assert save(writer, 2) is None and save(writer, 3) is None
        monkeypatch.undo()
        assert save(writer, 4) is not None, "it tries again, and the count starts again"
        monkeypatch.setattr(checkpoint, "_write_manifest", full)
        assert save(writer, 5) is None and save(writer, 6) is None
        with pytest.raises(UserError, match=r"3 saves in a row failed, .*No space left on device.*--resume latest"):
            save(writer, 7)
    assert "COULD NOT SAVE checkpoint-2" in caplog.text and "the next save will try again (1 of 3)" in caplog.text
    assert "the run stops (3 of 3)" in caplog.text
    found, faults = newest_intact([tmp_path])
    assert step_of(found) == 4 and faults == []
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-4"}, "nothing half-written is left"


# saves in processes of their own


def save_for_ever(words: list[str]) -> None:
    """Save steps 1, 2, 3, ... (every third one twice), three kept, until killed."""
    folder = Path(words[1])
    remove_unfinished(folder)
    writer = CheckpointWriter(folder, Engine(TrainConfig()), keep=3)
    newest, _ = newest_intact([folder])
    step = 0 if newest is None else step_of(newest)
    print("begins", flush=True)
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            save(writer, step, emergency=step % 5 == 0)
        print(f"saved {step}", flush=True)


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """Sixty kills at random moments, at least ten within a save: each time everything that had been saved, or something
    newer, is found intact."""
    run, moments = tmp_path / "run", random.Random(0)
    run.mkdir()
    unfinished = kills = 0
    while kills < 60 or unfinished < 10:
        kills += 1
        assert kills < 600, f"only {unfinished} kills fell into a save"
        running = launch([str(run)], tmp_path / "logs", entry=save_for_ever)
        running.wait_for("begins")
        time.sleep(moments.uniform(0.0, 0.08))
        running.signal(signal.SIGKILL)
        running.ends_with(-9)
        saved = [int(line.split()[1]) for line in running.log().splitlines() if line.startswith("saved")]
        unfinished += any(name.startswith(".unfinished") or name.endswith(".replaced") for name in names(run))
        found, faults = newest_intact([run])
        assert faults == [], "a folder with a checkpoint's name is whole"
        if saved:
            assert step_of(found) >= saved[-1]
        elif found is not None:
            step_of(found)


def save_with_little_room(words: list[str]) -> None:
    """Save once; then files may not grow beyond 6 kB: the shared state of 16 kB does not fit, the rest does."""
    folder = Path(words[1])
    writer = CheckpointWriter(folder, Engine(TrainConfig()), keep=3)
    save(writer, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
    print("result", save(writer, 2), save(writer, 3), flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print("result", save(writer, 4), flush=True)


def save_where_nothing_may_be_written(words: list[str]) -> None:
    """As a user without rights to the folder."""
    folder = Path(words[1])
    writer = CheckpointWriter(folder, Engine(TrainConfig()), keep=3)
    save(writer, 1)
    folder.chmod(0o555)
    if os.getuid() == 0:
        os.setuid(65534)
    for step in (2, 3, 4):
        save(writer, step)


def test_a_real_write_error_in_the_middle_of_a_file(tmp_path: Path) -> None:
    running = launch([str(tmp_path)], tmp_path / "logs", entry=save_with_little_room).ends_with(0)
    assert running.log().count("COULD NOT SAVE") == 2 and "result None None" in running.log()
    assert "result " + str(tmp_path / "checkpoint-4") in running.log()
    found, faults = newest_intact([tmp_path])
    assert step_of(found) == 4 and faults == []
    assert {info.step for info in list_checkpoints(tmp_path)} == {1, 4}


def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    running = launch([str(run)], tmp_path / "logs", entry=save_where_nothing_may_be_written).ends_with(1)
    assert "UserError: 3 saves in a row failed" in running.log() and "Permission denied" in running.log()
    found, _ = newest_intact([run])
    assert step_of(found) == 1
