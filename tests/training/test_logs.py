"""What a run writes down can be read back, and a log line holds the means since the line before, over all ranks."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.tiny_runs import arguments_for, launch, read_lines, train_here
from tinyvae.config.schema import TrainConfig
from tinyvae.data.sizes import ClipSize
from tinyvae.training.engine import Engine, StepResult
from tinyvae.training.logs import RunLog, StepLog, side_by_side, system_stats

SIZE = ClipSize(8, 32, 32)
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
    logging.getLogger("tinyvae.training").info("clip %s", os.fsdecode("größe \N{SNOWMAN} ".encode() + b"\xff.mp4"))
    log.metrics(1, {"train/loss": 1.0})
    log.close()
    text = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert "INFO hello 5" in text and r"clip größe ☃ \udcff.mp4" in text
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


def log_on_a_full_disk(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, sys.stderr.fileno())  # it is a file, which may not grow either
    log = open_log(Path(words[1]))
    log.metrics(1, {"train/loss": 1.0})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))  # no file may grow: what a full disk is to a program
    frames = torch.rand(3, 3, 8, 8)
    for step in (2, 3, 4):
        log.metrics(step, {"train/loss": float(step)})
        log.videos(step, [("a.mp4", frames, frames)])
        if log._tracker is not None:
            log._show(step, lambda tracker: tracker._writer.flush())  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    log.metrics(5, {"train/loss": 5.0})
    log.videos(5, [("a.mp4", frames, frames)])
    log.close()
    print(os.read(reader, 100_000).decode())


def test_a_full_disk_ends_neither_the_log_nor_the_run(tmp_path: Path) -> None:
    said = launch([str(tmp_path)], tmp_path / "said", entry=log_on_a_full_disk).ends_with(0).log()
    assert "could not log step 2" in said and said.count("could not write to TensorBoard") == 1
    steps = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
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
    kept = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["train/loss"]) for line in kept] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path, is_main=False)
    log.metrics(1, {"train/loss": 1.0})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_side_by_side_is_input_output_error() -> None:
    strip = side_by_side(torch.full((1, 3, 2, 2), 0.4), torch.full((1, 3, 2, 2), 0.6))
    assert strip.shape == (1, 2, 6, 3)
    assert strip[0, 0, :, 0].tolist() == [102, 102, 153, 153, 204, 204]


def log_of(**changes: object) -> StepLog:
    config = TrainConfig(n_frames=8, log_every=2, lr_scheduler="constant", learning_rate=1e-3, **changes)  # type: ignore[arg-type]
    return StepLog(config, Engine(config))


def add_step(
    log: StepLog,
    *losses: float,
    norm: float = 1.0,
    stepped: bool = True,
    size: ClipSize = SIZE,
    waited_s: float = 0.0,
    **terms: float,
) -> None:
    """A step of four clips in half a second; ``losses``: of its parts."""
    log.begin_step()
    for value in losses:
        parts = {name: torch.tensor(number) for name, number in {"loss": value, **terms}.items()}
        log.add(parts, share=1 / len(losses))
    result = StepResult(gradient_norm=norm, stepped=stepped)
    log.end_step(result, num_clips=4, size=size, seconds=0.5, waited_s=waited_s)


def test_a_line_is_the_mean_of_its_steps_and_their_parts() -> None:
    log = log_of()
    add_step(log, 1.0, 3.0, norm=2.0)
    add_step(log, 6.0, norm=4.0)
    assert log.is_due(2) and not log.is_due(3)
    line = log.take(2)
    assert line["train/loss"] == pytest.approx(4.0) and line["train/gradient_norm"] == pytest.approx(3.0)
    assert line["train/frames_per_second"] == pytest.approx(2 * 4 * 8 / 1.0)
    assert line["train/learning_rate"] == pytest.approx(1e-3) and log.recent_loss == pytest.approx(4.0)
    add_step(log, 8.0)
    assert log.take(2)["train/loss"] == pytest.approx(8.0), "the line before is still in it"


def test_a_line_says_how_much_of_the_time_went_by_without_clips() -> None:
    log, resumed = log_of(), log_of()
    add_step(log, 1.0, waited_s=0.1)
    resumed.load_state_dict(log.state_dict())
    for each in (log, resumed):
        add_step(each, 1.0, waited_s=0.3)
        line = each.take(2)
        assert line["train/waiting_for_clips"] == pytest.approx(0.4)
        assert "64 frames/s (40% of the time waiting for clips), " in each.bar_text(line)
    add_step(log, 1.0, waited_s=0.04)
    assert "64 frames/s, " in log.bar_text(log.take(3)), "a little is usual, and not told"


def test_a_term_that_begins_in_mid_line_is_the_mean_of_its_own_steps() -> None:
    """As Seraena's do; so too where the run is resumed in that line."""
    log, resumed = log_of(), log_of()
    for loss in (1.0, 2.0, 3.0):
        add_step(log, loss)
    add_step(log, 4.0, seraena_loss=0.5)
    assert log.num_clips
    resumed.load_state_dict(log.state_dict())
    for each in (log, resumed):
        add_step(each, 5.0, seraena_loss=1.5)
        line = each.take(4)
        assert line["train/loss"] == pytest.approx(3.0) and line["train/seraena_loss"] == pytest.approx(1.0)
        assert not each.num_clips
    add_step(log, 1.0, seraena_loss=3.0)
    assert log.take(4)["train/seraena_loss"] == pytest.approx(3.0), "the count of the line before is still in it"


def test_a_line_of_several_sizes_counts_real_frames_and_tells_the_sizes_apart() -> None:
    log = log_of(resolutions=("8x32x32", "4x64x64"))
    for loss, size in ((1.0, SIZE), (2.0, SIZE), (6.0, ClipSize(4, 64, 64))):
        add_step(log, loss, size=size)
    line = log.take(3)
    assert line["train/loss"] == pytest.approx(3.0) and line["train/loss_8x32x32"] == pytest.approx(1.5)
    assert line["train/loss_4x64x64"] == pytest.approx(6.0)
    assert (line["train/steps_8x32x32"], line["train/steps_4x64x64"]) == (2, 1)
    assert line["train/frames_per_second"] == pytest.approx(4 * (8 + 8 + 4) / 1.5)


def test_the_line_of_an_older_checkpoint_goes_on() -> None:
    """It had one count of steps for all terms."""
    log, older = log_of(), log_of()
    for loss in (1.0, 2.0):
        add_step(log, loss)
    state = log.state_dict()
    del state["counts"]
    older.load_state_dict(state)
    add_step(older, 6.0)
    assert older.take(4)["train/loss"] == pytest.approx(3.0)


def test_muons_rate_stands_beside_adamws() -> None:
    log = log_of(optimizer="muon", muon_learning_rate=0.02)
    add_step(log, 1.0)
    assert log.take(2)["train/muon_learning_rate"] == pytest.approx(0.02)
    assert "train/muon_learning_rate" not in log_of().take(2)


def test_a_skipped_step_and_a_failed_attempt_are_left_out() -> None:
    log = log_of()
    add_step(log, 2.0)
    add_step(log, float("nan"), stepped=False)
    log.begin_step()
    log.add({"loss": torch.tensor(100.0)}, share=0.5)  # then memory ran out, and the step begins again
    add_step(log, 4.0)
    assert log.take(2)["train/loss"] == pytest.approx(3.0)
    add_step(log, float("nan"), stepped=False)
    line = log.take(2)
    assert "train/loss" not in line and "loss" not in log.bar_text(line)


def test_the_bar_shows_loss_rate_speed_and_memory() -> None:
    log = log_of()
    add_step(log, 2.0)
    text = log.bar_text(log.take(2))
    assert text.startswith("loss 2, lr 1.00e-03, 64 frames/s, ") and text.endswith(" GiB")


def test_system_stats_join_in_where_asked() -> None:
    log = log_of(log_system_stats=True)
    add_step(log, 1.0)
    line = log.take(2)
    assert set(system_stats(torch.device("cpu"))) == {"system/cpu_percent", "system/memory_percent"} <= set(line)
    assert 0 < line["system/memory_percent"] <= 100


def test_a_gpu_whose_driver_tells_no_load_still_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a slice of a GPU (MIG): pynvml's errors have no common base with torch's."""

    class NVMLError(Exception):
        pass

    def not_supported(device: torch.device) -> int:
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", not_supported)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    assert system_stats(torch.device("cuda"))["system/gpu_memory_percent"] == 25


@pytest.mark.slow
def test_two_ranks_log_what_one_with_all_clips_does(clips: Path, tmp_path: Path) -> None:
    """And train.log holds the same lines for a reader."""
    shape = {"max_train_steps": 2, "log_every": 1, "validation_steps": 0, "epsilon": 1e-3}
    one = train_here(arguments_for(clips, tmp_path / "one", train_batch_size=4, **shape)).folder
    halves = {"train_batch_size": 1, "gradient_accumulation_steps": 2}
    launch(arguments_for(clips, tmp_path / "two", **shape, **halves), tmp_path, ranks=2).ends_with(0, 0)
    lines = [read_lines(run / "metrics.jsonl") for run in (one, tmp_path / "two")]
    for of_one, of_two in zip(*lines, strict=True):
        for name in ("train/loss", "train/reconstruction_loss", "train/gradient_norm", "train/learning_rate"):
            assert of_two[name] == pytest.approx(of_one[name], rel=1e-4), name
    text = (tmp_path / "two" / "train.log").read_text()
    assert f"INFO step 2 of 2: loss {lines[1][1]['train/loss']:.4g}, lr " in text
