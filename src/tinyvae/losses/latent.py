"""How far the student's latents are from the teacher's.

This is the encoder loss: with it the student encodes into the space that the diffusion model knows. Its counterpart,
the decoder loss, is `reconstruction_loss` on the decoding of the *teacher's* latents.
"""

from __future__ import annotations

from torch import Tensor

from tinyvae.losses.reconstruction import LossKind, mean_distance


def latent_loss(student_NTCHW: Tensor, teacher_NTCHW: Tensor, kind: LossKind = "mse") -> Tensor:
    """Distance of student latents from teacher latents, both in diffusion space; a scalar in fp32.

    The teacher's latents are a target: no gradient flows into them.
    """
    return mean_distance(student_NTCHW, teacher_NTCHW.detach(), kind)
