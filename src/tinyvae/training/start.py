"""From a configuration to a finished run: check, join the processes, build the parts, train, finish.

Everything a user can have got wrong is found here, before the first GPU or process group is touched where possible.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch

from tinyvae.config import TrainConfig
from tinyvae.config_checks import check_config
from tinyvae.config_files.loading import LoadedConfig
from tinyvae.config_files.run_folder import has_time, new_run_folder
from tinyvae.config_files.saving import to_json
from tinyvae.errors import UserError
from tinyvae.losses.lpips_weights import find_lpips_weights
from tinyvae.losses.perceptual import LPIPS
from tinyvae.losses.seraena import Seraena
from tinyvae.losses.seraena_start import SeraenaStart
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model, save_model
from tinyvae.teachers import load_teacher
from tinyvae.training.checkpoint import CheckpointWriter, remove_unfinished
from tinyvae.training.clips import RunData, open_data
from tinyvae.training.ema import WeightAverage
from tinyvae.training.engine import Engine, start_engine
from tinyvae.training.finish import write_final_model
from tinyvae.training.guards import SignalWatch, StopRequested, average_when_all_are_well
from tinyvae.training.initialisation import initialise_he
from tinyvae.training.optimizers import make_optimizers
from tinyvae.training.preflight import checks_at_start
from tinyvae.training.profiling import StepProfiler
from tinyvae.training.progress import HIGHER_IS_BETTER, LoopState, Progress
from tinyvae.training.resume import FoundCheckpoint, SavedRun, check_same_run, find_checkpoint, open_checkpoint
from tinyvae.training.run_log import RunLog
from tinyvae.training.run_report import write_run_report
from tinyvae.training.run_state import RunState, what_scores_mean, with_its_best_model
from tinyvae.training.task import TrainingTask
from tinyvae.training.trainer import LoopParts, Trainer
from tinyvae.training.validating import Validator
from tinyvae.training.validation import put_best_model_back

log = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Where a run ended."""

    folder: Path
    progress: Progress
    is_main: bool


def run_training(loaded: LoadedConfig, *, command: str) -> FinishedRun:
    """Run the whole training; raises `UserError` for mistakes and `StopRequested` when a signal ended it."""
    config = loaded.config
    check_before_start(loaded)
    engine = start_engine(config)
    with ExitStack() as at_end:
        at_end.callback(engine.close_quietly)
        signals = SignalWatch()
        at_end.callback(signals.close)
        found = engine.from_main(lambda: _asked_checkpoint(config))
        checkpoint = None if found is None else found.folder
        folder = engine.from_main(lambda: make_run_folder(config, checkpoint))
        saved = None if checkpoint is None else open_checkpoint(checkpoint)
        run_log = RunLog(folder, config, is_main=engine.is_main)
        at_end.callback(run_log.close)
        if engine.is_main:
            _tell_what_is_known(loaded, engine, found)
            log.info("run folder: %s", folder)
        try:
            progress = _run(config, engine, folder, signals, run_log, saved, command)
        except (UserError, StopRequested) as reason:
            run_log.note(f"the run ends: {reason}", level=logging.WARNING)  # the terminal is told by the command line
            raise
        engine.close()
    return FinishedRun(folder=folder, progress=progress, is_main=engine.is_main)


def _tell_what_is_known(loaded: LoadedConfig, engine: Engine, found: FoundCheckpoint | None) -> None:
    """What was decided for the user, and what does not stop the run but may trouble it."""
    for fault in found.passed_over if found is not None else ():
        log.warning("passing over a damaged checkpoint: %s", fault)
    for notice in loaded.notices:
        log.info("note: %s", notice)
    for check in checks_at_start(loaded.config, processes=engine.local_world_size):
        if check.fix:
            log.warning("%s: %s; fix: %s", check.name, check.found, check.fix)


def check_before_start(loaded: LoadedConfig) -> None:
    """What can be refused before any process group or GPU is touched; `tinyvae check --quick` asks for it too."""
    check_config(loaded.config, loaded.given_paths)


def _asked_checkpoint(config: TrainConfig) -> FoundCheckpoint | None:
    """The checkpoint to go on from. The main process decides: it alone reads every file to check it."""
    asked = config.resume_from_checkpoint
    return None if asked is None else find_checkpoint(asked, config)


def make_run_folder(config: TrainConfig, checkpoint: Path | None) -> Path:
    """The run's folder, made by the main process alone: time stamps of several processes would differ.

    A resumed run goes on in the folder of its checkpoint, unless ``output_dir`` names one folder for good. A folder
    that holds a run belongs to it: only a checkpoint that lies there goes on in it.
    """
    if checkpoint is not None and has_time(config.output_dir):
        folder = checkpoint.parent
    else:
        folder = new_run_folder(config.output_dir, datetime.now())
    homes = () if checkpoint is None else (checkpoint.parent.resolve(), checkpoint.resolve().parent)  # either may link
    is_its_own = folder.resolve() in homes
    if not is_its_own and (folder / "config.json").exists():
        other = "a run" if checkpoint is None else f"another run than that of {checkpoint}"
        raise UserError(
            f"{folder} already holds {other}; choose another --output_dir, or go on with it by --resume latest."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        put_best_model_back(folder)
    except OSError as fault:
        raise UserError(f"cannot write to the run folder {folder} ({fault}); choose another --output_dir.") from None
    return folder.absolute()


def bring_past_along(old_run: Path, folder: Path) -> None:
    """A run that goes on in a new folder has the lines and validations of its past there too; main process only."""
    for name in ("metrics.jsonl", "validation_history.json"):
        source, target = old_run / name, folder / name
        if source.is_file() and not target.exists():
            try:
                shutil.copyfile(source, target)
            except OSError as fault:
                reason = fault.strerror or fault
                raise UserError(
                    f"{source} could not be copied to {folder} ({reason}); check its space and permissions."
                ) from None


def write_run_config(folder: Path, config: TrainConfig) -> None:
    """``config.json``: the run's settings as they were resolved."""
    temporary = folder / ".config.json.part"
    temporary.write_text(to_json(config) + "\n")
    temporary.replace(folder / "config.json")


def _run(
    config: TrainConfig,
    engine: Engine,
    folder: Path,
    signals: SignalWatch,
    run_log: RunLog,
    saved: SavedRun | None,
    command: str,
) -> Progress:
    """Build what the loop drives, put a checkpoint's state into it, train, and write what a finished run leaves."""
    torch.manual_seed(config.seed)
    data = open_data(config, engine, folder)
    if saved is not None:
        check_same_run(saved, config, data_fingerprint=data.fingerprint)
    model = build_model(config).to(engine.device)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    task = build_task(config, engine, model)
    average = WeightAverage(model, decay=config.ema_decay) if config.ema_decay > 0 else None
    state = RunState(
        model=model,
        engine=engine,
        optimizer=config.optimizer,
        average=average,
        seraena=task.seraena,
        scored_with=what_scores_mean(config, data),
    )
    loop = _begin(config, folder, run_log, state, saved)
    validator = Validator(
        config,
        engine,
        folder,
        model=model,
        average=average,
        data=data,
        lpips=task.lpips,
        run_log=run_log,
        stop_signal=lambda: signals.received,
        from_step=loop.progress.step,
    )
    profiler = StepProfiler(
        folder / "profile.json" if config.enable_profiler and engine.is_main else None,
        device=engine.device,
        steps_left=config.max_train_steps - loop.progress.step,
    )
    parts = LoopParts(
        config=config,
        engine=engine,
        task=task,
        optimizers=optimizers,
        average=average,
        batches=data.training_batches(engine, start_sample=loop.progress.samples_seen),
        run_log=run_log,
        profiler=profiler,
        signals=signals,
        validate=validator.validate,
        save=make_saver(config, folder, state, data),
    )
    _describe(config, engine, data, model)
    trainer = Trainer(parts, loop)
    with closing(profiler), closing(parts.batches):  # else each worker is waited for 5 s at the exit
        progress = trainer.train()
    if engine.is_main:
        write_final_model(config, folder, model, average, progress, command=command)
    if engine.is_main and config.report:
        write_run_report(config, folder, data, task.lpips, device=engine.device, command=command)
    engine.barrier()
    if not trainer.is_saved:
        raise UserError(
            f"the run is complete, but its last checkpoint could not be written to {folder}; see train.log."
        )
    return progress


def _begin(config: TrainConfig, folder: Path, run_log: RunLog, state: RunState, saved: SavedRun | None) -> LoopState:
    """Where the loop begins: at step 0, or where the checkpoint stood. From here on the folder is this run's own."""
    engine = state.engine
    loop = LoopState(progress=Progress(), seraena_start=make_seraena_start(config))
    if saved is not None:
        loop = state.restore(saved, loop.seraena_start)
        log.info("resumed from %s at step %d", saved.folder, loop.progress.step)
        engine.from_main(lambda: bring_past_along(saved.folder.parent, folder))
    stood = loop.progress
    run_log.begin(from_step=stood.step, with_validation=stood.validated_step == stood.step)
    if engine.is_main:  # only now: a resume that is refused must leave the run's settings and lines as they were
        write_run_config(folder, config)
    if saved is not None:
        loop = replace(loop, progress=engine.from_main(lambda: with_its_best_model(stood, saved, folder)))
    return loop


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


def make_saver(config: TrainConfig, folder: Path, state: RunState, data: RunData) -> Callable[[LoopState, bool], bool]:
    """The function that writes a checkpoint (an emergency one where the flag says so), all ranks together.

    It tells whether the checkpoint is on disk.
    """
    writer = CheckpointWriter(folder, state.engine, keep=config.checkpoints_total_limit)

    def write_model(target: Path, *, step: int) -> None:
        with ExitStack() as swapped:
            if state.average is not None:
                swapped.enter_context(state.average.swapped_into(state.model))
            save_model(state.model, target, overwrite=True, training_step=step, formats=(".safetensors",))

    def save(loop: LoopState, emergency: bool) -> bool:
        progress = loop.progress
        facts = {
            "step": progress.step,
            "world_size": state.engine.world_size,
            "engine": state.engine.kind,
            "data_fingerprint": data.fingerprint,
            "config": json.loads(to_json(config)),
        }
        written = writer.save(
            step=progress.step,
            emergency=emergency,
            shared_state=lambda: state.shared(loop),
            rank_state=state.of_rank(loop),
            write_model=lambda target: write_model(target, step=progress.step),
            facts=facts,
            best_step=progress.best_step,
        )
        return written is not None

    return save


def _describe(config: TrainConfig, engine: Engine, data: RunData, model: TAEHV) -> None:
    if not engine.is_main:
        return
    clips = config.train_batch_size * config.gradient_accumulation_steps * engine.world_size
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    log.info(
        "%s (%.2f M parameters) on %d x %s; %d clips of %d x %d x %d a step; %d files train, %d validate",
        config.variant,
        parameters,
        engine.world_size,
        engine.device.type,
        clips,
        config.n_frames,
        config.height,
        config.width,
        len(data.train),
        len(data.validation),
    )
