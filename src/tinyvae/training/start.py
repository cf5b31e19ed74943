"""From a configuration to a finished run: check, join the processes, build the parts, train, finish."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tinyvae.config.load import LoadedConfig
from tinyvae.config.rules import check_config
from tinyvae.data.loader import TrainLoader
from tinyvae.errors import UserError, closed_paths_told
from tinyvae.files import writing_to
from tinyvae.heap import no_collections
from tinyvae.storage import use_file_cache
from tinyvae.terminal import count_of
from tinyvae.training.build import build_model, build_task, latent_complaints, make_seraena_start, open_latents
from tinyvae.training.checkpoint import CheckpointWriter, checkpoint_bytes
from tinyvae.training.clips import RunData, loading_processes, open_data
from tinyvae.training.deepspeed import start_engine
from tinyvae.training.diagnostics import StepProfiler
from tinyvae.training.finish import write_final_model, write_run_report
from tinyvae.training.guards import SignalWatch, StopRequested
from tinyvae.training.logs import RunLog
from tinyvae.training.loop import LoopParts, Trainer
from tinyvae.training.notify import Notifier
from tinyvae.training.optim import WeightAverage, make_optimizers
from tinyvae.training.preflight import checks_at_start, machine_complaints
from tinyvae.training.resume import (
    LoopState,
    Progress,
    RunState,
    SavedRun,
    asked_checkpoint,
    check_same_data,
    restore_best_model,
)
from tinyvae.training.run_folder import RunPlace, copy_past
from tinyvae.training.task import TrainingTask
from tinyvae.training.validation import Validator
from tinyvae.training.validation_teacher import ValidationTeacher, deciding_score, find_validation_teacher

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Where a run ended."""

    folder: Path
    progress: Progress
    is_main: bool


@closed_paths_told()
def check_before_start(loaded: LoadedConfig) -> None:
    """Refuse what can be refused before any process group or GPU is touched; `tinyvae check --quick` does it too."""
    config = loaded.config
    use_file_cache(config.file_cache_dir, config.file_cache_gb)
    also = [*machine_complaints(config), *latent_complaints(config)]
    check_config(config, loaded.given_paths, also=also, heading=loaded.source)


def run_training(loaded: LoadedConfig, *, command: str) -> FinishedRun:
    """Run the whole training; raises `UserError` for mistakes and `StopRequested` when a signal ended it.

    ``command``: the command line, for the model card. Example::

        run_training(load_config("quickstart", []), command="tinyvae train quickstart")
    """
    check_before_start(loaded)
    with ExitStack() as at_end:
        run = _Run(loaded, at_end)
        try:
            progress = run.build_and_train(command)
        except (UserError, StopRequested) as reason:
            run.run_log.note(f"the run ends: {reason}", level=logging.WARNING)  # the command line tells the terminal
            raise
        run.engine.close()
    return FinishedRun(folder=run.folder, progress=progress, is_main=run.engine.is_main)


class _Run:
    """A run from its first process group to its last file."""

    def __init__(self, loaded: LoadedConfig, at_end: ExitStack) -> None:
        """Join the processes, seed torch, find the checkpoint, take the folder. ``at_end`` gets what must be closed."""
        self._at_end = at_end
        self.config = config = loaded.config
        self.engine = engine = start_engine(config)
        torch.manual_seed(config.seed)
        at_end.callback(engine.close_quietly)
        self.signals = SignalWatch()
        at_end.callback(self.signals.close)
        # The main process decides: only it checks every file, and the clocks of the others would give other folders.
        asked = config.resume_from_checkpoint
        checkpoint, faults = engine.from_main(lambda: (None, []) if asked is None else asked_checkpoint(asked, config))
        self.place: RunPlace | None = None  # on the main process

        def take_place() -> tuple[Path, Path]:
            self.place = RunPlace(config, checkpoint)
            at_end.callback(self.place.leave)
            return self.place.folder, self.place.index_folder()

        self.folder, self.index_folder = engine.from_main(take_place)
        self.saved = None if checkpoint is None else SavedRun(checkpoint)
        self.run_log = RunLog(self.folder, config, is_main=engine.is_main)
        at_end.callback(self.run_log.close)
        self.notifier = at_end.enter_context(Notifier(config, self.folder, is_main=engine.is_main))
        if self.place is not None:
            self._log_notices(loaded, faults)
            log.info("run folder: %s%s", self.folder, f" ({self.place.note})" if self.place.note else "")

    def _log_notices(self, loaded: LoadedConfig, faults: list[str]) -> None:
        """Log what was decided for the user, and what does not stop the run but may trouble it."""
        for fault in faults:
            log.warning("passing over a damaged checkpoint: %s", fault)
        for notice in loaded.notices:
            log.info("note: %s", notice)
        for check in checks_at_start(self.config, processes=self.engine.local_world_size):
            if check.fix:
                log.warning("%s: %s; fix: %s", check.name, check.found, check.fix)

    def build_and_train(self, command: str) -> Progress:
        """Build what the loop drives, restore a checkpoint, train, and write what a finished run leaves."""
        config, engine, folder = self.config, self.engine, self.folder
        data = self._open_data()
        # Workers decode while the networks are built. A resumed run moves its index first: they open it by its name.
        clips = self._start_clips(data, Progress()) if self.saved is None else None
        model = build_model(config).to(engine.device)
        with no_collections():  # the first optimizer of a process imports a part of torch's compiler
            optimizers = make_optimizers(model, config)
        engine.prepare(model, optimizers)
        task = build_task(config, engine, model, latents=data.latents)
        average = WeightAverage(model, decay=config.ema_decay) if config.ema_decay > 0 else None
        teacher = find_validation_teacher(config, engine, task.teacher)
        needed_bytes = checkpoint_bytes(config, engine.world_size)
        state = RunState(
            config=config,
            engine=engine,
            writer=CheckpointWriter(folder, engine, keep=config.checkpoints_total_limit, needed_bytes=needed_bytes),
            data=data,
            model=model,
            average=average,
            seraena=task.seraena,
            decided_by=deciding_score(config, with_teacher=teacher is not None),
        )
        loop, state = self._settle(state)
        clips = clips or self._start_clips(state.data, loop.progress)
        validator = self._validator(state, task, teacher, from_step=loop.progress.step)
        profile = folder / "profile.json" if config.enable_profiler and engine.is_main else None
        profiler = StepProfiler(profile, device=engine.device, steps_left=config.max_train_steps - loop.progress.step)
        parts = LoopParts(
            config=config,
            engine=engine,
            task=task,
            optimizers=optimizers,
            average=average,
            batches=iter(clips),
            run_log=self.run_log,
            profiler=profiler,
            signals=self.signals,
            notifier=self.notifier,
            validate=validator.validate,
            save=state.save,
        )
        _log_size(state)
        trainer = Trainer(parts, loop)
        with closing(profiler), closing(parts.batches), validator.reading_ahead():  # else workers cost 5 s at the exit
            progress = trainer.train()
        if engine.is_main:
            write_final_model(config, folder, model, average, progress, command=command)
            if config.report:
                write_run_report(validator, state.data, command=command)
        engine.barrier()
        trainer.check_saved(folder)
        return progress

    def _validator(
        self, state: RunState, task: TrainingTask, teacher: ValidationTeacher | None, *, from_step: int
    ) -> Validator:
        return Validator(
            self.config,
            self.engine,
            self.folder,
            model=state.model,
            average=state.average,
            loader=state.data.validation_loader(self.engine) if self.config.validation_steps > 0 else None,
            lpips=task.lpips,
            teacher=teacher,
            run_log=self.run_log,
            stop_signal=lambda: self.signals.received,
            from_step=from_step,
        )

    def _open_data(self) -> RunData:
        """The run's files, with its latent store if it has one; refused if a checkpoint was made with others."""
        config, engine = self.config, self.engine
        resumes = self.saved is not None
        data = open_data(config, engine, self.folder, index_folder=self.index_folder, keeps_verdicts=resumes)
        latents = engine.from_main(lambda: open_latents(config, data.train, processes=engine.world_size))
        data = replace(data, latents=latents)
        if self.saved is not None:
            check_same_data(self.saved, config, data)
        return data

    def _start_clips(self, data: RunData, progress: Progress) -> TrainLoader:
        loader = data.training_loader(self.engine, start_sample=progress.samples_seen, start_step=progress.step)
        self._at_end.callback(loader.close)
        loader.start()
        return loader

    def _settle(self, state: RunState) -> tuple[LoopState, RunState]:
        """Restore the checkpoint, if any. Nothing can refuse the run after that: write its first files."""
        data = state.data
        loop = LoopState(progress=Progress(), seraena_start=make_seraena_start(self.config))
        if self.saved is not None:
            loop = state.restore(self.saved, loop)
            data.check_start(loop.progress.samples_seen, loop.progress.step)
            log.info("resumed from %s at step %d", self.saved.folder, loop.progress.step)
        progress = self.engine.from_main(lambda: self._write_first_files(loop.progress, data))
        if self.saved is not None:
            self.saved.shared.clear()  # hundreds of MB, which the run would hold to its end
        data = data.settled(self.index_folder, self.folder)
        return replace(loop, progress=progress), replace(state, data=data)

    def _write_first_files(self, progress: Progress, data: RunData) -> Progress:
        assert self.place is not None, "only the main process writes"
        with writing_to(self.folder):
            self.place.settle()
            if self.saved is not None:
                copy_past(self.saved.folder.parent, self.folder)
            self.run_log.begin(from_step=progress.step, with_validation=progress.validated_step == progress.step)
            data.name_bad_files()
            self.place.sign(self.config)
        return progress if self.saved is None else restore_best_model(progress, self.saved, self.folder)


def _log_size(state: RunState) -> None:
    config, engine, data = state.config, state.engine, state.data
    if (workers := loading_processes(config)) < config.dataloader_num_workers:
        log.info("clips are loaded by %d processes, not %d: as many as cores", workers, config.dataloader_num_workers)
    parameters = sum(p.numel() for p in state.model.parameters()) / 1e6
    network = f"{config.variant} ({parameters:.2f} M parameters) on {engine.world_size} x {engine.device.type}"
    clips = count_of(config.train_batch_size * config.gradient_accumulation_steps * engine.world_size, "clip")
    one_size = f" of {config.n_frames} x {config.height} x {config.width} a step"
    clips += one_size if len(config.sizes.sizes) == 1 else f" a step, of {config.sizes.in_words()}"
    log.info("%s; %s; %d files train, %d validate", network, clips, len(data.train), len(data.validation))
