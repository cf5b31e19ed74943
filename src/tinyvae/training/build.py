"""From settings to the parts that learn and teach: student, teacher, LPIPS, Seraena."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from tinyvae.config import TrainConfig
from tinyvae.errors import UserError
from tinyvae.losses.lpips_weights import find_lpips_weights
from tinyvae.losses.perceptual import LPIPS
from tinyvae.losses.seraena import Seraena
from tinyvae.losses.seraena_start import SeraenaStart
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model
from tinyvae.teachers import load_teacher
from tinyvae.training.engine import Engine
from tinyvae.training.guards import average_when_all_are_well
from tinyvae.training.initialisation import initialise_he
from tinyvae.training.progress import HIGHER_IS_BETTER
from tinyvae.training.task import TrainingTask

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
