"""One real training step before the run: how much memory it takes, and how long.

On a GPU the step is taken at full size. On a CPU it is taken with one small clip and scaled by the number of pixels;
activations are counted as autograd keeps them, which does not depend on the allocator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor

from tinyvae.config import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.guards import is_out_of_memory

SMALL_SIDE = 64
COUNTED_STEPS = 2  # the first one warms up


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """fp32 bytes of the student's weights, and of Seraena's discriminator (0 without one)."""

    weights: int
    discriminator: int


@dataclass(frozen=True, kw_only=True)
class TrialStep:
    """``seconds``: one optimiser step on one device. ``fault``: why there are no numbers; empty where there are."""

    memory_bytes: int = 0
    available_bytes: int = 0
    seconds: float = 0.0
    measured_at: str
    fault: str = ""


def state_bytes(config: TrainConfig) -> StateBytes:
    """From the shapes alone: nothing is allocated."""
    from tinyvae.losses.seraena_discriminator import SeraenaDiscriminator
    from tinyvae.models.taehv import TAEHV

    with torch.device("meta"):
        weights = sum(p.numel() for p in TAEHV(config.variant, width=config.model_width).parameters())
        discriminator = 0
        if config.use_seraena:
            network = SeraenaDiscriminator(3 * config.n_seraena_frames, config.spec.latent_channels)
            discriminator = sum(p.numel() for p in network.parameters())
    return StateBytes(weights=4 * weights, discriminator=4 * discriminator)


def try_step(config: TrainConfig) -> TrialStep:
    """Take a step as the configuration says, on this machine's first device."""
    if torch.cuda.is_available():
        return _full_size_step(config)
    return _scaled_step(config)


def _full_size_step(config: TrainConfig) -> TrialStep:
    at = f"measured, {config.train_batch_size} clips of {config.n_frames} frames of {config.height}x{config.width}"
    device = torch.device("cuda", 0)
    free, total = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        seconds, _ = _take_steps(config, device)
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        advice = "out of memory: use --gradient_checkpointing true, a smaller --train_batch_size, or smaller clips"
        return TrialStep(measured_at=at, fault=advice)
    except UserError as mistake:
        return TrialStep(measured_at=at, fault=str(mistake))
    finally:
        torch.cuda.empty_cache()
    used = torch.cuda.max_memory_reserved(device) + (total - free)
    accumulated = seconds * config.gradient_accumulation_steps
    return TrialStep(memory_bytes=used, available_bytes=total, seconds=accumulated, measured_at=at)


def _scaled_step(config: TrainConfig) -> TrialStep:
    """A step with one small clip and no teacher (its pass on a CPU would take minutes), scaled to the real size."""
    factor = config.spec.space_factor
    side = max(SMALL_SIDE // factor, 2) * factor
    small = replace(
        config,
        height=min(config.height, side),
        width=min(config.width, side),
        train_batch_size=1,
        use_ref_vae=False,
        encoder_loss_weight=0.0,
        decoder_loss_weight=0.0,
        compile_model=False,
    )
    at = f"1 clip of {small.n_frames} frames of {small.height}x{small.width} on the CPU, scaled by pixels"
    if config.use_ref_vae:
        at += ", without the teacher"
    try:
        seconds, activations = _take_steps(small, torch.device("cpu"))
    except UserError as mistake:
        return TrialStep(measured_at=at, fault=str(mistake))
    scale = config.train_batch_size * config.height * config.width / (small.height * small.width)
    state = state_bytes(config)
    # weights, gradients, two moments, the average; Seraena has no average
    fixed = 5 * state.weights + 4 * state.discriminator
    return TrialStep(
        memory_bytes=int(fixed + activations * scale),
        available_bytes=psutil.virtual_memory().available,
        seconds=seconds * scale * config.gradient_accumulation_steps,
        measured_at=at,
    )


def _take_steps(config: TrainConfig, device: torch.device) -> tuple[float, int]:
    """(seconds of one micro-batch's step, bytes that autograd kept for its backward pass)."""
    from tinyvae.training.engine import Engine
    from tinyvae.training.optimizers import make_optimizers
    from tinyvae.training.start import build_model, build_task

    engine = Engine(config)
    model = build_model(config).to(device)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    task = build_task(config, engine, model)
    frames = torch.rand(config.train_batch_size, config.n_frames, 3, config.height, config.width, device=device)
    kept = _KeptBytes()
    seconds = 0.0
    for number in range(COUNTED_STEPS):
        started = time.perf_counter()
        with engine.autocast(), torch.autograd.graph.saved_tensors_hooks(kept.count, _unchanged):
            losses = task.losses(frames, use_seraena=config.use_seraena)
        engine.backward(losses.total)
        engine.finish_step(max_grad_norm=config.max_grad_norm)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        if number == 0:
            first = kept.total
    return seconds, first


class _KeptBytes:
    """Adds up the storages that autograd keeps, each once."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: set[int] = set()

    def count(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def _unchanged(tensor: Any) -> Any:
    return tensor
