"""Find a teacher in a folder or on the hub, check it against the student, and load it through diffusers.

diffusers is imported only here and only when a teacher is asked for (``pip install 'tinyvae[teachers]'``).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinyvae.errors import MissingFileError, UserError, nearest_name, require_package
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers.families import (
    FAMILIES,
    TEACHER_KINDS,
    TeacherFamily,
    TeacherGeometry,
    geometry_of,
    latent_space_of,
)
from tinyvae.teachers.teacher import ReferenceVAE

CONFIG_NAME = "config.json"
WEIGHTS_PATTERN = "diffusion_pytorch_model*"
HUB_TIMEOUT_S = 10
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class FoundTeacher:
    """A teacher's config, read but not loaded. ``place`` and ``subfolder`` are what diffusers loads it by."""

    place: str
    subfolder: str | None
    family: TeacherFamily
    config: dict[str, Any]
    geometry: TeacherGeometry


def check_teacher(path: str | Path, kind: str | None, spec: VariantSpec, *, seen_from: Path | None = None) -> None:
    """Refuse, before any weight is read, a teacher that is missing, unknown, or not the student's.

    ``seen_from``: where a folder of that name was looked for, to say so; None: the shell's folder.
    """
    found = find_teacher(path, kind, seen_from=seen_from)
    if spec.name in found.family.variant_candidates(found.geometry):
        latent_space_of(found.config, found.geometry.latent_channels)
        return
    fitting = found.family.variant_candidates(found.geometry)
    advice = f"use variant {' or '.join(fitting)}" if fitting else "no variant fits this teacher"
    why = (
        f"has {found.geometry}, the variant {geometry_of(spec)}"
        if found.geometry != geometry_of(spec)
        else f"has another latent space than {spec.teacher}, which {spec.name} is for"
    )
    raise UserError(f"the teacher {path} ({found.family.class_name}) does not suit {spec.name}: it {why}; {advice}.")


def load_teacher(
    kind: str | None,
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    sample: bool = False,
    seed: int = 0,
    spec: VariantSpec | None = None,
) -> ReferenceVAE:
    """The frozen teacher of a local folder (a VAE's or a whole pipeline's) or of a hub name.

    ``kind`` None takes what config.json says. With ``spec`` the teacher is checked against that student now, and its
    latents at every call. ``sample`` draws from the latent distribution, with ``seed``, instead of its mode.
    """
    if spec is not None:
        check_teacher(path, kind, spec)
    found = find_teacher(path, kind)
    vae_class = _vae_class(found.family.class_name)
    options = {} if found.subfolder is None else {"subfolder": found.subfolder}
    try:
        vae = vae_class.from_pretrained(found.place, torch_dtype=dtype, **options)
    except (OSError, RuntimeError, ValueError) as failure:
        # diffusers words a missing, truncated or mismatched weights file as one of these.
        raise UserError(
            f"the teacher {path} cannot be loaded: {_first_line(failure)} (download its weights again)."
        ) from failure
    statistics = {name: value.float().tolist() for name, value in vae.named_buffers() if name.startswith("latents_")}
    space = latent_space_of(
        found.config,
        found.geometry.latent_channels,
        mean=statistics.get("latents_mean"),
        std=statistics.get("latents_std"),
    )
    return ReferenceVAE(
        vae.to(device),
        family=found.family,
        geometry=found.geometry,
        latent_space=space,
        spec=spec,
        sample=sample,
        seed=seed,
    )


def find_teacher(path: str | Path, kind: str | None, *, seen_from: Path | None = None) -> FoundTeacher:
    """Read a teacher's config.json (from the hub: that one small file) and tell its family."""
    if kind is not None and kind not in TEACHER_KINDS:
        raise UserError(
            f"there is no teacher kind {kind!r}.{nearest_name(kind, TEACHER_KINDS)} Use {', '.join(TEACHER_KINDS)}."
        )
    if Path(path).exists():
        place, subfolder, config = _local_config(Path(path))
    else:
        place, subfolder, config = _hub_config(str(path), seen_from or Path.cwd())
    class_name = config.get("_class_name") or _class_of_kind(kind, path)
    if class_name not in FAMILIES:
        raise UserError(f"the teacher {path} is a {class_name}; tinyvae learns from {', '.join(sorted(FAMILIES))}.")
    family = FAMILIES[class_name]
    if kind is not None and family.kind != kind:
        raise UserError(f"the teacher {path} is a {class_name}, which is of kind {family.kind}, not {kind}.")
    vae_class = _vae_class(class_name)
    whole = _defaults_of(vae_class) | config
    return FoundTeacher(place=place, subfolder=subfolder, family=family, config=whole, geometry=family.geometry(whole))


def _local_config(path: Path) -> tuple[str, str | None, dict[str, Any]]:
    if path.is_file():
        raise UserError(
            f"the teacher {path} is a file; name its folder in diffusers' format ({CONFIG_NAME} + weights)."
        )
    # A pipeline's folder keeps its VAE in vae/.
    folder = path / "vae" if (path / "vae" / CONFIG_NAME).is_file() else path
    config_path = folder / CONFIG_NAME
    if not config_path.is_file():
        raise MissingFileError(
            f"the teacher {path} has no {CONFIG_NAME}, nor has its vae folder; name a diffusers VAE."
        )
    try:
        config = json.loads(config_path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as broken:
        raise UserError(f"the teacher's {config_path} is no JSON ({broken}); download it again.") from None
    if not isinstance(config, dict):
        raise UserError(f"the teacher's {config_path} holds no table of settings; download it again.")
    weights = [file for file in folder.glob(WEIGHTS_PATTERN) if file.suffix in (".safetensors", ".bin")]
    if not weights:
        raise MissingFileError(f"the teacher {folder} has no weights ({WEIGHTS_PATTERN}.safetensors); download them.")
    for file in weights:
        _check_whole(file)
    return str(folder), None, config


def _check_whole(file: Path) -> None:
    """Refuse a weights file that was cut off on its way here; of a .safetensors file the header tells."""
    if file.suffix != ".safetensors":
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as broken:
        raise UserError(
            f"the teacher's {file} is not a whole file ({_first_line(broken)}); download it again."
        ) from None


def _hub_config(name: str, seen_from: Path) -> tuple[str, str | None, dict[str, Any]]:
    if not HUB_NAME.fullmatch(name):
        raise MissingFileError(f"there is no teacher folder {name} (seen from {seen_from}); check the path.")
    hub = require_package("huggingface_hub", extra="teachers", needed_for="a teacher from the hub")
    # Pipelines are what people publish, so vae/ comes first.
    subfolders = {"vae": f"vae/{CONFIG_NAME}", None: CONFIG_NAME}
    for subfolder, file in subfolders.items():
        cached = hub.try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return name, subfolder, json.loads(Path(cached).read_text())
    missing = f"there is no teacher folder {name} (seen from {seen_from}), and the hub gives nothing of that name"
    try:
        # One short question first: the hub's own download would try for a minute where there is no network.
        published = {item.rfilename for item in hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S).siblings or ()}
        for subfolder, file in subfolders.items():
            if file in published:
                return name, subfolder, json.loads(Path(hub.hf_hub_download(name, file)).read_text())
    except _network_failures() as failure:
        remedy = "name its folder, or download it first where there is a network"
        raise MissingFileError(f"{missing} ({_first_line(failure)}); {remedy}.") from None
    raise MissingFileError(f"{missing} with a VAE's {CONFIG_NAME} in it.")


def _network_failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when it refuses or cannot be reached: OSError, or its HTTP client's own errors."""
    clients = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name) is not None]
    return (OSError, ValueError, *(importlib.import_module(name).HTTPError for name in clients))


def _class_of_kind(kind: str | None, path: str | Path) -> str:
    classes = [family.class_name for family in FAMILIES.values() if family.kind == kind]
    if len(classes) != 1:
        raise UserError(
            f"the teacher's {CONFIG_NAME} in {path} does not say its _class_name; add it, one of {', '.join(FAMILIES)}."
        )
    return classes[0]


def _vae_class(class_name: str) -> Any:
    diffusers = require_package("diffusers", extra="teachers", needed_for="a teacher")
    vae_class = getattr(diffusers, class_name, None)
    if vae_class is None:
        raise UserError(f"diffusers {diffusers.__version__} has no {class_name}; upgrade it: pip install -U diffusers")
    return vae_class


def _defaults_of(vae_class: Any) -> dict[str, Any]:
    """What diffusers assumes where a config.json is silent."""
    parameters = inspect.signature(vae_class.__init__).parameters.values()
    return {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}


def _first_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else type(failure).__name__
