"""A network for pixels in [-1, 1]: its decoder is exact, its encoder too where the frame goes on in black."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.engines.small_models import small
from tinyvae.convert.pixel_range import to_signed_pixels, to_unit_pixels


@torch.no_grad()
def test_pixels_between_minus_one_and_one() -> None:
    model = small("taehv")
    signed = to_signed_pixels(model)
    latents, frames = torch.randn(1, 2, 16, 2, 3), torch.rand(5, 3, 16, 16)
    torch.testing.assert_close(signed.decode(latents), 2 * model.decode(latents) - 1, atol=1e-5, rtol=0)
    ours, theirs = model.encoder[0], signed.encoder[0]
    black = F.pad(2 * frames - 1, (1, 1, 1, 1), value=-1.0)
    made = F.conv2d(black, theirs.weight, theirs.bias)
    torch.testing.assert_close(made, ours(frames), atol=1e-5, rtol=0)


def test_there_and_back() -> None:
    model = small("taehv1_5").double()
    back = to_unit_pixels(to_signed_pixels(model)).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back[key], value, atol=1e-12, rtol=0)
