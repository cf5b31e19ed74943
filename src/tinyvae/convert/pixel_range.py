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
    changed, first, last = _copy_with_ends(model)
    with torch.no_grad():
        # first(x) with x = (y + 1) / 2, and 2 * last(x) - 1
        _bias(first).add_(first.weight.sum((1, 2, 3)) / 2)
        first.weight.div_(2)
        last.weight.mul_(2)
        _bias(last).mul_(2).sub_(1)
    return changed


def to_unit_pixels(model: TAEHV) -> TAEHV:
    """A copy that takes and gives pixels in [0, 1], of a network for [-1, 1], such as LightX2V's lighttaehy1_5.

    Example: ``to_unit_pixels(load_model(file, latent_space="vae", activation="leaky_relu")).decode_video(latents)``.
    """
    changed, first, last = _copy_with_ends(model)
    with torch.no_grad():
        _bias(first).sub_(first.weight.sum((1, 2, 3)))
        first.weight.mul_(2)
        last.weight.div_(2)
        _bias(last).add_(1).div_(2)
    return changed


def _copy_with_ends(model: TAEHV) -> tuple[TAEHV, nn.Conv2d, nn.Conv2d]:
    changed = copy.deepcopy(model)
    first, last = changed.encoder[0], changed.decoder[-1]
    assert isinstance(first, nn.Conv2d) and isinstance(last, nn.Conv2d)
    return changed, first, last


def _bias(conv: nn.Conv2d) -> torch.Tensor:
    assert conv.bias is not None
    return conv.bias
