"""Small networks for the engines' tests, and how far two results are apart."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tinyvae import TAEHV, VARIANTS

NETWORKS = [*{replace(spec, name="", teacher=""): name for name, spec in reversed(VARIANTS.items())}.values()]
"""The variants, of those that are one network with one frame rule the first alone."""
PREVIEWS = [("taehv", "time"), ("taehv", "space"), ("taehv", "both"), ("taeltx_2", "both"), ("taew2_2_super", "time")]


def small(variant: str, *, width: float = 0.25, **options: object) -> TAEHV:
    """A narrow network with weights of which every layer matters to the output; torch's own initialization fades over
    the depth."""
    model = TAEHV(variant, width=width, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape) * scale)
    return model.eval()


def relative_error(made: Tensor, expected: Tensor) -> float:
    assert made.shape == expected.shape
    return ((made - expected).norm() / expected.norm()).item()
