"""The training loop, and nothing else: read it from top to bottom.

A batch's way, with no turning back: clips -> device -> task (losses) -> gradients -> guards -> optimiser -> average of
weights -> log -> validate -> checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.config import TrainConfig
from tinyvae.data.clip_reading import ClipBatch
from tinyvae.errors import UserError
from tinyvae.losses.seraena_start import SeraenaStart
from tinyvae.training.ema import WeightAverage
from tinyvae.training.engine import Engine, StepResult
from tinyvae.training.guards import SignalWatch, Status, StopRequested, check_skipped, is_out_of_memory
from tinyvae.training.optimizers import OptimizerSet
from tinyvae.training.progress import Progress
from tinyvae.training.run_log import RunLog
from tinyvae.training.schedule import learning_rate_factor
from tinyvae.training.step_log import StepLog
from tinyvae.training.task import TrainingTask

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """What the loop drives; `tinyvae.training.start` puts it together."""

    config: TrainConfig
    run_folder: Path
    engine: Engine
    task: TrainingTask
    optimizers: OptimizerSet
    average: WeightAverage | None
    batches: Iterator[ClipBatch]
    run_log: RunLog
    signals: SignalWatch
    validate: Callable[[Progress, float], ValidationOutcome]
    save: Callable[[Progress, SeraenaStart | None, bool], None]


@dataclass(frozen=True, kw_only=True)
class ValidationOutcome:
    """What a validation changes: ``progress`` with best score and patience, the ``score`` itself, whether to stop."""

    progress: Progress
    score: float
    stop_early: bool


class Trainer:
    """Runs `LoopParts` from ``progress`` to the end of the configuration."""

    def __init__(self, parts: LoopParts, progress: Progress, seraena_start: SeraenaStart | None) -> None:
        self.parts = parts
        self.config = parts.config
        self.progress = progress
        self.seraena_start = seraena_start
        self.slices = 1  # parts that each micro-batch is cut into; doubled when memory runs out
        self.step_log = StepLog(parts.config, parts.engine)

    def train(self) -> Progress:
        """Train to the last step, an early stop (both return) or a signal (raises `StopRequested`)."""
        config, parts = self.config, self.parts
        first = self.progress.step
        with tqdm(
            total=config.max_train_steps, initial=first, desc="train", unit="step", disable=not parts.engine.is_main
        ) as bar:
            if self._validation_was_missed() and self._validate():
                return self.progress
            while self.progress.step < config.max_train_steps:
                started = time.perf_counter()
                clips = [next(parts.batches) for _ in range(config.gradient_accumulation_steps)]
                result = self.step(clips)
                self._count(clips, result, seconds=time.perf_counter() - started)
                bar.update()
                self._log(bar)
                self._stop_if_asked()
                if self._is_due(config.validation_steps) and self._validate():
                    return self.progress
                if self._is_due(config.checkpointing_steps) or self.progress.step == config.max_train_steps:
                    parts.save(self.progress, self.seraena_start, False)
        return self.progress

    def step(self, clips: list[ClipBatch]) -> StepResult:
        """One optimiser step over several micro-batches, all ranks together."""
        parts, config = self.parts, self.config
        if self.seraena_start is not None:
            self.seraena_start = self.seraena_start.before_step(self.progress.step)
        parts.optimizers.set_rates(learning_rate_factor(self.progress.step, config))
        while True:
            status = self._compute_gradients(clips)
            worst = Status(parts.engine.worst(status)[0])
            if worst == Status.WELL:
                break
            self._use_smaller_slices()
        result = parts.engine.finish_step(max_grad_norm=config.max_grad_norm)
        if result.stepped and parts.average is not None:
            parts.average.update(parts.task.model)
        return result

    def _compute_gradients(self, clips: list[ClipBatch]) -> Status:
        """The local work of a step: nothing in here waits for another rank, except Seraena's own exchange."""
        parts = self.parts
        self.step_log.begin_step()
        try:
            for batch in clips:
                frames = batch.model_input(parts.engine.device)
                for part in frames.chunk(self.slices):
                    self._add_gradients(part, share=len(part) / len(frames) / len(clips))
        except (RuntimeError, MemoryError) as fault:
            if not is_out_of_memory(fault):
                raise
            log.warning("process %d ran out of memory at step %d", parts.engine.rank, self.progress.step)
            parts.engine.discard_gradients()
            return Status.OUT_OF_MEMORY
        return Status.WELL

    def _add_gradients(self, frames: Tensor, *, share: float) -> None:
        use_seraena = self.seraena_start is not None and self.seraena_start.has_started
        with self.parts.engine.autocast():
            losses = self.parts.task.losses(frames, use_seraena=use_seraena)
        self.parts.engine.backward(losses.total * share)
        self.step_log.add(losses.logged, share=share)

    def _use_smaller_slices(self) -> None:
        """Some rank ran out of memory: all of them compute the same step again in smaller parts."""
        self.parts.engine.discard_gradients()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.slices >= self.config.train_batch_size:
            self.parts.save(self.progress, self.seraena_start, True)
            raise UserError(
                f"out of memory with a single clip of {self.config.n_frames} frames of {self.config.height}x"
                f"{self.config.width}; the run is saved. Use --gradient_checkpointing true, fewer frames or smaller "
                "ones, then --resume latest. See docs/troubleshooting.md#out-of-memory"
            )
        self.slices = min(self.config.train_batch_size, 2 * self.slices)
        log.warning("going on with micro-batches in %d parts: the same maths in less memory", self.slices)

    def _count(self, clips: list[ClipBatch], result: StepResult, *, seconds: float) -> None:
        engine, progress = self.parts.engine, self.progress
        num_clips = sum(len(batch) for batch in clips) * engine.world_size
        self.step_log.end_step(result, num_clips=num_clips, seconds=seconds)
        skipped_in_a_row = 0 if result.stepped else progress.skipped_in_a_row + 1
        self.progress = replace(
            progress,
            step=progress.step + 1,
            samples_seen=progress.samples_seen + num_clips,
            skipped_steps=progress.skipped_steps + (not result.stepped),
            skipped_in_a_row=skipped_in_a_row,
            training_s=progress.training_s + seconds,
        )
        if not result.stepped:
            self._report_skipped(clips)
            check_skipped(
                skipped_in_a_row, limit=self.config.max_skipped_steps, mixed_precision=self.config.mixed_precision
            )

    def _report_skipped(self, clips: list[ClipBatch]) -> None:
        """Name the clips of the ranks whose own loss was not finite (all of them where only the gradient was not)."""
        own = (math.isfinite(self.step_log.own_loss()), [name for batch in clips for name in batch.names])
        everybody = self.parts.engine.gather(own)
        suspects = [(rank, names) for rank, (finite, names) in enumerate(everybody) if not finite]
        suspects = suspects or [(rank, names) for rank, (_, names) in enumerate(everybody)]
        if self.parts.engine.is_main:
            listed = "; ".join(f"process {rank}: {', '.join(names)}" for rank, names in suspects)
            log.warning("step %d skipped: a loss or gradient was not finite (%s)", self.progress.step, listed)

    def _log(self, bar: tqdm) -> None:
        if self.step_log.is_due(self.progress.step):
            values = self.step_log.take()  # an exchange: every rank comes here at the same steps
            self.parts.run_log.metrics(self.progress.step, values)
            bar.set_postfix_str(self.step_log.bar_text(values))

    def _stop_if_asked(self) -> None:
        (signal_number,) = self.parts.engine.worst(self.parts.signals.received)
        if signal_number:
            self.parts.save(self.progress, self.seraena_start, True)
            raise StopRequested(signal_number)

    def _is_due(self, every: int) -> bool:
        """Whether something done every so many steps (0: never), and at the last one, is due after this step."""
        step = self.progress.step
        return every > 0 and (step % every == 0 or step == self.config.max_train_steps)

    def _validation_was_missed(self) -> bool:
        """Whether the run resumes from a save that a signal asked for between a step and its validation."""
        step = self.progress.step
        return step > 0 and self._is_due(self.config.validation_steps) and self.progress.validated_step != step

    def _validate(self) -> bool:
        """Validate; True where the run should end early."""
        outcome = self.parts.validate(self.progress, self.step_log.recent_loss)
        self.progress = outcome.progress
        if self.seraena_start is not None:
            was_started = self.seraena_start.has_started
            self.seraena_start = self.seraena_start.after_validation(self.progress.step, outcome.score)
            if self.seraena_start.has_started and not was_started:
                log.info("validation stopped improving: Seraena joins in at step %d", self.progress.step)
        if outcome.stop_early:
            self.parts.save(self.progress, self.seraena_start, False)
        return outcome.stop_early
