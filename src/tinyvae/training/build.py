"""From settings to the parts that learn and teach: student (with its first weights), teacher, LPIPS, Seraena."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

import torch

from tinyvae.config.rules import Complaint
from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip import ClipSettings
from tinyvae.data.latent_store import LatentStore
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UserError
from tinyvae.heap import no_collections
from tinyvae.losses.perceptual import LPIPS
from tinyvae.losses.seraena import Seraena
from tinyvae.losses.seraena.start import SeraenaStart
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model
from tinyvae.teachers import LatentSpace, Teacher, identify_teacher, load_teacher
from tinyvae.training.engine import Engine
from tinyvae.training.first_weights import draw_weights
from tinyvae.training.guards import average_when_all_are_well
from tinyvae.training.resume import HIGHER_IS_BETTER
from tinyvae.training.task import TrainingTask

log = logging.getLogger(__name__)

GRAPHS_PER_SIZE = 8  # as torch allows for one; the teacher's encoder has several shapes inside
AUTOCAST_IN_GRAPHS = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


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
        draw_weights(model, config)
    model.encoder.requires_grad_(config.trains_encoder)
    model.decoder.requires_grad_(config.trains_decoder)
    if not (config.trains_encoder and config.trains_decoder):
        rest = "as fresh weights are" if config.pretrained_model_path is None else "as it is in pretrained_model_path"
        log.info("only the %s is trained: no loss needs the other part, which stays %s", config.trained_parts, rest)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.folded_training = True  # the same function and gradients in less work (docs/performance.md)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.train()


def build_task(
    config: TrainConfig, engine: Engine, model: TAEHV, *, latents: LatentStore | None = None
) -> TrainingTask:
    """The task of a run; ``latents``: the store of a run that has one (`open_latents`)."""
    config = settle_compilation(config, engine.device)
    teacher = None if config.teacher_path is None else build_teacher(config, engine.device)
    seraena, on_gpu = None, engine.device.type == "cuda"
    if config.use_seraena:
        seraena = Seraena(
            config.spec,
            [size.n_frames for size in config.sizes.sizes],
            config.n_seraena_frames,
            buffer_mb=config.seraena_buffer_mb,
            buffer_sizes=config.sizes.pictures_at_once,
            buffer_device="cpu" if config.seraena_buffer_device == "cpu" else engine.device,
            device=engine.device,
            learning_rate=config.seraena_learning_rate,
            normalization=config.seraena_normalisation,
            seed=config.seed,
            rank=engine.rank,
            dtype=torch.bfloat16 if on_gpu and config.mixed_precision == "bf16" else torch.float32,
            compiled=config.compile_model,
        )
        for _, height, width in config.sizes.sizes:
            seraena.check_batch(config.train_batch_size, height, width)
    if (lpips := find_lpips(config)) is not None:
        lpips.to(engine.device)
    average = average_when_all_are_well(engine) if engine.many else None
    space = None if latents is None else LatentSpace.of(latents.facts.space)
    return TrainingTask(config, model, teacher=teacher, space=space, lpips=lpips, seraena=seraena, average=average)


def settle_compilation(config: TrainConfig, device: torch.device) -> TrainConfig:
    """The settings with ``compile_model`` off where it is useless (a CPU) or cannot work (no Triton, no C compiler).

    The trial takes a few seconds, which the first compilation of a process takes anyway.
    """
    if not config.compile_model:
        return config
    if device.type == "cpu":
        log.info("compile_model is left out: it is for GPUs, on a CPU it takes minutes at the start and brings little")
        return replace(config, compile_model=False)
    if config.deterministic:
        log.info("compile_model is left out: a compiled step need not have the same bits every time (deterministic)")
        return replace(config, compile_model=False)
    try:
        with no_collections():  # this imports the compiler
            keep_traces(config.mixed_precision)
            torch.compile(lambda x: (x + 1).relu())(torch.zeros(8, device=device))
    except (RuntimeError, ImportError) as fault:
        reason = " ".join(str(fault).split()[:40])
        log.warning("compile_model is left out, and a step takes twice as long: torch.compile fails here (%s)", reason)
        return replace(config, compile_model=False)
    # Beyond its limit torch runs a new shape without a compiled graph. This is the name that torch 2.6 has too.
    limits = torch._dynamo.config
    limits.cache_size_limit = max(limits.cache_size_limit, GRAPHS_PER_SIZE * len(config.sizes.sizes))
    return config


def keep_traces(mixed_precision: str) -> None:
    """Let torch keep on disk what it makes of a graph with ``autocast`` inside, as the folding of weights has it.

    Without this it keeps only the kernels, and each start traces and cuts the graph again: half of the time from a warm
    cache to the first step. torch leaves autocast out because a list has no entry for it: what it does follows from
    its arguments, which are part of the key (pytorch issue 191106). The precision around the graph is part of it in new
    versions of torch alone: so it goes into the key here. Old versions have no such setting.
    """
    from torch._inductor import config as inductor

    if hasattr(inductor, "unsafe_marked_cacheable_functions"):
        marked = dict.fromkeys(AUTOCAST_IN_GRAPHS, mixed_precision)
        inductor.unsafe_marked_cacheable_functions = {**inductor.unsafe_marked_cacheable_functions, **marked}


def build_teacher(config: TrainConfig, device: torch.device) -> Teacher:
    """The teacher that the settings name, on a device; they have been through `settle_compilation`."""
    assert config.teacher_path is not None
    return load_teacher(
        config.ref_vae_type,
        config.teacher_path,
        dtype=getattr(torch, config.ref_vae_dtype),
        device=device,
        spec=config.spec,
        compiled=config.compile_model,
    )


def open_latents(config: TrainConfig, train: ClipSet | None, *, processes: int | None) -> LatentStore | None:
    """The latent store of a run, checked against its settings, its files (None: not known yet) and its teacher."""
    if config.latent_store is None:
        return None
    store = LatentStore.open(config.latent_store)
    store.check_fits(_latent_facts(config, train, processes))
    known = identify_teacher(config.ref_vae_path) if config.use_ref_vae and config.ref_vae_path else None
    store.check_fits({"teacher": known or {}})  # a teacher that is not here cannot be compared
    store.check_complete()
    return replace(store, with_std=config.ref_vae_sample)  # a run that does not sample reads no spread


def latent_complaints(config: TrainConfig) -> list[Complaint]:
    """What is wrong with a latent store, as far as it shows at once: before files are indexed and weights read."""
    if config.latent_store is None or not config.latent_store.exists():  # the latter is complained of already
        return []
    try:
        LatentStore.open(config.latent_store).check_fits(_latent_facts(config, None, None))
    except UserError as mistake:
        return [Complaint(keys=("latent_store",), text=str(mistake))]
    return []


def _latent_facts(config: TrainConfig, train: ClipSet | None, processes: int | None) -> dict[str, Any]:
    """The facts that a store must have for a run, except which teacher made it."""
    facts = clip_facts(config, train, processes=processes)
    facts |= {"teacher": {"dtype": config.ref_vae_dtype}} if config.use_ref_vae else {}
    return facts | ({"has_std": True} if config.ref_vae_sample else {})  # a run that does not sample needs no spread


def clip_facts(config: TrainConfig, train: ClipSet | None, *, processes: int | None) -> dict[str, Any]:
    """What decides over the pixels of a run's clips, for a latent store: the settings, the files (None: not known yet)
    and, where clips have several sizes, the clips of a step, and so the number of processes (None: not known yet)."""
    clips = asdict(ClipSettings.from_config(config))
    unused = ["decode_timeout_s", "decoded_cache_gb", "decoded_cache_dir"]
    unused += [] if config.color_jitter else ["color_jitter_params"]
    unused += [] if config.gaussian_blur else ["gaussian_blur_sigma", "gaussian_blur_probability"]
    for key in unused:
        del clips[key]
    clips["resolutions"] = config.resolutions_in_steps
    if config.resolutions and processes is not None:
        clips["clips_per_step"] = config.train_batch_size * config.gradient_accumulation_steps * processes
    return {"clips": clips} | ({} if train is None else {"data": {"files": len(train), "hash": train.fingerprint}})


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
