"""The encoder for the other latent space, exactly.

Diffusion space is what the diffusion model sees; VAE space is what its VAE makes before scaling:
``diffusion = (vae - mean) * factor / std``, channel by channel. The encoder's last convolution is linear, so its rows
and its bias can take over the scaling. The decoder cannot be converted: 3·tanh(x/3) comes before its first convolution.
A decoder for VAE-space latents must be trained with them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import LatentSpaceName
from tinyvae.teachers.latent_space import LatentSpace
from tinyvae.teachers.statistics import KNOWN_STATISTICS


@torch.no_grad()
def convert_encoder(model: TAEHV, latent_space: LatentSpaceName, statistics: LatentSpace | None = None) -> TAEHV:
    """A copy of a model for the other latent space, as a start for training: the encoder is exact, the decoder is not.

    ``statistics``: those of the teacher; the default is the table of `tinyvae.teachers.statistics`.

    Example: ``save_model(convert_encoder(load_model("taew2_1.safetensors"), "vae"), "start.safetensors")``.
    """
    spec = model.spec
    converted = TAEHV.of(replace(spec, latent_space=latent_space)).to(model.device, model.dtype)
    converted.load_state_dict(model.state_dict())
    if spec.latent_space != latent_space:
        if statistics is None and spec.name not in KNOWN_STATISTICS:
            what = f"the latent statistics of {spec.teacher} are among the weights of its VAE"
            raise UserError(f"{what}; pass statistics=LatentSpace(...) (tinyvae.teachers).")
        known = statistics or KNOWN_STATISTICS[spec.name]
        if wrong := known.mistake(spec.latent_channels):
            raise UserError(f"{spec.name} was given {wrong}; take the numbers of its teacher.")
        # Computed in float64, stored in the dtype of the weights.
        mean, std = (torch.tensor(v, dtype=torch.float64, device=model.device) for v in (known.mean, known.std))
        scale, shift = std / known.factor, mean
        if latent_space == "diffusion":
            scale, shift = 1 / scale, -mean / scale
        last = converted.encoder[-1]
        assert isinstance(last, nn.Conv2d) and last.bias is not None
        last.weight.copy_(last.weight.double() * scale.view(-1, 1, 1, 1))
        last.bias.copy_(last.bias.double() * scale + shift)
    return converted.train(model.training)
