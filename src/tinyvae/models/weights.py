"""Weight files: which formats are read and written, and how to tell which variant a file holds.

Read: ``.safetensors``, ``.pth`` (tensors only), a model, checkpoint or run folder. Written: one file, or a folder with
``model.safetensors``, ``model.pth`` and ``config.json``. The variant comes from, in this order: the ``variant``
argument; what the file itself states; the folder's ``config.json`` (only for names that we write there); last the keys
and shapes.

Four variants share one network, and so do the two for LTX: where nothing states which, the variant is a guess. A file's
name never chooses, but a guess that the name contradicts (``taecvx.pth`` taken for taehv) is refused.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import safetensors.torch
import torch
from torch import Tensor

from tinyvae import __version__
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError, nearest_name
from tinyvae.files import atomic_write, check_readable, refuse_existing
from tinyvae.models.hub import FIRST_CHOICES, FORMATS, fetch_weights, list_weights, names_hub_model
from tinyvae.models.taehv import TAEHV, build_decoder, build_encoder
from tinyvae.models.variants import (
    VARIANTS,
    WIDTH_STEP,
    Activation,
    LatentSpaceName,
    Preview,
    VariantSpec,
    get_spec,
)

MODEL_FORMAT = "tinyvae-model"
RUN_FORMAT = "tinyvae-run"
LATENT_CONVENTIONS: dict[LatentSpaceName, str] = {
    "diffusion": "diffusion space: as the diffusion model sees latents, after its VAE's scaling factor or mean/std",
    "vae": "VAE space: as the diffusion model's VAE makes latents, before its scaling factor or mean/std",
}
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
METADATA_KEY = "tinyvae"  # of a safetensors file's metadata, and of that of a .pth file's state dict
DIFFUSERS_CLASS = "AutoencoderTinyVideo"  # what `tinyvae export --to diffusers` writes; its config.json states as much
DESCRIBED_NAMES = tuple(f"{stem}{suffix}" for stem in ("model", "final_model") for suffix in FORMATS)
DESCRIBED_NAMES += tuple(f"diffusion_pytorch_model{form}.safetensors" for form in ("", ".fp16", ".bf16"))
"""What we write into a folder with a ``config.json``. That file says nothing about any other name beside it."""

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CHECKPOINT_NAME = re.compile(r"(?:emergency_)?checkpoint-(\d+)")
SHOWN_KEYS = 4
OTHER_FORMATS = (".pt", ".bin", ".ckpt", ".onnx", ".gguf")  # files that we do not write

DAMAGE: tuple[type[Exception], ...] = (RuntimeError, EOFError, OSError, ValueError, LookupError, AttributeError)
DAMAGE += (TypeError, AssertionError, struct.error)
"""What torch.load raises for a file with changed bytes: a pickle is a program, and it can fail at each operation."""


def load_model(
    path: str | os.PathLike[str],
    variant: str | None = None,
    *,
    preview: Preview | None = None,
    latent_space: LatentSpaceName | None = None,
    activation: Activation | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> TAEHV:
    """The model in a weights file, model folder, checkpoint folder, run folder or repository of the hub, in eval mode.

    A run folder gives its best model, else its final one, else its newest checkpoint. A name of the hub is
    ``owner/name``, or ``owner/name:file``. ``variant`` overrules what the file states; it is needed only where neither
    the file nor its shapes can tell. ``latent_space`` ("diffusion" or "vae") and ``activation`` ("relu" or
    "leaky_relu") overrule the file likewise; shapes never tell them, and a file that does not state them is taken for
    diffusion space and ReLU. ``dtype`` defaults to the file's.

    Example: ``model = load_model("output/my_run", device="cuda", dtype=torch.float16)``.
    """
    _check_dtype(dtype)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as fault:  # no such name, no such card, a torch without it
        reason = str(fault).splitlines()[0]
        raise UserError(f"device={str(device)!r} cannot be used here ({reason}); use 'cpu' or another one.") from None
    weights_file = find_weights(Path(path))
    state, stated = read_weights(weights_file)
    check_state(state, origin=weights_file)
    spec = tell_variant(state, stated=stated, variant=variant, origin=weights_file)
    latent_space, activation = latent_space or stated.get("latent_space"), activation or stated.get("activation")
    if latent_space is None and "lighttae" in weights_file.name.lower():
        warn_of_lighttae(weights_file)
    with torch.device("meta"):
        model = TAEHV.of(
            replace(spec, preview=preview, latent_space=latent_space or "diffusion", activation=activation or "relu")
        )
    model.load_state_dict(state, assign=True)
    file_dtype = state["encoder.0.weight"].dtype
    return model.to(device=torch.device(device), dtype=dtype or file_dtype).eval().requires_grad_(True)


def warn_of_lighttae(file: Path) -> None:
    """LightX2V's files have the shapes of ours and other latents; nothing in them says so."""
    leaky = ", activation='leaky_relu', and it gives pixels in [-1, 1]" if "hy1" in file.name.lower() else ""
    warnings.warn(
        f"{file.name} is named like a network of LightX2V, which works with VAE-space latents, and does not state it; "
        f"it is taken for one of diffusion space. If it is LightX2V's, pass latent_space='vae'{leaky}.",
        stacklevel=3,
    )


def save_model(
    model: TAEHV,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    dtype: torch.dtype | None = None,
    training_step: int | None = None,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Write a model; returns the files written.

    A path that ends in ``.safetensors`` or ``.pth`` is one file, and nothing is written beside it. Any other path is a
    folder that gets ``model.safetensors`` and ``model.pth`` (or the one of ``formats``) and ``config.json``. Existing
    files are refused unless ``overwrite``. Each file appears whole or not at all.

    Example: ``save_model(model, "my_model.safetensors")``.
    """
    target = Path(path)
    single = target.suffix in FORMATS
    folder = target.parent if single else target
    weights_files = [target] if single else [folder / f"model{suffix}" for suffix in formats]
    # A run folder's config.json already states variant and width.
    config_file = None if single or _holds_run_config(folder / "config.json") else folder / "config.json"
    if target.suffix in OTHER_FORMATS:
        raise UserError(f"cannot write {target}: end its name in .safetensors or .pth, or name a folder for both.")
    if not set(formats) <= set(FORMATS):
        raise UserError(f"formats={formats!r} cannot be written; name one of {' and '.join(FORMATS)}, or both.")
    if not isinstance(model, torch.nn.Module):  # a fused codec, whose weights are folded
        raise UserError(f"a {type(model).__name__} cannot be saved; save the model that it was made of.")
    _check_dtype(dtype)
    state = plain_state(model, dtype=dtype)
    config = describe(model.spec, training_step=training_step)
    if not overwrite:
        refuse_existing(weights_files)
        _refuse_other_model(config_file, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FileExistsAlreadyError(f"{folder} is to be a folder, and a file is in its way; save elsewhere.") from None
    for file in weights_files:
        with atomic_write(file) as stream:
            if file.suffix == ".pth":
                torch.save(_with_statement(state, config), stream)
            else:
                stream.write(safetensors.torch.save(state, {"format": "pt", METADATA_KEY: json.dumps(config)}))
    if config_file is None:
        return weights_files
    with atomic_write(config_file, "w") as stream:
        stream.write(json.dumps(config, indent=1) + "\n")
    return [*weights_files, config_file]


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype not in (None, *WEIGHT_DTYPES):
        names = ", ".join(map(str, WEIGHT_DTYPES))
        raise UserError(f"dtype={dtype!r} does not suit weights; use one of {names}.")


def describe(spec: VariantSpec, *, training_step: int | None = None) -> dict[str, Any]:
    """The content of ``config.json``: everything another program needs to build and use the network."""
    facts = asdict(spec)
    facts.pop("preview")  # a way of running the weights, not a property of them
    facts["variant"] = facts.pop("name")
    return {
        "format": MODEL_FORMAT,
        **facts,
        "encoder_channels": [spec.hidden(64)],
        "decoder_channels": list(spec.decoder_channels[: 3 if spec.decoder == "base" else 4]),
        "time_factor": spec.time_factor,
        "space_factor": spec.space_factor,
        "trim": spec.trim,
        "latent_convention": LATENT_CONVENTIONS[spec.latent_space],
        "tinyvae_version": __version__,
        "training_step": training_step,
    }


def plain_state(model: torch.nn.Module, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The state dict with the family's flat keys: wrappers stripped, contiguous, on the CPU."""
    return {
        strip_wrappers(key): value.detach().to("cpu", dtype or value.dtype).contiguous()
        for key, value in model.state_dict().items()
    }


def strip_wrappers(key: str) -> str:
    while key.startswith(WRAPPERS):
        key = key.split(".", 1)[1]
    return key


# finding and reading


def find_weights(path: Path) -> Path:
    """The weights file that a path means: itself, the best one inside a folder, or one of the hub (see `hub`)."""
    try:
        is_file, is_there = path.is_file(), path.exists()
    except OSError as fault:  # a name that is too long, a folder that may not be entered
        raise MissingFileError(f"there is no model to be reached at {path} ({fault.strerror}).") from None
    if is_file:
        return path
    if not is_there:
        if names_hub_model(str(path)):
            return fetch_weights(str(path))
        if str(path) in VARIANTS:
            raise MissingFileError(
                f"{path} is the name of a variant, and weights come as a file; download {path}.pth (the GitHub "
                f"repository madebyollin/taehv publishes it) and use load_model('{path}.pth', variant='{path}'), "
                "or train one with: tinyvae train"
            )
        hint = nearest_name(str(path), VARIANTS) if len(path.parts) == 1 else ""
        raise MissingFileError(f"there is no model at {path} (looked from {Path.cwd()}); check the path.{hint}")
    if not path.is_dir():
        raise UserError(f"{path} is neither a file nor a folder; name a weights file or a run's folder.")
    try:
        inside = sorted(path.iterdir())
    except OSError as fault:
        raise UserError(f"{path} cannot be looked into ({fault.strerror}); check its permissions.") from None
    # A folder of a save that is under way or was cut short has another name.
    named = ((CHECKPOINT_NAME.fullmatch(entry.name), entry.name) for entry in inside)
    checkpoints = sorted(((int(match[1]), name) for match, name in named if match), reverse=True)
    for name in (*FIRST_CHOICES, *(f"{name}/model.safetensors" for _, name in checkpoints)):
        if (path / name).is_file():
            return path / name
    loose = [entry for entry in inside if entry.suffix in FORMATS]
    if len(loose) == 1:
        return loose[0]
    holds = "it holds no weights; name a weights file or a run's folder"
    if loose:
        holds = f"it holds {list_weights([file.name for file in loose])}; name one of them"
    raise UserError(f"{path} is not a model, checkpoint or run folder: {holds}.")


def read_weights(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(state dict, what the file or its folder's ``config.json`` states). The first bytes tell the format."""
    head = check_readable(file)
    if head[:2] in (b"PK", b"\x80\x02"):
        state, stated = _read_pickled(file)
    elif head[8:9] == b"{":
        state, stated = _read_safetensors(file)
    else:
        raise UserError(f"{file} is neither safetensors nor .pth, or it is cut off; download or save it again.")
    plain = {strip_wrappers(key): value.contiguous() for key, value in state.items()}
    if len(plain) < len(state):
        twice = next(key for key in state if strip_wrappers(key) != key and strip_wrappers(key) in state)
        raise UserError(f"{file} holds both {strip_wrappers(twice)} and {twice}; save one of the two models alone.")
    if not stated and file.name in DESCRIBED_NAMES:
        stated = _read_config(file.parent / "config.json")
    return plain, stated


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
            text = (opened.metadata() or {}).get(METADATA_KEY, "{}")
    except safetensors.SafetensorError as fault:
        raise UserError(f"{file} is not a whole safetensors file ({fault}); download or save it again.") from None
    return state, _parse_stated(text, origin=file)


def _read_pickled(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        why = "holds more than tensors (or is damaged) and could run code when opened, so it was not read"
        raise UserError(f"{file} {why}; ask its author for a .safetensors file.") from None
    except DAMAGE as fault:
        reason = str(fault).splitlines()[0] if str(fault) else "unexpected end"
        raise UserError(f"{file} is not a whole .pth file ({reason}); download or save it again.") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} does not hold a state dict (a mapping of names to tensors); it is not a model file.")
    for key, value in content.items():
        if value.layout != torch.strided or value.device.type != "cpu":
            raise UserError(f"{file}: {key} is no plain tensor ({value.layout}, {value.device}); save it again as one.")
    metadata = getattr(content, "_metadata", None)  # see `_with_statement`; other programs state nothing there
    own = metadata.get("") if isinstance(metadata, Mapping) else None
    text = own.get(METADATA_KEY) if isinstance(own, Mapping) else None
    stated = _parse_stated(text, origin=file) if isinstance(text, str) else {}
    return {str(key): value for key, value in content.items()}, stated


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return _parse_stated(file.read_text(encoding="utf-8"), origin=file)
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{file} beside the weights cannot be read ({fault}); fix or remove it.") from None


def _parse_stated(text: str, *, origin: Path) -> dict[str, Any]:
    """What a config states of variant, width, latent_space, activation and training_step; that of another program
    states nothing."""
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as fault:
        raise UserError(f"{origin} holds a description that is not valid JSON ({fault}); fix or remove it.") from None
    if not isinstance(config, dict) or not states_network(config):
        return {}
    width_key = "model_width" if config.get("format") == RUN_FORMAT else "width"  # a run's width is in pixels
    variant, width = config.get("variant"), config.get(width_key)
    if variant not in [None, *VARIANTS] or not isinstance(width, int | float | None):
        what = f"{origin} states variant {variant!r} and {width_key} {width!r}, which no model of this family has."
        hint = nearest_name(str(variant), VARIANTS)
        raise UserError(f"{what}{hint} Fix or remove it; the variants are {', '.join(VARIANTS)}.")
    stated = {key: config.get(key) for key in ("latent_space", "activation", "training_step")}
    for key, known in (("latent_space", get_args(LatentSpaceName)), ("activation", get_args(Activation))):
        if stated[key] not in (None, *known):
            what = f"{origin} states {key} {stated[key]!r}, which is not known"
            raise UserError(f"{what}; fix it to {' or '.join(known)}, or use a newer tinyvae.")
    return {"variant": variant, "width": width, **stated}


def states_network(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model or run of ours, or of our export for diffusers."""
    return config.get("format") in (MODEL_FORMAT, RUN_FORMAT) or config.get("_class_name") == DIFFUSERS_CLASS


def check_state(state: Mapping[str, Tensor], *, origin: Path) -> None:
    """Refuse weights in which no network computes; warn about values that are not finite."""
    for key, value in state.items():
        if not value.is_floating_point():
            raise UserError(f"{origin}: {key} is {value.dtype}, not floating point; this is not a plain model file.")
    dtypes = {value.dtype for value in state.values()}
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if len(dtypes) > 1:
        raise UserError(f"{origin} mixes the dtypes {names}; save it in one.")
    if not dtypes <= set(WEIGHT_DTYPES):
        raise UserError(f"{origin} is in {names}, in which nothing here computes; convert it to float16 or float32.")
    broken = [key for key, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        text = f"{origin.name} holds values that are not finite, first in {broken[0]}: it cannot make pictures."
        warnings.warn(text, stacklevel=3)


# writing


def _refuse_other_model(config_file: Path | None, config: Mapping[str, Any]) -> None:
    """Weights may have been moved away; their folder's config.json still says what it was made for."""
    if config_file is None or not config_file.exists():
        return
    there = _read_config(config_file)
    stated = {key: there[key] for key in ("latent_space", "activation") if there.get(key) is not None}
    stated |= {key: there.get(key) for key in ("variant", "width")}
    if not stated.items() <= config.items():
        text = f"{config_file} describes another model; save to another folder or pass overwrite=True."
        raise FileExistsAlreadyError(text)


def _holds_run_config(config_file: Path) -> bool:
    try:
        config = json.loads(config_file.read_bytes()) if config_file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") == RUN_FORMAT


def _with_statement(state: dict[str, Tensor], config: Mapping[str, Any]) -> OrderedDict[str, Tensor]:
    """A state dict that states its variant in torch's metadata: few facts, for readers with small buffers."""
    stating = OrderedDict(state)
    keys = ("format", "variant", "width", "latent_space", "activation", "training_step", "tinyvae_version")
    few = {key: config[key] for key in keys}
    stating._metadata = {"": {"version": 1, METADATA_KEY: json.dumps(few)}}  # type: ignore[attr-defined]
    return stating


# which variant it is


def tell_variant(
    state: Mapping[str, Tensor],
    *,
    stated: Mapping[str, Any],
    variant: str | None,
    origin: Path,
    presumed: str | None = None,
) -> VariantSpec:
    """Variant and width of weights. ``variant`` wins; ``presumed`` (a preset's) is taken where they state nothing."""
    width = _width_of(state)
    if width is None:
        first_keys = f"it begins with {', '.join(list(state)[:SHOWN_KEYS])}" if state else "it holds no tensor"
        expected = "expected encoder.0.weight, decoder.22.weight"
        raise UserError(f"{origin} is no model of this family: {first_keys}; {expected}.")
    if variant is None and stated.get("width") not in (None, width):
        raise UserError(
            f"{origin} has width {width:g} and is stated to have {stated['width']:g}: the description "
            "(config.json, or the file's metadata) is that of another model; remove it, or pass variant."
        )
    fitting = fitting_variants(state)
    wanted = variant or stated.get("variant")
    if wanted is not None:
        spec = get_spec(wanted, width=width)
        if wanted not in fitting:
            likely = f"it looks like {' or '.join(fitting)}" if fitting else "it fits no variant"
            said = "was asked for" if variant else "is stated for it"
            raise UserError(f"{origin} is not a {wanted} model, which {said}; {likely}. {_difference(state, spec)}")
        return spec
    if not fitting:
        shapes = {(key, value.shape) for key, value in state.items()}
        specs = [get_spec(name, width=width) for name in VARIANTS]
        closest = max(specs, key=lambda spec: len(shapes & _expected_shapes(spec).items()))
        raise UserError(f"{origin} fits no variant; the closest is {closest.name}. {_difference(state, closest)}")
    taken = presumed if presumed in fitting else fitting[0]
    if len(fitting) > 1:
        _object_by_name(origin, taken, fitting)
        if taken != presumed:
            text = f"{origin.name} could be {', '.join(fitting)}: they share one network and nothing states which; "
            text += f"taking {taken}. Say which with variant= (in a command: --variant)."
            warnings.warn(text, stacklevel=3)
    return get_spec(taken, width=width)


def fitting_variants(state: Mapping[str, Tensor]) -> list[str]:
    """The variants whose keys and shapes these are, in the order of the table."""
    width = _width_of(state)
    if width is None:
        return []
    shapes = {key: value.shape for key, value in state.items()}
    specs = [get_spec(name, width=width) for name in VARIANTS]
    # To build a network takes time: only those with these channels at both ends are built.
    ends = shapes["encoder.0.weight"][1], shapes.get("encoder.17.bias")
    likely = [spec for spec in specs if (spec.image_channels, (spec.latent_channels,)) == ends]
    return [spec.name for spec in likely if shapes == _expected_shapes(spec)]


def variants_in_name(file: Path) -> list[str]:
    """The variants that a file's name speaks of: ``my-taew2.1.pth`` of taew2_1, not of taew2_2."""
    left, found = file.name.lower(), []
    for name in sorted(VARIANTS, key=len, reverse=True):  # taehv is not to be found inside taehv1_5
        # A separator may be another one or left out, and a number must end: taehv10 is not taehv1 and a zero.
        left, count = re.subn(name.replace("_", "[._-]?") + r"(?!\d)", " ", left)
        found += [name] if count else []
    return found


def _object_by_name(origin: Path, taken: str, fitting: list[str]) -> None:
    named = variants_in_name(origin)
    if named and taken not in named:
        likely = next((name for name in named if name in fitting), "NAME")
        raise UserError(
            f"{origin} could be {', '.join(fitting)}: they share one network and nothing in the file states which. "
            f"It would be taken for {taken}, but its name speaks of {' and '.join(named)}; say which it is with "
            f"--variant {likely} (in Python: variant={likely!r})."
        )


def _width_of(state: Mapping[str, Tensor]) -> float | None:
    first = state.get("encoder.0.weight")
    if first is None or first.ndim != 4 or "decoder.22.weight" not in state:
        return None
    width = first.shape[0] / 64
    return width if width % WIDTH_STEP == 0 and width > 0 else None


def _expected_shapes(spec: VariantSpec) -> Mapping[str, torch.Size]:
    return _network_shapes(replace(spec, name="taehv", teacher="", frame_rule="causal"))


@cache
def _network_shapes(spec: VariantSpec) -> Mapping[str, torch.Size]:
    """Keys and shapes of a network; ``spec`` has no more than what decides them, so that twins share a result."""
    with torch.device("meta"):
        parts = {"encoder": build_encoder(spec), "decoder": build_decoder(spec)}
    states = {name: part.state_dict() for name, part in parts.items()}
    return {f"{name}.{key}": value.shape for name, state in states.items() for key, value in state.items()}


def _difference(state: Mapping[str, Tensor], spec: VariantSpec) -> str:
    """The first few keys in which a state dict differs from a variant."""
    found = shape_differences(state, _expected_shapes(spec))
    more = f" and {len(found) - SHOWN_KEYS} more" if len(found) > SHOWN_KEYS else ""
    return f"Against {spec.name}: {'; '.join(found[:SHOWN_KEYS])}{more}."


def shape_differences(state: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """What a strict load would complain about: keys that are missing, keys too many, other shapes."""
    missing = [f"{key} is missing" for key in expected if key not in state]
    unknown = [f"{key} is not known" for key in state if key not in expected]
    other = [
        f"{key} is {list(state[key].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in state and tuple(state[key].shape) != tuple(shape)
    ]
    return missing + unknown + other
