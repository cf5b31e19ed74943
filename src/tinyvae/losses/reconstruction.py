"""How far the decoded frames are from the frames they should be.

The loss is computed in fp32 whatever the networks run in: a bf16 mean over a clip would keep three digits.
Nothing is clamped: outside [0, 1] a clamp has no gradient and the pixel would never come back.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from tinyvae.errors import UserError, nearest_name

LossKind = Literal["mse", "l1", "charbonnier"]
LOSS_KINDS: tuple[str, ...] = get_args(LossKind)

CHARBONNIER_WIDTH = 1e-3
"""Below this difference (of a [0, 1] pixel) the Charbonnier loss is quadratic, above it linear."""


def check_loss_kind(kind: str) -> None:
    """Refuse a loss kind that does not exist, naming the nearest."""
    if kind not in LOSS_KINDS:
        raise UserError(f"there is no loss {kind!r}.{nearest_name(kind, LOSS_KINDS)} Use {', '.join(LOSS_KINDS)}.")


def mean_distance(a: Tensor, b: Tensor, kind: LossKind) -> Tensor:
    """Mean over all elements of the distance between two tensors of one shape; a scalar in fp32."""
    assert a.shape == b.shape, f"two different shapes: {tuple(a.shape)} and {tuple(b.shape)}"
    difference = a.float() - b.float()
    if kind == "l1":
        return difference.abs().mean()
    squared = difference * difference
    if kind == "charbonnier":
        # Minus the width: a perfect reconstruction costs exactly 0, and the gradient is the same.
        return ((squared + CHARBONNIER_WIDTH**2).sqrt() - CHARBONNIER_WIDTH).mean()
    assert kind == "mse", kind
    return squared.mean()


def reconstruction_loss(decoded_NTCHW: Tensor, target_NTCHW: Tensor, kind: LossKind = "mse") -> Tensor:
    """Distance of decoded frames (not clamped) from their targets in [0, 1]; a scalar in fp32.

    ``target_NTCHW`` comes from `VideoCodec.target`: decoded frame j is input frame j. The same function serves the
    student's own round trip and the decoding of a teacher's latents.
    """
    return mean_distance(decoded_NTCHW, target_NTCHW, kind)
