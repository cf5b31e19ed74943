"""What the GPU tests of engines and kernels share: networks, whole runs of a stream, and errors with their floor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinyvae import TAEHV, StreamingDecoder, StreamingEncoder

SHORT = [torch.float16, torch.bfloat16]
FLOOR = {torch.float16: 2e-4, torch.bfloat16: 2e-3, torch.float32: 2e-6}
"""A plain error below this is rounding luck: no engine is held to less."""


def needs_hopper() -> None:
    """Skips the test on cards for which the Hopper kernels are not made."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")


def spread(variant: str, **options: object) -> TAEHV:
    """Weights of which every layer matters to the output."""
    model = TAEHV(variant, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.cuda().eval()


def error(made: Tensor, exact: Tensor) -> float:
    assert made.shape == exact.shape, (made.shape, exact.shape)
    return ((made.double() - exact).norm() / exact.norm()).item()


def by_latents(codec: object, latents: Tensor) -> Tensor:
    stream = StreamingDecoder(codec, num_latents=latents.shape[1])  # type: ignore[arg-type]
    return torch.cat([stream.push(part) for part in latents.split(1, dim=1)], dim=1)


def by_frames(codec: object, frames: Tensor) -> Tensor:
    stream = StreamingEncoder(codec)  # type: ignore[arg-type]
    parts = [stream.push(part) for part in frames.split(3, dim=1)]
    return torch.cat([*parts, stream.flush()], dim=1)
