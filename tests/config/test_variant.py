"""Which variant a run trains where nothing names it, and what `teacher` is short for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.data.test_latent_store import FACTS
from tinyvae import TAEHV, save_model
from tinyvae.config.load import LoadedConfig, load_config
from tinyvae.config.rules import check_config
from tinyvae.data.latent_store import LatentStore
from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS
from tinyvae.teachers import LatentSpace

pytest.importorskip("diffusers")

WAN_2_2 = {"_class_name": "AutoencoderKLWan", "z_dim": 48, "patch_size": 2}
TEACHERS: dict[str, dict[str, Any]] = {
    "taecvx": {"_class_name": "AutoencoderKLCogVideoX"},
    "taew2_1": {"_class_name": "AutoencoderKLWan"},
    "taehv": {"_class_name": "AutoencoderKLHunyuanVideo"},
    "taeh3": {"_class_name": "AutoencoderKLMiniMaxH3"},
}
"""Variant -> config.json of a teacher that only it can learn from; diffusers' defaults are the released networks."""


def write_teacher(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that says what it is; its weights are not of that network."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, folder / "diffusion_pytorch_model.safetensors")
    return folder


def distill(teacher: object, *words: object) -> LoadedConfig:
    return load_config("distill", ["--teacher", str(teacher), *map(str, words)])


def refusal(teacher: object, *words: object) -> str:
    """What is said of the settings or of the files they name."""
    with pytest.raises(UserError) as caught:
        loaded = distill(teacher, *words)
        check_config(loaded.config, loaded.given_paths, heading=loaded.source)
    return str(caught.value)


@pytest.mark.parametrize("variant", TEACHERS)
def test_the_teacher_tells_the_variant(tmp_path: Path, variant: str) -> None:
    folder = write_teacher(tmp_path / "teacher", TEACHERS[variant])
    loaded = distill(folder)
    config = loaded.config
    assert (config.variant, config.use_ref_vae, config.teacher_path) == (variant, True, str(folder))
    assert any(notice.startswith(f"variant is set to {variant}, because") for notice in loaded.notices)
    assert config.spec.is_training_length(config.n_frames)


def test_a_presets_clip_length_gives_way_and_the_users_does_not(tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher", TEACHERS["taeh3"])
    loaded = load_config("scratch", ["--teacher", str(folder), "--encoder_loss_weight", "1"])
    assert loaded.config.n_frames == 17
    assert "n_frames is set to 17, because taeh3 takes no clips of 12 frames." in loaded.notices
    assert "n_frames=9 does not suit taeh3" in refusal(folder, "--n_frames", 9)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("preset", ["scratch", "quickstart"])
def test_every_variant_trains_by_a_preset_as_it_stands(preset: str, variant: str) -> None:
    config = load_config(preset, ["--variant", variant]).config
    assert all(VARIANTS[variant].is_training_length(size.n_frames) for size in config.sizes.sizes)


def test_the_users_clip_length_stays_beside_the_users_variant() -> None:
    with pytest.raises(UserError, match="n_frames=12 does not suit taeltx_2"):
        load_config("scratch", ["--variant", "taeltx_2", "--n_frames", "12"])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_presets_clip_length_suits_all_variants(variant: str) -> None:
    assert VARIANTS[variant].is_training_length(load_config("distill").config.n_frames)


def test_several_students_are_asked_about(tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher", WAN_2_2)
    text = refusal(folder)
    assert (
        "several variants can learn from the teacher" in text and "48 latent channels, 4x in time, 16x in space" in text
    )
    assert "--variant taew2_2 or --variant taew2_2_super" in text
    assert distill(folder, "--variant", "taew2_2").config.variant == "taew2_2"
    save_model(TAEHV("taew2_2_super", width=0.125), tmp_path / "start.safetensors")
    started = distill(folder, "--pretrained_model_path", tmp_path / "start.safetensors", "--model_width", 0.125)
    assert started.config.variant == "taew2_2_super", "the weights to start from decide among them"


def test_a_variant_that_is_stated_stays(tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher", TEACHERS["taew2_1"])
    words = ("--data_root", tmp_path, "--variant", "taehv")
    assert "does not suit taehv: it has another latent space" in refusal(folder, *words)
    assert "use variant taew2_1" in refusal(folder, *words)
    loaded = load_config("quickstart", ["--teacher", str(folder), "--decoder_loss_weight", "1"])
    assert loaded.config.variant == "taehv", "the preset states it"


def test_wrong_teachers(tmp_path: Path) -> None:
    """One sentence each, which names what was given and what to do."""
    absent = tmp_path / "absent"
    data = ("--data_root", tmp_path)
    assert f"teacher={absent} does not exist" in refusal(absent, *data)
    assert "has no config.json" in refusal(tmp_path, *data)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    file.write_bytes(b"")
    assert "is a file; name its folder" in refusal(file, *data)
    other = write_teacher(tmp_path / "other", {"_class_name": "AutoencoderKL"})
    assert "is a AutoencoderKL; tinyvae learns from" in refusal(other, *data)
    odd = write_teacher(tmp_path / "odd", {"_class_name": "AutoencoderKLWan", "z_dim": 4})
    assert "there is no variant for the teacher" in refusal(odd) and "4 latent channels" in refusal(odd)
    loaded = load_config("distill", ["--data_root", str(tmp_path)])
    with pytest.raises(UserError, match="no teacher is named; name its folder"):
        check_config(loaded.config, loaded.given_paths)
    with pytest.raises(UserError, match="--teacher needs a value"):
        load_config("distill", ["--teacher"])


def test_teacher_is_short_for_two_settings(tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher", TEACHERS["taecvx"])
    named = load_config("h100", ["--teacher", str(folder)]).config
    assert (named.use_ref_vae, named.ref_vae_path) == (True, str(folder))
    without = load_config("h100", ["--teacher", "none"])
    assert not without.config.use_ref_vae and without.config.decoder_loss_weight == 0
    with pytest.raises(UserError, match="set a weight"):
        load_config("scratch", ["--teacher", str(folder)])
    settings = tmp_path / "mine.py"
    settings.write_text("args.teacher = 'teacher'\nargs.decoder_loss_weight = 1.0\n")
    assert load_config(settings).config.teacher_path == str(folder), "in a settings file too, from its folder"
    assert "name two teachers" in refusal(folder, "--ref_vae_path", "a/b")


@pytest.mark.parametrize(("class_name", "channels", "variant"), [("Wan", 16, "taew2_1"), ("CogVideoX", 16, "taecvx")])
def test_a_store_tells_the_variant_without_its_teacher(
    tmp_path: Path, class_name: str, channels: int, variant: str
) -> None:
    space = LatentSpace(mean=(0.0,) * channels, std=(1.0,) * channels, factor=1.0)
    teacher = {**FACTS.teacher, "class": f"AutoencoderKL{class_name}"}
    facts = replace(FACTS, teacher=teacher, space=asdict(space))
    LatentStore.create(tmp_path / "store", facts, num_clips=2, batch_size=1)
    loaded = load_config("distill", ["--latent_store", str(tmp_path / "store")])
    assert loaded.config.variant == variant
    assert f"(AutoencoderKL{class_name}, 16 latent channels)" in loaded.notices[0]
