"""The clips of a run: what is written for a user who has none."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tinyvae.config.schema import TrainConfig
from tinyvae.data import sample_clips
from tinyvae.data.index_build import open_or_build_index
from tinyvae.errors import UserError
from tinyvae.training import preflight
from tinyvae.training.clips import split_files, write_missing_sample_clips
from tinyvae.video.write import VideoWriter

few_clips = partial(sample_clips.write_sample_clips, count=12, height=32, width=48, frames=5)


def run_with_samples(folder: Path) -> TrainConfig:
    return TrainConfig(
        data_root=folder, use_sample_clips=True, n_frames=4, height=32, width=32, dataloader_num_workers=0
    )


def git_sees(folder: Path) -> str:
    command = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_sample_clips_are_not_seen_by_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_clips, "write_sample_clips", few_clips)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    config = run_with_samples(tmp_path / "sample_clips")
    write_missing_sample_clips(config)
    assert (tmp_path / "sample_clips/annotations.json").is_file()
    assert git_sees(tmp_path) == ""
    before = sorted(tmp_path.rglob("*"))
    write_missing_sample_clips(config)  # they are there
    assert sorted(tmp_path.rglob("*")) == before
    few_clips(tmp_path / "asked_for")
    assert "asked_for/annotations.json" in git_sees(tmp_path), "a set that the user asks for is a folder like any other"


def test_sample_clips_of_a_start_that_was_stopped_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every later run would learn from the few that were there."""
    config, write = run_with_samples(tmp_path / "samples"), VideoWriter.write
    monkeypatch.setattr(sample_clips, "write_sample_clips", few_clips)
    written = []

    def stopped(writer: VideoWriter, *frames: object) -> None:
        written.append(writer)
        if len(written) == 4:
            raise KeyboardInterrupt
        write(writer, *frames)  # type: ignore[arg-type]

    monkeypatch.setattr(VideoWriter, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_missing_sample_clips(config)
    monkeypatch.setattr(VideoWriter, "write", write)
    assert len(list(tmp_path.rglob("*.mp4"))) == 3
    (check,) = preflight._data(config)
    assert check.found == f"the sample clips will be written to {tmp_path / 'samples'}"
    write_missing_sample_clips(config)
    assert len(list(tmp_path.rglob("*.mp4"))) == 12 and (tmp_path / "samples/annotations.json").is_file()
    assert [file.name for file in (tmp_path / "samples").glob(".*")] == [".gitignore"]
    (check,) = preflight._data(config)
    assert "12 files" in check.found and "10 train, 2 validate" in check.found, "the list splits them, as in the run"


def test_sample_clips_that_cannot_be_written_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_clips, "write_sample_clips", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_missing_sample_clips(run_with_samples(tmp_path / "samples"))


def test_a_run_that_never_validates_needs_no_file_for_it(clips: Path, tmp_path: Path) -> None:
    """The validation clips of a preset may be larger than all of the user's files."""
    index = open_or_build_index(clips, cache_dir=tmp_path, show_progress_bar=False)
    size = {"height": 32, "width": 32, "n_frames": 4, "validation_height": 256, "validation_width": 256}
    config = TrainConfig(data_root=clips, validation_steps=0, **size)  # type: ignore[arg-type]
    assert [len(side) for side in split_files(config, index)] == [8, 0]
    with pytest.raises(UserError, match=r"no file of .* can give a clip of 4 frames at 32x64"):
        split_files(replace(config, height=64), index)
    with pytest.raises(UserError, match=r"no file of .* can give a validation clip"):
        split_files(replace(config, validation_steps=1), index)
