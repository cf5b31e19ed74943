"""A teacher: a frozen diffusers VAE, found in a folder or on the hub, checked against the student, and loaded."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.errors import MissingFileError, UserError, nearest_name, require_package
from tinyvae.models.hub import hub_failures
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers.families import (
    FAMILIES,
    TEACHER_KINDS,
    TeacherFamily,
    TeacherGeometry,
    geometry_of,
    latent_space_of,
)

CONFIG_NAME = "config.json"
WEIGHTS_PATTERN = "diffusion_pytorch_model*"
HUB_TIMEOUT_S = 10
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

PIXELS_PER_CALL = 6_000_000  # of one pass through the VAE (17 frames of 480x720), to bound its memory


class TeacherError(UserError):
    """A teacher that does not do its work. The run stops: training on made-up latents is worse."""


class Teacher:
    """Frames NTCHW in [0, 1] to latents NTCHW and back; both ends in fp32, without gradients. The latents are in
    diffusion space, or in VAE space for a student (``spec``) of that space.

    It is no module, so it cannot get into an optimizer or a checkpoint.

    Example::

        teacher = load_teacher(None, "owner/model", dtype=torch.bfloat16, device="cuda", spec=get_spec("taecvx"))
        latents_NTCHW = teacher.encode(model.target(frames_NTCHW))
    """

    def __init__(self, vae: Any, found: FoundTeacher, spec: VariantSpec | None, *, sample: bool, seed: int) -> None:
        """``vae``: a diffusers VAE on its device. The other arguments are those of `load_teacher`."""
        family = found.family
        self._vae = vae.eval().requires_grad_(False)
        self._one_at_a_time = family.one_at_a_time
        self._spec = spec
        self._sample = sample
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self.class_name = family.class_name
        self.geometry = found.geometry
        self.device: torch.device = self._vae.device
        self.dtype: torch.dtype = self._vae.dtype
        self.num_parameters = sum(parameter.numel() for parameter in self._vae.parameters())
        held = {name: value.tolist() for name, value in vae.named_buffers() if name.startswith("latents_")}
        mean, std, self._factor = latent_space_of({**found.config, **held}, found.geometry.latent_channels)
        if spec is not None and spec.latent_space == "vae":  # then the student's latents are the VAE's own
            mean, std, self._factor = [0.0] * len(mean), [1.0] * len(std), 1.0
        self._mean, self._std, self._pixel_mean, self._pixel_std = (
            torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1, 1)
            for values in (mean, std, family.pixel_mean, family.pixel_std)
        )

    def begin_step(self, step: int) -> None:
        """The draws of ``sample`` that follow depend on the seed and this number alone: there is no state to save."""
        self._generator.manual_seed((self._seed * 1_000_003 + step) % 2**63)

    @torch.no_grad()
    def encode(self, frames_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW, fp32, of frames NTCHW in [0, 1] on any device: `VideoCodec.target` of the clip.

        Latents of another number or size than the student's, or that are not finite, stop the run.
        """
        num_frames = frames_NTCHW.shape[1]
        if self._spec is not None:
            aligned = self._spec.aligned_frames(num_frames)
            assert aligned == num_frames, f"give the {aligned} frames of VideoCodec.target, not all {num_frames}"
        with torch.autocast(device_type=self.device.type, enabled=False):
            parts = [self._encode_part(part) for part in self._parts(frames_NTCHW, frames_NTCHW[0].numel() // 3)]
        latents = torch.cat(parts).transpose(1, 2)
        self._check_latents(latents, frames_NTCHW)
        return latents

    @torch.no_grad()
    def decode(self, latents_NTCHW: Tensor) -> Tensor:
        """Frames NTCHW in [0, 1], fp32, of latents NTCHW in the same space: the quality a student is measured by."""
        pixels = latents_NTCHW[0, :, 0].numel() * self.geometry.time_factor * self.geometry.space_factor**2
        with torch.autocast(device_type=self.device.type, enabled=False):
            parts = [self._decode_part(part) for part in self._parts(latents_NTCHW, pixels)]
        return torch.cat(parts).transpose(1, 2)

    def _parts(self, videos_NTCHW: Tensor, pixels_each: int) -> tuple[Tensor, ...]:
        return videos_NTCHW.split(1 if self._one_at_a_time else max(1, PIXELS_PER_CALL // pixels_each))

    def _encode_part(self, frames_NTCHW: Tensor) -> Tensor:
        video_NCTHW = frames_NTCHW.to(self.device, torch.float32).transpose(1, 2)
        video_NCTHW = (video_NCTHW - self._pixel_mean) / self._pixel_std
        distribution = self._vae.encode(video_NCTHW.to(self.dtype)).latent_dist
        z = distribution.sample(generator=self._generator) if self._sample else distribution.mode()
        return (z.float() - self._mean) * self._factor / self._std

    def _decode_part(self, latents_NTCHW: Tensor) -> Tensor:
        z_NCTHW = latents_NTCHW.to(self.device, torch.float32).transpose(1, 2)
        z_NCTHW = (z_NCTHW * self._std / self._factor + self._mean).to(self.dtype)
        # LTX decoders that can also denoise need a time: 0 says that the latents are clean.
        times = [z_NCTHW.new_zeros(len(z_NCTHW))] if self._vae.config.get("timestep_conditioning") else []
        video_NCTHW = self._vae.decode(z_NCTHW, *times).sample
        return (video_NCTHW.float() * self._pixel_std + self._pixel_mean).clamp(0, 1)

    def _check_latents(self, latents_NTCHW: Tensor, frames_NTCHW: Tensor) -> None:
        spec, num_frames = self._spec, frames_NTCHW.shape[1]
        if spec is not None:
            height, width = (size // spec.space_factor for size in frames_NTCHW.shape[-2:])
            wanted = (len(frames_NTCHW), spec.latents(num_frames), spec.latent_channels, height, width)
            if tuple(latents_NTCHW.shape) != wanted:
                raise TeacherError(
                    f"the teacher {self.class_name} made latents of shape {tuple(latents_NTCHW.shape)} from "
                    f"{num_frames} frames where {spec.name} makes {wanted}; choose a clip length and size on which "
                    "they agree."
                )
        if not bool(torch.isfinite(latents_NTCHW).all()):
            remedy = "the frames themselves are not finite"
            if bool(torch.isfinite(frames_NTCHW).all()):
                remedy = f"it runs in {str(self.dtype).removeprefix('torch.')}; set ref_vae_dtype to bf16 or fp32"
            raise TeacherError(f"the teacher {self.class_name} made latents that are not finite: {remedy}.")


def load_teacher(
    kind: str | None,
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    sample: bool = False,
    seed: int = 0,
    spec: VariantSpec | None = None,
) -> Teacher:
    """The frozen teacher of a local folder (a VAE's or a whole pipeline's) or of a hub name.

    ``kind`` None: what config.json says. ``spec``: the student that it must fit; its latents are checked at every call.
    ``sample``: draw from the latent distribution instead of taking its mode.
    """
    if spec is not None:
        check_teacher(path, kind, spec)
    found = find_teacher(path, kind)
    options = {} if found.subfolder is None else {"subfolder": found.subfolder}
    try:
        vae = _vae_class(found.family.class_name).from_pretrained(found.place, torch_dtype=dtype, **options)
    except (OSError, RuntimeError, ValueError) as failure:
        # diffusers reports a missing, truncated or mismatched weights file as one of these.
        why = _first_line(failure)
        raise UserError(f"the teacher {path} cannot be loaded: {why} (download its weights again).") from failure
    return Teacher(vae.to(device), found, spec, sample=sample, seed=seed)


def check_teacher(path: str | Path, kind: str | None, spec: VariantSpec, *, seen_from: Path | None = None) -> None:
    """Refuse, before any weight is read, a teacher that is missing, unknown, or not the student's.

    ``seen_from``: the folder that ``path`` is relative to, for the message; None: the shell's folder.
    """
    found = find_teacher(path, kind, seen_from=seen_from)
    fitting = found.family.variant_candidates(found.geometry)
    if spec.name in fitting:
        latent_space_of(found.config, found.geometry.latent_channels)
        return
    advice = f"use variant {' or '.join(fitting)}" if fitting else "no variant fits this teacher"
    why = f"has another latent space than {spec.teacher}, which {spec.name} is for"
    if found.geometry != geometry_of(spec):
        why = f"has {found.geometry}, the variant {geometry_of(spec)}"
    raise UserError(f"the teacher {path} ({found.family.class_name}) does not suit {spec.name}: it {why}; {advice}.")


@dataclass(frozen=True, kw_only=True)
class FoundTeacher:
    """A teacher's config, read but not loaded. ``place`` and ``subfolder`` are what diffusers loads it by."""

    place: str
    subfolder: str | None
    family: TeacherFamily
    config: dict[str, Any]
    geometry: TeacherGeometry


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
    of_kind = [family.class_name for family in FAMILIES.values() if family.kind == kind]
    class_name = config.get("_class_name") or (of_kind[0] if len(of_kind) == 1 else None)
    if class_name is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"the teacher's {CONFIG_NAME} in {path} does not say its _class_name; add it, one of {known}.")
    if class_name not in FAMILIES:
        raise UserError(f"the teacher {path} is a {class_name}; tinyvae learns from {', '.join(sorted(FAMILIES))}.")
    family = FAMILIES[class_name]
    if kind is not None and family.kind != kind:
        raise UserError(f"the teacher {path} is a {class_name}, which is of kind {family.kind}, not {kind}.")
    parameters = inspect.signature(_vae_class(class_name).__init__).parameters.values()
    # What diffusers assumes where a config.json is silent.
    defaults = {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}
    whole = defaults | config
    return FoundTeacher(place=place, subfolder=subfolder, family=family, config=whole, geometry=family.geometry(whole))


def _local_config(path: Path) -> tuple[str, None, dict[str, Any]]:
    if path.is_file():
        raise UserError(
            f"the teacher {path} is a file; name its folder in diffusers' format ({CONFIG_NAME} + weights)."
        )
    # A pipeline's folder keeps its VAE in vae/.
    folder = path / "vae" if (path / "vae" / CONFIG_NAME).is_file() else path
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise MissingFileError(
            f"the teacher {path} has no {CONFIG_NAME}, nor has its vae folder; name a diffusers VAE."
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as broken:
        raise UserError(f"the teacher's {file} is no JSON ({broken}); download it again.") from None
    if not isinstance(config, dict):
        raise UserError(f"the teacher's {file} holds no table of settings; download it again.")
    weights = [file for file in folder.glob(WEIGHTS_PATTERN) if file.suffix in (".safetensors", ".bin")]
    if not weights:
        raise MissingFileError(f"the teacher {folder} has no weights ({WEIGHTS_PATTERN}.safetensors); download them.")
    from safetensors import SafetensorError, safe_open

    for file in weights:
        try:
            if file.suffix == ".safetensors":  # its header tells whether it is whole
                safe_open(file, framework="pt")
        except (SafetensorError, OSError) as broken:
            why = _first_line(broken)
            raise UserError(f"the teacher's {file} is not a whole file ({why}); download it again.") from None
    return str(folder), None, config


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
    failures: tuple[type[Exception], ...] = (ValueError, *hub_failures())
    try:
        # One short question first: the hub's own download would try for a minute where there is no network.
        published = {item.rfilename for item in hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S).siblings or ()}
        for subfolder, file in subfolders.items():
            if file in published:
                return name, subfolder, json.loads(Path(hub.hf_hub_download(name, file)).read_text())
    except failures as failure:
        missing += f" ({_first_line(failure)}); name its folder, or download it first where there is a network."
        raise MissingFileError(missing) from None
    raise MissingFileError(f"{missing} with a VAE's {CONFIG_NAME} in it.")


def _vae_class(class_name: str) -> Any:
    diffusers = require_package("diffusers", extra="teachers", needed_for="a teacher")
    vae_class = getattr(diffusers, class_name, None)
    if vae_class is None:
        raise UserError(f"diffusers {diffusers.__version__} has no {class_name}; upgrade it: pip install -U diffusers")
    return vae_class


def _first_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else type(failure).__name__
