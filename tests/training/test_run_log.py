"""What a run writes down can be read back: metrics, TensorBoard scalars, pictures, animations and the configuration."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tinyvae.config.schema import TrainConfig
from tinyvae.training.logs import RunLog, side_by_side

CONFIG = TrainConfig(data_root=Path("/data/of the run"), color_jitter_params=(0.1, 0.2, 0.3, 0.04), tracker_name="t")


def open_log(folder: Path, *, is_main: bool = True, from_step: int = 0) -> RunLog:
    log = RunLog(folder, CONFIG, is_main=is_main)
    log.begin(from_step=from_step)
    return log


def test_tensorboard_holds_scalars_config_pictures_and_animations(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.metrics(3, {"train/loss": 0.5, "val/psnr": 21.25})
    frames = torch.rand(5, 3, 8, 16)
    log.videos(3, [("a.mp4", frames, frames * 0.9)])
    log.close()
    events = EventAccumulator(str(tmp_path / "logs" / "t"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    assert events.Scalars("val/psnr")[0].value == 21.25 and events.Scalars("train/loss")[0].step == 3
    animation = Image.open(io.BytesIO(events.Images("val_video/a.mp4")[0].encoded_image_string))
    assert animation.format == "GIF" and animation.n_frames == 5 and animation.size == (48, 8)
    assert events.Images("val_picture/a.mp4")
    assert any(
        "/data/of the run" in str(t.tensor_proto.string_val[0].decode()) for t in events.Tensors("config/text_summary")
    )


def test_log_file_and_metrics_lines(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    logging.getLogger("tinyvae.training").info("hello %d", 5)
    log.metrics(1, {"train/loss": 1.0})
    log.close()
    assert "INFO hello 5" in (tmp_path / "train.log").read_text()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 1.0}


def test_the_logger_is_afterwards_as_it_was_before(tmp_path: Path) -> None:
    logger = logging.getLogger("tinyvae")
    before = (logger.level, logger.propagate, list(logger.handlers))
    logger.setLevel(logging.ERROR)
    try:
        log = open_log(tmp_path)
        assert logger.level == logging.INFO and not logger.propagate
        log.close()
        assert (logger.level, logger.propagate, logger.handlers) == (logging.ERROR, *before[1:])
    finally:
        logger.setLevel(before[0])


def test_until_it_begins_no_file_is_touched_and_no_line_is_lost(tmp_path: Path) -> None:
    log = RunLog(tmp_path, CONFIG, is_main=True)
    logging.getLogger("tinyvae.training").info("early %d", 1)
    log.note("noted")
    assert list(tmp_path.iterdir()) == []
    log.begin()
    logging.getLogger("tinyvae.training").info("late")
    log.close()
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["early 1", "noted", "late"]
    refused = RunLog(tmp_path / "refused", CONFIG, is_main=True)
    logging.getLogger("tinyvae.training").info("never")
    refused.close()
    assert not (tmp_path / "refused").exists()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_file_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = open_log(tmp_path)
    (file,) = [handler for handler in log._handlers if isinstance(handler, logging.FileHandler)]
    disk = file.setStream(FullDisk())
    assert disk is not None
    disk.close()
    log.note("one")
    log.note("two")
    log.close()
    assert capsys.readouterr().err.splitlines() == ["train.log cannot be written: [Errno 28] No space left on device"]


FULL_DISK = """
import logging, resource, sys
from pathlib import Path
import torch
from tinyvae.config.schema import TrainConfig
from tinyvae.training.logs import RunLog

log = RunLog(Path(sys.argv[1]), TrainConfig(tracker_name="t"), is_main=True)
log.begin()
log.metrics(1, {"train/loss": 1.0})
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))  # no file may grow: what a full disk is to a program
frames = torch.rand(3, 3, 8, 8)
for step in (2, 3, 4):
    log.metrics(step, {"train/loss": float(step)})
    log.videos(step, [("a.mp4", frames, frames)])
    if log._writer is not None:
        log._show(step, lambda writer: writer.flush())
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
log.metrics(5, {"train/loss": 5.0})
log.videos(5, [("a.mp4", frames, frames)])
log.close()
"""


def test_a_full_disk_ends_neither_the_log_nor_the_run(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "could not log step 2" in done.stderr and done.stderr.count("could not write to TensorBoard") == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5], "what could not be written came later, and no line is torn"
    events = EventAccumulator(str(tmp_path / "logs" / "t"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")][-1] == 5


def test_resumed_log_drops_lines_beyond_its_checkpoint_and_torn_ones(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/loss": float(step)}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 2, "tra')
    log = open_log(tmp_path, from_step=2)
    log.metrics(3, {"train/loss": 30.0})
    log.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in kept] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path, is_main=False)
    log.metrics(1, {"train/loss": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_side_by_side_is_input_output_error() -> None:
    frames = torch.full((1, 3, 2, 2), 0.5)
    strip = side_by_side(frames, torch.full((1, 3, 2, 2), 0.6))
    assert strip.shape == (1, 3, 2, 6)
    assert strip[0, 0, 0].tolist() == pytest.approx([0.5, 0.5, 0.6, 0.6, 0.4, 0.4])
