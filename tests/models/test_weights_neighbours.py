"""Weights beside others in one folder: a file is what it is, whatever lies beside it and whatever it is called."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tinyvae import TAEHV, VARIANTS, get_spec, load_model, save_model
from tinyvae.errors import UserError
from tinyvae.models.weights import describe, variants_in_name

SHARED = (("taehv", "taecvx", "taew2_1", "taeos1_3"), ("taeltx_2", "taeltx2_3"))
"""Variants of one network each; a guess takes the first."""

WIDTH = 0.125


@cache
def network(variant: str, width: float = WIDTH) -> TAEHV:
    """Nobody changes its weights: the tests are about what a file states."""
    return TAEHV(variant, width=width)


def foreign(file: Path, variant: str, *, width: float = WIDTH) -> Path:
    """Weights as other programs write them: a bare state dict that states nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {key: value.clone() for key, value in network(variant, width).state_dict().items()}
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        save_file(state, file)
    return file


def write_run_config(folder: Path, variant: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run = {"format": "tinyvae-run", "variant": variant, "model_width": WIDTH, "width": 720, "height": 480}
    (folder / "config.json").write_text(json.dumps(run))


def write_model_config(folder: Path, variant: str) -> None:
    """As a model folder has it, and as a single file used to have it beside itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(describe(get_spec(variant, width=WIDTH))))


def loaded_variant(path: Path, variant: str | None = None) -> str:
    """What a file loads as, where no guess is allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_model(path, variant=variant).spec.name


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_every_variant_in_one_folder_states_itself(tmp_path: Path, suffix: str) -> None:
    for variant in VARIANTS:
        written = save_model(network(variant), tmp_path / f"of_{variant}{suffix}", training_step=3)
        assert written == [tmp_path / f"of_{variant}{suffix}"]
    assert sorted(file.stem for file in tmp_path.iterdir()) == sorted(f"of_{variant}" for variant in VARIANTS)
    assert {variant: loaded_variant(tmp_path / f"of_{variant}{suffix}") for variant in VARIANTS} == {
        variant: variant for variant in VARIANTS
    }


def test_a_pth_file_is_a_flat_state_dict_for_others(tmp_path: Path) -> None:
    """Its statement lies where torch keeps version numbers: other programs see keys and tensors, nothing else."""
    model = network("taecvx")
    save_model(model, tmp_path / "x.pth")
    state = torch.load(tmp_path / "x.pth", weights_only=True)
    assert list(state) == list(model.state_dict()) and all(type(value) is torch.Tensor for value in state.values())
    TAEHV("taehv", width=WIDTH).load_state_dict(state, strict=True)
    (tmp_path / "x.pth").rename(tmp_path / "renamed.bin")
    assert loaded_variant(tmp_path / "renamed.bin") == "taecvx"


def test_a_model_saved_beside_others_does_not_relabel_them(tmp_path: Path) -> None:
    """The walk of a user: one save_model into checkpoints/ spoiled every file that lay there."""
    foreign(tmp_path / "taecvx.pth", "taecvx", width=0.25)
    foreign(tmp_path / "taew2_2.pth", "taew2_2", width=0.25)
    save_model(network("taehv"), tmp_path / "x.safetensors")
    assert not (tmp_path / "config.json").exists()
    assert loaded_variant(tmp_path / "taew2_2.pth") == "taew2_2"
    assert loaded_variant(tmp_path / "taecvx.pth", "taecvx") == "taecvx"
    with pytest.raises(UserError, match=r"3 weight files \(taecvx\.pth, taew2_2\.pth, x\.safetensors\)"):
        load_model(tmp_path)


@pytest.mark.parametrize("write_config", [write_run_config, write_model_config])
def test_a_folders_config_is_not_about_foreign_names(tmp_path: Path, write_config: object) -> None:
    """checkpoints/ that became a run folder, or has the config.json of an earlier version's single file."""
    write_config(tmp_path, "taehv")  # type: ignore[operator]
    for variant in (*SHARED[0], *SHARED[1], "taew2_2"):
        file = foreign(tmp_path / f"{variant}.pth", variant, width=0.25)
        assert loaded_variant(file, variant) == variant
        twins = next((group for group in SHARED if variant in group), (variant,))
        if len(twins) == 1:
            assert loaded_variant(file) == variant
        elif variant != twins[0]:
            with pytest.raises(UserError, match=f"--variant {variant}"):
                load_model(file)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth", "final_model.safetensors", "final_model.pth"])
@pytest.mark.parametrize("write_config", [write_run_config, write_model_config])
def test_old_folders_of_ours_load(tmp_path: Path, name: str, write_config: object) -> None:
    """Their .pth files stated nothing themselves."""
    write_config(tmp_path, "taecvx")  # type: ignore[operator]
    foreign(tmp_path / name, "taecvx")
    assert loaded_variant(tmp_path) == loaded_variant(tmp_path / name) == "taecvx"


def test_an_old_single_file_loads(tmp_path: Path) -> None:
    save_model(network("taecvx"), tmp_path / "x.safetensors")
    write_model_config(tmp_path, "taecvx")
    assert loaded_variant(tmp_path / "x.safetensors") == loaded_variant(tmp_path) == "taecvx"


def test_a_run_folder_beside_foreign_weights(tmp_path: Path) -> None:
    """A run's config.json has its ``width`` in pixels; a model saved beside it does not replace it."""
    write_run_config(tmp_path, "taew2_1")
    run = (tmp_path / "config.json").read_text()
    for name in ("final_model.safetensors", "final_model.pth"):
        save_model(network("taew2_1"), tmp_path / name)
    save_model(network("taew2_1"), tmp_path / "checkpoint-5", formats=(".safetensors",))
    assert sorted(file.name for file in (tmp_path / "checkpoint-5").iterdir()) == ["config.json", "model.safetensors"]
    foreign(tmp_path / "taecvx.pth", "taecvx")
    for path in (".", "final_model.pth", "checkpoint-5", "checkpoint-5/model.safetensors"):
        assert loaded_variant(tmp_path / path) == "taew2_1"
    assert (tmp_path / "config.json").read_text() == run


def test_a_model_of_another_variant_in_a_run_folder_states_itself(tmp_path: Path) -> None:
    write_run_config(tmp_path, "taehv")
    save_model(network("taecvx", 0.25), tmp_path / "model.pth")
    assert loaded_variant(tmp_path / "model.pth") == "taecvx"


@pytest.mark.parametrize("group", SHARED)
def test_a_guess_that_the_name_contradicts_is_refused(tmp_path: Path, group: tuple[str, ...]) -> None:
    for variant, suffix in zip(group[1:], (".pth", ".safetensors", ".pth"), strict=False):
        file = foreign(tmp_path / f"{variant}-mine{suffix}", variant)
        with pytest.raises(UserError, match=f"taken for {group[0]}, but its name speaks of {variant}") as refused:
            load_model(file)
        assert f"--variant {variant} (in Python: variant='{variant}')" in str(refused.value)
        for asked in (group[0], variant):
            assert loaded_variant(file, asked) == asked, "what the caller says is obeyed"


def test_a_name_that_agrees_does_not_make_a_guess_certain(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="could be taehv, taecvx"):
        assert load_model(foreign(tmp_path / "taehv.pth", "taehv")).spec.name == "taehv"


def test_a_name_says_nothing_against_what_is_known(tmp_path: Path) -> None:
    """What the file states, and what its shapes tell, is no guess: renaming changes nothing."""
    save_model(network("taecvx"), tmp_path / "taehv.pth")
    assert loaded_variant(tmp_path / "taehv.pth") == "taecvx"
    assert loaded_variant(foreign(tmp_path / "taew2_1.pth", "taew2_2")) == "taew2_2"


@pytest.mark.parametrize(
    ("name", "spoken"),
    [
        *((f"{variant}.pth", [variant]) for variant in VARIANTS),
        ("TAEW2_1.safetensors", ["taew2_1"]),
        ("lighttaew2.1_bf16.pth", ["taew2_1"]),
        ("taehv15-step100.pth", ["taehv1_5"]),
        ("taehv1_5_super_v2.pth", ["taehv1_5_super"]),
        ("taehv-100k.pth", ["taehv"]),
        ("taehv100.pth", []),
        ("taeltx-2.pth", ["taeltx_2"]),
        ("taecvx_from_taehv.pth", ["taecvx", "taehv"]),
        ("model.pth", []),
        ("final_model.safetensors", []),
    ],
)
def test_what_names_speak_of(name: str, spoken: list[str]) -> None:
    assert variants_in_name(Path("taecvx") / name) == spoken
