"""The two spaces of a teacher's latents: the VAE's own, and diffusion space, on which tinyvae trains most students.

A VAE gives a distribution for each clip (mean and spread). A draw from it depends on the seed and on the clip's
position in the run alone. So a run has the same latents whether the teacher runs beside it or its distributions come
from a store, with any batch size and any number of processes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyvae.models.variants import VariantSpec


@dataclass(frozen=True, kw_only=True)
class LatentSpace:
    """Diffusion space is ``(z - mean) * factor / std``; ``mean`` and ``std`` have one value for each channel.

    Example::

        space = LatentSpace.scaled(16, 0.7)
        latents_NTCHW = space.normalize(mean_NTCHW)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    factor: float

    @classmethod
    def scaled(cls, channels: int, factor: float = 1.0) -> LatentSpace:
        """The space of a VAE whose latents become diffusion space by ``factor`` alone."""
        return cls(mean=(0.0,) * channels, std=(1.0,) * channels, factor=factor)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LatentSpace:
        """The space whose fields a JSON file holds, where tuples are lists."""
        return cls(mean=tuple(values["mean"]), std=tuple(values["std"]), factor=values["factor"])

    def mistake(self, channels: int) -> str:
        """What is wrong with these numbers for this many latent channels, in words; empty where nothing is."""
        for name, values in (("latents_mean", self.mean), ("latents_std", self.std)):
            if len(values) != channels:
                return f"{len(values)} {name} for {channels} latent channels"
        if not (self.factor > 0 and all(value > 0 for value in self.std)):
            return f"a scaling_factor ({self.factor}) or one of latents_std that is not above 0"
        return ""

    def of_student(self, spec: VariantSpec) -> LatentSpace:
        """The space in which a student's latents are: this one, or for a student of VAE space none of its scaling."""
        if spec.latent_space == "diffusion":
            return self
        return LatentSpace.scaled(len(self.mean))

    def normalize(self, z_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW of the VAE's own space, any float dtype, to diffusion space, fp32."""
        return (z_NTCHW.float() - _column(self.mean, z_NTCHW.device)) * self.factor / _column(self.std, z_NTCHW.device)

    def denormalize(self, latents_NTCHW: Tensor) -> Tensor:
        """The way back, fp32."""
        device = latents_NTCHW.device
        return latents_NTCHW.float() * _column(self.std, device) / self.factor + _column(self.mean, device)


def draw(mean_NTCHW: Tensor, std_NTCHW: Tensor, *, seed: int, positions: Sequence[int]) -> Tensor:
    """A draw from each clip's distribution, NTCHW fp32; ``positions``: of the clips in the run.

    The random numbers come from the CPU, so they are the same on every device.
    """
    assert len(positions) == len(mean_NTCHW), "one position for each clip"
    noise = torch.stack([_noise(tuple(mean_NTCHW.shape[1:]), seed, position) for position in positions])
    return mean_NTCHW.float() + std_NTCHW.float() * noise.to(mean_NTCHW.device)


def _noise(shape: tuple[int, ...], seed: int, position: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, position)).standard_normal(shape, dtype=np.float32))


def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    kept = _kept_column(values, device)
    # If the first call was a compiler's trace, a tensor without values was kept.
    return kept if type(kept) is Tensor else _make_column(values, device)


def _make_column(values: tuple[float, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a tensor of inference mode would fail in a later step with gradients
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


_kept_column = functools.lru_cache(maxsize=64)(_make_column)  # else every step copies these few numbers to the device
