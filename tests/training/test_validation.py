"""The validation code itself, scored on predictors whose result is known: no scale or alignment slip can pass."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tinyvae import TAEHV, get_spec, load_model
from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip import ClipSettings
from tinyvae.data.index_build import open_or_build_index
from tinyvae.data.loader import ValidationReads, make_validation_loader
from tinyvae.data.splits import split
from tinyvae.errors import UserError
from tinyvae.models.codec import VideoCodec
from tinyvae.training import validation
from tinyvae.training.engine import Engine
from tinyvae.training.guards import Status
from tinyvae.training.logs import RunLog
from tinyvae.training.optim import WeightAverage
from tinyvae.training.resume import Progress
from tinyvae.training.validation import (
    Scorer,
    ValidationCut,
    ValidationResult,
    Validator,
    validate,
    write_best_model,
    write_json,
)


class Predictor(VideoCodec):
    """A codec whose output is a plain function of its input, cut by the variant's own frame rule."""

    def __init__(self, output_of: object, variant: str = "taehv") -> None:
        self.spec = get_spec(variant)
        self.output_of = output_of

    def reconstruct(self, frames_NTCHW: Tensor) -> Tensor:
        return self.output_of(self.target(frames_NTCHW))  # type: ignore[operator]


PERFECT = Predictor(lambda frames: frames)
BLACK = Predictor(torch.zeros_like)
MEAN_COLOUR = Predictor(lambda frames: frames.mean(dim=(1, 3, 4), keepdim=True).expand_as(frames))
LATE = Predictor(lambda frames: torch.cat([frames[:, :1], frames[:, :-1]], dim=1))


@dataclass(frozen=True)
class Batch:
    frames: Tensor
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def model_input(self, device: torch.device) -> Tensor:
        return self.frames


class Batches:
    """A loader; it fails after its batches with ``failure``."""

    reads = ValidationReads()

    def __init__(self, *batches: Batch, failure: Exception | None = None) -> None:
        self._batches, self._failure = batches, failure

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches
        if self._failure is not None:
            raise self._failure

    def check(self, reads: list[ValidationReads]) -> None:
        """All clips are good."""


class TwoRanks:
    """An engine as rank 0 of two sees it, whose peer has nothing to do and is as ``peer`` says."""

    device = torch.device("cpu")

    def __init__(self, peer: Status) -> None:
        self.peer = peer
        self.told: list[int] = []

    def worst(self, signal_number: int, status: int, has_more: int) -> tuple[int, int, int]:
        self.told.append(status)
        return signal_number, max(status, self.peer), has_more


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(TrainConfig())


def score(model: Any, loader: Any, engine: Any, **options: Any) -> ValidationResult:
    return validate(Scorer(model=model, device=engine.device, lpips=None, **options), loader, engine)


def psnr(model: VideoCodec, loader: object, engine: Engine) -> float:
    return score(model, loader, engine).metrics["psnr"]


def test_predictors_of_known_quality(engine: Engine) -> None:
    """Frames that are 0.25 and 0.75 in halves: the mean is 0.5 everywhere, off by 0.25 -> 12.04 dB."""
    frames = torch.full((2, 9, 3, 16, 16), 0.25)
    frames[..., 8:] = 0.75
    loader = Batches(Batch(frames, ["a", "b"]))
    assert psnr(PERFECT, loader, engine) >= 100
    assert psnr(MEAN_COLOUR, loader, engine) == pytest.approx(-20 * math.log10(0.25), abs=1e-3)
    assert psnr(BLACK, loader, engine) == pytest.approx(-10 * math.log10((0.25**2 + 0.75**2) / 2), abs=1e-3)


def test_predictors_on_real_clips(shared: Path, tmp_path: Path, engine: Engine) -> None:
    settings = ClipSettings(height=128, width=128, n_frames=9, random_resize=False)
    clips = shared / "data" / "clips"
    index = open_or_build_index(clips / "val", cache_dir=tmp_path, show_progress_bar=False)
    _, val = split(index, settings, train_split=0.01)
    loader = make_validation_loader(val, settings, batch_size=4, num_samples=8)
    batches = Batches(*loader)
    scores = {
        name: psnr(model, batches, engine)
        for name, model in {"perfect": PERFECT, "black": BLACK, "mean": MEAN_COLOUR, "late": LATE}.items()
    }
    assert scores["perfect"] >= 100
    assert 4 < scores["black"] < 9
    assert 11 < scores["mean"] < 21
    assert scores["late"] < 45  # one frame late is far from perfect: a shift cannot hide
    again = psnr(MEAN_COLOUR, loader, engine)
    assert again == scores["mean"]  # the same clips, the same number, every time


def test_one_pass_scores_the_weights_with_and_without_averaging(engine: Engine) -> None:
    model = TAEHV("taehv", width=0.125).eval()
    average = WeightAverage(model, decay=0.9)
    for parameter in model.parameters():
        parameter.data *= 1.1
    own = {name: value.clone() for name, value in model.state_dict().items()}
    loader = Batches(*(Batch(torch.rand(2, 9, 3, 16, 16), [name, name + "2"]) for name in "ab"))

    both = score(model, loader, engine, average=average, num_shown=3)
    assert all(value.equal(own[name]) for name, value in model.state_dict().items()), "its own weights are back"
    raw = score(model, loader, engine)
    with average.swapped_into(model):
        averaged = score(model, loader, engine, num_shown=3)
    assert both.metrics == averaged.metrics and both.raw_metrics == raw.metrics != both.metrics
    assert raw.raw_metrics is None and raw.shown == [] and both.num_clips == 4
    assert [name for name, _, _ in both.shown] == ["a", "a2", "b"]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(both.shown, averaged.shown, strict=True))


def test_spread_is_over_clips_and_names_are_unique(engine: Engine) -> None:
    dark, bright = torch.zeros(1, 5, 3, 16, 16), torch.full((1, 5, 3, 16, 16), 0.5)
    loader = Batches(Batch(dark + 0.1, ["a"]), Batch(bright, ["b"]))
    result = score(BLACK, loader, engine)
    values = [20.0, -20 * math.log10(0.5)]
    assert result.num_clips == 2
    assert result.metrics["psnr"] == pytest.approx(sum(values) / 2, abs=1e-3)
    assert result.metrics["psnr_std"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2), abs=1e-3)


def test_a_score_that_one_machine_cannot_measure_is_that_of_the_others() -> None:
    ranks: Any = [{"a": ({"psnr": 20.0}, None)}, {"b": ({"psnr": 30.0, "lpips": 0.25}, None)}]
    metrics = validation._result(ranks, []).metrics
    assert (metrics["psnr"], metrics["lpips"], metrics["lpips_std"]) == (25.0, 0.25, 0.0)


def test_a_fault_in_the_middle_is_the_reason_of_the_cut(engine: Engine) -> None:
    seen: list[int] = []

    def output_of(frames: Tensor) -> Tensor:
        seen.append(len(frames))
        if len(seen) == 2:
            raise ZeroDivisionError
        return frames

    loader = Batches(*(Batch(torch.zeros(1, 5, 3, 16, 16), [name]) for name in "ab"))
    with pytest.raises(ValidationCut) as cut:
        score(Predictor(output_of), loader, engine)
    assert isinstance(cut.value.reason, ZeroDivisionError)


def test_no_usable_clip_is_an_error_that_names_the_first(clips: Path, tmp_path: Path, engine: Engine) -> None:
    shutil.copytree(clips, tmp_path / "clips")
    settings = ClipSettings(height=32, width=32, n_frames=5, random_resize=False)
    index = open_or_build_index(tmp_path / "clips", cache_dir=tmp_path, show_progress_bar=False)
    _, val = split(index, settings, train_split=0.5)
    shutil.rmtree(tmp_path / "clips")
    first = index.row(int(val.rows[0])).path
    message = f"not one validation clip could be read; the first was {first!r}: .*No such file"
    with pytest.raises(ValidationCut, match=message) as cut:
        score(PERFECT, make_validation_loader(val, settings, batch_size=2), engine)
    assert isinstance(cut.value.reason, UserError)
    with pytest.raises(UserError, match=message):  # of several ranks, after they have told each other
        loaders = [make_validation_loader(val, settings, batch_size=2, rank=r, world_size=2) for r in (0, 1)]
        assert [list(loader) for loader in loaders] == [[], []]
        loaders[1].check([loader.reads for loader in loaders])


@pytest.mark.parametrize("fault", [UserError("shared memory is full"), OSError("no more files"), KeyError("a bug")])
def test_whatever_fails_on_a_rank_is_told_to_all(fault: Exception) -> None:
    """Also what the loader raises: the peer, which is well, waits for the status and would wait for ever."""
    engine = TwoRanks(peer=Status.WELL)
    loader = Batches(Batch(torch.zeros(1, 5, 3, 16, 16), ["a"]), failure=fault)
    with pytest.raises(ValidationCut) as cut:
        score(PERFECT, loader, engine)
    assert cut.value.reason is fault and engine.told == [Status.WELL, Status.HAS_TO_STOP]


def test_a_rank_that_is_well_leaves_with_the_others() -> None:
    loader = Batches(Batch(torch.zeros(1, 5, 3, 16, 16), ["a"]))
    for peer, reason in ((Status.HAS_TO_STOP, type(None)), (Status.OUT_OF_MEMORY, UserError)):
        with pytest.raises(ValidationCut) as cut:
            score(PERFECT, loader, TwoRanks(peer=peer))
        assert isinstance(cut.value.reason, reason)


def test_best_model_is_replaced_whole(tmp_path: Path) -> None:
    first, second = TAEHV("taew2_2", width=0.125), TAEHV("taew2_2", width=0.125)
    write_best_model(tmp_path, first, {"step": 1, "psnr": 20.0})
    write_best_model(tmp_path, second, {"step": 2, "psnr": 21.0})
    best = tmp_path / "best_model"
    assert sorted(f.name for f in best.iterdir()) == [
        "config.json",
        "model.pth",
        "model.safetensors",
        "model_info.json",
    ]
    assert json.loads((best / "model_info.json").read_text())["step"] == 2
    loaded = load_model(best).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in second.state_dict().items())
    assert [f.name for f in tmp_path.iterdir()] == ["best_model"]


def make_validator(folder: Path, engine: Engine, config: TrainConfig, *, from_step: int = 0) -> Validator:
    run_log = RunLog(folder, config, is_main=False)
    run_log.close()
    model = TAEHV("taehv", width=0.125)
    parts: Any = {"model": model, "average": None, "loader": None, "lpips": None, "run_log": run_log}
    return Validator(config, engine, folder, **parts, stop_signal=lambda: 0, from_step=from_step)


@pytest.mark.parametrize(("checkpointing_steps", "best"), [(5, (4, 25.0)), (3, (3, 30.0))])
def test_a_best_model_that_is_nowhere_is_not_the_best(
    tmp_path: Path,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    checkpointing_steps: int,
    best: tuple[int, float],
) -> None:
    """The disk is full at steps 1 and 3. If a checkpoint of step 3 holds the model, it stays the best."""

    def write(folder: Path, model: TAEHV, info: dict[str, Any]) -> None:
        if info["step"] in (1, 3):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_best_model(folder, model, info)

    caplog.set_level("INFO")
    config = TrainConfig(checkpointing_steps=checkpointing_steps, max_train_steps=9)
    validator = make_validator(tmp_path, engine, config)
    monkeypatch.setattr("tinyvae.training.validation.write_best_model", write)
    progress, steps = Progress(), []
    for step, score in ((1, 10.0), (2, 20.0), (3, 30.0), (4, 25.0)):
        result = ValidationResult(metrics={"psnr": score}, num_clips=1, shown=[])
        monkeypatch.setattr(Validator, "_score", lambda self, result=result: result)
        progress, _ = validator.validate(replace(progress, step=step), 0.1)
        steps.append(progress.best_step)
    assert (progress.best_step, progress.best_score) == best and progress.stale_validations == (best[0] == 3)
    assert steps[:2] == [None, 2]
    assert json.loads((tmp_path / "best_model/model_info.json").read_text())["step"] == (4 if best[0] == 4 else 2)
    assert caplog.text.count("COULD NOT WRITE best_model/ of step 3") == 1
    first = "there is none yet. No checkpoint is due at this step, so the next validation counts as first."
    assert f"): {first}" in caplog.text
    assert "psnr 10.00 dB (no best model yet);" in caplog.text and "None" not in caplog.text


def test_history_forgets_what_lies_beyond_the_resumed_step(tmp_path: Path, engine: Engine) -> None:
    file = tmp_path / "validation_history.json"

    def record(validator: Validator, step: int, score: float) -> None:
        result = ValidationResult(metrics={"psnr": score}, num_clips=1, shown=[])
        validator._record(Progress(step=step, best_step=step), result, None, seconds=1.0)

    first = make_validator(tmp_path, engine, TrainConfig())
    for step in (10, 20, 30):
        record(first, step, float(step))
    resumed = make_validator(tmp_path, engine, TrainConfig(), from_step=20)
    assert [entry["step"] for entry in json.loads(file.read_text())] == [10, 20]
    record(resumed, 30, 30.0)
    record(resumed, 30, 99.0)
    assert [(e["step"], e["psnr"]) for e in json.loads(file.read_text())] == [(10, 10.0), (20, 20.0), (30, 99.0)]


def test_what_a_full_disk_cut_off_does_not_stay_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TAEHV("taehv", width=0.125)
    write_best_model(tmp_path, model, {"step": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_best_model(tmp_path, model, {"step": 2})
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "validation_history.json", [{"step": 2}])
    assert [f.name for f in tmp_path.iterdir()] == ["best_model"]
    assert json.loads((tmp_path / "best_model" / "model_info.json").read_text())["step"] == 1
