"""The losses of training: each a function or object of its own, each in fp32, each with its own weight in the config.

`reconstruction_loss` also serves as the decoder loss (on decoded *teacher* latents); `latent_loss` is the encoder
loss; `perceptual_loss` needs `LPIPS`; `Seraena` makes the targets of `seraena_loss`; `SeraenaStart` says when.
"""

from tinyvae.losses.latent import latent_loss
from tinyvae.losses.lpips_weights import find_lpips_weights
from tinyvae.losses.perceptual import LPIPS, perceptual_loss
from tinyvae.losses.reconstruction import LOSS_KINDS, LossKind, check_loss_kind, reconstruction_loss
from tinyvae.losses.seraena import Seraena, SeraenaResult, saved_ranks_for, seraena_loss
from tinyvae.losses.seraena_discriminator import SeraenaDiscriminator
from tinyvae.losses.seraena_start import SeraenaStart
from tinyvae.losses.temporal import check_temporal_frames, temporal_loss

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
