"""The teacher in validation: what is scored, what decides, and that its latents are computed once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.tiny_runs import arguments_for, launch, read_lines, run_differences, train_here
from tinyvae import TAEHV
from tinyvae.cli.main import run as run_verb
from tinyvae.config.schema import TrainConfig
from tinyvae.models.weights import save_model
from tinyvae.training import validation_teacher
from tinyvae.training.engine import Engine
from tinyvae.training.validation_teacher import (
    ValidationTeacher,
    deciding_score,
    find_validation_teacher,
    latent_snr,
)

pytest.importorskip("diffusers")


def distilling(clips: Path, run: Path, teacher: Path, **changes: object) -> list[str]:
    """A run that trains encoder and decoder each against the teacher, and no round trip."""
    settings: dict[str, object] = {
        "variant": "taecvx",
        "use_ref_vae": True,
        "ref_vae_path": teacher,
        "ref_vae_dtype": "float32",
        "reconstruction_loss_weight": 0.0,
        "encoder_loss_weight": 1.0,
        "decoder_loss_weight": 10.0,
        "n_frames": 8,
        "validation_n_frames": 12,  # of which the teacher and the student count nine alike
        "max_train_steps": 2,
        "validation_steps": 1,
        "checkpointing_steps": 1,
        **changes,
    }
    return arguments_for(clips, run, **settings)


def test_a_run_that_trains_no_round_trip_is_scored_by_its_decoder(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """In history, log, card and best_model; the report has the same figure, from another path through the code."""
    run = train_here(distilling(clips, tmp_path / "run", teacher, report=True))
    history = read_lines(run.folder / "validation_history.json")
    best = max(history, key=lambda entry: entry["decoder_psnr"])
    assert run.progress.best_step == best["step"] and run.progress.best_score == best["decoder_psnr"]
    assert json.loads((run.folder / "best_model/model_info.json").read_text())["decoder_psnr"] == best["decoder_psnr"]
    assert "decoder_psnr" in history[-1]["raw"] and history[0]["psnr"] != history[0]["decoder_psnr"]
    text = (run.folder / "train.log").read_text()
    assert f"decoder_psnr {history[0]['decoder_psnr']:.2f} dB" in text and "(best decoder_psnr" in text
    assert "student's decoder on teacher latents" in text
    assert "| step | psnr | ssim | decoder_psnr | latent_snr |" in (run.folder / "model_card.md").read_text()
    (figures,) = json.loads((run.folder / "results.json").read_text())["comparison"]["teacher_figures"]
    assert figures["decoder"]["psnr"]["mean"] == pytest.approx(best["decoder_psnr"], abs=1e-3)
    assert 'id="teacher"' in (run.folder / "report.html").read_text()


@pytest.mark.slow
def test_scores_start_again_without_the_teacher_and_a_resume_with_it_is_exact(
    clips: Path, teacher: Path, tmp_path: Path
) -> None:
    """A latent store needs no teacher, so it can be gone when the run goes on."""
    words = ["--clips", "4", "--output", str(tmp_path / "store"), "--dtype", "float32"]
    copy = shutil.copytree(teacher, tmp_path / "teacher")
    run_verb(["latents", *distilling(clips, tmp_path / "x", copy), *words])
    stored: dict[str, object] = {"latent_store": tmp_path / "store", "max_train_steps": 4, "checkpoints_total_limit": 9}
    train_here(distilling(clips, tmp_path / "whole", copy, **stored))
    resume: dict[str, object] = {**stored, "resume_from_checkpoint": tmp_path / "whole/checkpoint-2"}
    train_here(distilling(clips, tmp_path / "resumed", copy, **resume))
    assert run_differences(tmp_path / "whole", tmp_path / "resumed", 4) == []
    shutil.rmtree(copy)
    alone = train_here(distilling(clips, tmp_path / "alone", copy, **resume))
    said = (alone.folder / "train.log").read_text()
    assert "is not here: validation and report score the student's own round trip alone" in said
    assert "old and new scores cannot be compared (metric_for_best_model: decoder_psnr -> psnr)" in said
    entries = read_lines(alone.folder / "validation_history.json")
    assert ["decoder_psnr" in entry for entry in entries] == [True, True, False, False]
    assert alone.progress.best_step in (3, 4)


@pytest.mark.slow
def test_two_ranks_score_as_one(clips: Path, teacher: Path, tmp_path: Path) -> None:
    frozen: dict[str, object] = {"learning_rate": 1e-30, "ema_decay": 0.0, "max_train_steps": 1}
    train_here(distilling(clips, tmp_path / "one", teacher, **frozen))
    launch(distilling(clips, tmp_path / "two", teacher, **frozen), tmp_path / "logs", ranks=2).ends_with(0, 0)
    (one,), (two,) = (read_lines(tmp_path / name / "validation_history.json") for name in ("one", "two"))
    assert one["num_clips"] == two["num_clips"] == 2
    for name in ("psnr", "decoder_psnr", "decoder_ssim", "latent_snr"):
        assert one[name] == pytest.approx(two[name], abs=1e-5), name


@pytest.mark.parametrize(
    ("weights", "with_teacher", "metric", "expected"),
    [
        ({}, True, "psnr", "psnr"),
        ({"reconstruction": 0.0, "decoder": 1.0}, True, "lpips", "decoder_lpips"),
        ({"reconstruction": 0.0, "decoder": 1.0, "encoder": 1.0}, True, "psnr", "decoder_psnr"),
        ({"reconstruction": 0.0, "decoder": 1.0}, False, "psnr", "psnr"),
        ({"reconstruction": 0.0, "encoder": 1.0}, True, "psnr", "latent_snr"),
        ({"reconstruction": 0.0, "encoder": 1.0}, True, "ssim", "ssim"),
        ({"reconstruction": 1.0, "decoder": 1.0}, True, "psnr", "psnr"),
    ],
)
def test_what_decides(weights: dict[str, float], with_teacher: bool, metric: str, expected: str) -> None:
    settings: dict[str, Any] = {f"{name}_loss_weight": weight for name, weight in weights.items()}
    config = TrainConfig(metric_for_best_model=metric, **settings)  # type: ignore[arg-type]
    assert deciding_score(config, with_teacher=with_teacher) == expected


def test_a_network_of_ours_beside_a_store_needs_no_diffusers(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation_teacher.importlib.util, "find_spec", lambda name: None)
    save_model(TAEHV("taehv", width=0.125), tmp_path / "whole.safetensors")
    for path, is_found in ((tmp_path / "whole.safetensors", True), (teacher, False)):
        config = TrainConfig(use_ref_vae=True, ref_vae_path=str(path), latent_store=tmp_path)
        assert (find_validation_teacher(config, Engine(config), None) is not None) == is_found


class CountingTeacher:
    """Latents that are the means of the frames; ``seen``: how many clips it was given."""

    seen = 0

    def clip_of(self, frames_NTCHW: Tensor) -> Tensor:
        return frames_NTCHW

    def encode(self, frames_NTCHW: Tensor) -> Tensor:
        self.seen += len(frames_NTCHW)
        return frames_NTCHW.mean(dim=(2, 3, 4), keepdim=True)[:, ::4].expand(-1, -1, 16, 2, 2)


def test_latents_are_computed_once_and_the_teacher_is_not_kept() -> None:
    model, opened = TAEHV("taecvx", width=0.125), []

    def open_teacher() -> Any:
        opened.append(CountingTeacher())
        return opened[-1]

    teacher = ValidationTeacher("somewhere", model.spec, open_teacher)
    frames = torch.rand(2, 12, 3, 16, 16)
    assert teacher.frames(frames).shape[1] == 9
    first = teacher.latents(["a", "b"], teacher.frames(frames))
    teacher.forget()
    again = teacher.latents(["b", "a"], teacher.frames(frames))
    assert again.flip(0).equal(first) and first.shape == (2, 3, 16, 2, 2)
    assert len(opened) == 1 and opened[0].seen == 2 and teacher._opened is None


def test_latent_snr() -> None:
    wanted = torch.randn(2, 3, 16, 8, 8) * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1, 1)
    off = wanted + torch.tensor([0.1, 0.3]).view(2, 1, 1, 1, 1)
    assert latent_snr(off, wanted) == pytest.approx([20.0, 20.0], abs=0.3)  # a tenth of the deviation
    assert latent_snr(wanted, wanted)[0] > 90
