"""The programs that load our weights, as one table: which variants, which dtype, which file name, where the file goes.

Each row is a `Slot`: one use that one program has for one variant. A slot also says what the program expects of the
network: its latent space, its activation, its pixel range. A network that does not match decodes wrongly there, and no
program says so. So `choose_slot` refuses it, with the reason and the way out.

This file needs no torch, so that ``tinyvae export --to list`` answers at once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyvae.errors import UserError, nearest_name
from tinyvae.models.variants import VARIANTS, Activation, LatentSpaceName, VariantSpec
from tinyvae.terminal import in_columns

Written = Literal["weights", "folder", "graphs", "page"]

SLOT_WORDS = {"vae": "its use as the VAE", "preview": "the live preview"}
ANY_DTYPE = ("float16", "bfloat16", "float32")
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".gguf")  # of weight files; no folder is called so
FORM_WORDS = {"diffusion": "diffusion-space latents", "vae": "VAE-space latents"}
FORM_WORDS |= {"relu": "ReLU", "leaky_relu": "LeakyReLU(0.2)"}
ANY_FORM: dict[str, Any] = {"latent_space": None, "activation": None}
"""Of a slot that takes every network of its variant."""
SUPER = tuple(name for name in VARIANTS if name.endswith("_super"))


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One use that a program has for one variant.

    ``dtypes``: those that the program reads as it should; the first is written unless the user asks for another.
    ``other_dtypes``: what goes wrong with the others.
    ``place``: where the file goes, and what it does there; ``{file}`` stands for its name, ``{teacher}`` for the model
    whose VAE it replaces. ``latent_space`` and ``activation``: of the networks that it takes; None: all.
    ``handed_scale``: the program hands over the latents of this space divided by this, and scales them itself.
    ``signed_pixels``: it takes and gives pixels in [-1, 1]; the export converts the first and the last convolution.
    """

    variant: str
    file_name: str
    place: str
    name: str = "vae"
    dtypes: tuple[str, ...] = ANY_DTYPE
    other_dtypes: str = ""
    latent_space: LatentSpaceName | None = "diffusion"
    activation: Activation | None = "relu"
    handed_scale: float = 1.0
    signed_pixels: bool = False

    def takes(self, spec: VariantSpec) -> bool:
        """Whether a network is what the program expects here."""
        return self.variant == spec.name and not self.differences(spec)

    def differences(self, spec: VariantSpec) -> list[str]:
        """In what a network of this variant is not what the program expects: "latent_space", "activation"."""
        return [key for key in ANY_FORM if getattr(self, key) not in (None, getattr(spec, key))]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program: its slots, and why it has none for other variants.

    ``refused``: variant -> reason, with ``; what to do`` where more helps than the programs that take it.
    """

    name: str
    title: str
    slots: tuple[Slot, ...]
    writes: Written = "weights"
    suffixes: tuple[str, ...] = (".safetensors",)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def any_width(self) -> bool:
        """Whether it runs networks of other widths than 1: a program that builds the network itself does not."""
        return self.writes != "weights"


def _same_slots(file_suffix: str, place: str, *, without: Container[str] = (), **options: Any) -> tuple[Slot, ...]:
    """One slot for each variant: the variant's name is the file's."""
    return tuple(
        Slot(variant=variant, file_name=f"{variant}{file_suffix}", place=place, **options)
        for variant in VARIANTS
        if variant not in without
    )


# ComfyUI

APPROX = "put {file} into ComfyUI/models/vae_approx"
_COMFY_NO_MODEL = "ComfyUI has no model with these latents (%s) and would scale them as another model's"
HUNYUAN_SCALE, HUNYUAN_15_SCALE = 0.476986, 1.03682
"""The diffusion latents of Hunyuan Video, and of 1.5, are those of their VAE times this."""
_HALF = {
    "dtypes": ("float16",),
    "other_dtypes": "with another dtype it takes the file for Wan 2.1's and does not scale the latents",
}
_NOT_HALF = {
    "dtypes": ("bfloat16", "float32"),
    "other_dtypes": "it takes a float16 file with 16 channels for Hunyuan Video's and scales the latents",
}


def _comfy_vae(variant: str, stem: str, **options: Any) -> Slot:
    place = f"{APPROX}: the Load VAE node then offers {stem}, for VAE Decode and VAE Encode"
    return Slot(variant=variant, file_name=f"{stem}.safetensors", **{"place": place, **options})


def _comfy_preview(variant: str, stem: str, **options: Any) -> Slot:
    # The VAE loader offers the exact stem alone, the preview takes any name that begins with it. With the longer name
    # nobody can load the file into the decode node, where it would decode wrongly.
    place = (
        f"{APPROX} and remove other files there that begin with {stem}: it makes the live previews (choose "
        "the preview method TAESD). It cannot serve the VAE Decode node"
    )
    return Slot(variant=variant, name="preview", file_name=f"{stem}_preview.safetensors", place=place, **options)


COMFYUI = Program(
    name="comfyui",
    title="ComfyUI",
    slots=(
        _comfy_vae("taehv", "taehv", handed_scale=HUNYUAN_SCALE, **_HALF),
        _comfy_vae("taew2_1", "lighttaew2_1", latent_space="vae", **_NOT_HALF),
        _comfy_preview("taew2_1", "lighttaew2_1", **_NOT_HALF),
        _comfy_vae("taew2_2", "lighttaew2_2", latent_space="vae"),
        _comfy_preview("taew2_2", "lighttaew2_2"),
        _comfy_vae(
            "taehv1_5",
            "lighttaehy1_5",
            activation="leaky_relu",
            handed_scale=HUNYUAN_15_SCALE,
            signed_pixels=True,
        ),
        _comfy_vae("taeltx_2", "taeltx_2"),
        _comfy_vae(
            "taeltx2_3",
            "taeltx2_3",
            place="put {file} into ComfyUI/models/vae: the Load VAE node then offers it, for VAE Decode and VAE Encode",
        ),
        _comfy_vae("taeh3", "taeh3"),
    ),
    refused={
        "taecvx": _COMFY_NO_MODEL % "CogVideoX",
        "taeos1_3": _COMFY_NO_MODEL % "Open-Sora",
        "taeltx2_3_wide": "ComfyUI knows no wide decoder; train taeltx2_3",
        **dict.fromkeys(SUPER, "ComfyUI stops with a KeyError on super decoders; train the base variant"),
    },
)

# LightX2V

_LIGHT_ONLY = "LightX2V has a tiny VAE for its Wan and Hunyuan Video 1.5 models alone"


def _light(variant: str, stem: str, host: str, **options: Any) -> Slot:
    setting = f'set "use_tae": true and "tae_path" to the path of {{file}} in the config of a {host} model'
    return Slot(
        variant=variant,
        file_name=f"{stem}.safetensors",
        dtypes=("bfloat16", "float16", "float32"),
        place=f"{setting}; it then decodes with this network",
        **options,
    )


LIGHTX2V = Program(
    name="lightx2v",
    title="LightX2V",
    suffixes=(".safetensors", ".pth"),
    slots=(
        _light("taew2_1", "taew2_1", "Wan 2.1"),
        _light("taew2_1", "lighttaew2_1", "Wan 2.1", latent_space="vae"),
        _light("taew2_2", "taew2_2", "Wan 2.2-5B"),
        _light("taew2_2", "lighttaew2_2", "Wan 2.2-5B", latent_space="vae"),
        _light(
            "taehv1_5",
            "lighttaehy1_5",
            "Hunyuan Video 1.5",
            latent_space="vae",
            activation="leaky_relu",
            handed_scale=1 / HUNYUAN_15_SCALE,
            signed_pixels=True,
        ),
    ),
    refused={
        **dict.fromkeys(
            ("taehv", "taecvx", "taeos1_3", "taeltx_2", "taeltx2_3", "taeltx2_3_wide", "taeh3"), _LIGHT_ONLY
        ),
        **dict.fromkeys(SUPER, "LightX2V loads strictly and knows no super decoder; train the base variant"),
    },
)

# stable-diffusion.cpp

_SDCPP_HOSTS = {
    "taew2_1": "Wan 2.1, Wan 2.2-14B or Qwen Image",
    "taew2_2": "Wan 2.2-5B",
    "taehv1_5": "Hunyuan Video 1.5",
    "taeltx_2": "LTX-2",
    "taeltx2_3": "LTX-2.3 or LTX-2.5",
    "taeltx2_3_wide": "LTX-2.3 or LTX-2.5",
    "taeh3": "MiniMax H3",
}

SDCPP = Program(
    name="sdcpp",
    title="stable-diffusion.cpp",
    slots=tuple(
        Slot(
            variant=variant,
            file_name=f"{variant}.safetensors",
            place=f"start a {host} model with --tae {{file}}: it then decodes with this network",
        )
        for variant, host in _SDCPP_HOSTS.items()
    ),
    refused={
        "taehv": "stable-diffusion.cpp has no tiny VAE for Hunyuan Video 1.0",
        "taecvx": "stable-diffusion.cpp does not run CogVideoX",
        "taeos1_3": "stable-diffusion.cpp does not run Open-Sora",
        **dict.fromkeys(SUPER, "stable-diffusion.cpp knows no super decoder; train the base variant"),
    },
)

# diffusers

_DIFFUSERS_LTX = (
    "the statistics that its pipelines need are among the weights of the VAE; use "
    "AutoencoderTinyVideo.from_tinyvae(model, teacher=pipe.vae) in Python (docs/diffusers.md)"
)

_DIFFUSERS_NO = {
    **{variant: _DIFFUSERS_LTX for variant in VARIANTS if variant.startswith("taeltx")},
    "taeos1_3": "diffusers has no pipeline of Open-Sora",
}

DIFFUSERS = Program(
    name="diffusers",
    title="diffusers",
    writes="folder",
    slots=_same_slots(
        "",
        "`tinyvae.diffusers.AutoencoderTinyVideo.from_pretrained('{file}')` is a VAE for the pipelines of {teacher}",
        without=_DIFFUSERS_NO,
        **ANY_FORM,
    ),
    refused=_DIFFUSERS_NO,
)

# upstream's class, ONNX, the browser

_UPSTREAM_NO = {"taeltx2_3_wide": "the wide decoder is in a branch of upstream's class alone"}

UPSTREAM = Program(
    name="upstream",
    title="upstream's TAEHV class, SGLang, FastVideo",
    suffixes=(".pth",),
    slots=_same_slots(
        ".pth",
        "load it with TAEHV('{file}') and keep its name: the path picks the variant there",
        without=_UPSTREAM_NO,
    ),
    refused=_UPSTREAM_NO,
)
_GRAPH_DTYPES = ("float32", "float16", "int8")

ONNX = Program(
    name="onnx",
    title="ONNX (onnxruntime and others)",
    writes="graphs",
    slots=_same_slots(
        "",
        "{file}/encoder.onnx takes the frames of one latent a call, {file}/decoder.onnx one latent a call; "
        "examples/stream_onnx.py shows the loop",
        dtypes=_GRAPH_DTYPES,
        **ANY_FORM,
    ),
)

WEB = Program(
    name="web",
    title="a page in the browser",
    writes="page",
    slots=_same_slots(
        "",
        "start `python -m http.server -d {file}` and open http://localhost:8000 to try the model",
        dtypes=_GRAPH_DTYPES,
        **ANY_FORM,
    ),
)

PROGRAMS: dict[str, Program] = {
    program.name: program for program in (COMFYUI, DIFFUSERS, LIGHTX2V, SDCPP, UPSTREAM, ONNX, WEB)
}


# choosing


def get_program(name: str) -> Program:
    """The program of this name; a mistake names the nearest one."""
    if name not in PROGRAMS:
        raise UserError(
            f"there is no program {name!r} to export to.{nearest_name(name, PROGRAMS)} "
            f"The programs are {', '.join(PROGRAMS)}; `tinyvae export --to list` says what each takes."
        )
    return PROGRAMS[name]


def choose_slot(program: Program, spec: VariantSpec, *, name: str | None = None) -> Slot:
    """The slot of a program that fits a network, or a `UserError` with the reason and the way out.

    Example: ``choose_slot(COMFYUI, get_spec("taehv")).dtypes`` is ``("float16",)``.
    """
    names = list(dict.fromkeys(slot.name for slot in program.slots))
    if name not in (None, *names):
        raise UserError(f"{program.title} has no slot {name!r}; leave --slot out, or use {_or(names)}.")
    if spec.preview is not None:
        raise UserError("a model loaded with preview= cannot be exported; load it without preview=.")
    if spec.name in program.refused:
        why = program.refused[spec.name]
        why += (", or " if ";" in why else "; ") + _elsewhere(program, spec)
        raise UserError(f"{spec.name} cannot be exported to {program.title}: {why}.")
    if spec.width != 1 and not program.any_width:
        raise UserError(
            f"{program.title} knows the released widths alone, and this model has width {spec.width:g}; "
            f"{_elsewhere(program, spec)}, or train one with model_width = 1."
        )
    wanted = name or "vae"
    for slot in program.slots:
        if slot.name == wanted and slot.takes(spec):
            return slot
    raise UserError(_why_no_slot(program, spec, wanted))


def _why_no_slot(program: Program, spec: VariantSpec, wanted: str) -> str:
    ways = [f"{SLOT_WORDS[slot.name]} works (--slot {slot.name})" for slot in program.slots if slot.takes(spec)]
    ways.append(f"or {_elsewhere(program, spec)}")
    slot = next((slot for slot in program.slots if (slot.variant, slot.name) == (spec.name, wanted)), None)
    if slot is not None:
        keys = slot.differences(spec)
        needed, given = (", ".join(FORM_WORDS[getattr(each, key)] for key in keys) for each in (slot, spec))
        reason = f"{SLOT_WORDS[wanted]} needs a network for {needed}, and this one has {given}"
        reason += ", so it would decode wrongly without a word"
        ours = VARIANTS[spec.name]
        settings = [f"--{key} {getattr(slot, key)}" for key in ANY_FORM if getattr(slot, key) != getattr(ours, key)]
        ways += [f"or train one for it (tinyvae train ... {' '.join(settings)})"] if settings else []
    else:
        reason = f"it has no {wanted} slot for {spec.name}"
    return f"{spec.name} cannot be exported to {program.title}: {reason}; {', '.join(ways).removeprefix('or ')}."


def _elsewhere(program: Program, spec: VariantSpec) -> str:
    """``use --to onnx or --to web``: the other programs, which take this network."""
    others = [other for other in PROGRAMS.values() if other is not program and (spec.width == 1 or other.any_width)]
    return f"use {_or([f'--to {other.name}' for other in others if any(slot.takes(spec) for slot in other.slots)])}"


def _or(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_dtype(program: Program, slot: Slot, dtype: str | None, *, has_data: bool = False) -> str:
    """The dtype to write: the slot's own, or the one asked for where the program reads it as it should.

    ``has_data``: whether the user named videos, which int8 alone takes.
    """
    chosen = dtype or slot.dtypes[0]
    if chosen not in (*ANY_DTYPE, "int8"):
        raise UserError(f"--dtype {dtype!r} is not known; use {_or([*slot.dtypes])}.")
    if chosen not in slot.dtypes:
        why = f" ({slot.other_dtypes})" if slot.other_dtypes else ""
        what = f"{program.title} does not read {slot.variant} as {dtype}{why}"
        raise UserError(f"{what}; use --dtype {_or([*slot.dtypes])}.")
    if chosen == "int8" and not has_data:
        raise UserError("--dtype int8 is calibrated on videos like those that will be decoded; name some with --data.")
    if has_data and chosen != "int8":
        raise UserError(f"--data is for --dtype int8 alone, and {chosen} is written; leave it out or add --dtype int8.")
    return chosen


def output_file(program: Program, slot: Slot, output: Path) -> Path:
    """Where the export goes: ``output`` itself, or the slot's file name in the folder ``output``."""
    if program.writes != "weights":
        if output.suffix in (*WEIGHT_SUFFIXES, ".onnx") and not output.exists():
            raise UserError(f"--output {output}: several files are written for {program.title}; name a folder.")
        return output
    names_a_file = output.suffix in WEIGHT_SUFFIXES and not output.is_dir()
    file = output if names_a_file else output / slot.file_name
    if file.suffix not in program.suffixes:
        raise UserError(
            f"{program.title} opens {_or([*program.suffixes])} files; name the output so, or name a folder "
            f"(the file is then called {slot.file_name})."
        )
    return file


def program_table() -> str:
    """Programs and variants as text: the dtype that is written, by slot, or - where the program cannot use it."""
    rows = [("variant", *PROGRAMS)]
    rows += [(spec.name, *(_cell(program, spec) for program in PROGRAMS.values())) for spec in VARIANTS.values()]
    titles = [f"  {program.name:<10} {program.title}" for program in PROGRAMS.values()]
    any_width = _or([program.name for program in PROGRAMS.values() if program.any_width])
    legend = (
        "A cell has the dtype that is written; (preview): the live preview alone, with --slot preview; -: refused, "
        f"and\nthe message says why. A network of another width than 1 can go to {any_width}."
    )
    return "\n".join([*in_columns(rows), "", legend, "", *titles])


def _cell(program: Program, spec: VariantSpec) -> str:
    for slot in program.slots:
        if slot.takes(spec):
            return slot.dtypes[0] if slot.name == "vae" else f"({slot.name})"
    return "-"
