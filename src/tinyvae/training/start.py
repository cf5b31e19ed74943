"""From a configuration to a finished run: check, join the processes, build the parts, train, finish.

Everything a user can have got wrong is found here, before the first GPU or process group is touched where possible.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tinyvae.config.load import LoadedConfig
from tinyvae.config.rules import check_config
from tinyvae.config.schema import TrainConfig, to_json
from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import save_model
from tinyvae.terminal import count_of
from tinyvae.training.build import build_model, build_task, make_seraena_start
from tinyvae.training.checkpoint import CheckpointWriter
from tinyvae.training.clips import RunData, loading_processes, open_data
from tinyvae.training.deepspeed import start_engine
from tinyvae.training.diagnostics import StepProfiler
from tinyvae.training.engine import Engine
from tinyvae.training.finish import write_final_model, write_run_report
from tinyvae.training.guards import SignalWatch, StopRequested
from tinyvae.training.logs import RunLog
from tinyvae.training.loop import LoopParts, Trainer
from tinyvae.training.notify import Notifier
from tinyvae.training.optim import WeightAverage, make_optimizers
from tinyvae.training.preflight import checkpoint_bytes, checks_at_start, machine_complaints
from tinyvae.training.resume import FoundCheckpoint, SavedRun, asked_checkpoint, check_same_data, open_checkpoint
from tinyvae.training.run_folder import RunPlace, bring_past_along, cannot_write
from tinyvae.training.state import LoopState, Progress, RunState, what_scores_mean, with_its_best_model
from tinyvae.training.validation import Validator

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What is there before anything is built.

    ``place``: on the main process. ``index_folder``: where the index is made. ``saved``: the past of a resumed run.
    """

    config: TrainConfig
    engine: Engine
    folder: Path
    index_folder: Path
    place: RunPlace | None
    run_log: RunLog
    saved: SavedRun | None

    def from_the_past(self, state: RunState, fresh: LoopState) -> LoopState:
        """Where the loop begins: ``fresh`` at step 0, or where the checkpoint stood. Nothing is written yet."""
        if self.saved is None:
            return fresh
        loop = state.restore(self.saved, fresh.seraena_start)
        log.info("resumed from %s at step %d", self.saved.folder, loop.progress.step)
        return loop

    def settle(self, loop: LoopState, data: RunData) -> tuple[LoopState, RunData]:
        """Nothing can be refused any more: from here on the folder is this run's own."""
        stood = loop.progress
        self.engine.from_main(lambda: self._write_first_files(stood, data))
        data = data.settled(self.index_folder, self.folder)
        if self.saved is not None:
            saved = self.saved.tidied()
            best = self.engine.from_main(lambda: with_its_best_model(stood, saved, self.folder))
            loop = replace(loop, progress=best)
        return loop, data

    def _write_first_files(self, stood: Progress, data: RunData) -> None:
        assert self.place is not None, "only the main process writes"
        try:
            self.place.settle()
            if self.saved is not None:
                bring_past_along(self.saved.folder.parent, self.folder)
            self.run_log.begin(from_step=stood.step, with_validation=stood.validated_step == stood.step)
            data.name_bad_files()
            self.place.sign(self.config)
        except OSError as fault:
            raise cannot_write(self.folder, fault) from None


log = logging.getLogger(__name__)


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
        # The main process decides: it alone reads every file of a checkpoint to check it.
        asked = config.resume_from_checkpoint
        found = None if asked is None else engine.from_main(lambda: asked_checkpoint(asked, config))
        checkpoint = None if found is None else found.folder
        place, folder, index_folder = _take_place(config, engine, checkpoint, at_end)
        saved = None if checkpoint is None else open_checkpoint(checkpoint)
        run_log = RunLog(folder, config, is_main=engine.is_main)
        at_end.callback(run_log.close)
        notifier = at_end.enter_context(Notifier(config, folder, is_main=engine.is_main))
        if engine.is_main:
            _tell_what_is_known(loaded, engine, found)
            log.info("run folder: %s%s", folder, f" ({place.note})" if place is not None and place.note else "")
        begin = Beginning(
            config=config,
            engine=engine,
            folder=folder,
            index_folder=index_folder,
            place=place,
            run_log=run_log,
            saved=saved,
        )
        try:
            progress = _run(begin, signals, notifier, command)
        except (UserError, StopRequested) as reason:
            run_log.note(f"the run ends: {reason}", level=logging.WARNING)  # the terminal is told by the command line
            raise
        engine.close()
    return FinishedRun(folder=folder, progress=progress, is_main=engine.is_main)


def _take_place(
    config: TrainConfig, engine: Engine, checkpoint: Path | None, at_end: ExitStack
) -> tuple[RunPlace | None, Path, Path]:
    """The run's folder and that of its index. The main process decides (time stamps of several would differ) and is the
    only one to hold the `RunPlace`."""
    held: list[RunPlace] = []

    def take() -> tuple[Path, Path]:
        held.append(RunPlace(config, checkpoint))
        at_end.callback(held[0].leave)
        return held[0].folder, held[0].index_folder()

    folder, index_folder = engine.from_main(take)
    return (held[0] if held else None), folder, index_folder


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
    here = machine_complaints(loaded.config)
    check_config(loaded.config, loaded.given_paths, also=here, heading=loaded.source)


def _run(begin: Beginning, signals: SignalWatch, notifier: Notifier, command: str) -> Progress:
    """Build what the loop drives, put a checkpoint's state into it, train, and write what a finished run leaves."""
    config, engine, folder = begin.config, begin.engine, begin.folder
    torch.manual_seed(config.seed)
    data = open_data(config, engine, folder, index_folder=begin.index_folder)
    if begin.saved is not None:
        check_same_data(begin.saved, config, data_fingerprint=data.fingerprint)
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
    fresh = LoopState(progress=Progress(), seraena_start=make_seraena_start(config))
    loop, data = begin.settle(begin.from_the_past(state, fresh), data)
    validator = Validator(
        config,
        engine,
        folder,
        model=model,
        average=average,
        loader=data.validation_loader(engine) if config.validation_steps > 0 else None,
        lpips=task.lpips,
        run_log=begin.run_log,
        stop_signal=lambda: signals.received,
        from_step=loop.progress.step,
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
        run_log=begin.run_log,
        profiler=profiler,
        signals=signals,
        notifier=notifier,
        validate=validator.validate,
        save=make_saver(config, folder, state, data),
    )
    _describe(config, engine, data, model)
    trainer = Trainer(parts, loop)
    with closing(profiler), closing(parts.batches):  # else each worker is waited for 5 s at the exit
        progress = trainer.train()
    if engine.is_main:
        write_final_model(config, folder, model, average, progress, command=command)
        if config.report:
            write_run_report(config, folder, data, task.lpips, device=engine.device, command=command)
    engine.barrier()
    trainer.check_saved(folder)
    return progress


def make_saver(config: TrainConfig, folder: Path, state: RunState, data: RunData) -> Callable[[LoopState, bool], bool]:
    """The function that writes a checkpoint (an emergency one where the flag says so), all ranks together.

    It tells whether the checkpoint is on disk.
    """
    writer = CheckpointWriter(
        folder,
        state.engine,
        keep=config.checkpoints_total_limit,
        needed_bytes=checkpoint_bytes(config, state.engine.world_size),
    )

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
    if (workers := loading_processes(config)) < config.dataloader_num_workers:
        log.info("clips are loaded by %d processes, not %d: as many as cores", workers, config.dataloader_num_workers)
    log.info(
        "%s (%.2f M parameters) on %d x %s; %s of %d x %d x %d a step; %d files train, %d validate",
        config.variant,
        parameters,
        engine.world_size,
        engine.device.type,
        count_of(clips, "clip"),
        config.n_frames,
        config.height,
        config.width,
        len(data.train),
        len(data.validation),
    )
