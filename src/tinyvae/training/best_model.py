"""What a run does at a validation: score raw and averaged weights, keep the best model, decide on stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.losses.perceptual import LPIPS
from tinyvae.models.taehv import TAEHV
from tinyvae.training.checkpoint import WRITE_FAULTS, why_not_written
from tinyvae.training.clips import RunData
from tinyvae.training.ema import WeightAverage
from tinyvae.training.engine import Engine
from tinyvae.training.logs import RunLog
from tinyvae.training.loop import ValidationOutcome
from tinyvae.training.preflight import state_bytes
from tinyvae.training.resume import Progress
from tinyvae.training.validation import (
    ValidationHistory,
    ValidationResult,
    score_in_words,
    validate,
    write_best_model,
    write_json,
)

log = logging.getLogger(__name__)


class Validator:
    """The validations of one run. All ranks call `validate` at the same steps and get the same outcome."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        folder: Path,
        *,
        model: TAEHV,
        average: WeightAverage | None,
        data: RunData,
        lpips: LPIPS | None,
        run_log: RunLog,
        stop_signal: Callable[[], int],
        from_step: int,
    ) -> None:
        """``stop_signal``: the number of a signal that this rank has received, 0 for none. ``from_step``: the step that
        the run begins at; what the history holds beyond it is dropped."""
        self._config = config
        self._engine = engine
        self._folder = folder
        self._model = model
        self._average = average
        self._lpips = lpips
        self._run_log = run_log
        self._stop_signal = stop_signal
        self._loader = data.validation_loader(engine) if config.validation_steps > 0 else None
        self._history = ValidationHistory(folder / "validation_history.json", up_to_step=from_step)
        if engine.is_main:
            self._history.write_what_is_left()

    def validate(self, progress: Progress, train_loss: float) -> ValidationOutcome:
        """Score, log, keep the best; the averaged weights decide where there are any.

        ``train_loss``: of the newest log line; NaN where there is none yet.
        """
        config = self._config
        raw = self._score() if self._average is not None else None
        with ExitStack() as swapped:
            if self._average is not None:
                swapped.enter_context(self._average.swapped_into(self._model))
            result = self._score()
            score = result.metrics.get(config.metric_for_best_model, math.nan)
            if math.isnan(score):
                raise UserError(
                    f"validation at step {progress.step} gave no {config.metric_for_best_model}: the outputs are not "
                    "finite or the metric could not be measured."
                )
            improved = progress.improved_by(score, config.metric_for_best_model)
            if improved:  # on all ranks: what the main process cannot mend is raised by all of them
                self._engine.from_main(lambda: self._keep_best(progress, result, train_loss))
        progress = replace(
            progress,
            best_score=score if improved else progress.best_score,
            best_step=progress.step if improved else progress.best_step,
            stale_validations=0 if improved else progress.stale_validations + 1,
            validated_step=progress.step,
        )
        stop = 0 < config.early_stopping_patience <= progress.stale_validations
        if self._engine.is_main:
            self._write_down(progress, result, raw, train_loss, improved=improved, stop=stop)
        self._engine.barrier()
        return ValidationOutcome(progress=progress, score=score)

    def _score(self) -> ValidationResult:
        assert self._loader is not None, "validation without a loader"
        was_training = self._model.training
        self._model.eval()
        try:
            return validate(self._model, self._loader, self._engine, lpips=self._lpips, stop_signal=self._stop_signal)
        finally:
            self._model.train(was_training)

    def _keep_best(self, progress: Progress, result: ValidationResult, train_loss: float) -> None:
        """Write ``best_model/``; a full disk must not end the run here: three failed checkpoints do that."""
        try:
            write_best_model(self._folder, self._model, self._info(progress, result, train_loss))
        except WRITE_FAULTS as fault:
            log.error(
                "COULD NOT WRITE best_model/ of step %d (%s): it still holds the earlier best. This step's own "
                "checkpoint, once written, is kept beside the newest ones.",
                progress.step,
                why_not_written(fault, self._folder, needed_bytes=2 * state_bytes(self._config).weights),
            )

    def _info(self, progress: Progress, result: ValidationResult, train_loss: float) -> dict[str, Any]:
        return {
            "step": progress.step,
            "psnr": result.metrics["psnr"],
            "ssim": result.metrics.get("ssim"),
            "lpips": result.metrics.get("lpips"),
            "train_loss": train_loss if math.isfinite(train_loss) else None,
        }

    def _write_down(
        self,
        progress: Progress,
        result: ValidationResult,
        raw: ValidationResult | None,
        train_loss: float,
        *,
        improved: bool,
        stop: bool,
    ) -> None:
        values = {f"val/{name}": value for name, value in result.metrics.items()}
        if raw is not None:
            values |= {f"val_raw/{name}": value for name, value in raw.metrics.items()}
        self._run_log.metrics(progress.step, values)
        if self._config.save_validation_videos:
            self._run_log.videos(progress.step, result.shown)
        entry = {
            "step": progress.step,
            "timestamp": datetime.now(UTC).isoformat(),
            "num_clips": result.num_clips,
            "train_loss": train_loss if math.isfinite(train_loss) else None,
            "is_best": improved,
            **result.metrics,
            "raw": None if raw is None else raw.metrics,
        }
        try:
            self._history.add(entry)
        except OSError as fault:  # the entry is written with the next one
            told = why_not_written(fault, self._folder)
            log.error("could not write validation_history.json at step %d: %s", progress.step, told)
        shown = ", ".join(
            f"{name} {score_in_words(name, result.metrics[name])}"
            for name in ("psnr", "ssim", "lpips")
            if name in result.metrics
        )
        metric = self._config.metric_for_best_model
        best = (
            f" (best {metric})"
            if improved
            else f" (best {metric} {score_in_words(metric, progress.best_score)} at step {progress.best_step})"
        )
        log.info("validation at step %d: %s%s", progress.step, shown, best)
        self._write_early_stop(progress, stop=stop)

    def _write_early_stop(self, progress: Progress, *, stop: bool) -> None:
        """``early_stop_info.json`` is there exactly while the run stands still for it; a larger patience ends that."""
        file = self._folder / "early_stop_info.json"
        if not stop:
            file.unlink(missing_ok=True)
            return
        info = {
            "step": progress.step,
            "metric": self._config.metric_for_best_model,
            "best_score": progress.best_score,
            "best_step": progress.best_step,
            "validations_without_improvement": progress.stale_validations,
            "patience": self._config.early_stopping_patience,
            "timestamp": datetime.now(UTC).isoformat(),
        }
        try:
            write_json(file, info)
        except OSError as fault:
            log.error("could not write %s: %s", file.name, why_not_written(fault, self._folder))
        log.info("stopping early: no better %s in %d validations", info["metric"], progress.stale_validations)
