"""Exports: what each program would read from the file, compared with the golden frames; and what is never written."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.test_golden import FILE_OF, GOLDEN, golden_cases, golden_model
from tinyvae import TAEHV, get_spec, load_model, save_model
from tinyvae.convert import programs, readers
from tinyvae.convert.export import (
    ExportMismatchError,
    check_folder,
    check_path,
    check_weights,
    export,
    place_of_file,
    round_model,
)
from tinyvae.convert.pixel_range import to_unit_pixels
from tinyvae.convert.programs import COMFYUI, LIGHTX2V, PROGRAMS, SDCPP, UPSTREAM, choose_slot
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError
from tinyvae.evaluation.round_trip import is_teacher

WEIGHTS = [program for program in PROGRAMS.values() if program.writes == "weights"]
IN_DEFAULT_RUN = ("comfyui", "taehv", "vae")
EXPORTS = [
    (program.name, slot.variant, slot.name)
    for program in WEIGHTS
    for slot in program.slots
    if slot.variant in GOLDEN and slot.takes(get_spec(slot.variant))
]
ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""How far the weights' rounding may move a frame."""
HUNYUAN_SCALE = 0.476986


@cache
def released(variant: str) -> TAEHV:
    """The golden model of full width, as the programs expect it. Treat as read-only."""
    return golden_model(variant)


@pytest.mark.parametrize(
    ("program", "variant", "slot"),
    [pytest.param(*case, marks=[] if case == IN_DEFAULT_RUN else pytest.mark.slow) for case in EXPORTS],
)
def test_the_file_gives_the_golden_frames(shared: Path, tmp_path: Path, program: str, variant: str, slot: str) -> None:
    done = export(released(variant), to=program, output=tmp_path, slot=slot)
    (file,) = done.files
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name], "nothing else is left there"
    assert str(file) in done.message and "\n" not in done.message
    state = dict(torch.load(file, weights_only=True)) if file.suffix == ".pth" else load_file(file)
    assert {value.dtype for value in state.values()} == {getattr(torch, done.dtype)}
    reading = readers.READINGS[program](state, file, variant)
    readers.check_shapes(state, reading)
    golden = load_file(shared / "golden" / f"{FILE_OF.get(variant, variant)}.safetensors")
    case = golden_cases(shared, variant)[0]["case"]
    latents: Tensor = golden[f"{case}.latents"]
    # ComfyUI's decode node hands over Hunyuan Video's latents as its VAE makes them.
    handed = latents / HUNYUAN_SCALE if (program, variant) == ("comfyui", "taehv") else latents
    made = readers.read_decode({key: value.float() for key, value in state.items()}, reading, handed)
    tolerance = ROUNDING[getattr(torch, done.dtype)]
    torch.testing.assert_close(made.clamp(0, 1), golden[f"{case}.decoded"], atol=tolerance, rtol=0)


@pytest.mark.parametrize("variant", ["taew2_1", pytest.param("taeh3", marks=pytest.mark.slow)])
def test_a_folder_of_diffusers(tmp_path: Path, variant: str) -> None:
    pytest.importorskip("diffusers", reason="the extra 'diffusers' is not installed")
    from tinyvae.diffusers import AutoencoderTinyVideo

    model = golden_model(variant, width=0.25)
    done = export(model, to="diffusers", output=tmp_path / "vae", dtype="float32")
    assert {file.name for file in done.files} == {file.name for file in (tmp_path / "vae").iterdir()}
    vae = AutoencoderTinyVideo.from_pretrained(tmp_path / "vae")
    assert vae.spec == model.spec and vae.dtype == torch.float32
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in vae.state_dict().items())
    assert len({file.stat().st_mode for file in done.files}) == 1, "whoever reads the config may read the weights"
    assert load_model(tmp_path / "vae").spec == model.spec and not is_teacher(tmp_path / "vae")
    with pytest.raises(FileExistsAlreadyError, match=r"config\.json exists already"):
        export(model, to="diffusers", output=tmp_path / "vae")


@pytest.mark.slow
def test_wrong_statistics_are_noticed() -> None:
    pytest.importorskip("diffusers", reason="the extra 'diffusers' is not installed")
    from tinyvae.diffusers import AutoencoderTinyVideo

    model = golden_model("taew2_1", width=0.25)
    vae = AutoencoderTinyVideo.from_tinyvae(model)
    check_folder(vae, model, PROGRAMS["diffusers"])
    vae.register_to_config(latents_mean=[0.0] * 16)
    with pytest.raises(ExportMismatchError, match="rules of diffusers, the frames differ"):
        check_folder(vae, model, PROGRAMS["diffusers"])


@pytest.mark.slow
def test_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    done = export(released("taew2_2"), to="sdcpp", output=tmp_path / "wan.safetensors", dtype="float32")
    assert done.dtype == "float32" and math.isinf(done.rounding_db)
    assert "dB" not in done.message and str(tmp_path / "wan.safetensors") in done.message


@pytest.mark.slow
def test_an_export_loads_here_too(tmp_path: Path) -> None:
    file = export(released("taew2_1"), to="comfyui", slot="preview", output=tmp_path).files[0]
    loaded = load_model(file)
    assert loaded.spec == get_spec("taew2_1") and loaded.dtype == torch.bfloat16
    with safe_open(file, framework="pt") as opened:
        assert "tinyvae" in opened.metadata()


@pytest.mark.slow
def test_a_path_is_loaded_first(tmp_path: Path) -> None:
    save_model(released("taew2_2"), tmp_path / "plain.safetensors")
    done = export(tmp_path / "plain.safetensors", to="lightx2v", output=tmp_path)
    assert done.files == (tmp_path / "taew2_2.safetensors",) and 40 < done.rounding_db < 90
    with pytest.raises(MissingFileError, match="there is no model at"):
        export(tmp_path / "absent.safetensors", to="lightx2v", output=tmp_path)


@pytest.mark.slow
def test_the_model_is_not_changed(tmp_path: Path) -> None:
    model = golden_model("taehv")
    model.gradient_checkpointing = True
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export(model, to="comfyui", output=tmp_path)
    assert model.gradient_checkpointing and model.dtype == torch.float32
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# what is refused


@pytest.mark.slow
def test_an_existing_file_stays(tmp_path: Path) -> None:
    (tmp_path / "taew2_2.safetensors").write_text("mine")
    with pytest.raises(FileExistsAlreadyError, match="exists already; name another --output, or add --overwrite"):
        export(released("taew2_2"), to="sdcpp", output=tmp_path)
    assert (tmp_path / "taew2_2.safetensors").read_text() == "mine"
    export(released("taew2_2"), to="sdcpp", output=tmp_path, overwrite=True)
    assert load_model(tmp_path / "taew2_2.safetensors").spec.name == "taew2_2"


def test_a_fused_codec_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="export the model that it was made of"):
        export(released("taew2_2").fused(), to="upstream", output=tmp_path / "taew2_2.pth")  # type: ignore[arg-type]


def test_values_that_the_dtype_cannot_hold() -> None:
    model = golden_model("taehv")
    with torch.no_grad():
        model.decoder[3].conv[0].weight[0, 0, 0, 0] = 1e6
    round_model(model, "bfloat16")
    with pytest.raises(UserError, match=r"decoder\.3\.conv\.0\.weight has values that are not finite as float16"):
        round_model(model, "float16")


@pytest.mark.parametrize(
    ("program", "variant", "slot", "file", "words"),
    [
        (LIGHTX2V, "taew2_1", None, "lighttaew2_1.safetensors", "must not have that word; call the file taew2_1"),
        (LIGHTX2V, "taew2_1", None, "lighttae_runs/taew2_1.safetensors", "in a folder without that word"),
        (LIGHTX2V, "taew2_1", None, "taecvx_runs/taew2_1.safetensors", "counts frames as for CogVideoX"),
        (COMFYUI, "taew2_1", "preview", "lighttaew2_1.safetensors", "VAE loader for exactly lighttaew2_1"),
        (COMFYUI, "taew2_1", "preview", "my_wan.safetensors", "begins with lighttaew2_1"),
        (UPSTREAM, "taehv", None, "taew2_2_runs/taehv.pth", "words in the whole path"),
        (UPSTREAM, "taew2_2_super", None, "taew2_2.pth", "call the file taew2_2_super.pth"),
        (UPSTREAM, "taecvx", None, "best.pth", "would not take .*best.pth for taecvx"),
    ],
)
def test_paths_that_mean_something_else_there(
    program: programs.Program, variant: str, slot: str | None, file: str, words: str
) -> None:
    chosen = choose_slot(program, get_spec(variant), name=slot)
    with pytest.raises(UserError, match=words):
        check_path(program, chosen, Path("/somewhere") / file)
    check_path(program, chosen, Path("/somewhere") / chosen.file_name)


def test_another_name_for_comfyui_goes_into_another_folder() -> None:
    place = place_of_file(COMFYUI, choose_slot(COMFYUI, get_spec("taehv")), Path("my_best.safetensors"))
    assert place.startswith("put my_best.safetensors into ComfyUI/models/vae: ")


# the check can fail


def written(folder: Path, model: TAEHV, dtype: torch.dtype = torch.float32) -> Path:
    return save_model(model, folder / "file.safetensors", dtype=dtype)[0]


def test_a_wan_file_in_float16_is_noticed(tmp_path: Path) -> None:
    """ComfyUI would scale its latents as Hunyuan Video's, without a word."""
    slot = choose_slot(COMFYUI, get_spec("taew2_1"), name="preview")
    file = written(tmp_path, released("taew2_1"), torch.float16)
    with pytest.raises(ExportMismatchError, match=r"rules of ComfyUI, the frames differ from the model's by 0\."):
        check_weights(file, tmp_path / slot.file_name, COMFYUI, slot, round_model(released("taew2_1"), "float16"))


@pytest.mark.slow
def test_a_hunyuan_15_file_in_comfyui_is_noticed(tmp_path: Path) -> None:
    slot = choose_slot(SDCPP, get_spec("taehv1_5"))
    with pytest.raises(ExportMismatchError, match="the frames differ"):
        check_weights(written(tmp_path, released("taehv1_5")), tmp_path / "a", COMFYUI, slot, released("taehv1_5"))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["decoder.7.conv.weight", "encoder.17.bias"])
def test_one_changed_weight_is_noticed(tmp_path: Path, key: str) -> None:
    slot = choose_slot(SDCPP, get_spec("taew2_2"))
    file = written(tmp_path, released("taew2_2"))
    state = load_file(file)
    state[key].view(-1)[0] += 1
    save_file(state, file)
    with pytest.raises(ExportMismatchError, match="differ from the model's"):
        check_weights(file, file, SDCPP, slot, released("taew2_2"))


@pytest.mark.slow
def test_a_frame_rule_that_differs_is_noticed(tmp_path: Path) -> None:
    slot, model = choose_slot(UPSTREAM, get_spec("taecvx")), released("taecvx")
    file = written(tmp_path, model)
    with pytest.raises(ExportMismatchError, match=r"have shape \[1, 5, 3, 24, 32\] instead of \[1, 8, 3, 24, 32\]"):
        check_weights(file, Path("/x/taehv.pth"), UPSTREAM, slot, model)


@pytest.mark.slow
def test_a_missing_key_is_noticed(tmp_path: Path) -> None:
    slot, model = choose_slot(SDCPP, get_spec("taew2_2")), released("taew2_2")
    file = written(tmp_path, model)
    save_file({key: value for key, value in load_file(file).items() if key != "encoder.0.bias"}, file)
    with pytest.raises(ExportMismatchError, match=r"cannot read the file: encoder\.0\.bias is missing"):
        check_weights(file, file, SDCPP, slot, model)


def test_nothing_is_left_when_the_check_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "read_decode", lambda state, reading, latents: torch.zeros(1))
    with pytest.raises(ExportMismatchError, match="nothing was written"):
        export(released("taew2_2"), to="sdcpp", output=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_variant_is_exported_somewhere() -> None:
    assert {variant for _, variant, _ in EXPORTS} == set(GOLDEN)


# other latent spaces, activations and decoders: the export's own check compares frames and latents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "variant", "options", "name"),
    [
        ("comfyui", "taew2_1", {"latent_space": "vae"}, "lighttaew2_1.safetensors"),
        ("comfyui", "taew2_2", {"latent_space": "vae"}, "lighttaew2_2.safetensors"),
        ("comfyui", "taehv1_5", {"activation": "leaky_relu"}, "lighttaehy1_5.safetensors"),
        ("lightx2v", "taew2_1", {"latent_space": "vae"}, "lighttaew2_1.safetensors"),
        ("lightx2v", "taew2_2", {"latent_space": "vae"}, "lighttaew2_2.safetensors"),
        ("lightx2v", "taehv1_5", {"latent_space": "vae", "activation": "leaky_relu"}, "lighttaehy1_5.safetensors"),
        ("sdcpp", "taeltx2_3_wide", {}, "taeltx2_3_wide.safetensors"),
        ("diffusers", "taew2_1", {"latent_space": "vae", "activation": "leaky_relu"}, None),
    ],
    ids=str,
)
def test_students_of_other_forms(
    tmp_path: Path, program: str, variant: str, options: dict[str, str], name: str | None
) -> None:
    done = export(golden_model(variant, **options), to=program, output=tmp_path)
    assert name is None or done.files == (tmp_path / name,)


def test_the_change_to_signed_pixels_does_not_round(tmp_path: Path) -> None:
    model = golden_model("taehv1_5", latent_space="vae", activation="leaky_relu").bfloat16()
    assert export(model, to="lightx2v", output=tmp_path, dtype="float32").rounding_db > 100


@pytest.mark.slow
def test_a_file_for_signed_pixels_comes_back(tmp_path: Path) -> None:
    """It states nothing, because our own models are for [0, 1]; the warning says what to pass."""
    model = golden_model("taehv1_5", latent_space="vae", activation="leaky_relu")
    (file,) = export(model, to="lightx2v", output=tmp_path, dtype="float32").files
    with pytest.warns(UserWarning, match=r"pass latent_space='vae', activation='leaky_relu', and it gives pixels in"):
        assert load_model(file).spec.activation == "relu"
    loaded = to_unit_pixels(load_model(file, latent_space="vae", activation="leaky_relu"))
    latents = torch.randn(1, 3, 32, 2, 3)
    with torch.no_grad():
        torch.testing.assert_close(loaded.decode(latents), model.decode(latents), atol=2e-5, rtol=0)
