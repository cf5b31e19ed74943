"""The clips of a run: what is written for a user who has none."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from tinyvae.config.schema import TrainConfig
from tinyvae.data import sample_clips
from tinyvae.training.clips import write_missing_sample_clips


def git_sees(folder: Path) -> str:
    command = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_sample_clips_are_not_seen_by_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = partial(sample_clips.write_sample_clips, count=2, height=32, width=48, frames=5)
    monkeypatch.setattr(sample_clips, "write_sample_clips", few)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    config = TrainConfig(data_root=tmp_path / "sample_clips", use_sample_clips=True)
    write_missing_sample_clips(config)
    assert (tmp_path / "sample_clips/annotations.json").is_file()
    assert git_sees(tmp_path) == ""
    before = sorted(tmp_path.rglob("*"))
    write_missing_sample_clips(config)  # they are there
    assert sorted(tmp_path.rglob("*")) == before
    few(tmp_path / "asked_for")
    assert "asked_for/annotations.json" in git_sees(tmp_path), "a set that the user asks for is a folder like any other"


def test_sample_clips_of_a_killed_run_are_completed_and_files_of_a_user_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(sample_clips.write_sample_clips, count=3, height=32, width=48, frames=2)
    monkeypatch.setattr(sample_clips, "write_sample_clips", few)
    config = TrainConfig(data_root=tmp_path, use_sample_clips=True)
    few(tmp_path)
    (tmp_path / "annotations.json").unlink()  # it is written last
    (tmp_path / sample_clips.clip_name(2)).rename(tmp_path / "train/.002_rotation.mp4.77.part")
    write_missing_sample_clips(config)
    assert (tmp_path / "annotations.json").is_file() and (tmp_path / sample_clips.clip_name(2)).is_file()
    (tmp_path / "annotations.json").unlink()
    (tmp_path / "mine.mp4").write_bytes(b"mine")
    write_missing_sample_clips(config)
    assert not (tmp_path / "annotations.json").exists()
