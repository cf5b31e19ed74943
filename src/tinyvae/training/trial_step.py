"""One real training step before the run: how much memory it takes, and how long.

On a GPU the step is taken at full size. On a CPU it is taken with a few small clips and scaled by the number of pixels
(but for the optimiser, whose time is that of the weights); activations are counted as autograd keeps them, which does
not depend on the allocator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.guards import is_out_of_memory

SMALL_SIDE = 64
SMALL_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """fp32 bytes of the student's weights, and of Seraena's discriminator (0 without one)."""

    weights: int
    discriminator: int


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """``micro_batch_s``: forward and backward of one micro-batch. ``optimiser_s``: once per step. ``kept_bytes``: what
    autograd kept of a micro-batch for its backward pass."""

    micro_batch_s: float
    optimiser_s: float
    kept_bytes: int

    def step_s(self, *, micro_batches: int, scale: float = 1.0) -> float:
        """Seconds of an optimiser step whose micro-batches are ``scale`` times as large."""
        return self.micro_batch_s * scale * micro_batches + self.optimiser_s


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
    from tinyvae.losses.seraena.discriminator import SeraenaDiscriminator
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
        cost = _take_steps(config, device)
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
    seconds = cost.step_s(micro_batches=config.gradient_accumulation_steps)
    return TrialStep(memory_bytes=used, available_bytes=total, seconds=seconds, measured_at=at)


def _scaled_step(config: TrainConfig) -> TrialStep:
    """A step with small clips and no teacher (its pass on a CPU would take minutes), scaled to the real size."""
    factor = config.spec.space_factor
    side = max(SMALL_SIDE // factor, 2) * factor
    small = replace(
        config,
        height=min(config.height, side),
        width=min(config.width, side),
        train_batch_size=min(config.train_batch_size, SMALL_BATCH),
        use_ref_vae=False,
        encoder_loss_weight=0.0,
        decoder_loss_weight=0.0,
        compile_model=False,
    )
    pixels, small_pixels = (c.train_batch_size * c.height * c.width for c in (config, small))
    scale = pixels / small_pixels
    clips = "1 clip" if small.train_batch_size == 1 else f"{small.train_batch_size} clips"
    at = f"{clips} of {small.n_frames} frames of {small.height}x{small.width} on the CPU"
    if scale > 1:
        at += ", scaled by pixels"
    if config.use_ref_vae:
        at += ", without the teacher"
    try:
        cost = _take_steps(small, torch.device("cpu"))
    except UserError as mistake:
        return TrialStep(measured_at=at, fault=str(mistake))
    state = state_bytes(config)
    # weights, gradients, two moments, the average; Seraena has no average
    fixed = 5 * state.weights + 4 * state.discriminator
    return TrialStep(
        memory_bytes=int(fixed + cost.kept_bytes * scale),
        available_bytes=psutil.virtual_memory().available,
        seconds=cost.step_s(micro_batches=config.gradient_accumulation_steps, scale=scale),
        measured_at=at,
    )


def _take_steps(config: TrainConfig, device: torch.device) -> StepCost:
    """What a micro-batch and the optimiser cost in the second of two steps; the first warms up and counts bytes."""
    from tinyvae.training.build import build_model, build_task
    from tinyvae.training.engine import Engine
    from tinyvae.training.optim import make_optimizers

    engine = Engine(config)
    model = build_model(config).to(device)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    task = build_task(config, engine, model)
    frames = torch.rand(config.train_batch_size, config.n_frames, 3, config.height, config.width, device=device)

    def seconds_of(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    def micro_batch(watch: AbstractContextManager[object] = nullcontext()) -> None:  # noqa: B008 (it holds nothing)
        with engine.autocast(), watch:  # the forward pass alone: what checkpointing makes again is not kept
            losses = task.losses(frames, use_seraena=config.use_seraena)
        engine.backward(losses.total)

    def optimiser() -> None:
        engine.finish_step(max_grad_norm=config.max_grad_norm)

    kept = _KeptBytes()
    micro_batch(torch.autograd.graph.saved_tensors_hooks(kept.count, _unchanged))
    optimiser()
    return StepCost(micro_batch_s=seconds_of(micro_batch), optimiser_s=seconds_of(optimiser), kept_bytes=kept.total)


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
