"""A teacher: a frozen VAE of diffusers or network of ours, found, checked against the student, and loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.errors import MissingFileError, UserError, first_line, nearest_name, require_package
from tinyvae.files import check_readable, sha256_of
from tinyvae.models.hub import hub_failures, names_repository
from tinyvae.models.variants import LatentSpaceName, VariantSpec
from tinyvae.models.weights import load_model
from tinyvae.teachers.families import (
    FAMILIES,
    NETWORK,
    TEACHER_KINDS,
    TeacherFamily,
    TeacherGeometry,
    geometry_of,
    latent_space_of,
)
from tinyvae.teachers.network import NetworkVAE, identify_network, is_network, read_network
from tinyvae.teachers.whole_clips import WHOLE_PIXELS, encode_whole, prepare_encoder, takes_whole

log = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
CONFIG_PLACES = (f"vae/{CONFIG_NAME}", CONFIG_NAME)  # of a pipeline, which most people publish, and of a VAE alone
WEIGHTS_NAME = "diffusion_pytorch_model"  # with its ending, or with the number of a part between
HUB_TIMEOUT_S = 10
HASH_DIGITS = 16

PIXELS_PER_CALL = 24_000_000  # of one pass through the VAE (4 clips of 16 frames of 480x720); less if memory runs out


class TeacherError(UserError):
    """A teacher that does not do its work. The run stops: training on made-up latents is worse."""


class Teacher:
    """Frames NTCHW in [0, 1] to latents NTCHW and back; both ends in fp32, without gradients. The latents are in
    diffusion space, or in VAE space for a student (``spec``) of that space.

    It is no module, so it cannot get into an optimizer or a checkpoint.

    Example::

        teacher = load_teacher(None, "owner/model", dtype=torch.bfloat16, device="cuda", spec=get_spec("taecvx"))
        latents_NTCHW = teacher.encode(teacher.clip_of(frames_NTCHW))
    """

    def __init__(self, vae: Any, found: FoundTeacher, spec: VariantSpec | None, *, compiled: bool = False) -> None:
        """``vae``: a diffusers VAE on its device. ``spec``: the student that its latents must fit. ``compiled``:
        compile the encoder, if its family can be compiled."""
        family = found.family
        self._vae = vae.eval().requires_grad_(False)
        if compiled and family.compiles:
            self._vae.encoder.compile(dynamic=False)
        self._encode_whole: Callable[[Any, Tensor], Tensor] | None = None
        if family.in_parts:
            prepare_encoder(self._vae)
            self._encode_whole = torch.compile(encode_whole, dynamic=False) if compiled else encode_whole
        self._pixels_per_call = PIXELS_PER_CALL
        self.found, self.spec = found, spec
        self.class_name = family.class_name
        self.geometry = found.geometry
        self.device: torch.device = self._vae.device
        self.dtype: torch.dtype = self._vae.dtype
        self.num_parameters = sum(parameter.numel() for parameter in self._vae.parameters())
        # One clip at a time on a CPU: nothing is slower, and a clip's latents do not depend on its neighbors.
        self._one_at_a_time = family.one_at_a_time or self.device.type == "cpu"
        held = {name: value.tolist() for name, value in vae.named_buffers() if name.startswith("latents_")}
        self.space = latent_space_of({**found.config, **held}, found.geometry.latent_channels)
        self._student_space = self.space if spec is None else self.space.of_student(spec)
        own: LatentSpaceName = found.config.get("latent_space", "diffusion")  # only a network of ours states it
        self.latent_space: LatentSpaceName = own if spec is None else spec.latent_space
        self._pixel_mean, self._pixel_std = (
            torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1, 1)
            for values in (family.pixel_mean, family.pixel_std)
        )

    def clip_of(self, frames_NTCHW: Tensor) -> Tensor:
        """The frames of a clip that the teacher encodes: those that the student gives back (`VideoCodec.target`). A
        network of ours encodes all of them, as the student does."""
        if self.spec is None or self.found.family.sees_all:
            return frames_NTCHW
        return frames_NTCHW[:, : self.spec.aligned_frames(frames_NTCHW.shape[1])]

    def encode(self, frames_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW, fp32: the means of `distribution`, which says what the frames are. The VAE runs as diffusers
        runs it, because evaluations time this."""
        return self._student_space.normalize(self._distribution(frames_NTCHW, with_std=False, as_diffusers=True)[0])

    def distribution(self, frames_NTCHW: Tensor, *, with_std: bool = False) -> tuple[Tensor, Tensor | None]:
        """(mean, std) NTCHW of each clip's latents in the VAE's own space and dtype; ``with_std`` off: std is None.

        The frames are NTCHW in [0, 1] on any device: `clip_of` the clip. Latents of another number or
        size than the student's, or that are not finite, stop the run.
        """
        return self._distribution(frames_NTCHW, with_std=with_std, as_diffusers=False)

    @torch.no_grad()
    def _distribution(
        self, frames_NTCHW: Tensor, *, with_std: bool, as_diffusers: bool
    ) -> tuple[Tensor, Tensor | None]:
        num_frames, _, height, width = frames_NTCHW.shape[1:]
        assert self.clip_of(frames_NTCHW).shape == frames_NTCHW.shape, f"give clip_of the {num_frames} frames"
        whole = self._encode_whole is not None and not as_diffusers and takes_whole(num_frames, height, width)
        pixels = num_frames * height * width
        with torch.autocast(device_type=self.device.type, enabled=False):
            parts = self._whole_clips(frames_NTCHW, pixels) if whole else None
            parts = parts or self._in_parts(self._encode_part, frames_NTCHW, pixels)
            mean = torch.cat([part.mode() for part in parts]).transpose(1, 2)
            std = torch.cat([part.std for part in parts]).transpose(1, 2) if with_std else None
        for values in (mean, std):
            if values is not None:
                self._check_latents(values, frames_NTCHW)
        return mean, std

    @torch.no_grad()
    def decode(self, latents_NTCHW: Tensor) -> Tensor:
        """Frames NTCHW in [0, 1], fp32, of latents NTCHW in the same space: the quality a student is measured by."""
        pixels = latents_NTCHW[0, :, 0].numel() * self.geometry.time_factor * self.geometry.space_factor**2
        with torch.autocast(device_type=self.device.type, enabled=False):
            return torch.cat(self._in_parts(self._decode_part, latents_NTCHW, pixels)).transpose(1, 2)

    def _whole_clips(self, frames_NTCHW: Tensor, pixels_each: int) -> list[Any] | None:
        """`_encode_whole_part` over the clips; None where memory does not hold one clip, as diffusers' parts may."""
        try:
            return self._in_parts(self._encode_whole_part, frames_NTCHW, pixels_each, most_pixels=WHOLE_PIXELS)
        except torch.OutOfMemoryError:
            self._encode_whole = None
        torch.cuda.empty_cache()
        log.info("the teacher runs each clip in parts from now on: memory ran out")
        return None

    def _in_parts(
        self,
        run: Callable[[Tensor], Any],
        videos_NTCHW: Tensor,
        pixels_each: int,
        *,
        most_pixels: int = PIXELS_PER_CALL,
    ) -> list[Any]:
        """``run`` over as many videos at once as memory holds. Where it runs out, fewer, from then on."""
        while True:
            most = min(most_pixels, self._pixels_per_call)
            size = 1 if self._one_at_a_time else max(1, most // pixels_each)
            try:
                return [run(part) for part in videos_NTCHW.split(size)]
            except torch.OutOfMemoryError:
                if min(size, len(videos_NTCHW)) == 1:
                    raise
            self._pixels_per_call = min(size, len(videos_NTCHW)) * pixels_each // 2
            torch.cuda.empty_cache()
            log.info("the teacher takes fewer clips at once from now on: memory ran out")

    def _encode_part(self, frames_NTCHW: Tensor) -> Any:
        """diffusers' distribution of the latents NCTHW."""
        return self._vae.encode(self._pixels_of(frames_NTCHW)).latent_dist

    def _encode_whole_part(self, frames_NTCHW: Tensor) -> Any:
        """The same, of whole clips at once."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        assert self._encode_whole is not None
        return DiagonalGaussianDistribution(self._encode_whole(self._vae, self._pixels_of(frames_NTCHW)))

    def _pixels_of(self, frames_NTCHW: Tensor) -> Tensor:
        """Frames in [0, 1] as the VAE takes them, NCTHW."""
        video_NCTHW = frames_NTCHW.to(self.device, torch.float32).transpose(1, 2)
        return ((video_NCTHW - self._pixel_mean) / self._pixel_std).to(self.dtype)

    def _decode_part(self, latents_NTCHW: Tensor) -> Tensor:
        z_NTCHW = self._student_space.denormalize(latents_NTCHW.to(self.device))
        z_NCTHW = z_NTCHW.to(self.dtype).transpose(1, 2)
        # LTX decoders that can also denoise need a time: 0 says that the latents are clean.
        times = [z_NCTHW.new_zeros(len(z_NCTHW))] if self._vae.config.get("timestep_conditioning") else []
        video_NCTHW = self._vae.decode(z_NCTHW, *times).sample
        return (video_NCTHW.float() * self._pixel_std + self._pixel_mean).clamp(0, 1)

    def _check_latents(self, latents_NTCHW: Tensor, frames_NTCHW: Tensor) -> None:
        spec, num_frames = self.spec, frames_NTCHW.shape[1]
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
    spec: VariantSpec | None = None,
    compiled: bool = False,
) -> Teacher:
    """The frozen teacher of a local folder (a VAE's or a whole pipeline's), of a hub name, or of weights of ours.

    ``kind`` None: what config.json says. ``spec``: the student that it must fit; its latents are checked at every call.
    ``compiled``: compile its encoder, where that is faster (a GPU).
    """
    found = find_teacher(path, kind) if spec is None else check_teacher(path, kind, spec)
    if found.family.kind == NETWORK.kind:
        network = load_model(found.place, found.config["variant"], device=device, dtype=dtype)
        return Teacher(NetworkVAE(network), found, spec)
    options = {} if found.subfolder is None else {"subfolder": found.subfolder}
    try:
        vae, loaded = _vae_class(found.family.class_name).from_pretrained(
            found.place, torch_dtype=dtype, output_loading_info=True, **options
        )
    except (OSError, RuntimeError, ValueError) as failure:
        # diffusers reports a missing, truncated or mismatched weights file as one of these.
        why = first_line(failure)
        raise UserError(f"the teacher {path} cannot be loaded: {why} (download its weights again).") from failure
    # diffusers only warns of them, and their values are then random or none at all.
    if absent := sorted(dict(vae.named_parameters()).keys() & loaded["missing_keys"]):
        why = f"its weights lack {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else "")
        raise UserError(f"the teacher {path} cannot be loaded: {why}; take weights and config.json of one VAE.")
    return Teacher(vae.to(device), found, spec, compiled=compiled)


def check_teacher(
    path: str | Path, kind: str | None, spec: VariantSpec, *, seen_from: Path | None = None
) -> FoundTeacher:
    """Find a teacher. Refuse, before its weights are loaded, one that is missing, unknown, or not the student's.

    ``seen_from``: the folder that ``path`` is relative to, for the message; None: the shell's folder.
    """
    found = find_teacher(path, kind, seen_from=seen_from, presumed=spec.name)
    fitting = found.family.variant_candidates(found.geometry)
    if found.family.kind == NETWORK.kind and found.config["latent_space"] != spec.latent_space:
        what = f"the teacher {path} makes latents of {found.config['latent_space']} space"
        raise UserError(f"{what}; set latent_space to {found.config['latent_space']}, or name another teacher.")
    if spec.name in fitting:
        latent_space_of(found.config, found.geometry.latent_channels)  # refuses statistics that do not fit
        return found
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


def find_teacher(
    path: str | Path, kind: str | None, *, seen_from: Path | None = None, presumed: str | None = None
) -> FoundTeacher:
    """Read a teacher's config.json (from the hub: that one small file), or weights of ours, and tell its family.

    ``presumed``: the variant of weights that do not state one and fit several.
    """
    if kind is not None and kind not in TEACHER_KINDS:
        raise UserError(
            f"there is no teacher kind {kind!r}.{nearest_name(kind, TEACHER_KINDS)} Use {', '.join(TEACHER_KINDS)}."
        )
    if kind == NETWORK.kind or is_network(path):
        if kind not in (None, NETWORK.kind):
            raise UserError(f"the teacher {path} holds a network of kind {NETWORK.kind}, not {kind}.")
        file, network, facts = read_network(path, presumed=presumed)
        geometry = network.geometry(facts)
        return FoundTeacher(place=str(file), subfolder=None, family=network, config=facts, geometry=geometry)
    if Path(path).exists():
        file = _local_config(Path(path))
        place, subfolder = str(file.parent), None
    else:
        file = _hub_config(str(path), seen_from or Path.cwd())
        place, subfolder = str(path), "vae" if file.parent.name == "vae" else None
    config = _read_config(file)
    of_kind = [family.class_name for family in FAMILIES.values() if family.kind == kind]
    class_name = config.get("_class_name") or (of_kind[0] if len(of_kind) == 1 else None)
    if not isinstance(class_name, str):
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
    try:
        geometry = family.geometry(whole)
    except (TypeError, ValueError, OverflowError) as fault:
        what = f"the teacher's {CONFIG_NAME} in {path} has a value that no {class_name} has ({fault})"
        raise UserError(f"{what}; take the one that belongs to its weights.") from None
    return FoundTeacher(place=place, subfolder=subfolder, family=family, config=whole, geometry=geometry)


def identify_teacher(path: str | Path) -> dict[str, str] | None:
    """What tells a teacher from any other: its class, and hashes of its settings and weights; no weights are loaded.

    None where its files are not on this machine. diffusers is not needed.
    """
    if is_network(path):
        file, settings = identify_network(path)
        class_name, weights = settings["_class_name"], sha256_of(file)
    else:
        folder = _folder_here(path)
        if folder is None:
            return None
        config = _read_config(folder / CONFIG_NAME)
        class_name = str(config.get("_class_name"))
        # diffusers writes its version and the place of a download as keys that begin with _.
        settings = {key: value for key, value in config.items() if not key.startswith("_")}
        weights = _sha256("".join(map(sha256_of, _weight_files(folder))))
    in_order = json.dumps(settings, sort_keys=True)
    return {"class": class_name, "config": _sha256(in_order)[:HASH_DIGITS], "weights": weights[:HASH_DIGITS]}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _folder_here(path: str | Path) -> Path | None:
    """The folder with a teacher's config.json and weights; None where they are not on this machine."""
    config = _own_config(Path(path))
    if config is None and names_repository(str(path)) and importlib.util.find_spec("huggingface_hub"):
        config = _cached_config(importlib.import_module("huggingface_hub"), str(path))
    return config.parent if config is not None and _weight_files(config.parent) else None


def _own_config(folder: Path) -> Path | None:
    """The config.json of the VAE in a folder: a pipeline's keeps its VAE in vae/."""
    try:
        return next((folder / name for name in CONFIG_PLACES if (folder / name).is_file()), None)
    except OSError as refused:  # a folder that may not be entered
        text = f"the teacher {folder} cannot be looked into ({refused.strerror}); check its permissions."
        raise UserError(text) from None


def _cached_config(hub: Any, name: str) -> Path | None:
    """The same of a download from the hub."""
    cached = (hub.try_to_load_from_cache(name, file) for file in CONFIG_PLACES)
    return next((Path(file) for file in cached if isinstance(file, str)), None)


def _weight_files(folder: Path) -> list[Path]:
    """The files that diffusers loads: one, or its parts; safetensors before bin. Not those of other precisions."""
    for suffix in ("safetensors", "bin"):
        for pattern in (f"{WEIGHTS_NAME}.{suffix}", f"{WEIGHTS_NAME}-*-of-*.{suffix}"):
            if files := sorted(folder.glob(pattern)):
                return files
    return []


def _local_config(path: Path) -> Path:
    """The config.json of a teacher's folder, beside whole weights."""
    if path.is_file():
        raise UserError(
            f"the teacher {path} is a file; name its folder in diffusers' format ({CONFIG_NAME} + weights)."
        )
    file = _own_config(path)
    if file is None:
        raise MissingFileError(
            f"the teacher {path} has no {CONFIG_NAME}, nor has its vae folder; name a diffusers VAE."
        )
    weights = _weight_files(file.parent)
    if not weights:
        raise MissingFileError(f"the teacher {file.parent} has no weights ({WEIGHTS_NAME}.safetensors); download them.")
    from safetensors import SafetensorError, safe_open

    for part in weights:
        check_readable(part)
        try:
            if part.suffix == ".safetensors":  # its header tells whether it is whole
                safe_open(part, framework="pt")
        except (SafetensorError, OSError) as broken:
            why = first_line(broken)
            raise UserError(f"the teacher's {part} is not a whole file ({why}); download it again.") from None
    return file


def _read_config(file: Path) -> dict[str, Any]:
    check_readable(file)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as broken:
        raise UserError(f"the teacher's {file} is no JSON ({broken}); download it again.") from None
    if not isinstance(config, dict):
        raise UserError(f"the teacher's {file} holds no table of settings; download it again.")
    return config


def _hub_config(name: str, seen_from: Path) -> Path:
    """The config.json of a teacher on the hub, here or downloaded."""
    if not names_repository(name):
        raise MissingFileError(f"there is no teacher folder {name} (seen from {seen_from}); check the path.")
    hub = require_package("huggingface_hub", extra="teachers", needed_for="a teacher from the hub")
    file = _cached_config(hub, name)
    if file is None:
        missing = f"there is no teacher folder {name} (seen from {seen_from}), and the hub gives nothing of that name"
        failures: tuple[type[Exception], ...] = (ValueError, *hub_failures())
        try:
            file = _downloaded_config(hub, name)
        except failures as failure:
            missing += f" ({first_line(failure)}); name its folder, or download it first where there is a network."
            raise MissingFileError(missing) from None
        if file is None:
            raise MissingFileError(f"{missing} with a VAE's {CONFIG_NAME} in it.")
    return file


def _downloaded_config(hub: Any, name: str) -> Path | None:
    # One short question first: the hub's own download would try for a minute where there is no network.
    published = {item.rfilename for item in hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S).siblings or ()}
    wanted = next((file for file in CONFIG_PLACES if file in published), None)
    return None if wanted is None else Path(hub.hf_hub_download(name, wanted))


def _vae_class(class_name: str) -> Any:
    diffusers = require_package("diffusers", extra="teachers", needed_for="a teacher")
    vae_class = getattr(diffusers, class_name, None)
    if vae_class is None:
        raise UserError(f"diffusers {diffusers.__version__} has no {class_name}; upgrade it: pip install -U diffusers")
    return vae_class
