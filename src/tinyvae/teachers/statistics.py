"""The latent statistics of each variant's teacher, as numbers.

A VAE's own latents z become *diffusion space*, which tinyvae's networks work in, by
``(z - mean) * factor / std``, channel by channel. A teacher that is at hand says its numbers itself
(`families.latent_space_of`); this table is for the places where only the student is.
"""

from __future__ import annotations

from typing import Any

from tinyvae.errors import UserError
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers.families import FAMILIES, TeacherGeometry, geometry_of
from tinyvae.teachers.latent_space import LatentSpace

WAN_2_1_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN_2_1_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)
WAN_2_2_MEAN = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
    *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
    *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
    *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
WAN_2_2_STD = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
    *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
    *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
    *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)
MINIMAX_H3_MEAN = (
    *(0.85809034, -0.96065915, 1.066164, -0.50903255, -0.2727582, -1.3675414, -0.2553255, -0.26907554),
    *(-0.5376841, -0.04640973, 0.66573703, 0.19690128, -0.5460608, -0.4035342, -0.23683025, 0.25928453),
    *(-0.30133945, 0.21134199, -1.1206849, 0.35819334, -0.042251438, 0.260483, 0.22864093, 0.7056032),
)
MINIMAX_H3_STD = (
    *(1.2223774, 1.2767264, 1.6831775, 1.7549455, 1.5636216, 2.1941435, 0.9653138, 1.0569886),
    *(0.8419489, 0.7729953, 1.8955938, 0.94684184, 0.79968095, 0.449889, 0.71974, 0.6936293),
    *(2.961095, 2.76942, 3.0496185, 2.1088054, 3.2762263, 3.1627357, 2.2816813, 2.6127844),
)


_HUNYUAN_1_5 = LatentSpace.scaled(32, 1.03682)
_WAN_2_2 = LatentSpace(mean=WAN_2_2_MEAN, std=WAN_2_2_STD, factor=1.0)

KNOWN_STATISTICS: dict[str, LatentSpace] = {
    "taehv": LatentSpace.scaled(16, 0.476986),
    "taehv1_5": _HUNYUAN_1_5,
    "taehv1_5_super": _HUNYUAN_1_5,
    "taecvx": LatentSpace.scaled(16, 0.7),  # CogVideoX-5B and 1.5; the 2B model has 1.15258426
    "taew2_1": LatentSpace(mean=WAN_2_1_MEAN, std=WAN_2_1_STD, factor=1.0),
    "taew2_2": _WAN_2_2,
    "taew2_2_super": _WAN_2_2,
    "taeh3": LatentSpace(mean=MINIMAX_H3_MEAN, std=MINIMAX_H3_STD, factor=1.0),
}
"""Not here: LTX, whose statistics are among the VAE's weights, and Open-Sora 1.3, for which diffusers has no VAE."""


def chosen_statistics(
    spec: VariantSpec, mean: list[float] | None, std: list[float] | None, factor: float | None
) -> LatentSpace:
    """The statistics that were given, and the teacher's for the rest; identity where the table does not know it."""
    known = KNOWN_STATISTICS.get(spec.name) or LatentSpace.scaled(spec.latent_channels)
    chosen = LatentSpace(
        mean=known.mean if mean is None else tuple(mean),
        std=known.std if std is None else tuple(std),
        factor=known.factor if factor is None else factor,
    )
    if wrong := chosen.mistake(spec.latent_channels):
        raise UserError(f"{spec.name} was given {wrong}; take the numbers of its teacher.")
    return chosen


def statistics_of_vae(vae: Any, spec: VariantSpec) -> dict[str, Any]:
    """The constructor's options that a diffusers VAE states, in its config or (LTX) among its weights."""
    config, family = vae.config, FAMILIES.get(type(vae).__name__)
    if family is not None and spec.name not in family.variants:
        raise UserError(
            f"the teacher is a {family.class_name}, which has another latent space than {spec.teacher}, which "
            f"{spec.name} is for; take one of {', '.join(family.variants)}."
        )
    geometry = family.geometry(config) if family is not None else stated_geometry(vae)
    if geometry != geometry_of(spec):
        raise UserError(
            f"the teacher is a {type(vae).__name__} with {geometry}, and {spec.name} has {geometry_of(spec)}; "
            f"take the variant for {spec.teacher}."
        )
    options: dict[str, Any] = {"invert_scale_latents": bool(config.get("invert_scale_latents", False))}
    buffers = dict(vae.named_buffers(recurse=False))  # LTX keeps its statistics there
    for name in ("latents_mean", "latents_std"):
        values = buffers[name].float().tolist() if name in buffers else config.get(name)
        # A VAE with a factor alone has mean 0 and deviation 1, whatever our table says.
        options[name] = list(values) if values is not None else [float(name == "latents_std")] * spec.latent_channels
    options["scaling_factor"] = float(config.get("scaling_factor") or 1.0)
    return options


def stated_geometry(vae: Any) -> TeacherGeometry:
    """The numbers of a VAE that is of no family of teachers, such as Qwen-Image's or one of ours."""
    if not hasattr(vae, "temperal_downsample"):
        what = f"the teacher is a {type(vae).__name__}, which does not say how many frames it packs into a latent"
        raise UserError(f"{what}; pass the VAE of a video pipeline.")
    return TeacherGeometry(
        latent_channels=vae.config.get("latent_channels") or vae.config.get("z_dim"),
        time_factor=2 ** sum(vae.temperal_downsample),
        space_factor=vae.spatial_compression_ratio,
    )


def pixel_normalization(spec: VariantSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, deviation) by which frames in [0, 1] become what the teacher's pipelines use: [-1, 1], except H3's."""
    for family in FAMILIES.values():
        if spec.name in family.variants:
            return family.pixel_mean, family.pixel_std
    return (0.5,) * 3, (0.5,) * 3
