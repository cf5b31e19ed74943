"""A disk that is really full: a small file system of its own, filled while a run writes to it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import arguments_for, launch, train_here
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.files import why_not_written
from tinyvae.models.taehv import TAEHV
from tinyvae.training.checkpoint import CheckpointWriter
from tinyvae.training.finish import write_final_model
from tinyvae.training.resume import Progress
from tinyvae.training.validation import write_best_model

ROOM = 12 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this machine lets us mount no small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, *, leaving: int) -> Path:
    """Use the space up except for this many bytes."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(max(0, free - leaving)))
    return ballast


class FullAfterFirstSave:
    """The disk fills up right after the first checkpoint; half a checkpoint more has room."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def __call__(self, rank: int) -> None:
        save = CheckpointWriter.save

        def save_then_fill(writer: CheckpointWriter, **options: object) -> Path | None:
            written = save(writer, **options)  # type: ignore[arg-type]
            if not (self.disk / "ballast").exists():
                fill(self.disk, leaving=1_500_000)
            return written

        CheckpointWriter.save = save_then_fill  # type: ignore[method-assign]


def test_a_full_disk_is_told_as_one_by_all_who_write(clips: Path, small_disk: Path, tmp_path: Path) -> None:
    run = small_disk / "run"
    changes = {"max_train_steps": 6, "checkpointing_steps": 1, "validation_steps": 1, "log_every": 1}
    changes |= {"learning_rate": 1e-4, "checkpoints_total_limit": 9}
    words = arguments_for(clips, run, **changes)
    running = launch(words, tmp_path / "logs", prepare=FullAfterFirstSave(small_disk)).ends_with(2)
    text = running.log()
    room = rf"No space left on device: .* free in {run}"
    assert "unexpected pos" not in text and "Traceback" not in text
    assert re.search(rf"COULD NOT SAVE checkpoint-2 \({room}, about [\d.]+ MiB needed\)", text), text
    assert re.search(rf"3 saves in a row failed, the last because of: {room}", text), text
    (small_disk / "ballast").unlink()
    again = train_here(
        arguments_for(clips, run, **{**changes, "max_train_steps": 2, "resume_from_checkpoint": "latest"})
    )
    assert again.progress.step == 2, "what was saved before is whole"


def test_the_final_model_and_the_best_model(clips: Path, small_disk: Path) -> None:
    config, model = TrainConfig(model_width=0.125), TAEHV("taehv", width=0.125)
    fill(small_disk, leaving=300_000)
    says = rf"No space left on device: .* free in {small_disk}, about 1\.\d+ MiB needed"
    with pytest.raises(UserError, match=says):
        write_final_model(config, small_disk, model, None, Progress(step=1), command="x")
    with pytest.raises((OSError, RuntimeError)) as fault:
        write_best_model(small_disk, model, {"step": 1})
    assert why_not_written(fault.value, small_disk).startswith("No space left on device")


def test_a_start_on_a_full_disk_is_one_sentence(clips: Path, small_disk: Path) -> None:
    for leaving in (0, 8192):
        ballast = fill(small_disk, leaving=leaving)
        with pytest.raises(UserError, match="No space left on device"):
            train_here(arguments_for(clips, small_disk / "run", checkpointing_steps=1, validation_steps=0))
        ballast.unlink()
    words = arguments_for(clips, small_disk / "run", max_train_steps=1, validation_steps=0)
    assert train_here(words).progress.step == 1, "with room the same words do it"


def test_reasons_that_are_no_full_disk_stay_what_they_are(tmp_path: Path) -> None:
    assert why_not_written(PermissionError(errno.EACCES, "Permission denied", "x"), tmp_path) == "Permission denied"
    assert why_not_written(RuntimeError("something else\nmore"), tmp_path) == "something else"
    quota = OSError(errno.EDQUOT, "quota")
    assert why_not_written(quota, tmp_path, needed_bytes=2**20).endswith(f"free in {tmp_path}, about 1.00 MiB needed")


def test_torch_hides_the_reason_and_it_is_found(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None: ...

    with pytest.raises(Exception) as hidden:
        torch.save({"a": torch.zeros(1000)}, Full())  # type: ignore[arg-type]
    assert why_not_written(hidden.value, tmp_path).startswith("No space left on device")
