"""A network for pixels in [-1, 1] instead of [0, 1], and back.

The last convolution of the decoder and the first one of the encoder are linear, so they can take over the change. The
decoder converts exactly. The encoder does so except at the border of the frame: a convolution adds zeros there, which
are black in [0, 1] and gray in [-1, 1].
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tinyvae.models.taehv import TAEHV


def to_signed_pixels(model: TAEHV) -> TAEHV:
    """A copy that takes and gives pixels in [-1, 1]. Its calls still clamp to [0, 1]: it is for writing a file.

    Example: ``save_file(to_signed_pixels(model).state_dict(), "lighttaehy1_5.safetensors")``.
    """
    return _with_pixels(model, scale=2.0, shift=-1.0)


def to_unit_pixels(model: TAEHV) -> TAEHV:
    """A copy that takes and gives pixels in [0, 1], of a network for [-1, 1], such as LightX2V's lighttaehy1_5.

    Example: ``to_unit_pixels(load_model(file, latent_space="vae", activation="leaky_relu")).decode_video(latents)``.
    """
    return _with_pixels(model, scale=0.5, shift=0.5)


def _with_pixels(model: TAEHV, *, scale: float, shift: float) -> TAEHV:
    """A copy for pixels that are ``scale * x + shift`` where the model's are x."""
    changed = copy.deepcopy(model)
    first, last = changed.encoder[0], changed.decoder[-1]
    assert isinstance(first, nn.Conv2d) and first.bias is not None
    assert isinstance(last, nn.Conv2d) and last.bias is not None
    with torch.no_grad():
        first.weight.div_(scale)
        first.bias.sub_(shift * first.weight.sum((1, 2, 3)))
        last.weight.mul_(scale)
        last.bias.mul_(scale).add_(shift)
    return changed
