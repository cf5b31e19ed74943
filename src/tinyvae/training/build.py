"""From settings to the parts that learn and teach: student, teacher, LPIPS, Seraena."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.losses.lpips_weights import find_lpips_weights
from tinyvae.losses.perceptual import LPIPS
from tinyvae.losses.seraena import Seraena
from tinyvae.losses.seraena.start import SeraenaStart
from tinyvae.models.blocks import MemBlock, SuperMemBlock
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model
from tinyvae.teachers import load_teacher
from tinyvae.training.engine import Engine
from tinyvae.training.guards import average_when_all_are_well
from tinyvae.training.resume import HIGHER_IS_BETTER
from tinyvae.training.task import TrainingTask

QUIET_BRANCH = 0.03  # a tenth of a dB better after 1,000 steps than 0.1; 0.01 is as good (docs/results.md)
MID_GREY = 0.5


def initialise_he(model: TAEHV, *, seed: int) -> None:
    """Draw all weights anew from ``seed``; independent of torch's global random state and of the device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            layers = list(stack)
            for layer, following in zip(layers, [*layers[1:], None], strict=True):
                _draw_layer(layer, followed_by_relu=isinstance(following, nn.ReLU), generator=generator)
        output = model.decoder[-1]
        assert isinstance(output, nn.Conv2d) and output.bias is not None
        output.bias.fill_(MID_GREY)


def _draw_layer(layer: nn.Module, *, followed_by_relu: bool, generator: torch.Generator) -> None:
    convs = [part for part in layer.modules() if isinstance(part, nn.Conv2d)]
    for conv in convs:
        last_of_branch = isinstance(layer, MemBlock | SuperMemBlock) and conv is convs[-1]
        if isinstance(layer, MemBlock | SuperMemBlock):
            inside = list(layer.conv.children())
            place = inside.index(conv)
            followed_by_relu = place + 1 < len(inside) and isinstance(inside[place + 1], nn.ReLU)
        gain = math.sqrt(2.0) if followed_by_relu else 1.0
        _draw_conv(conv, gain=gain * (QUIET_BRANCH if last_of_branch else 1.0), generator=generator)


def _draw_conv(conv: nn.Conv2d, *, gain: float, generator: torch.Generator) -> None:
    fan_in = conv.weight[0].numel()
    drawn: Tensor = torch.randn(conv.weight.shape, generator=generator) * (gain / math.sqrt(fan_in))
    conv.weight.copy_(drawn)
    if conv.bias is not None:
        conv.bias.zero_()


log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build_model(config: TrainConfig) -> TAEHV:
    """The student, on the CPU: pretrained weights, or fresh ones drawn from the seed."""
    if config.pretrained_model_path is not None:
        model = load_model(config.pretrained_model_path, variant=config.variant, dtype=torch.float32)
        if model.spec.width != config.model_width:
            raise UserError(
                f"{config.pretrained_model_path} has model_width {model.spec.width:g}, the configuration says "
                f"{config.model_width:g}; use --model_width {model.spec.width:g}."
            )
    else:
        model = TAEHV(config.variant, width=config.model_width)
        if config.init == "he":
            initialise_he(model, seed=config.seed)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.folded_training = True  # the same function and gradients in less work (docs/performance.md)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.train()


def build_task(config: TrainConfig, engine: Engine, model: TAEHV) -> TrainingTask:
    """The student's task with the teacher, LPIPS and Seraena that the configuration asks for."""
    if config.compile_model and engine.device.type == "cpu":
        log.info("compile_model is left out: it is for GPUs, on a CPU it takes minutes at the start and brings little")
        config = replace(config, compile_model=False)
    teacher = None
    if config.teacher_path is not None:
        dtype = TORCH_DTYPES[config.ref_vae_dtype]
        teacher = load_teacher(
            config.teacher_type,
            config.teacher_path,
            dtype=dtype,
            device=engine.device,
            sample=config.ref_vae_sample,
            seed=config.seed + engine.rank,
            spec=config.spec,
        )
    lpips = find_validation_lpips(config)
    seraena = None
    if config.use_seraena:
        seraena = Seraena(
            config.spec,
            config.n_frames,
            config.n_seraena_frames,
            buffer_mb=config.seraena_buffer_mb,
            buffer_device="cpu" if config.seraena_buffer_device == "cpu" else engine.device,
            device=engine.device,
            learning_rate=config.seraena_learning_rate,
            normalisation=config.seraena_normalisation,
            seed=config.seed,
            rank=engine.rank,
        )
    average = average_when_all_are_well(engine) if engine.many else None
    return TrainingTask(
        config,
        model,
        teacher=teacher,
        lpips=None if lpips is None else lpips.to(engine.device),
        seraena=seraena,
        average=average,
    )


def find_validation_lpips(config: TrainConfig) -> LPIPS | None:
    """LPIPS for the loss and for validation; without a loss term it is measured only where its weights are found."""
    try:
        return LPIPS.from_file(find_lpips_weights(config.lpips_weights))
    except UserError as absent:
        if config.perceptual_loss_weight > 0 or config.lpips_weights is not None:
            raise
        if config.metric_for_best_model == "lpips":
            raise UserError(f"metric_for_best_model is lpips: {absent}") from None
        log.info("LPIPS will not be measured: %s", absent)
        return None


def make_seraena_start(config: TrainConfig) -> SeraenaStart | None:
    if not config.use_seraena:
        return None
    higher = HIGHER_IS_BETTER[config.metric_for_best_model]
    if config.seraena_start == "auto":
        return SeraenaStart(patience=config.seraena_patience, higher_is_better=higher)
    return SeraenaStart(at_step=config.seraena_start, higher_is_better=higher)
