"""The encoder for the other latent space, exactly.

Diffusion space is what the diffusion model sees; VAE space is what its VAE makes before scaling:
``diffusion = (vae - mean) * factor / std``, channel by channel. The encoder's last convolution is linear, so its rows
and its bias can take over the scaling. The decoder cannot be converted: 3·tanh(x/3) comes before its first convolution.
A decoder for VAE-space latents must be trained with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import LatentSpaceName
from tinyvae.teachers.latent_space import LatentSpace
from tinyvae.teachers.statistics import KNOWN_STATISTICS

LAST_CONV = "encoder.17"


def convert_encoder(model: TAEHV, latent_space: LatentSpaceName, statistics: LatentSpace | None = None) -> TAEHV:
    """A copy of a model for the other latent space, as a start for training: the encoder is exact, the decoder is not.

    ``statistics``: those of the teacher; the default is the table of `tinyvae.teachers.statistics`.

    Example: ``save_model(convert_encoder(load_model("taew2_1.safetensors"), "vae"), "start.safetensors")``.
    """
    spec = model.spec
    converted = TAEHV.of(replace(spec, latent_space=latent_space)).to(model.device, model.dtype)
    state = model.state_dict()
    if spec.latent_space != latent_space:
        if statistics is None and spec.name not in KNOWN_STATISTICS:
            what = f"the latent statistics of {spec.teacher} are among the weights of its VAE"
            raise UserError(f"{what}; pass statistics=LatentSpace(...) (tinyvae.teachers).")
        known = statistics or KNOWN_STATISTICS[spec.name]
        state = (encoder_to_vae_space if latent_space == "vae" else encoder_to_diffusion_space)(state, known)
    converted.load_state_dict(state)
    return converted.train(model.training)


def encoder_to_vae_space(state: Mapping[str, Tensor], statistics: LatentSpace) -> dict[str, Tensor]:
    """A state dict whose encoder makes VAE-space latents, from one whose encoder makes diffusion-space latents.

    Example: ``model.load_state_dict(encoder_to_vae_space(model.state_dict(), statistics))``.
    """
    std, mean = _float64(statistics)
    return _rescale_last_conv(state, std / statistics.factor, mean)


def encoder_to_diffusion_space(state: Mapping[str, Tensor], statistics: LatentSpace) -> dict[str, Tensor]:
    """The other way: from an encoder that makes VAE-space latents."""
    std, mean = _float64(statistics)
    return _rescale_last_conv(state, statistics.factor / std, -mean * statistics.factor / std)


def _float64(statistics: LatentSpace) -> list[Tensor]:
    return [torch.tensor(values, dtype=torch.float64) for values in (statistics.std, statistics.mean)]


def _rescale_last_conv(state: Mapping[str, Tensor], scale: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Latents become ``latents * scale + shift``. Computed in float64, stored in the dtype of the weights."""
    weight, bias = state[f"{LAST_CONV}.weight"], state[f"{LAST_CONV}.bias"]
    assert weight.shape[0] == len(scale), "the statistics are of another number of latent channels"
    scale, shift = scale.to(weight.device), shift.to(weight.device)
    return {
        **state,
        f"{LAST_CONV}.weight": (weight.double() * scale.view(-1, 1, 1, 1)).to(weight.dtype),
        f"{LAST_CONV}.bias": (bias.double() * scale + shift).to(bias.dtype),
    }
