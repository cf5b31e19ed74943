"""Twenty steps of the whole recipe (teacher, LPIPS, Seraena, fp32, CPU) give the losses that are stored here.

A change that moves the numbers of training shows here first. Where it is meant, write the new ones:
``python -m tests.training.test_golden_losses``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.tiny_runs import SERAENA, arguments_for, read_lines, train_here
from tinyvae.losses.perceptual import LPIPS
from tinyvae.video.write import VideoWriter

STORED = Path(__file__).with_suffix(".json")
STEPS = 20
TERMS = ("loss", "reconstruction_loss", "encoder_loss", "decoder_loss", "perceptual_loss", "seraena_loss")


def write_films(folder: Path) -> Path:
    """Six films without loss (crf 0): their pixels do not depend on the version of the encoder."""
    folder.mkdir()
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(48.0), indexing="ij")
    for number in range(6):
        waves = [[torch.sin((x * (1 + c) + y * number + 5 * t) / 8) for c in range(3)] for t in range(10)]
        pixels = torch.stack([torch.stack(frame) for frame in waves]) * 100 + 128
        with VideoWriter(folder / f"film_{number}.mp4", fps=24, width=48, height=48, crf=0) as writer:
            writer.write(pixels.round().to(torch.uint8))
    return folder


def write_teacher(folder: Path) -> Path:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLCogVideoX(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
    vae.save_pretrained(folder)
    return folder


def write_lpips(file: Path) -> Path:
    torch.manual_seed(0)
    weights = LPIPS().state_dict()
    save_file({name: value.abs() if name.startswith("lin") else value for name, value in weights.items()}, file)
    return file


def recipe_for(folder: Path, **changes: object) -> list[str]:
    """The command line behind ``tinyvae train`` of the whole recipe on a CPU, with its files in ``folder``."""
    settings: dict[str, object] = {
        "variant": "taecvx",
        "use_ref_vae": True,
        "cogvideox_model_path": write_teacher(folder / "teacher"),
        "lpips_weights": write_lpips(folder / "lpips.safetensors"),
        "encoder_loss_weight": 0.1,
        "decoder_loss_weight": 0.1,
        "perceptual_loss_weight": 0.1,
        "color_jitter": True,
        "ref_vae_dtype": "float32",
        "seraena_start": 5,
        "n_frames": 8,
        "max_train_steps": STEPS,
        "lr_warmup_steps": 5,
        "learning_rate": 1e-3,
        "validation_steps": 0,
        "checkpointing_steps": STEPS,
        "log_every": 1,
        **SERAENA,
        **changes,
    }
    return arguments_for(write_films(folder / "films"), folder / "run", **settings)


def losses_of_a_run(folder: Path) -> dict[str, list[float]]:
    """Every loss of every step, by name."""
    train_here(recipe_for(folder))
    lines = read_lines(folder / "run" / "metrics.jsonl")
    return {term: [line[f"train/{term}"] for line in lines if f"train/{term}" in line] for term in TERMS}


def test_twenty_steps_have_the_stored_losses(tmp_path: Path) -> None:
    found, stored = losses_of_a_run(tmp_path), json.loads(STORED.read_text())
    assert [len(found[term]) for term in TERMS] == [STEPS] * 5 + [STEPS - 5], "Seraena joins in at step 5"
    for term in TERMS:
        # Another build of torch rounds otherwise, and each step adds to that.
        assert found[term] == pytest.approx(stored[term], rel=5e-3), term


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        losses = losses_of_a_run(Path(made))
    rows = {term: [float(f"{value:.6g}") for value in values] for term, values in losses.items()}
    STORED.write_text(json.dumps(rows, indent=1) + "\n")
