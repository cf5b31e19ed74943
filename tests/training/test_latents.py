"""A latent store: what it makes of a run's clips, and that training from it is training with the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_golden_losses import write_teacher
from tests.training.tiny_runs import arguments_for, run_differences, train_here
from tinyvae.config.load import load_config
from tinyvae.data.latent_store import LatentStore
from tinyvae.training.latents import LatentJob, make_latents

STEPS = 4


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"))


def recipe(clips: Path, run: Path, **changes: object) -> list[str]:
    """A run of a few steps that learns from a teacher; with everything that changes pixels and latents switched on."""
    settings: dict[str, object] = {
        "variant": "taecvx",
        "encoder_loss_weight": 0.1,
        "decoder_loss_weight": 0.1,
        "ref_vae_dtype": "float32",
        "ref_vae_sample": True,
        "color_jitter": True,
        "gaussian_blur": True,
        "n_frames": 8,
        "max_train_steps": STEPS,
        "checkpointing_steps": STEPS,
        "validation_steps": STEPS,
        "log_every": 1,
        **changes,
    }
    return arguments_for(clips, run, **settings)


def with_teacher(teacher: Path, **changes: object) -> dict[str, object]:
    return {"use_ref_vae": True, "ref_vae_path": teacher, **changes}


def make(words: list[str], folder: Path, *, num_clips: int = 8, dtype: str = "float32") -> LatentStore:
    return make_latents(load_config(words[0], words[1:]), LatentJob(folder=folder, num_clips=num_clips, dtype=dtype))


@pytest.mark.parametrize(("teacher_dtype", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_training_from_a_store_is_training_with_the_teacher(
    clips: Path, teacher: Path, tmp_path: Path, teacher_dtype: str, dtype: str
) -> None:
    """To the last bit; a store in bfloat16 keeps all that a teacher in bfloat16 says. The teacher may be gone."""
    words = recipe(clips, tmp_path / "live", **with_teacher(teacher, ref_vae_dtype=teacher_dtype))
    make(words, tmp_path / "store", dtype=dtype)
    train_here(words)
    train_here(recipe(clips, tmp_path / "stored", latent_store=tmp_path / "store"))
    assert run_differences(tmp_path / "live", tmp_path / "stored", STEPS) == []
