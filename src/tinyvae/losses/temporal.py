"""Whether the video moves as it should: the difference of frame differences.

A still error costs nothing here, flicker costs much; reconstruction alone weighs both alike.
"""

from __future__ import annotations

from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.losses.reconstruction import LossKind, mean_distance
from tinyvae.models.variants import VariantSpec


def temporal_loss(decoded_NTCHW: Tensor, target_NTCHW: Tensor, kind: LossKind = "mse") -> Tensor:
    """Distance of ``decoded[t+1] - decoded[t]`` from ``target[t+1] - target[t]``; a scalar in fp32.

    Needs two frames or more: `check_temporal_frames` says so at start-up.
    """
    decoded, target = decoded_NTCHW.float(), target_NTCHW.float()
    assert decoded.shape[1] >= 2, f"one decoded frame has no difference in time: {tuple(decoded.shape)}"
    return mean_distance(decoded[:, 1:] - decoded[:, :-1], target[:, 1:] - target[:, :-1], kind)


def check_temporal_frames(spec: VariantSpec, n_frames: int) -> None:
    """Refuse a temporal loss on clips of which only one frame is decoded."""
    if spec.aligned_frames(n_frames) < 2:
        raise UserError(
            f"temporal_loss_weight needs at least 2 decoded frames, but {spec.name} decodes "
            f"{spec.aligned_frames(n_frames)} of n_frames={n_frames}; use longer clips or a weight of 0."
        )
