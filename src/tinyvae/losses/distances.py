"""How far frames or latents are from what they should be: the reconstruction, encoder, decoder and temporal losses.

All are computed in fp32. Nothing is clamped: outside [0, 1] a clamp has no gradient, and no pixel would come back.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

LossKind = Literal["mse", "l1", "charbonnier"]

CHARBONNIER_WIDTH = 1e-3  # below this difference (of a [0, 1] pixel) the Charbonnier loss is quadratic, above it linear


def reconstruction_loss(made: Tensor, target: Tensor, kind: LossKind = "mse") -> Tensor:
    """Mean over all elements of the distance between two tensors of one shape; a scalar in fp32.

    For frames NTCHW: decoded ones, not clamped, and `VideoCodec.target` of the clip, in [0, 1]. The decoder loss is the
    same distance, of frames decoded from the teacher's latents.
    """
    assert made.shape == target.shape, f"two different shapes: {tuple(made.shape)} and {tuple(target.shape)}"
    difference = made.float() - target.float()
    if kind == "l1":
        return difference.abs().mean()
    squared = difference * difference
    if kind == "charbonnier":
        # Minus the width: a perfect reconstruction costs exactly 0, and the gradient is the same.
        return ((squared + CHARBONNIER_WIDTH**2).sqrt() - CHARBONNIER_WIDTH).mean()
    assert kind == "mse", kind
    return squared.mean()


def latent_loss(student_NTCHW: Tensor, teacher_NTCHW: Tensor) -> Tensor:
    """MSE of student latents from teacher latents (they get no gradient), both in diffusion space; a scalar in fp32."""
    return reconstruction_loss(student_NTCHW, teacher_NTCHW.detach())


def temporal_loss(decoded_NTCHW: Tensor, target_NTCHW: Tensor) -> Tensor:
    """MSE of ``decoded[t+1] - decoded[t]`` from ``target[t+1] - target[t]``, of 2 frames or more; a scalar in fp32."""
    decoded, target = decoded_NTCHW.float(), target_NTCHW.float()
    assert decoded.shape[1] >= 2, f"one decoded frame has no difference in time: {tuple(decoded.shape)}"
    return reconstruction_loss(decoded[:, 1:] - decoded[:, :-1], target[:, 1:] - target[:, :-1])
