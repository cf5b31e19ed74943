"""From settings to the parts that learn and teach: student (with its first weights), teacher, LPIPS, Seraena."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.losses.perceptual import LPIPS
from tinyvae.losses.seraena import Seraena
from tinyvae.losses.seraena.start import SeraenaStart
from tinyvae.models.blocks import TwoFrameBlock
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model
from tinyvae.teachers import load_teacher
from tinyvae.training.engine import Engine
from tinyvae.training.guards import average_when_all_are_well
from tinyvae.training.resume import HIGHER_IS_BETTER
from tinyvae.training.task import TrainingTask

log = logging.getLogger(__name__)

QUIET_BRANCH = 0.03  # a tenth of a dB better after 1,000 steps than 0.1; 0.01 is as good (docs/results.md)


def build_model(config: TrainConfig) -> TAEHV:
    """The student, on the CPU: pretrained weights, or fresh ones drawn from the seed."""
    if config.pretrained_model_path is not None:
        model = load_model(
            config.pretrained_model_path,
            variant=config.variant,
            latent_space=config.latent_space,
            activation=config.activation,
            dtype=torch.float32,
        )
        assert model.spec == config.spec, "the configuration's rules compare them"
    else:
        model = TAEHV.of(config.spec)
        if config.init == "he":
            initialize_he(model, seed=config.seed)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.folded_training = True  # the same function and gradients in less work (docs/performance.md)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.train()


def initialize_he(model: TAEHV, *, seed: int) -> None:
    """Draw all weights from ``seed`` alone: a deviation of sqrt(2 / inputs) before a ReLU, sqrt(1 / inputs) elsewhere.

    Residual branches begin far smaller, and the output begins at mid gray.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for conv, following, ends_branch in [*_convs(model.encoder), *_convs(model.decoder)]:
            gain = math.sqrt(2.0) if isinstance(following, nn.ReLU | nn.LeakyReLU) else 1.0
            deviation = gain * (QUIET_BRANCH if ends_branch else 1.0) / math.sqrt(conv.weight[0].numel())
            conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator) * deviation)
            if conv.bias is not None:
                conv.bias.zero_()
        output = model.decoder[-1]
        assert isinstance(output, nn.Conv2d) and output.bias is not None
        output.bias.fill_(0.5)


def _convs(stack: nn.Sequential) -> Iterator[tuple[nn.Conv2d, nn.Module | None, bool]]:
    """Each conv of a stack, the layer that follows it, and whether it is the last of a residual branch."""
    for layer, following in pairwise([*stack, None]):
        if isinstance(layer, TwoFrameBlock):
            inside = pairwise([*layer.conv, None])
            yield from ((part, after, after is None) for part, after in inside if isinstance(part, nn.Conv2d))
        elif layer is not None:
            yield from ((part, following, False) for part in layer.modules() if isinstance(part, nn.Conv2d))


def build_task(config: TrainConfig, engine: Engine, model: TAEHV) -> TrainingTask:
    if config.compile_model and engine.device.type == "cpu":
        log.info("compile_model is left out: it is for GPUs, on a CPU it takes minutes at the start and brings little")
        config = replace(config, compile_model=False)
    teacher = seraena = None
    if config.teacher_path is not None:
        teacher = load_teacher(
            config.ref_vae_type,
            config.teacher_path,
            dtype=getattr(torch, config.ref_vae_dtype),
            device=engine.device,
            sample=config.ref_vae_sample,
            seed=config.seed + engine.rank,
            spec=config.spec,
        )
    if config.use_seraena:
        seraena = Seraena(
            config.spec,
            config.n_frames,
            config.n_seraena_frames,
            buffer_mb=config.seraena_buffer_mb,
            buffer_device="cpu" if config.seraena_buffer_device == "cpu" else engine.device,
            device=engine.device,
            learning_rate=config.seraena_learning_rate,
            normalization=config.seraena_normalisation,
            seed=config.seed,
            rank=engine.rank,
        )
        seraena.check_batch(config.train_batch_size, config.height, config.width)
    if (lpips := find_lpips(config)) is not None:
        lpips.to(engine.device)
    average = average_when_all_are_well(engine) if engine.many else None
    return TrainingTask(config, model, teacher=teacher, lpips=lpips, seraena=seraena, average=average)


def find_lpips(config: TrainConfig) -> LPIPS | None:
    """LPIPS for the loss and for validation; where nothing needs it and its weights are not found, None."""
    try:
        return LPIPS.from_file(config.lpips_weights)
    except UserError as absent:
        needed = config.perceptual_loss_weight > 0 or config.metric_for_best_model == "lpips"
        if needed or config.lpips_weights is not None:
            raise
        log.info("LPIPS will not be measured: %s", absent)
        return None


def make_seraena_start(config: TrainConfig) -> SeraenaStart | None:
    """When Seraena begins, as the configuration says; None for a run without it."""
    if not config.use_seraena:
        return None
    start = config.seraena_start
    rule = {"patience": config.seraena_patience} if start == "auto" else {"at_step": start}
    return SeraenaStart(**rule, higher_is_better=HIGHER_IS_BETTER[config.metric_for_best_model])
