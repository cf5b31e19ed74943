"""How many operations and bytes a folded network needs at least: the floor under every measured time.

Operations: two per multiply-add of the convolutions. Bytes: every step reads its input once, writes its output once
and reads its weights once; what a memory block does between its three convolutions is counted like that too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tinyvae.models.fold import ConvStep, GrowStep, MemStep, PoolStep, SoftClampStep, Step, SuperMemStep, fold_layers
from tinyvae.models.taehv import TAEHV


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One folded step over one video."""

    name: str
    flops: float
    bytes_moved: float


def count_steps(
    steps: list[Step], *, num_frames: int, height: int, width: int, channels: int, element_size: int
) -> list[StepWork]:
    """Work of each step; ``num_frames`` x ``channels`` x ``height`` x ``width`` is what enters the first one."""
    counted: list[StepWork] = []
    for step in steps:
        before = num_frames * height * width
        weights = 0
        if isinstance(step, SoftClampStep):
            name, macs, values = "soft clamp", 0, 0  # done where the next step reads
        elif isinstance(step, MemStep | SuperMemStep):
            name, macs, values, weights = _block_work(step, before, channels)
        else:
            weights = step.weight.numel()
            outputs = step.weight.shape[0]
            scale = 1
            if isinstance(step, PoolStep):
                name, num_frames, height, width = (
                    "pool, 3x3 stride 2",
                    num_frames // step.stride,
                    height // 2,
                    width // 2,
                )
                macs, made = num_frames * height * width * weights, outputs
            else:
                macs = before * weights
                scale = 4 if isinstance(step, GrowStep) or (isinstance(step, ConvStep) and step.shuffle) else 1
                made = outputs // (step.frames * scale)
                num_frames *= step.frames
                height, width = height * (2 if scale == 4 else 1), width * (2 if scale == 4 else 1)
                name = "upsample, grow, 3x3" if isinstance(step, GrowStep) else f"conv to {outputs}"
            values = before * channels + num_frames * height * width * made
            channels = made
        counted.append(StepWork(name=name, flops=2.0 * macs, bytes_moved=float((values + weights) * element_size)))
    return counted


def _block_work(step: MemStep | SuperMemStep, pixels: int, channels: int) -> tuple[str, int, int, int]:
    """(name, multiply-adds, activations moved, weights) of a memory block."""
    if isinstance(step, MemStep):
        weights = step.first.numel() + step.second.numel() + step.third.numel()
        # three convolutions, each in and out, and the residual
        return f"memory block {channels}", pixels * weights, pixels * channels * 7, weights
    weights = step.depth.numel() + step.past_depth.numel() + step.widen.numel() + step.narrow.numel()
    return f"super memory block {channels}", pixels * weights, pixels * channels * (1 + 2 + 2 + 4 + 4 + 1 + 1), weights


def steps_of(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> list[StepWork]:
    """Per-step work of encoding ``num_frames`` frames of this size, or of decoding what they encode to."""
    spec = model.spec
    with torch.no_grad():
        steps = fold_layers(model.encoder if operation == "encode" else model.decoder)
    size = torch.empty(0, dtype=model.dtype).element_size()
    if operation == "encode":
        patch = spec.patch_size
        return count_steps(
            steps,
            num_frames=spec.latents(num_frames) * spec.time_factor,
            height=height // patch,
            width=width // patch,
            channels=spec.image_channels,
            element_size=size,
        )
    return count_steps(
        steps,
        num_frames=spec.latents(num_frames),
        height=height // spec.space_factor,
        width=width // spec.space_factor,
        channels=spec.latent_channels,
        element_size=size,
    )


def count_work(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> tuple[float, float]:
    """(operations, bytes) of the whole pass."""
    steps = steps_of(model, operation, num_frames, height, width)
    return sum(step.flops for step in steps), sum(step.bytes_moved for step in steps)
