"""What a finished run leaves: a card that says what really happened, and a report that cannot end the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny_runs import arguments_for, write_clips
from tinyvae import TAEHV, load_model
from tinyvae.cli.main import run as run_verb
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import ClipSource, Middle, frame_chunks, measure_clip
from tinyvae.evaluation.evaluating import EvaluationSettings, evaluate_round_trip
from tinyvae.training import finish
from tinyvae.training.finish import model_card, write_final_model
from tinyvae.training.optim import WeightAverage
from tinyvae.training.resume import Progress

CONFIG = TrainConfig(model_width=0.125, n_frames=8, height=64, width=48, temporal_loss_weight=0.5, ema_decay=0.9)
PROGRESS = Progress(step=40, samples_seen=160, training_s=1800)


def write_history(folder: Path) -> None:
    scores = [(20, 21.5, True), (40, 21.25, False)]
    entries = [{"step": s, "num_clips": 3, "psnr": p, "ssim": 0.5, "is_best": best} for s, p, best in scores]
    (folder / "validation_history.json").write_text(json.dumps(entries))


def card_of(folder: Path, **changes: Any) -> str:
    config = replace(CONFIG, **changes)
    return model_card(config, folder, TAEHV("taehv", width=0.125), PROGRESS, command="tinyvae train x --seed 1")


def test_the_card(tmp_path: Path) -> None:
    write_history(tmp_path)
    card = card_of(tmp_path)
    assert card.startswith("---\nlibrary_name: tinyvae\n")
    for words in (
        "# taehv, 0.2 M parameters",
        "from fresh weights, with no teacher",
        "40 of 10000 steps, 160 clips of 8 frames of 64x48, 0:30:00 (h:mm:ss)",
        "losses (weight): reconstruction (10), temporal (0.5)\n",
        "running mean over the steps, decay 0.9",
        "`tinyvae train x --seed 1`",
        "Means over 3 clips: the middle 8 frames, at 64x48, of files that were not trained on",
        "| step | psnr | ssim |",
        "| 20, best | 21.50 dB | 0.5000 |",
        "| 40 | 21.25 dB | 0.5000 |",
        '"temporal_loss_weight": 0.5',
    ):
        assert words in card, words


def test_the_card_of_a_run_with_several_sizes_names_them(tmp_path: Path) -> None:
    card = card_of(tmp_path, resolutions=("8x64x48:0.25", "4x32x32:0.75"))
    assert "160 clips of several sizes (8x64x48 (0.25), 4x32x32 (0.75)), 0:30:00 (h:mm:ss)" in card


def test_scores_that_only_some_validations_have(tmp_path: Path) -> None:
    """LPIPS weights that a resumed run was given, or lost: a dash where it was not measured."""
    for first, last, rows in (
        ({}, {"lpips": 0.25}, ("| 20, best | 21.50 dB | – |", "| 40 | 21.25 dB | 0.2500 |")),
        ({"lpips": 0.5}, {}, ("| 20, best | 21.50 dB | 0.5000 |", "| 40 | 21.25 dB | – |")),
    ):
        entries = [{"step": 20, "num_clips": 3, "psnr": 21.5, "is_best": True, **first}]
        entries += [{"step": 40, "num_clips": 3, "psnr": 21.25, "is_best": False, **last}]
        (tmp_path / "validation_history.json").write_text(json.dumps(entries))
        card = card_of(tmp_path)
        assert all(row in card for row in ("| step | psnr | lpips |", *rows)), card


def test_a_card_without_validation_with_a_teacher_and_a_start(tmp_path: Path) -> None:
    changes = {"pretrained_model_path": Path("start.pth"), "use_ref_vae": True, "ref_vae_path": "owner/vae"}
    card = card_of(tmp_path, ema_decay=0.0, **changes)
    for words in ("from start.pth, with the teacher owner/vae", "of the last step", "The run had no validation."):
        assert words in card, words


def test_the_card_of_a_decoder_from_stored_latents(tmp_path: Path) -> None:
    changes = {"use_ref_vae": True, "ref_vae_path": "owner/vae", "latent_store": Path("latents")}
    losses = {"reconstruction_loss_weight": 0.0, "decoder_loss_weight": 10.0, "temporal_loss_weight": 0.0}
    card = card_of(tmp_path, **changes, **losses)
    for words in (
        "from fresh weights, with stored latents of the teacher owner/vae\n",
        "decoder (10)\n- only the decoder was trained; the other part has fresh (random) weights\n- weights:",
    ):
        assert words in card, words


def test_the_final_model_is_the_average_and_the_card_can_be_left_out(tmp_path: Path) -> None:
    model = TAEHV("taehv", width=0.125)
    average = WeightAverage(model, decay=0.9)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data += 1.0
    write_final_model(replace(CONFIG, save_model_card=False), tmp_path, model, average, PROGRESS, command="x")
    assert not (tmp_path / "model_card.md").exists()
    for name in ("final_model.safetensors", "final_model.pth"):
        saved = load_model(tmp_path / name).state_dict()
        assert all(saved[key].equal(value) for key, value in before.items()), "the raw weights were written"
    assert not model.state_dict()["encoder.0.weight"].equal(before["encoder.0.weight"]), "the run's own are back"


@pytest.mark.parametrize(
    ("part", "fault"),
    [("publish", UserError("no room for it")), ("report_clips", MemoryError("no room for the clips"))],
)
def test_a_report_that_fails_is_a_warning_with_the_command(
    part: str, fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(finish, part, broken)
    clips = write_clips(tmp_path / "clips", num_clips=4)
    words = arguments_for(clips, tmp_path / "run", report=True, max_train_steps=2)
    assert run_verb(["train", *words]) == 0
    said = capfd.readouterr().err
    assert "the run is complete, but its report could not be made" in said and str(fault) in said
    assert ("Traceback" in said) == (not isinstance(fault, UserError)), "a bug of ours comes with its traceback"
    again = said.split("make it again with: ")[1].splitlines()[0]
    monkeypatch.undo()
    assert run_verb(again.split()[1:]) == 0, again
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(("size", "scaled", "validations"), [((24, 32), True, 2), ((24, 16), False, 0)])
def test_a_report_has_its_clips_in_memory_and_shows_the_same_frames(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], scaled: bool, validations: int
) -> None:
    """From the validations, or where there was none read by threads: bit for bit what an evaluation would read."""
    seen: dict[str, Any] = {}

    def evaluated(trip: Any, sources: list[ClipSource], settings: EvaluationSettings, **options: Any) -> Any:
        seen.update(sources=sources, settings=settings)
        return evaluate_round_trip(trip, sources, settings, **options)

    def unread(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened for the report")

    monkeypatch.setattr(finish, "evaluate_round_trip", evaluated)
    with monkeypatch.context() as closed:
        closed.setattr("tinyvae.evaluation.clip_sources.probe_video", unread)
        closed.setattr("tinyvae.evaluation.clip_sources.iterate_frames", unread)
        changes: dict[str, Any] = {"validation_height": size[0], "validation_width": size[1], "random_resize": scaled}
        changes |= {"validation_steps": validations, "min_frame_delta": 2, "max_train_steps": 2}
        words = arguments_for(clips, tmp_path / "run", report=True, **changes)
        run_verb(["train", *words, "--max_frame_delta", "2"])
    assert (tmp_path / "run/report.html").is_file()
    asked = {"max_frames": 4, "size": size, "middle": Middle(frame_step=2, scaled=scaled)}
    assert vars(seen["settings"]).items() >= asked.items() and len(seen["sources"]) == 2
    for source in seen["sources"]:
        part = measure_clip(ClipSource(name=source.name, path=source.path), **asked)
        assert part == measure_clip(source, **asked)  # the same place in the same file
        assert torch.cat(list(frame_chunks(part, chunk_frames=3))).equal(source.frames)
