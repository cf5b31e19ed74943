"""Pictures of validation clips: drawn in another process, whole, in order; a failure there is told."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tinyvae.config import TrainConfig
from tinyvae.training import pictures
from tinyvae.training.logs import RunLog
from tinyvae.training.pictures import DrawingError, draw_pictures


def test_each_clip_gets_its_own_pictures() -> None:
    strips = [(name, np.full((5, 16, 24, 3), level, np.uint8)) for name, level in (("dark", 20), ("light", 220))]
    drawn = draw_pictures(strips)
    assert [(made.name, made.width, made.height) for made in drawn] == [("dark", 24, 16), ("light", 24, 16)]
    for made, (_, frames) in zip(drawn, strips, strict=True):
        png, gif = (Image.open(io.BytesIO(file)) for file in (made.png, made.gif))
        assert np.array_equal(np.asarray(png), frames[2]) and png.format == "PNG"
        assert gif.format == "GIF" and abs(int(np.asarray(gif.convert("RGB")).mean()) - frames.mean()) < 8


def log_of_a_run(folder: Path) -> str:
    """What a run logs that draws the pictures of its step 3."""
    folder.mkdir()
    log = RunLog(folder, TrainConfig(output_dir=folder), is_main=True)
    log.begin()
    log.videos(3, [("a.mp4", torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8))])
    log.close()
    return (folder / "train.log").read_text()


def test_a_process_that_fails_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise MemoryError('no room for a picture')")
    monkeypatch.setattr(pictures, "__file__", str(broken))
    with pytest.raises(DrawingError, match="no room for a picture"):
        draw_pictures([("a", np.zeros((1, 8, 8, 3), np.uint8))])
    said = log_of_a_run(tmp_path / "run")
    assert "the pictures of step 3 could not be drawn: MemoryError: no room for a picture" in said


def test_a_process_that_cannot_be_started_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_processes(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(pictures.subprocess, "run", no_more_processes)
    said = log_of_a_run(tmp_path / "run")
    assert "the pictures of step 3 could not be drawn: [Errno 12] Cannot allocate memory" in said
