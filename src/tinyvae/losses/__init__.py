"""The losses of training: each a function or object of its own, each in fp32, each with its own weight in the config.

`reconstruction_loss` also serves as the decoder loss (on decoded *teacher* latents); `latent_loss` is the encoder
loss; `perceptual_loss` needs `LPIPS`; `Seraena` makes the targets of `seraena_loss`; `SeraenaStart` says when.
"""

from tinyvae.losses.distances import (
    LOSS_KINDS,
    LossKind,
    check_loss_kind,
    check_temporal_frames,
    latent_loss,
    reconstruction_loss,
    temporal_loss,
)
from tinyvae.losses.lpips_weights import find_lpips_weights
from tinyvae.losses.perceptual import LPIPS, perceptual_loss
from tinyvae.losses.seraena import Seraena, SeraenaResult, saved_ranks_for, seraena_loss
from tinyvae.losses.seraena.discriminator import SeraenaDiscriminator
from tinyvae.losses.seraena.start import SeraenaStart

__all__ = [
    "LOSS_KINDS",
    "LPIPS",
    "LossKind",
    "Seraena",
    "SeraenaDiscriminator",
    "SeraenaResult",
    "SeraenaStart",
    "check_loss_kind",
    "check_temporal_frames",
    "find_lpips_weights",
    "latent_loss",
    "perceptual_loss",
    "reconstruction_loss",
    "saved_ranks_for",
    "seraena_loss",
    "temporal_loss",
]
