"""Which diffusers VAEs can teach, and what each one's numbers mean.

Every family below was read from its own diffusers model and pipeline: how it counts latents, what pixel range it
takes, and how its latents become *diffusion space*, which is what the diffusion model sees and what tinyvae trains on.
All of them fit one formula, ``diffusion = (z - mean) * factor / std``, channel by channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS, VariantSpec

TeacherKind = Literal["cogvideox", "wan", "hunyuan", "ltx", "minimax"]
TEACHER_KINDS: tuple[str, ...] = get_args(TeacherKind)

Config = Mapping[str, Any]
"""A VAE's config.json, with diffusers' defaults where it is silent."""


@dataclass(frozen=True, kw_only=True)
class TeacherGeometry:
    """What one teacher makes of a video: latent channels, input frames per latent, pixels per latent pixel."""

    latent_channels: int
    time_factor: int
    space_factor: int

    def __str__(self) -> str:
        return f"{self.latent_channels} latent channels, {self.time_factor}x in time, {self.space_factor}x in space"


@dataclass(frozen=True, kw_only=True)
class TeacherFamily:
    """One VAE class of diffusers.

    ``variants``: the students whose latent space is this family's. A video in [0, 1] enters as
    ``(x - pixel_mean) / pixel_std``. ``one_at_a_time``: diffusers' class fails on a batch of more than one video.
    """

    kind: TeacherKind
    class_name: str
    variants: tuple[str, ...]
    geometry: Callable[[Config], TeacherGeometry] = field(repr=False)
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    pixel_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    one_at_a_time: bool = False

    def variant_candidates(self, geometry: TeacherGeometry) -> tuple[str, ...]:
        """The students that fit a teacher of this family with these numbers."""
        return tuple(name for name in self.variants if geometry_of(VARIANTS[name]) == geometry)


def geometry_of(spec: VariantSpec) -> TeacherGeometry:
    """A student's numbers, to compare with a teacher's."""
    return TeacherGeometry(
        latent_channels=spec.latent_channels, time_factor=spec.time_factor, space_factor=spec.space_factor
    )


def _cogvideox_geometry(config: Config) -> TeacherGeometry:
    return TeacherGeometry(
        latent_channels=config["latent_channels"],
        time_factor=int(config["temporal_compression_ratio"]),
        space_factor=2 ** (len(config["block_out_channels"]) - 1),
    )


def _wan_geometry(config: Config) -> TeacherGeometry:
    # From the network itself: the scale_factor_* entries only steer tiling, and old configs lack them.
    return TeacherGeometry(
        latent_channels=config["z_dim"],
        time_factor=2 ** sum(config["temperal_downsample"]),
        space_factor=2 ** (len(config["dim_mult"]) - 1) * (config["patch_size"] or 1),
    )


def _hunyuan_geometry(config: Config) -> TeacherGeometry:
    return TeacherGeometry(
        latent_channels=config["latent_channels"],
        time_factor=config["temporal_compression_ratio"],
        space_factor=config["spatial_compression_ratio"],
    )


def _ltx_geometry(config: Config) -> TeacherGeometry:
    # Each block that scales does so by 2, in time, in space or in both, as its own type says.
    scaling = config["spatio_temporal_scaling"]
    kinds = config["downsample_type"]
    scaled = [kind for kind, scales in zip(kinds, scaling, strict=False) if scales]
    return TeacherGeometry(
        latent_channels=config["latent_channels"],
        time_factor=config["patch_size_t"] * 2 ** sum(kind != "spatial" for kind in scaled),
        space_factor=config["patch_size"] * 2 ** sum(kind != "temporal" for kind in scaled),
    )


def _minimax_geometry(config: Config) -> TeacherGeometry:
    return TeacherGeometry(
        latent_channels=config["latent_channels"],
        time_factor=math.prod(config["temporal_downsample_factors"]),
        space_factor=math.prod(config["spatial_downsample_factors"]),
    )


FAMILIES: dict[str, TeacherFamily] = {
    family.class_name: family
    for family in (
        TeacherFamily(
            kind="cogvideox",
            class_name="AutoencoderKLCogVideoX",
            variants=("taecvx",),
            geometry=_cogvideox_geometry,
        ),
        TeacherFamily(
            kind="wan",
            class_name="AutoencoderKLWan",
            variants=("taew2_1", "taew2_2", "taew2_2_super"),
            geometry=_wan_geometry,
        ),
        TeacherFamily(
            kind="hunyuan",
            class_name="AutoencoderKLHunyuanVideo",
            variants=("taehv",),
            geometry=_hunyuan_geometry,
        ),
        TeacherFamily(
            kind="hunyuan",
            class_name="AutoencoderKLHunyuanVideo15",
            variants=("taehv1_5", "taehv1_5_super"),
            geometry=_hunyuan_geometry,
            one_at_a_time=True,  # its attention mask [N, S, S] does not fit the scores [N, 1, S, S] (diffusers 0.42)
        ),
        TeacherFamily(
            kind="ltx",
            class_name="AutoencoderKLLTX2Video",
            variants=("taeltx_2", "taeltx2_3"),
            geometry=_ltx_geometry,
        ),
        TeacherFamily(
            # The VAE of LTX-Video 0.9: another latent space in the same shape. No released student is for it, so the
            # students of that shape may learn it.
            kind="ltx",
            class_name="AutoencoderKLLTXVideo",
            variants=("taeltx_2", "taeltx2_3"),
            geometry=_ltx_geometry,
        ),
        TeacherFamily(
            kind="minimax",
            class_name="AutoencoderKLMiniMaxH3",
            variants=("taeh3",),
            geometry=_minimax_geometry,
            # The one family that is not fed [-1, 1] but colours normalised as ImageNet's.
            pixel_mean=(0.485, 0.456, 0.406),
            pixel_std=(0.229, 0.224, 0.225),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """How a VAE's own latents become diffusion space: ``(z - mean) * factor / std``."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float

    def __post_init__(self) -> None:
        if not (self.factor > 0 and all(value > 0 for value in self.std)):
            raise UserError(
                f"the teacher's scaling_factor of {self.factor} or one of its latents_std is not above 0; "
                "take the config.json that belongs to its weights."
            )


def latent_space_of(
    config: Config, channels: int, *, mean: list[float] | None = None, std: list[float] | None = None
) -> LatentSpace:
    """The diffusion space of a VAE; ``mean`` and ``std`` are those that its weights hold (LTX), if they do.

    CogVideoX's ``invert_scale_latents`` is left alone on purpose: it concerns the conditioning image of its
    image-to-video models only; what the diffusion model makes is divided by the factor in every one of its pipelines.
    """
    mean = mean if mean is not None else config.get("latents_mean")
    std = std if std is not None else config.get("latents_std")
    for name, values in (("latents_mean", mean), ("latents_std", std)):
        if values is not None and len(values) != channels:
            raise UserError(
                f"the teacher's config.json has {len(values)} {name} for {channels} latent channels; "
                "take the config.json that belongs to these weights."
            )
    return LatentSpace(
        mean=tuple(mean) if mean is not None else (0.0,) * channels,
        std=tuple(std) if std is not None else (1.0,) * channels,
        factor=float(config.get("scaling_factor") or 1.0),
    )
