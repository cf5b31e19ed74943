"""The table of programs: whole, and each refusal says why and what to do instead."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tinyvae import VARIANTS, get_spec
from tinyvae.convert import programs
from tinyvae.convert.programs import COMFYUI, DIFFUSERS, LIGHTX2V, ONNX, PROGRAMS, SDCPP, UPSTREAM, choose_slot
from tinyvae.errors import UserError
from tinyvae.models.variants import Activation, LatentSpaceName


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=lambda program: program.name)
def test_every_variant_has_a_slot_or_a_reason(program: programs.Program) -> None:
    with_slot = {slot.variant for slot in program.slots}
    assert with_slot | program.refused.keys() == VARIANTS.keys()
    assert not with_slot & program.refused.keys()


@pytest.mark.parametrize(
    ("program", "variant", "words"),
    [
        (COMFYUI, "taew2_1", "VAE-space latents, and this one has diffusion-space latents.*live preview works .--slot"),
        (COMFYUI, "taew2_2", "would decode wrongly without a word; the live preview works"),
        (
            COMFYUI,
            "taehv1_5",
            r"LeakyReLU\(0.2\), and this one has ReLU.*or train one for it .*--activation leaky_relu",
        ),
        (COMFYUI, "taew2_2_super", "KeyError.*train the base variant, or use --to diffusers, --to upstream"),
        (COMFYUI, "taecvx", "no model with these latents"),
        (DIFFUSERS, "taeltx_2", r"among the weights of the VAE; use AutoencoderTinyVideo\.from_tinyvae"),
        (DIFFUSERS, "taeos1_3", "no pipeline of Open-Sora; use --to upstream, --to onnx or --to web"),
        (LIGHTX2V, "taehv1_5", r"LeakyReLU"),
        (LIGHTX2V, "taeltx_2", "Wan and Hunyuan Video 1.5 models alone"),
        (LIGHTX2V, "taew2_2_super", "knows no super decoder"),
        (COMFYUI, "taeltx2_3_wide", "no wide decoder"),
        (UPSTREAM, "taeltx2_3_wide", "a branch of upstream's class alone; use --to sdcpp"),
        (SDCPP, "taecvx", "does not run CogVideoX; use --to diffusers, --to upstream"),
        (SDCPP, "taehv1_5_super", "no super decoder"),
    ],
)
def test_what_cannot_work_is_refused(program: programs.Program, variant: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_slot(program, get_spec(variant))


def test_other_widths_go_to_graphs_alone() -> None:
    narrow = get_spec("taehv", width=0.5)
    assert choose_slot(ONNX, narrow).variant == "taehv"
    for program in (COMFYUI, UPSTREAM):
        others = "use --to diffusers, --to onnx or --to web"
        with pytest.raises(UserError, match=rf"released widths alone, and this model has width 0\.5; {others}"):
            choose_slot(program, narrow)


@pytest.mark.parametrize("width", [0.5, 1.0])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("latent_space", ["diffusion", "vae"])
def test_a_refusal_names_programs_that_take_the_network(
    width: float, activation: Activation, latent_space: LatentSpaceName
) -> None:
    named = 0
    for program, variant in product(PROGRAMS.values(), VARIANTS):
        spec = get_spec(variant, width=width, activation=activation, latent_space=latent_space)
        try:
            choose_slot(program, spec)
        except UserError as refusal:
            for name in re.findall(r"--to (\w+)", str(refusal)):
                choose_slot(PROGRAMS[name], spec)
                named += 1
    assert named > 50


def test_a_preview_model_is_refused() -> None:
    with pytest.raises(UserError, match="load it without preview="):
        choose_slot(ONNX, get_spec("taehv", preview="time"))


def test_the_preview_slot() -> None:
    assert choose_slot(COMFYUI, get_spec("taew2_1"), name="preview").file_name == "lighttaew2_1_preview.safetensors"
    with pytest.raises(UserError, match="has no preview slot for taehv; its use as the VAE works"):
        choose_slot(COMFYUI, get_spec("taehv"), name="preview")
    with pytest.raises(UserError, match=r"stable-diffusion\.cpp has no slot 'preview'"):
        choose_slot(SDCPP, get_spec("taew2_1"), name="preview")


def test_networks_in_vae_space_find_their_slots() -> None:
    """Students for the lighttae slots: the table has the rows, the choice is by what the network is."""
    wan, wan_2_2 = (get_spec(name, latent_space="vae") for name in ("taew2_1", "taew2_2"))
    assert choose_slot(COMFYUI, wan).file_name == "lighttaew2_1.safetensors"
    assert choose_slot(LIGHTX2V, wan_2_2).file_name == "lighttaew2_2.safetensors"
    leaky = get_spec("taehv1_5", activation="leaky_relu")
    assert choose_slot(COMFYUI, leaky).file_name == "lighttaehy1_5.safetensors"
    assert choose_slot(LIGHTX2V, replace(leaky, latent_space="vae")).file_name == "lighttaehy1_5.safetensors"
    assert choose_slot(ONNX, replace(leaky, latent_space="vae")).variant == "taehv1_5", "it takes every form"
    with pytest.raises(UserError, match="needs a network for diffusion-space latents"):
        choose_slot(SDCPP, wan)


def test_dtypes() -> None:
    taehv, wan = (choose_slot(COMFYUI, get_spec(v), name=n) for v, n in (("taehv", None), ("taew2_1", "preview")))
    assert programs.check_dtype(COMFYUI, taehv, None) == "float16"
    assert programs.check_dtype(COMFYUI, wan, None) == "bfloat16"
    assert programs.check_dtype(COMFYUI, wan, "float32") == "float32"
    with pytest.raises(UserError, match=r"taew2_1 as float16 .*Hunyuan Video's and scales.*use --dtype bfloat16 or"):
        programs.check_dtype(COMFYUI, wan, "float16")
    with pytest.raises(UserError, match=r"takes the file for Wan 2\.1's"):
        programs.check_dtype(COMFYUI, taehv, "bfloat16")
    with pytest.raises(UserError, match="--dtype 'int4' is not known"):
        programs.check_dtype(COMFYUI, taehv, "int4")
    with pytest.raises(UserError, match="ComfyUI does not read taehv as int8"):
        programs.check_dtype(COMFYUI, taehv, "int8")


def test_output_files(tmp_path: Path) -> None:
    slot = choose_slot(UPSTREAM, get_spec("taecvx"))
    assert programs.output_file(UPSTREAM, slot, tmp_path) == tmp_path / "taecvx.pth"
    assert programs.output_file(UPSTREAM, slot, tmp_path / "my_taecvx.pth") == tmp_path / "my_taecvx.pth"
    for name in ("taecvx.safetensors", "taecvx.gguf", "taecvx.ckpt"):
        with pytest.raises(UserError, match=r"opens \.pth files"):
            programs.output_file(UPSTREAM, slot, tmp_path / name)
    for program, name in ((ONNX, "model.onnx"), (DIFFUSERS, "vae.safetensors")):
        with pytest.raises(UserError, match=f"{name}: several files are written for .*; name a folder"):
            programs.output_file(program, choose_slot(program, get_spec("taecvx")), tmp_path / name)


def test_the_table_names_every_program_and_variant() -> None:
    lines = programs.program_table().splitlines()
    assert lines[0].split() == ["variant", *PROGRAMS]
    assert [line.split()[0] for line in lines[1 : 1 + len(VARIANTS)]] == list(VARIANTS)
    (wan,) = [line.split() for line in lines if line.startswith("taew2_1 ")]
    assert wan[1:6] == ["(preview)", "float16", "bfloat16", "float16", "float16"]
    assert max(map(len, lines)) <= 120
