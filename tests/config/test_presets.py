"""The built-in presets: the values the documents promise, valid as they stand, the same when Python runs them."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinyvae.config.load import PRESET_FOLDER, load_config, load_preset, preset_names, preset_summary
from tinyvae.config.rules import check_config, value_complaints
from tinyvae.config.schema import FIELDS, TrainConfig
from tinyvae.errors import UserError

NAMES = ["16gpu_h100", "1gpu_h100", "a800", "distill", "h100", "quickstart", "scratch", "test"]
WITH_TEACHER = ["16gpu_h100", "1gpu_h100", "a800", "h100", "test"]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

# Beside the numbers of the guide's table, which tests/test_docs.py compares with the presets.
PROMISED: dict[str, dict[str, Any]] = {
    "h100": {
        "validation_steps": 1_000,
        "num_validation_samples": 20,
        "validation_batch_size": 2,
        "early_stopping_patience": 5,
        "metric_for_best_model": "psnr",
    },
    "scratch": {
        "height": 128,
        "width": 128,
        "n_frames": 12,
        "train_batch_size": 16,
        "optimizer": "muon",
        "init": "colors",
        "crop_candidates": 4,
        "mixed_precision": "bf16",
        "compile_model": True,
        "use_ref_vae": False,
        "muon_learning_rate": 0.004,
        "lr_scheduler": "linear",
        "lr_warmup_steps": 30,
        "validation_height": 256,
        "validation_width": 256,
    },
    "distill": {  # the rest is as in scratch, which a test below says
        "use_ref_vae": True,
        "init": "he",
        "reconstruction_loss_weight": 0.0,
        "n_frames": 17,
        "train_batch_size": 8,
    },
}

RECIPE = {
    "reconstruction_loss_weight": 10.0,
    "encoder_loss_weight": 0.1,
    "decoder_loss_weight": 0.1,
    "perceptual_loss_weight": 0.1,
    "seraena_loss_weight": 0.1,
    "optimizer": "adamw",
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 1e-2,
    "max_grad_norm": 1.0,
    "lr_scheduler": "cosine",
    "mixed_precision": "bf16",
    "seed": 42,
    "variant": "taecvx",
    "use_ref_vae": True,
    "use_seraena": True,
}


def test_the_presets_are_these() -> None:
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_valid_as_it_stands(name: str) -> None:
    assert not value_complaints(load_config(name).config)
    assert not load_config(name).notices


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_what_python_makes_of_it(name: str) -> None:
    ran = runpy.run_path(str(PRESET_FOLDER / f"{name}.py"))["config"]
    assert isinstance(ran, TrainConfig)
    # Only its own name is added.
    assert load_preset(name) == replace(ran, output_dir=Path(f"output/{name}_%Y-%m-%d_%H-%M-%S"), tracker_name=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_command_hardware_and_result(name: str) -> None:
    summary = preset_summary(name)
    for heading in ("Command:", "Hardware:", "Expect:"):
        assert heading in summary
    assert name.removeprefix("16gpu_") in summary


@pytest.mark.parametrize("name", ["scratch", "distill"])
def test_a_preset_says_which_videos_it_takes(name: str) -> None:
    preset = load_preset(name)
    frames, height, width = preset.validation_size
    trains = f"at least {preset.height}x{preset.width} pixels and {preset.n_frames} frames"
    assert f"{trains} (to validate: {height}x{width} and {frames} frames)" in preset_summary(name)


@pytest.mark.parametrize("name", list(PROMISED))
def test_promised_values(name: str) -> None:
    preset = load_preset(name)
    assert {key: getattr(preset, key) for key in PROMISED[name]} == PROMISED[name]


@pytest.mark.parametrize("name", WITH_TEACHER)
def test_the_recipe_is_common(name: str) -> None:
    preset = load_preset(name)
    assert {key: getattr(preset, key) for key in RECIPE} == RECIPE
    assert preset.lr_warmup_steps > 0
    assert preset.n_frames % 8 in (0, 1), "other lengths are encoded in one mode by CogVideoX and decoded in the other"


def test_a800_is_h100_in_5000_steps() -> None:
    a800, h100 = load_preset("a800"), load_preset("h100")
    changed = {key for key in vars(h100) if getattr(a800, key) != getattr(h100, key)}
    assert a800.max_train_steps == 5_000
    names = {"output_dir", "tracker_name"}
    assert changed == {"max_train_steps", "lr_warmup_steps", "seraena_start", "ema_decay"} | names


@pytest.mark.parametrize("name", NAMES)
def test_averaged_weights_span_a_fifth_of_the_run_at_most(name: str) -> None:
    preset = load_preset(name)
    assert 1 / (1 - preset.ema_decay) <= preset.max_train_steps / 5 + 1e-6


def test_distill_is_scratch_with_a_teacher() -> None:
    distill, scratch = load_preset("distill"), load_preset("scratch")
    changed = {key for key in FIELDS if getattr(distill, key) != getattr(scratch, key)}
    lengths = {
        "n_frames",
        "train_batch_size",
        "max_train_steps",
        "validation_steps",
        "checkpointing_steps",
        "output_dir",
        "tracker_name",
    }
    assert changed - lengths == {
        *("use_ref_vae", "reconstruction_loss_weight", "encoder_loss_weight", "decoder_loss_weight"),
        "init",  # its latents of colors are not the teacher's
    }
    assert distill.trained_parts == "encoder and decoder" and not distill.makes_round_trip


def test_quickstart_needs_nothing_but_two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINYVAE_LPIPS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load_config("quickstart")
    check_config(loaded.config, loaded.given_paths)
    config = loaded.config
    assert config.model_width == 0.25
    assert config.use_sample_clips and config.data_root == tmp_path / "sample_clips"
    assert config.output_dir.parent == tmp_path / "output"
    assert config.mixed_precision == "no"


def test_presets_that_need_files_say_all_of_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINYVAE_LPIPS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = load_config("h100")
    with pytest.raises(UserError) as caught:
        check_config(loaded.config, loaded.given_paths)
    for words in (
        "4 mistakes",
        "--data_root FOLDER",
        "checkpoints/taecvx.pth",
        "CogVideoX-2b",
        "tinyvae lpips-weights",
    ):
        assert words in str(caught.value)


def choice_of(key: str) -> str:
    """The cell "ours" of the document's table of choices."""
    lines = DOCUMENT.read_text(encoding="utf-8").split("## Where the sources disagree")[1].splitlines()
    return next(line.split("|")[3] for line in lines if line.startswith(f"| `{key}` |"))


def test_the_document_says_which_averages_the_presets_have() -> None:
    decays = {f"{load_preset(name).ema_decay:g}" for name in NAMES}
    assert set(re.findall(r"0\.\d+", choice_of("ema_decay"))) == decays


@pytest.mark.parametrize("key", ["compile_model", "gradient_checkpointing"])
def test_the_document_says_what_is_on_in_the_presets(key: str) -> None:
    switch, _, names = choice_of(key).strip().partition(", except in ")
    others = {name for name in NAMES if getattr(load_preset(name), key) != (switch == "on")}
    assert switch in ("on", "off") and set(re.findall(r"`(\w+)`", names)) == others
