"""From a configuration to a finished run: check, join the processes, build the parts, train, finish.

Mistakes of the user are found here, before a GPU or a process group is touched where that is possible.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tinyvae.config.load import LoadedConfig
from tinyvae.config.rules import check_config
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.terminal import count_of
from tinyvae.training.best_model import Validator
from tinyvae.training.build import build_model, build_task, make_seraena_start
from tinyvae.training.checkpoint import CheckpointWriter
from tinyvae.training.clips import RunData, loading_processes, open_data
from tinyvae.training.deepspeed import start_engine
from tinyvae.training.diagnostics import StepProfiler
from tinyvae.training.ema import WeightAverage
from tinyvae.training.engine import Engine
from tinyvae.training.finish import write_final_model, write_run_report
from tinyvae.training.guards import SignalWatch, StopRequested
from tinyvae.training.logs import RunLog
from tinyvae.training.loop import LoopParts, Trainer
from tinyvae.training.notify import Notifier
from tinyvae.training.optim import make_optimizers
from tinyvae.training.preflight import checkpoint_bytes, checks_at_start, machine_complaints
from tinyvae.training.resume import (
    FoundCheckpoint,
    LoopState,
    Progress,
    RunState,
    SavedRun,
    asked_checkpoint,
    check_same_data,
    open_checkpoint,
    restore_best_model,
)
from tinyvae.training.run_folder import RunPlace, copy_past, write_error

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Where a run ended."""

    folder: Path
    progress: Progress
    is_main: bool


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """What exists before the parts are built.

    ``place``: on the main process only. ``index_folder``: where the index is made. ``saved``: for a resumed run.
    """

    config: TrainConfig
    engine: Engine
    signals: SignalWatch
    folder: Path
    index_folder: Path
    place: RunPlace | None
    run_log: RunLog
    notifier: Notifier
    saved: SavedRun | None
    command: str


def check_before_start(loaded: LoadedConfig) -> None:
    """Refuse what can be refused before any process group or GPU is touched; `tinyvae check --quick` does it too."""
    here = machine_complaints(loaded.config)
    check_config(loaded.config, loaded.given_paths, also=here, heading=loaded.source)


def run_training(loaded: LoadedConfig, *, command: str) -> FinishedRun:
    """Run the whole training; raises `UserError` for mistakes and `StopRequested` when a signal ended it.

    ``command``: the command line, for the model card. Example::

        run_training(load_config("quickstart", []), command="tinyvae train quickstart")
    """
    config = loaded.config
    check_before_start(loaded)
    engine = start_engine(config)
    with ExitStack() as at_end:
        at_end.callback(engine.close_quietly)
        signals = SignalWatch()
        at_end.callback(signals.close)
        # The main process decides: only it reads every file of a checkpoint to check it.
        asked = config.resume_from_checkpoint
        found = None if asked is None else engine.from_main(lambda: asked_checkpoint(asked, config))
        place, folder, index_folder = _take_place(config, engine, None if found is None else found.folder, at_end)
        run_log = RunLog(folder, config, is_main=engine.is_main)
        at_end.callback(run_log.close)
        run = StartedRun(
            config=config,
            engine=engine,
            signals=signals,
            folder=folder,
            index_folder=index_folder,
            place=place,
            run_log=run_log,
            notifier=at_end.enter_context(Notifier(config, folder, is_main=engine.is_main)),
            saved=None if found is None else open_checkpoint(found.folder),
            command=command,
        )
        if place is not None:
            _log_notices(loaded, engine, found)
            log.info("run folder: %s%s", folder, f" ({place.note})" if place.note else "")
        try:
            progress = _build_and_train(run)
        except (UserError, StopRequested) as reason:
            run_log.note(f"the run ends: {reason}", level=logging.WARNING)  # the command line tells the terminal
            raise
        engine.close()
    return FinishedRun(folder=folder, progress=progress, is_main=engine.is_main)


def _take_place(
    config: TrainConfig, engine: Engine, checkpoint: Path | None, at_end: ExitStack
) -> tuple[RunPlace | None, Path, Path]:
    """The run's folder and the folder of its index. The main process decides, because each would have another time, and
    only it holds the `RunPlace`."""
    held: list[RunPlace] = []

    def take() -> tuple[Path, Path]:
        held.append(RunPlace(config, checkpoint))
        at_end.callback(held[0].leave)
        return held[0].folder, held[0].index_folder()

    folder, index_folder = engine.from_main(take)
    return (held[0] if held else None), folder, index_folder


def _log_notices(loaded: LoadedConfig, engine: Engine, found: FoundCheckpoint | None) -> None:
    """Log what was decided for the user, and what does not stop the run but may trouble it."""
    for fault in found.passed_over if found is not None else ():
        log.warning("passing over a damaged checkpoint: %s", fault)
    for notice in loaded.notices:
        log.info("note: %s", notice)
    for check in checks_at_start(loaded.config, processes=engine.local_world_size):
        if check.fix:
            log.warning("%s: %s; fix: %s", check.name, check.found, check.fix)


def _build_and_train(run: StartedRun) -> Progress:
    """Build what the loop drives, restore a checkpoint, train, and write what a finished run leaves."""
    config, engine, folder = run.config, run.engine, run.folder
    torch.manual_seed(config.seed)
    data = open_data(config, engine, folder, index_folder=run.index_folder)
    if run.saved is not None:
        check_same_data(run.saved, config, data_fingerprint=data.fingerprint)
    model = build_model(config).to(engine.device)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    task = build_task(config, engine, model)
    average = WeightAverage(model, decay=config.ema_decay) if config.ema_decay > 0 else None
    state = RunState(
        config=config, engine=engine, folder=folder, data=data, model=model, average=average, seraena=task.seraena
    )
    loop, data = _settle(run, _first_loop_state(run, state), data)
    validator = Validator(
        config,
        engine,
        folder,
        model=model,
        average=average,
        data=data,
        lpips=task.lpips,
        run_log=run.run_log,
        stop_signal=lambda: run.signals.received,
        from_step=loop.progress.step,
    )
    writer = CheckpointWriter(
        folder,
        engine,
        keep=config.checkpoints_total_limit,
        needed_bytes=checkpoint_bytes(config, engine.world_size),
    )
    profile = folder / "profile.json" if config.enable_profiler and engine.is_main else None
    profiler = StepProfiler(profile, device=engine.device, steps_left=config.max_train_steps - loop.progress.step)
    parts = LoopParts(
        config=config,
        engine=engine,
        task=task,
        optimizers=optimizers,
        average=average,
        batches=data.training_batches(engine, start_sample=loop.progress.samples_seen),
        run_log=run.run_log,
        profiler=profiler,
        signals=run.signals,
        notifier=run.notifier,
        validate=validator.validate,
        save=lambda loop, emergency: state.save(writer, loop, emergency=emergency),
    )
    if engine.is_main:
        _log_size(config, engine, data, model)
    trainer = Trainer(parts, loop)
    with closing(profiler), closing(parts.batches):  # else each worker is waited for 5 s at the exit
        progress = trainer.train()
    if engine.is_main:
        write_final_model(config, folder, model, average, progress, command=run.command)
        if config.report:
            write_run_report(config, folder, data, task.lpips, device=engine.device, command=run.command)
    engine.barrier()
    trainer.check_saved(folder)
    return progress


def _first_loop_state(run: StartedRun, state: RunState) -> LoopState:
    """Where the loop starts: at step 0, or where the checkpoint was. Nothing is written."""
    loop = LoopState(progress=Progress(), seraena_start=make_seraena_start(run.config))
    if run.saved is not None:
        loop = state.restore(run.saved, loop)
        log.info("resumed from %s at step %d", run.saved.folder, loop.progress.step)
    return loop


def _settle(run: StartedRun, loop: LoopState, data: RunData) -> tuple[LoopState, RunData]:
    """Nothing can refuse the run any more: write its first files and make ``best_model/`` the right one."""
    progress = loop.progress

    def write_first_files() -> None:
        assert run.place is not None, "only the main process writes"
        try:
            run.place.settle()
            if run.saved is not None:
                copy_past(run.saved.folder.parent, run.folder)
            run.run_log.begin(from_step=progress.step, with_validation=progress.validated_step == progress.step)
            data.name_bad_files()
            run.place.sign(run.config)
        except OSError as fault:
            raise write_error(run.folder, fault) from None

    run.engine.from_main(write_first_files)
    if run.saved is not None:
        saved = run.saved.tidied()
        progress = run.engine.from_main(lambda: restore_best_model(progress, saved, run.folder))
    return replace(loop, progress=progress), data.settled(run.index_folder, run.folder)


def _log_size(config: TrainConfig, engine: Engine, data: RunData, model: TAEHV) -> None:
    clips = config.train_batch_size * config.gradient_accumulation_steps * engine.world_size
    if (workers := loading_processes(config)) < config.dataloader_num_workers:
        log.info("clips are loaded by %d processes, not %d: as many as cores", workers, config.dataloader_num_workers)
    log.info(
        "%s (%.2f M parameters) on %d x %s; %s of %d x %d x %d a step; %d files train, %d validate",
        config.variant,
        sum(p.numel() for p in model.parameters()) / 1e6,
        engine.world_size,
        engine.device.type,
        count_of(clips, "clip"),
        config.n_frames,
        config.height,
        config.width,
        len(data.train),
        len(data.validation),
    )
