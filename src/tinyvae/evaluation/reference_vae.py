"""A reference VAE (a diffusers folder) in the place of a model: what the tiny network stands in for.

It runs a clip as a whole, as diffusers does, so its memory grows with the clip: use ``max_frames``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tinyvae.errors import UserError
from tinyvae.evaluation.round_trip import RoundTrip


def is_reference_vae(path: Path) -> bool:
    """Whether a folder is a diffusers VAE, or a pipeline folder with one in ``vae/``; told by ``_class_name``."""
    for folder in (path, path / "vae"):
        config = folder / "config.json"
        if config.is_file():
            try:
                content = json.loads(config.read_text())
            except json.JSONDecodeError:
                continue
            if isinstance(content, dict) and str(content.get("_class_name", "")).startswith("Autoencoder"):
                return True
    return False


def open_reference_vae(path: Path, *, device: torch.device, dtype: torch.dtype | None, label: str | None) -> RoundTrip:
    raise UserError(f"{path}: reference VAEs cannot be opened yet")
