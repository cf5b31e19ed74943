"""The correction that Seraena asks of a fake: the discriminator's input gradient, brought to a useful size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tinyvae.losses.seraena_discriminator import PATCH_PIXELS, SeraenaDiscriminator

Normalisation = Literal["golden", "size_independent"]
NORMALISATIONS: tuple[str, ...] = get_args(Normalisation)

STD_FLOOR = 1e-5
"""Added to the gradient's deviation before it divides: a discriminator that sees no difference asks for nothing."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """``values_NCHW``: what to add to each fake, detached. The rest are scalars for the log, on the same device."""

    values_NCHW: Tensor
    std: Tensor
    real_score: Tensor
    fake_score: Tensor


def make_correction(
    discriminator: SeraenaDiscriminator,
    real_NCHW: Tensor,
    fake_NCHW: Tensor,
    contexts_NCHW: Tensor,
    normalisation: Normalisation,
) -> Correction:
    """The direction in which each fake's scores come nearer to its real image's; the discriminator in eval mode.

    g = -gradient over the fakes of the sum over samples of mean (D(real) - D(fake))², divided by its own standard
    deviation over the whole batch + 1e-5. In ``golden`` mode that mean is over the score maps and all H/8 · W/8
    patches, as published: g shrinks with the image while the 1e-5 stays, and the correction fades at large sizes.
    ``size_independent`` takes the sum over patches instead, so the same fault gets the same correction at any size.
    """
    assert not discriminator.training, "the correction is made in eval mode"
    with torch.enable_grad():
        fake = fake_NCHW.detach().clone().requires_grad_(True)
        with torch.no_grad():
            real_scores = discriminator(real_NCHW, contexts_NCHW)
        fake_scores = discriminator(fake, contexts_NCHW)
        distance = (real_scores - fake_scores).square().mean(dim=(1, 2, 3)).sum()
        (gradient,) = torch.autograd.grad(distance, fake)
    g = -gradient
    if normalisation == "size_independent":
        height, width = g.shape[-2:]
        g = g * ((height // PATCH_PIXELS) * (width // PATCH_PIXELS))
    values = g / (g.std(correction=0) + STD_FLOOR)
    return Correction(
        values_NCHW=values,
        std=values.std(correction=0),
        real_score=real_scores.mean(),
        fake_score=fake_scores.detach().mean(),
    )
