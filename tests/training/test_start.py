"""Whole runs: what a run folder holds, what the terms do together, and what is refused at the start."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import still_alive
from tests.training.tiny_runs import SERAENA, arguments_for, read_lines, train_here
from tinyvae import TAEHV, load_model, save_model
from tinyvae.config.load import load_config
from tinyvae.config.schema import TrainConfig
from tinyvae.data.index_build import usable_cores
from tinyvae.errors import UserError
from tinyvae.training.start import run_training
from tinyvae.video.write import VideoWriter


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder / "final_model.safetensors").state_dict()


def test_a_run_folder_holds_all_that_is_promised(clips: Path, tmp_path: Path) -> None:
    changes = {"report": True, "report_to": "tensorboard", "save_validation_videos": True, "log_every": 1}
    run = train_here(arguments_for(clips, tmp_path / "run", **changes))
    names = {file.name for file in run.folder.iterdir()}
    promised = "config.json train.log metrics.jsonl logs best_model validation_history.json final_model.pth"
    assert {*promised.split(), "final_model.safetensors", "model_card.md", "report.html", "checkpoint-6"} <= names
    best = run.folder / "best_model"
    parts = {"model.safetensors", "model.pth", "config.json", "model_info.json"}
    assert {file.name for file in best.iterdir()} == parts
    info = json.loads((best / "model_info.json").read_text())
    assert {"step", "psnr", "ssim", "lpips", "train_loss", "timestamp"} <= set(info)
    lines = read_lines(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    wanted = {"train/learning_rate", "train/gradient_norm", "train/frames_per_second", "train/gpu_memory_gb"}
    assert wanted <= set(lines[0]) and [line["step"] for line in lines if "val/psnr" in line] == [2, 4, 6]
    history = read_lines(run.folder / "validation_history.json")
    assert [entry["step"] for entry in history] == [2, 4, 6] and "raw" in history[0]
    config = json.loads((run.folder / "config.json").read_text())
    assert config["variant"] == "taehv" and config["model_width"] == 0.125
    assert load_model(run.folder).spec.width == 0.125
    assert "PSNR" in (run.folder / "report.html").read_text()
    assert "psnr" in (run.folder / "model_card.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_no_utf8(clips: Path, tmp_path: Path) -> None:
    """Of the folder and of its files, in train.log, TensorBoard and the card."""
    folder = tmp_path / os.fsdecode(b"gr\xf6sse")
    folder.mkdir()
    for file in clips.glob("*.mp4"):
        shutil.copy(file, folder / (file.stem + os.fsdecode(b"\xff.mp4")))
    changes = {"report_to": "tensorboard", "save_validation_videos": True, "max_train_steps": 2}
    words = arguments_for(folder, tmp_path / "run", **changes)
    run = run_training(load_config(words[0], words[1:]), command=" ".join(words)).folder
    for name in ("train.log", "model_card.md"):
        assert r"gr\udcf6sse" in (run / name).read_text(encoding="utf-8"), name
    events = EventAccumulator(str(run / "logs" / "quickstart"))
    events.Reload()
    assert all(tag.endswith(r"\udcff.mp4") for tag in events.Tags()["images"]) and events.Tags()["images"]


def test_clips_are_decoded_while_the_networks_are_built(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the processes that decode them end with a run that is refused later."""
    others, workers = set(psutil.Process().children()), []

    def refuse(config: TrainConfig) -> TAEHV:
        workers.extend(child for child in psutil.Process().children() if child not in others)
        raise UserError("no network today")

    monkeypatch.setattr("tinyvae.training.start.build_model", refuse)
    with pytest.raises(UserError, match="no network today"):
        train_here(arguments_for(clips, tmp_path / "run", dataloader_num_workers=1))
    assert workers and still_alive(workers) == []


def test_accumulation_is_the_larger_batch(clips: Path, tmp_path: Path) -> None:
    """Four clips a step as 4 and as 2 x 2: the same clips, the same gradients but for rounding."""
    finals = []
    for batch, accumulation in ((4, 1), (2, 2)):
        shape = {"train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        run = train_here(arguments_for(clips, tmp_path / f"{batch}", validation_steps=0, max_train_steps=3, **shape))
        assert run.progress.samples_seen == 12
        finals.append(final_weights(run.folder))
    for key, value in finals[0].items():
        torch.testing.assert_close(finals[1][key], value, atol=2e-5, rtol=1e-3)


def test_teacher_seraena_and_lpips_in_one_run(clips: Path, teacher: Path, tmp_path: Path, shared: Path) -> None:
    """All terms on: each is logged, the teacher is in no checkpoint, and training moves the student only."""
    changes = {
        "variant": "taecvx",
        "n_frames": 8,
        "use_ref_vae": True,
        "cogvideox_model_path": teacher,
        "ref_vae_dtype": "float32",
        "encoder_loss_weight": 0.1,
        "decoder_loss_weight": 0.1,
        "perceptual_loss_weight": 0.1,
        "temporal_loss_weight": 0.1,
        "lpips_weights": shared / "lpips" / "alex.safetensors",
        "max_train_steps": 2,
        "log_every": 1,
        "report_to": "tensorboard",
        "tracker_name": "all",
        "save_validation_videos": True,
        **SERAENA,
    }
    run = train_here(arguments_for(clips, tmp_path / "run", **changes))
    lines = read_lines(run.folder / "metrics.jsonl")
    terms = ("reconstruction", "encoder", "decoder", "perceptual", "temporal", "seraena")
    assert all(f"train/{term}_loss" in lines[0] for term in terms)
    assert "val/lpips" in lines[-1]
    state = torch.load(run.folder / "checkpoint-2" / "training_state.pt", weights_only=True)
    assert set(state["model"]) == set(TAEHV("taecvx", width=0.125).state_dict())
    assert not any("teacher" in key or "vae" in key for key in state)
    events = EventAccumulator(str(run.folder / "logs" / "all"))
    events.Reload()
    scalars = [f"train/{term}_loss" for term in terms if term != "temporal"]
    scalars += [f"train/{name}" for name in ("loss", "learning_rate", "gradient_norm", "frames_per_second")]
    scalars += ["train/gpu_memory_gb", *(f"val/{name}{s}" for name in ("psnr", "ssim", "lpips") for s in ("", "_std"))]
    assert set(scalars) <= set(events.Tags()["scalars"])
    kinds = [tag.split("/")[0] for tag in events.Tags()["images"]]
    assert kinds.count("val_picture") == kinds.count("val_video") == 2


def test_drawn_teacher_latents_are_drawn_alike_after_a_resume(clips: Path, teacher: Path, tmp_path: Path) -> None:
    changes = {"variant": "taecvx", "n_frames": 8, "use_ref_vae": True, "encoder_loss_weight": 1.0, "log_every": 1}
    changes |= {"cogvideox_model_path": teacher, "ref_vae_dtype": "float32"}
    changes |= {"validation_steps": 0, "checkpointing_steps": 1, "max_train_steps": 2}
    runs = {}
    for sample in (True, False):
        whole = tmp_path / f"whole_{sample}"
        train_here(arguments_for(clips, whole, ref_vae_sample=sample, **changes))
        runs[sample] = final_weights(whole)
    changes |= {"ref_vae_sample": True, "resume_from_checkpoint": tmp_path / "whole_True" / "checkpoint-1"}
    resumed = train_here(arguments_for(clips, tmp_path / "resumed", **changes))
    assert all(torch.equal(runs[True][key], value) for key, value in final_weights(resumed.folder).items())
    assert any(not torch.equal(runs[True][key], value) for key, value in runs[False].items()), "nothing was drawn"


def test_seraena_begins_by_itself_when_validation_stalls(clips: Path, tmp_path: Path) -> None:
    frozen = {"learning_rate": 1e-30, "ema_decay": 0.0, "validation_steps": 1, "log_every": 1, "max_train_steps": 4}
    auto = {**SERAENA, "seraena_start": "auto", "seraena_patience": 2}
    run = train_here(arguments_for(clips, tmp_path / "run", **frozen, **auto))
    lines = read_lines(run.folder / "metrics.jsonl")
    with_seraena = [line["step"] for line in lines if "train/seraena_loss" in line]
    assert with_seraena == [4]  # best at step 1, nothing at steps 2 and 3
    assert "Seraena joins in at step 3" in (run.folder / "train.log").read_text()


def test_pretrained_weights_are_where_training_starts(clips: Path, tmp_path: Path) -> None:
    save_model(TAEHV("taehv", width=0.125), tmp_path / "start.safetensors")
    settings = {"pretrained_model_path": tmp_path / "start.safetensors", "learning_rate": 1e-30, "max_train_steps": 1}
    run = train_here(arguments_for(clips, tmp_path / "run", ema_decay=0.0, validation_steps=0, **settings))
    start = load_model(tmp_path / "start.safetensors").state_dict()
    assert all(torch.allclose(start[key], value) for key, value in final_weights(run.folder).items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_frames": 6}, "n_frames=6 does not suit taehv"),
        ({"height": 36}, "multiples of 8"),
        ({"encoder_loss_weight": 0.1}, "needs a teacher"),
        ({"perceptual_loss_weight": 0.1, "lpips_weights": "no/such/file"}, "lpips_weights"),
        ({"pretrained_model_path": "no/such/model.pth"}, "no/such/model.pth"),
        ({"data_root": "no/such/folder"}, "data_root"),
        ({"train_split": 1.0}, "no file to validate on"),
        ({"height": 320, "width": 320}, "320"),
    ],
)
def test_mistakes_end_at_the_start(clips: Path, tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        train_here(arguments_for(clips, tmp_path / "run", **changes))
    assert not list(tmp_path.glob("run/checkpoint-*"))


@pytest.mark.parametrize("random_resize", [True, False])
def test_card_and_report_show_one_psnr(clips: Path, tmp_path: Path, random_resize: bool) -> None:
    """The report looks at the clips of the validations: the middle frames, every second one, the same window."""
    size = {"validation_height": 24, "validation_width": 24, "min_frame_delta": 2, "max_frame_delta": 2}
    changes = {**size, "random_resize": random_resize, "report": True, "learning_rate": 1e-2}
    run = train_here(arguments_for(clips, tmp_path / "run", **changes)).folder
    results = json.loads((run / "results.json").read_text())
    best = json.loads((run / "best_model/model_info.json").read_text())
    (evaluation,) = results["evaluations"]
    assert evaluation["summary"]["psnr"]["mean"] == pytest.approx(best["psnr"], abs=2e-3)
    assert f"| {best['step']}, best | {best['psnr']:.2f} dB |" in (run / "model_card.md").read_text()
    report = (run / "report.html").read_text()
    assert "the middle 4 frames of each" in report and f"{'scaled' if random_resize else 'cropped'} to 24×24" in report


def test_what_is_said_at_the_start_is_said_once(clips: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """No line thrice, no `1 clips`, nothing of torch's about the number of loading processes."""
    changes = {"max_train_steps": 1, "validation_steps": 0, "train_batch_size": 1, "dataloader_num_workers": 99}
    run = train_here(arguments_for(clips, tmp_path / "run", **changes)).folder
    text = (run / "train.log").read_text()
    assert text.count("left out") == 1 and "; 1 clip of 4 x 32 x 32 a step" in text
    assert f"clips are loaded by {usable_cores()} processes, not 99" in text
    assert [str(w.message) for w in recwarn if "worker" in str(w.message)] == []


def test_most_files_too_small_is_said_aloud(clips: Path, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    shutil.copytree(clips, folder)
    for number in range(3):
        with VideoWriter(folder / f"large_{number}.mp4", fps=24, width=96, height=80) as writer:
            writer.write(torch.full((14, 3, 80, 96), 40 * number, dtype=torch.uint8))
    changes = {"height": 64, "width": 64, "max_train_steps": 1, "validation_steps": 0}
    run = train_here(arguments_for(folder, tmp_path / "run", **changes)).folder
    assert "WARNING MOST FILES CANNOT BE USED: 8 of 11" in (run / "train.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_a_cpu_is_told_what_is_not_for_it(clips: Path, tmp_path: Path) -> None:
    large = {"height": 480, "width": 720, "train_batch_size": 2, "gradient_accumulation_steps": 4, "n_frames": 16}
    with pytest.raises(UserError, match=r"quickstart: no GPU is visible here.*--allow_cpu true"):
        train_here(arguments_for(clips, tmp_path / "run", **large, model_width=1.0))
    assert not (tmp_path / "run").exists()
    changes = {"mixed_precision": "bf16", "compile_model": True, "max_train_steps": 1, "validation_steps": 0}
    run = train_here(arguments_for(clips, tmp_path / "run", **changes)).folder
    text = (run / "train.log").read_text()
    assert "compile_model is left out" in text and "fix: use --mixed_precision no here" in text
