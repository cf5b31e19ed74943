"""A latent store: what it makes of a run's clips, and that training from it is training with the teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.test_latent_store import FACTS, SIZES
from tests.training.test_golden_losses import write_teacher
from tests.training.tiny_runs import arguments_for, read_lines, run_differences, train_here
from tinyvae.config.load import load_config
from tinyvae.config.schema import TrainConfig
from tinyvae.data.latent_store import LatentStore
from tinyvae.errors import UserError
from tinyvae.training.clips import RunData
from tinyvae.training.latents import LatentJob, make_latents

STEPS = 4
FACTS_OF_SIZES = replace(FACTS, clips={**FACTS.clips, **SIZES})


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


@pytest.mark.slow
def test_a_store_of_several_sizes(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """As with the teacher, to the last bit, through two stages; a smaller store comes round again inside each stage."""
    sizes: dict[str, object] = {"resolutions": "8x32x32,8x16x24,1x32x32@3", "max_train_steps": 6}
    words = recipe(clips, tmp_path / "live", **with_teacher(teacher, **sizes))
    make(words, tmp_path / "store", num_clips=6)
    train_here(words)
    train_here(recipe(clips, tmp_path / "stored", latent_store=tmp_path / "store", **sizes))
    assert run_differences(tmp_path / "live", tmp_path / "stored", 6) == []
    make(words, tmp_path / "small", num_clips=1)
    train_here(recipe(clips, tmp_path / "again", latent_store=tmp_path / "small", **sizes))
    lines = [line for line in read_lines(tmp_path / "again/metrics.jsonl") if "train/loss" in line]
    steps = [key for line in lines for key in line if key.startswith("train/steps_")]
    assert len(set(steps[:3])) == 1 and steps[3:] == ["train/steps_1x32x32"] * 3
    with pytest.raises(UserError, match=r"clips\.clips_per_step is 4 here and 2 in the store"):
        train_here(recipe(clips, tmp_path / "other", latent_store=tmp_path / "store", train_batch_size=4, **sizes))
    one_size = recipe(clips, tmp_path / "one", latent_store=tmp_path / "store")
    with pytest.raises(UserError, match=r"clips\.resolutions is \[\] here and \['8x32x32', "):
        train_here(one_size)


def test_a_store_of_several_sizes_needs_steps_that_always_had_as_many_clips(tmp_path: Path) -> None:
    store = LatentStore(folder=tmp_path, facts=FACTS_OF_SIZES, num_clips=12)
    data = RunData(config=TrainConfig(), train=None, validation=None, bad_files=None, latents=store)  # type: ignore[arg-type]
    data.check_start(60, 10)
    with pytest.raises(UserError, match="has taken 62 clips in 10 steps, and the latent store has 6 clips for each"):
        data.check_start(62, 10)
