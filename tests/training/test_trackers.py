"""Trackers hold a run's curves, settings and pictures, and a resumed run goes on in the same record."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.test_rules import check_paths
from tests.processes import HANGS_S, wait_until
from tests.training.tiny_runs import arguments_for, read_lines, train_here, write_clips
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training import trackers
from tinyvae.training.logs import RunLog

PICTURES = {"save_validation_videos": True, "max_train_steps": 4, "checkpointing_steps": 2}


def train_twice(tmp_path: Path, report_to: str) -> Path:
    """A run of four steps, resumed for two more; returns its folder."""
    clips, folder = write_clips(tmp_path / "clips"), tmp_path / "run"
    options = {**PICTURES, "report_to": report_to, "tracker_name": "small run", "log_every": 1}
    train_here(arguments_for(clips, folder, **options))
    train_here(arguments_for(clips, folder, **{**options, "max_train_steps": 6}, resume_from_checkpoint="latest"))
    return folder


def logged_lines(folder: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in read_lines(folder / "metrics.jsonl") if name in line}


@pytest.mark.slow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = train_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'logs' / 'mlflow.db'}")
    (experiment,) = [found for found in client.search_experiments() if found.name == "tinyvae"]
    (record,) = client.search_runs([experiment.experiment_id])
    assert record.info.run_name == "small run" and record.info.status == "FINISHED"
    assert record.data.params["model_width"] == "0.125"
    for name in ("train/loss", "val/psnr"):
        logged = {metric.step: metric.value for metric in client.get_metric_history(record.info.run_id, name)}
        assert logged == pytest.approx(logged_lines(folder, name))
    for kind, suffix in (("val_picture", "png"), ("val_video", "gif")):
        clips = client.list_artifacts(record.info.run_id, kind)
        assert clips
        files = client.list_artifacts(record.info.run_id, clips[0].path)
        assert {file.path.rsplit("/")[-1] for file in files} == {f"{step}.{suffix}" for step in (2, 4, 6)}


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB with parts, each behind a header of 7 bytes."""
    place, block, record = 7, 2**15, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # the rest of a block is filling
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_records(folder: Path) -> tuple[set[str], dict[str, dict[int, Any]], dict[str, str]]:
    """(ids of the offline runs, values by name and step, settings) of wandb's own files."""
    from wandb.proto import wandb_internal_pb2

    ids, values, settings = set(), {}, {}
    for file in sorted((folder / "logs" / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                row = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                for name, value in row.items():
                    values.setdefault(name, {})[row["step"]] = value
    return ids, values, settings


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", f"{HANGS_S:g}")  # seconds for the start of wandb's own process
    folder = train_twice(tmp_path, "wandb")

    def is_written() -> bool:
        """A process of wandb's own writes the files, and may be behind on a busy machine. The pictures come last."""
        values = wandb_records(folder)[1]
        return any(name.startswith("val_video/") and 6 in steps for name, steps in values.items())

    wait_until(is_written)
    ids, values, settings = wandb_records(folder)
    assert ids == {json.loads((folder / "tracker.json").read_text())["wandb"]}, "one record"
    assert settings["model_width"] == "0.125"
    for name in ("train/loss", "val/psnr"):
        assert values[name] == pytest.approx(logged_lines(folder, name))
    pictures = [name for name in values if name.startswith(("val_picture/", "val_video/"))]
    assert pictures and set(values[pictures[0]]) == {2, 4, 6}
    assert list((folder / "logs" / "wandb").rglob("*.gif")) and list((folder / "logs" / "wandb").rglob("*.png"))


@pytest.mark.slow
def test_wandb_without_a_key_is_one_sentence(tmp_path: Path) -> None:
    """In a process of its own: wandb keeps the settings of its first run."""
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    program = (
        "import sys\nfrom pathlib import Path\nfrom tinyvae.config.schema import TrainConfig\n"
        "from tinyvae.training.trackers import open_tracker\n"
        "open_tracker(Path(sys.argv[1]), TrainConfig(report_to='wandb'), from_step=0)"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    surroundings = {**clean, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=surroundings, stdin=subprocess.DEVNULL
    )
    expected = r"UserError: wandb cannot begin a run \(.*\); log in with `wandb login`, set WANDB_MODE=offline"
    assert re.search(expected, done.stderr), done.stderr


def test_a_tracker_that_is_not_installed_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(data_root=write_clips(tmp_path, num_clips=1), output_dir=tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_paths(config)
    with pytest.raises(UserError, match=r"report_to=wandb needs the package 'wandb'.*pip install 'tinyvae\[wandb\]'"):
        check_paths(replace(config, report_to="wandb"))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install tensorboard, or set report_to to none"):
        check_paths(config)
    check_paths(replace(config, report_to="none"))


class FailingTracker(trackers.Tracker):
    """A server that went away."""

    def scalars(self, step: int, values: Any) -> None:
        raise OSError("the server is down")

    pictures = scalars  # type: ignore[assignment]

    def close(self) -> None:
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = [FailingTracker(), UserError("it cannot be opened again"), UserError()]

    def open_next(*arguments: object, **options: object) -> object:
        made = opened.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr("tinyvae.training.logs.open_tracker", open_next)
    log = RunLog(tmp_path, TrainConfig(), is_main=True)
    log.begin()
    log.metrics(1, {"train/loss": 1.0})
    log.metrics(2, {"train/loss": 2.0})
    log.videos(2, [("a.mp4", torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8))])
    log.close()
    told = (tmp_path / "train.log").read_text()
    assert (
        "could not write to TensorBoard at step 1: the server is down" in told and "it cannot be opened again" in told
    )
    assert "could not write to TensorBoard at step 2: UserError\n" in told, "an error without a word"
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
