"""Which VAEs can teach, and what each one's numbers mean: those of diffusers, and networks of our own family.

tinyvae trains on *diffusion space*, which is what the diffusion model sees: ``(z - mean) * factor / std``, channel by
channel, for all families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS, VariantSpec
from tinyvae.teachers.latent_space import LatentSpace

TeacherKind = Literal["cogvideox", "wan", "hunyuan", "ltx", "minimax", "taehv"]
TEACHER_KINDS: tuple[str, ...] = get_args(TeacherKind)

Config = Mapping[str, Any]  # a VAE's config.json, with diffusers' defaults where it is silent


@dataclass(frozen=True)
class TeacherGeometry:
    """What one teacher makes of a video: latent channels, input frames per latent, pixels per latent pixel."""

    latent_channels: int
    time_factor: int
    space_factor: int

    def __str__(self) -> str:
        return f"{self.latent_channels} latent channels, {self.time_factor}x in time, {self.space_factor}x in space"


@dataclass(frozen=True)
class TeacherFamily:
    """One VAE class of diffusers.

    ``variants``: the students whose latent space is this family's. A video in [0, 1] enters as
    ``(x - pixel_mean) / pixel_std``. ``one_at_a_time``: diffusers' class fails on a batch of more than one video.
    ``compiles``: torch.compile makes its encoder faster (seen on a GPU). ``in_parts``: diffusers runs a clip latent by
    latent, and `whole_clips` at once. ``sees_all``: it encodes all frames of a clip, as a student does, and not only
    those that come back.
    """

    kind: TeacherKind
    class_name: str
    variants: tuple[str, ...]
    geometry: Callable[[Config], TeacherGeometry] = field(repr=False)
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    pixel_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    one_at_a_time: bool = False
    compiles: bool = False
    in_parts: bool = False
    sees_all: bool = False

    def variant_candidates(self, geometry: TeacherGeometry) -> tuple[str, ...]:
        """The students that fit a teacher of this family with these numbers."""
        return tuple(name for name in self.variants if geometry_of(VARIANTS[name]) == geometry)


def geometry_of(spec: VariantSpec) -> TeacherGeometry:
    """A student's numbers, to compare with a teacher's."""
    return TeacherGeometry(spec.latent_channels, spec.time_factor, spec.space_factor)


def _cogvideox_geometry(config: Config) -> TeacherGeometry:
    space_factor = 2 ** (len(config["block_out_channels"]) - 1)
    return TeacherGeometry(config["latent_channels"], int(config["temporal_compression_ratio"]), space_factor)


def _wan_geometry(config: Config) -> TeacherGeometry:
    # From the network itself: the scale_factor_* entries only steer tiling, and old configs lack them.
    space_factor = 2 ** (len(config["dim_mult"]) - 1) * (config["patch_size"] or 1)
    return TeacherGeometry(config["z_dim"], 2 ** sum(config["temperal_downsample"]), space_factor)


def _hunyuan_geometry(config: Config) -> TeacherGeometry:
    names = ("latent_channels", "temporal_compression_ratio", "spatial_compression_ratio")
    return TeacherGeometry(*(config[name] for name in names))


def _ltx_geometry(config: Config) -> TeacherGeometry:
    # Each block that scales does so by 2, in time, in space or in both, as its own type says.
    pairs = zip(config["downsample_type"], config["spatio_temporal_scaling"], strict=False)
    scaled = [kind for kind, scales in pairs if scales]
    time_factor = config["patch_size_t"] * 2 ** sum(kind != "spatial" for kind in scaled)
    space_factor = config["patch_size"] * 2 ** sum(kind != "temporal" for kind in scaled)
    return TeacherGeometry(config["latent_channels"], time_factor, space_factor)


def _minimax_geometry(config: Config) -> TeacherGeometry:
    factors = (math.prod(config[f"{axis}_downsample_factors"]) for axis in ("temporal", "spatial"))
    return TeacherGeometry(config["latent_channels"], *factors)


_LTX_STUDENTS = ("taeltx_2", "taeltx2_3", "taeltx2_3_wide")
_FAMILIES = (
    TeacherFamily("cogvideox", "AutoencoderKLCogVideoX", ("taecvx",), _cogvideox_geometry, compiles=True),
    TeacherFamily("wan", "AutoencoderKLWan", ("taew2_1", "taew2_2", "taew2_2_super"), _wan_geometry, in_parts=True),
    TeacherFamily("hunyuan", "AutoencoderKLHunyuanVideo", ("taehv",), _hunyuan_geometry),
    TeacherFamily(
        "hunyuan",
        "AutoencoderKLHunyuanVideo15",
        ("taehv1_5", "taehv1_5_super"),
        _hunyuan_geometry,
        one_at_a_time=True,  # its attention mask [N, S, S] does not fit the scores [N, 1, S, S] (diffusers 0.42)
    ),
    TeacherFamily("ltx", "AutoencoderKLLTX2Video", _LTX_STUDENTS, _ltx_geometry),
    # The VAE of LTX-Video 0.9: another latent space in the same shape. No released student is for it, so the students
    # of that shape may learn it.
    TeacherFamily("ltx", "AutoencoderKLLTXVideo", _LTX_STUDENTS, _ltx_geometry),
    TeacherFamily(
        "minimax",
        "AutoencoderKLMiniMaxH3",
        ("taeh3",),
        _minimax_geometry,
        # The one family that does not take [-1, 1] but colors normalized as ImageNet's.
        pixel_mean=(0.485, 0.456, 0.406),
        pixel_std=(0.229, 0.224, 0.225),
    ),
)
FAMILIES: dict[str, TeacherFamily] = {family.class_name: family for family in _FAMILIES}

NETWORK = TeacherFamily(
    "taehv",
    "TAEHV",
    tuple(VARIANTS),
    lambda config: geometry_of(VARIANTS[config["variant"]]),
    pixel_mean=(0.0, 0.0, 0.0),  # frames enter as they are
    pixel_std=(1.0, 1.0, 1.0),
    sees_all=True,
)
"""A network of our own, which teaches a smaller one; no class of diffusers, so not among `FAMILIES`."""


def latent_space_of(config: Config, channels: int) -> LatentSpace:
    """The latent space of a VAE with this config. LTX keeps mean and std among its weights: the caller adds them.

    CogVideoX's ``invert_scale_latents`` is not used: it concerns only the first image of its image-to-video models.
    """
    mean = config.get("latents_mean") or [0.0] * channels
    std = config.get("latents_std") or [1.0] * channels
    try:
        mean, std = (tuple(map(float, values)) for values in (mean, std))
        space = LatentSpace(mean=mean, std=std, factor=float(config.get("scaling_factor") or 1.0))
        wrong = space.mistake(channels)
    except (TypeError, ValueError) as fault:
        wrong = f"latents_mean, latents_std or a scaling_factor that is no number ({fault})"
    if wrong:
        raise UserError(f"the teacher's config.json has {wrong}; take the one that belongs to its weights.")
    return space
