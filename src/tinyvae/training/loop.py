"""The training loop: clips -> losses -> gradients -> guards -> optimizer -> weight average -> log, validate, save."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip_reading import ClipBatch
from tinyvae.data.sizes import ClipSize
from tinyvae.errors import UserError
from tinyvae.losses.seraena import HalfStepError, SeraenaResult
from tinyvae.terminal import progress_bar
from tinyvae.training.diagnostics import StepProfiler, log_losses
from tinyvae.training.engine import Engine, PeerLostError, StepResult
from tinyvae.training.guards import (
    AnotherRankInTrouble,
    SignalWatch,
    Status,
    StopRequested,
    is_out_of_memory,
    out_of_memory_error,
    skipped_steps_error,
)
from tinyvae.training.logs import RunLog, StepLog
from tinyvae.training.notify import Notifier
from tinyvae.training.optim import OptimizerSet, WeightAverage, learning_rate_factor, learning_rates
from tinyvae.training.resume import LoopState, Progress
from tinyvae.training.task import TrainingTask
from tinyvae.training.validation import ValidationCut, stops_early

log = logging.getLogger(__name__)

STOPPED_ELSEWHERE = (
    "another process of this run had to stop, its own message says why; the run is saved, go on with --resume latest "
    "when that is fixed. See docs/troubleshooting.md#a-lost-process"
)


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """What the loop drives."""

    config: TrainConfig
    engine: Engine
    task: TrainingTask
    optimizers: OptimizerSet
    average: WeightAverage | None
    batches: Generator[ClipBatch, None, None]
    run_log: RunLog
    profiler: StepProfiler
    signals: SignalWatch
    notifier: Notifier
    validate: Callable[[Progress, float], tuple[Progress, float]]  # newest training loss in, score out
    save: Callable[[LoopState, bool], bool]  # is it an emergency? -> is the checkpoint on disk?


class Trainer:
    """Runs `LoopParts` from ``state`` to the end of the configuration."""

    def __init__(self, parts: LoopParts, state: LoopState) -> None:
        self.parts = parts
        self.config = parts.config
        self.progress = state.progress
        self.seraena_start = state.seraena_start
        # Size of a clip (TCHW) -> parts that each micro-batch is cut into; doubled when memory runs out.
        self.slices: Counter[torch.Size] = Counter()
        self.step_log = StepLog(parts.config, parts.engine)
        if state.step_log is not None:
            self.step_log.load_state_dict(state.step_log)
        self.mistake: UserError | None = None  # why this rank has to stop
        self.is_saved = True  # whether the newest save that was tried is on disk
        self.tells_more = parts.config.debug  # about the first step

    def train(self) -> Progress:
        """Train to the last step, an early stop (both return) or a signal (raises `StopRequested`)."""
        config, parts, begun_at = self.config, self.parts, self.progress.step
        parts.signals.hold()
        parts.notifier.is_at(self.progress)
        with progress_bar(
            total=config.max_train_steps, initial=begun_at, desc="train", unit="step", disable=not parts.engine.is_main
        ) as bar:
            if begun_at > 0 and self._is_due(config.validation_steps) and self.progress.validated_step != begun_at:
                # The run resumes from a save that a signal asked for between a step and its validation.
                self._validate(bar)
                self._save_if_due()
            elif stops_early(self.progress, config):
                log.info("this run had stopped early; a larger --early_stopping_patience makes it go on")
            while self.progress.step < config.max_train_steps and not stops_early(self.progress, config):
                started = time.perf_counter()
                clips = self._next_clips()
                waited_s = time.perf_counter() - started
                result = self.step(clips)
                self._count(clips, result, seconds=time.perf_counter() - started, waited_s=waited_s)
                parts.profiler.step()
                bar.update()
                if self.progress.step == begun_at + 1:
                    first_s = time.perf_counter() - started
                    parts_s = f"{waited_s:.1f} s of them for its clips, {first_s - waited_s:.1f} s to compute it"
                    log.info("first step done %.1f s after the start, %s", seconds_running(), parts_s)
                if self.step_log.is_due(self.progress.step):
                    self._log(bar)
                (signal_number,) = parts.engine.worst(parts.signals.received)
                if signal_number:
                    self._save(emergency=True)
                    raise StopRequested(signal_number)
                if self._is_due(config.validation_steps):
                    self._validate(bar)
                self._save_if_due()
        return self.progress

    def check_saved(self, folder: Path) -> None:
        if not self.is_saved:
            raise UserError(f"the last checkpoint of the finished run could not be written to {folder}; see train.log.")

    def _next_clips(self) -> list[ClipBatch]:
        """The clips of a step. If this rank has none, all ranks save before they stop."""
        stage = self.config.sizes.stage_at(self.progress.step)
        if stage.first_step == self.progress.step > 0:
            log.info("from step %d on the clips are %s", stage.first_step, stage.in_words())
        try:
            return [next(self.parts.batches) for _ in range(self.config.gradient_accumulation_steps)]
        except UserError as mistake:
            self.parts.engine.worst(Status.HAS_TO_STOP)  # meets the others where they next ask for the status
            self._save(emergency=True)
            raise self._shared_reason(mistake) from None

    def step(self, clips: list[ClipBatch]) -> StepResult:
        """One optimizer step over several micro-batches, all ranks together."""
        parts, config = self.parts, self.config
        if self.seraena_start is not None:
            self.seraena_start = self.seraena_start.before_step(self.progress.step)
        parts.optimizers.set_rates(learning_rate_factor(self.progress.step, config))
        while (worst := self._compute_gradients(clips)) != Status.WELL:
            parts.engine.discard_gradients()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if worst == Status.HAS_TO_STOP:
                self._save(emergency=True)
                raise self._shared_reason(self.mistake)
            self._use_smaller_slices(clips[0].frames.shape[1:])
        result = self._apply_gradients()
        if self.tells_more:
            applied = "applied" if result.stepped else "NOT applied"
            log.info("debug: gradient norm before clipping: %.6g, the step was %s", result.gradient_norm, applied)
            log_losses(learning_rates(self.progress.step, config))
            self.tells_more = False
        if result.stepped and parts.average is not None:
            parts.average.update(parts.task.model)
        return result

    def _compute_gradients(self, clips: list[ClipBatch]) -> Status:
        """The local work of a step, and how it went on the worst of the ranks."""
        self.step_log.begin_step()
        self.parts.task.begin_step(self.progress.step)
        try:
            for batch in clips:
                self._add_gradients(batch, share=1 / len(clips))
            status = Status.WELL
        except AnotherRankInTrouble as trouble:
            return trouble.status
        except (PeerLostError, HalfStepError):
            raise  # no other rank can be told, or nothing can be saved
        except UserError as mistake:  # for example a teacher that fails
            self.mistake = mistake
            status = Status.HAS_TO_STOP
        except (RuntimeError, MemoryError) as fault:
            if not is_out_of_memory(fault):
                raise
            log.warning("process %d ran out of memory at step %d", self.parts.engine.rank, self.progress.step)
            status = Status.OUT_OF_MEMORY
        return Status(self.parts.engine.worst(status)[0])

    def _add_gradients(self, batch: ClipBatch, *, share: float) -> None:
        """Gradients of one micro-batch; ``share``: its part of the step's clips."""
        task, engine = self.parts.task, self.parts.engine
        use_seraena = self.seraena_start is not None and self.seraena_start.has_started
        frames = batch.model_input(engine.device)
        latents = None if batch.latents is None else batch.latents.to(engine.device)
        length = math.ceil(len(frames) / (self.slices[frames.shape[1:]] or 1))
        rows = [slice(first, first + length) for first in range(0, len(frames), length)]
        parts = [frames[of_part] for of_part in rows]
        stored = [None if latents is None else latents[of_part] for of_part in rows]
        positions = [batch.positions[of_part] for of_part in rows]
        corrections: list[SeraenaResult | None] = [None] * len(parts)
        if use_seraena and len(parts) > 1:
            with engine.autocast():
                corrections = list(task.correct_in_parts(parts, stored=stored, positions=positions))
        for part, corrected, of_teacher, places in zip(parts, corrections, stored, positions, strict=True):
            with engine.autocast():
                losses = task.losses(
                    part,
                    use_seraena=use_seraena,
                    step=self.progress.step,
                    corrected=corrected,
                    stored=of_teacher,
                    positions=places,
                )
            weight = share * len(part) / len(frames)
            # A loss that is not finite can have finite gradients, and the guard looks at those alone: make them NaN.
            is_finite = torch.isfinite(losses.total.detach())
            engine.backward(losses.total * torch.where(is_finite, weight, torch.nan))
            self.step_log.add(losses.logged, share=weight)

    def _use_smaller_slices(self, size: torch.Size) -> None:
        """Some rank ran out of memory: all of them compute the same step again in smaller parts, and so all later
        steps with clips of this size (TCHW)."""
        most, slices = self.config.train_batch_size, self.slices[size] or 1
        if slices >= most:
            self._save(emergency=True)
            n_frames, _, height, width = size
            raise out_of_memory_error(n_frames, height, width)
        self.slices[size] = min(most, 2 * slices)
        of_size = "" if len(self.config.sizes.sizes) == 1 else f" for clips of {size[0]}x{size[2]}x{size[3]}"
        what = f"{self.slices[size]} parts{of_size}"
        log.warning("going on with micro-batches in %s: the same math in less memory", what)

    def _apply_gradients(self) -> StepResult:
        try:
            return self.parts.engine.finish_step(max_grad_norm=self.config.max_grad_norm)
        except (RuntimeError, MemoryError) as fault:
            if not is_out_of_memory(fault):
                raise
            # No save: some ranks may have stepped. The others notice that this one is lost.
            raise UserError(
                "out of memory while the gradients were applied; use --gradient_checkpointing true or a smaller "
                "--train_batch_size, then --resume latest. See docs/troubleshooting.md#out-of-memory"
            ) from None

    def _count(self, clips: list[ClipBatch], result: StepResult, *, seconds: float, waited_s: float) -> None:
        """Add a finished step to the progress; end the run after too many skipped steps in a row."""
        config, progress = self.config, self.progress
        num_clips = sum(len(batch) for batch in clips) * self.parts.engine.world_size
        n_frames, _, height, width = clips[0].frames.shape[1:]
        size = ClipSize(n_frames, height, width)
        self.step_log.end_step(result, num_clips=num_clips, size=size, seconds=seconds, waited_s=waited_s)
        skipped_in_a_row = 0 if result.stepped else progress.skipped_in_a_row + 1
        self.progress = replace(
            progress,
            step=progress.step + 1,
            samples_seen=progress.samples_seen + num_clips,
            skipped_steps=progress.skipped_steps + (not result.stepped),
            skipped_in_a_row=skipped_in_a_row,
            training_s=progress.training_s + seconds,
        )
        self.parts.notifier.is_at(self.progress)
        if not result.stepped:
            self._report_skipped(clips)
            if skipped_in_a_row >= config.max_skipped_steps:
                self._save(emergency=True)
                raise skipped_steps_error(skipped_in_a_row, mixed_precision=config.mixed_precision)

    def _report_skipped(self, clips: list[ClipBatch]) -> None:
        """Name the clips of the ranks whose own loss was not finite (of all ranks where only the gradient was not)."""
        names = ", ".join(name for batch in clips for name in batch.names)
        own = (math.isfinite(self.step_log.own_loss()), f"process {self.parts.engine.rank}: {names}")
        ranks = self.parts.engine.gather(own)
        suspects = [told for is_finite, told in ranks if not is_finite] or [told for _, told in ranks]
        if self.parts.engine.is_main:
            step, listed = self.progress.step, "; ".join(suspects)
            log.warning("step %d skipped: a loss or gradient was not finite (%s)", step, listed)

    def _log(self, bar: tqdm) -> None:
        values = self.step_log.take(self.progress.step)  # an exchange: every rank comes here at the same steps
        self.parts.run_log.metrics(self.progress.step, values)
        text = self.step_log.bar_text(values)
        bar.set_postfix_str(text)
        self.parts.run_log.note(f"step {self.progress.step} of {self.config.max_train_steps}: {text}")

    def _is_due(self, every: int) -> bool:
        """Whether something is due that is done every ``every`` steps (0: never) and after the last one."""
        step = self.progress.step
        return every > 0 and (step % every == 0 or step == self.config.max_train_steps)

    def _validate(self, bar: tqdm) -> None:
        """Score the model. If a validation fails, all ranks save before they stop; a resumed run validates again."""
        try:
            self.progress, score = self.parts.validate(self.progress, self.step_log.recent_loss)
        except PeerLostError:
            raise  # no rank is left to save with
        except (ValidationCut, UserError) as cut:  # all ranks raise the same
            self._save(emergency=True)
            raise self._shared_reason(cut.reason if isinstance(cut, ValidationCut) else cut) from None
        self.parts.notifier.is_at(self.progress)
        if stops_early(self.progress, self.config) and self.step_log.num_clips:
            self._log(bar)  # no later line would hold these steps
        if self.seraena_start is not None and not self.seraena_start.has_started:
            self.seraena_start = self.seraena_start.after_validation(self.progress.step, score)
            if self.seraena_start.has_started:
                log.info("validation stopped improving: Seraena joins in at step %d", self.progress.step)

    def _shared_reason(self, own: Exception | None) -> Exception:
        """Why the run stops, on every rank: ``own``, or the mistake that another rank has met. So all have one exit
        code, and no machine starts a run again that waits for its user."""
        told = self.parts.engine.gather(str(own) if isinstance(own, UserError) else "")
        mistake = next(filter(None, told), None)
        return own or (PeerLostError(STOPPED_ELSEWHERE) if mistake is None else UserError(mistake))

    def _save_if_due(self) -> None:
        at_the_end = self.progress.step == self.config.max_train_steps or stops_early(self.progress, self.config)
        if self._is_due(self.config.checkpointing_steps) or at_the_end:
            self._save(emergency=False)

    def _save(self, *, emergency: bool) -> None:
        state = LoopState(progress=self.progress, seraena_start=self.seraena_start, step_log=self.step_log.state_dict())
        self.is_saved = self.parts.notifier.is_saved = self.parts.save(state, emergency)
        self.parts.notifier.is_at(self.progress)


def seconds_running() -> float:
    """Since this process started."""
    created = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux counts from its boot, and psutil knows the time of that to a second
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (created - psutil.boot_time())
    return time.time() - created
