"""A network of the family as a teacher: a trained student that teaches a smaller one, such as its own pruned form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VARIANTS, VariantSpec
from tinyvae.models.weights import (
    FORMATS,
    find_weights,
    fitting_variants,
    read_weights,
    states_network,
    tell_variant,
    variants_in_name,
)
from tinyvae.teachers.families import NETWORK, TeacherFamily


def is_network(path: str | Path) -> bool:
    """Whether a path is a weights file or a model, checkpoint or run folder of ours; what diffusers wrote is not."""
    place = Path(path)
    if place.is_file():
        return place.suffix in FORMATS and not place.stem.startswith("diffusion_pytorch_model")
    try:
        config = json.loads((place / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and states_network(config)


def read_network(path: str | Path, *, presumed: str | None) -> tuple[Path, TeacherFamily, dict[str, Any]]:
    """(weights file, family, facts). Its students are the variants of the same latents. ``presumed``: the variant that
    weights are taken for where they do not state it."""
    file = find_weights(Path(path))
    state, stated = read_weights(file)
    if "encoder.0.weight" not in state:  # such as Wan2.1_VAE.pth, the VAE as its authors publish it
        what = f"the teacher {file} is neither a network of this family nor in diffusers' format"
        raise UserError(f"{what}; name the folder of a VAE that diffusers can load (config.json + weights).")
    named = variants_in_name(file)
    if presumed is not None and not stated.get("variant") and named and presumed not in named:
        raise UserError(
            f"the teacher {file} does not state its variant. It would be taken for that of the student, {presumed}, "
            f"but its name speaks of {' and '.join(named)}; take a teacher for {presumed}, or rename the file."
        )
    spec = tell_variant(state, stated=stated, variant=None, origin=file, presumed=presumed)
    students = tuple(name for name, other in VARIANTS.items() if other.teacher == spec.teacher)
    return file, replace(NETWORK, variants=students), _facts(spec, stated)


def identify_network(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """(weights file, facts), to tell networks apart. Weights that state no variant count as the first that fits."""
    file = find_weights(Path(path))
    state, stated = read_weights(file)
    guessed = None if stated.get("variant") else next(iter(fitting_variants(state)), None)
    return file, _facts(tell_variant(state, stated=stated, variant=guessed, origin=file), stated)


def _facts(spec: VariantSpec, stated: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "_class_name": NETWORK.class_name,
        "variant": spec.name,
        "width": spec.width,
        "latent_space": stated.get("latent_space") or "diffusion",
        "activation": stated.get("activation") or "relu",
    }


class NetworkVAE(nn.Module):
    """A network with the calls of a diffusers VAE, which a `Teacher` makes. Videos are NCTHW in [0, 1]."""

    def __init__(self, network: TAEHV) -> None:
        super().__init__()
        self.network = network
        self.config: dict[str, Any] = {}
        self.device, self.dtype = network.device, network.dtype
        self._fused = network.fused()

    def encode(self, video_NCTHW: Tensor) -> SimpleNamespace:
        z_NCTHW = self._fused.encode_video(video_NCTHW.transpose(1, 2)).transpose(1, 2)
        # A distribution without spread: a network of ours makes one latent of a clip.
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: z_NCTHW, std=torch.zeros_like(z_NCTHW)))

    def decode(self, z_NCTHW: Tensor) -> SimpleNamespace:
        return SimpleNamespace(sample=self._fused.decode_video(z_NCTHW.transpose(1, 2)).transpose(1, 2))
