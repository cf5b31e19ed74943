"""How good the model is now: score raw and averaged weights, keep the best model, and say when to stop early."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip_reading import ClipBatch
from tinyvae.data.loader import ValidationLoader
from tinyvae.errors import UserError
from tinyvae.evaluation.metrics import ClipMetrics, clip_metrics
from tinyvae.evaluation.statistics import estimate
from tinyvae.files import atomic_write, why_not_written
from tinyvae.losses.perceptual import LPIPS
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import save_model
from tinyvae.training.checkpoint import WRITE_FAULTS
from tinyvae.training.engine import Engine
from tinyvae.training.guards import Status, StopRequested, is_out_of_memory
from tinyvae.training.logs import RunLog
from tinyvae.training.optim import WeightAverage, averaged_weights
from tinyvae.training.validation_teacher import DECODER, LATENT_SNR, ValidationTeacher, deciding_score, latent_snr

if TYPE_CHECKING:
    from tinyvae.training.resume import Progress

log = logging.getLogger(__name__)

HISTORY = "validation_history.json"
SHOWN_CLIPS = 4
ROUND_TRIP_METRICS = ("psnr", "ssim", "lpips")
SHOWN_METRICS = (*ROUND_TRIP_METRICS, "decoder_psnr", LATENT_SNR)
RECORDED_METRICS = ("psnr", "ssim", "lpips", "mse", "mae", "flicker_error", "flicker_energy")
DECODER_METRICS = ("psnr", "ssim", "lpips", "mse")  # of the decoder alone: those that can decide

Shown = list[tuple[str, Tensor, Tensor]]  # name, input, output; TCHW in [0, 1] on the CPU
Scores = dict[str, float]  # of a clip, by metric; ``decoder_NAME``: of the decoder on teacher latents
ScoresOfClip = tuple[Scores, Scores | None]  # with the weights that decide, and, of an average, with those without it


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """``metrics``: name -> mean over clips, and name_std -> spread over clips.

    ``raw_metrics``: the same of the weights without averaging; None where there is no average.
    """

    metrics: dict[str, float]
    raw_metrics: dict[str, float] | None = None
    num_clips: int
    shown: Shown


class ValidationCut(Exception):  # noqa: N818 (news for the loop)
    """All ranks left a validation half-way. ``reason``: why, as far as this rank knows; None: another rank knows."""

    def __init__(self, reason: Exception | None) -> None:
        super().__init__(str(reason or "another rank cannot go on"))
        self.reason = reason


@dataclass(frozen=True)
class Validator:
    """The validations of one run. All ranks call `validate` at the same steps and get the same outcome."""

    config: TrainConfig
    engine: Engine
    folder: Path
    _: KW_ONLY
    model: TAEHV
    average: WeightAverage | None  # its weights decide where there are any
    loader: ValidationLoader | None  # None for a run without validation
    lpips: LPIPS | None
    teacher: ValidationTeacher | None = None  # its latents of the clips are scored too
    run_log: RunLog
    stop_signal: Callable[[], int]  # the number of a signal that this rank has received, 0 for none
    from_step: int

    def __post_init__(self) -> None:
        if self.engine.is_main and (self.folder / HISTORY).is_file():
            write_json(self.folder / HISTORY, self.history)  # without a future that did not happen

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """What ``validation_history.json`` holds up to the step where the run begins, and what this run adds."""
        file = self.folder / HISTORY
        found = json.loads(file.read_text()) if file.is_file() else []
        return [entry for entry in found if entry["step"] <= self.from_step]

    @property
    def decided_by(self) -> str:
        """The name of the score that decides on the best model."""
        return deciding_score(self.config, with_teacher=self.teacher is not None)

    @contextmanager
    def reading_ahead(self) -> Iterator[None]:
        """Around the training: workers decode the clips of the first validation while the steps begin."""
        if self.loader is not None:
            self.loader.start()
        try:
            yield
        finally:
            if self.loader is not None:
                self.loader.close()

    @property
    def known_clips(self) -> dict[str, Tensor]:
        """The clips of this rank's validations that are in memory, by name: uint8 TCHW."""
        return {} if self.loader is None else self.loader.kept_clips

    def validate(self, progress: Progress, train_loss: float) -> tuple[Progress, float]:
        """Score, log, keep the best: the new progress and the score. ``train_loss``: of the newest log line, or NaN."""
        started, metric = time.perf_counter(), self.decided_by
        result = self._score()
        score = result.metrics.get(metric, math.nan)
        if math.isnan(score):
            raise UserError(
                f"validation at step {progress.step} gave no {metric}: the outputs are not finite or the metric "
                "could not be measured."
            )
        improved = progress.improved_by(score, self.config.metric_for_best_model)
        known_loss = train_loss if math.isfinite(train_loss) else None
        # What fails on the main process for good is raised by all ranks.
        is_best = improved and self.engine.from_main(lambda: self._keep_best(progress, result, known_loss))
        progress = replace(
            progress,
            best_score=score if is_best else progress.best_score,
            best_step=progress.step if is_best else progress.best_step,
            stale_validations=0 if improved else progress.stale_validations + 1,
            validated_step=progress.step,
        )
        if self.engine.is_main:
            self._record(progress, result, known_loss, seconds=time.perf_counter() - started)
            self._record_early_stop(progress)
        self.engine.barrier()
        return progress, score

    def _score(self) -> ValidationResult:
        assert self.loader is not None, "validation without a loader"
        shows = self.engine.is_main and self.config.save_validation_videos
        scorer = Scorer(
            model=self.model,
            device=self.engine.device,
            lpips=self.lpips,
            average=self.average,
            teacher=self.teacher,
            shows_decoder=self.decided_by.startswith(DECODER),
            num_shown=SHOWN_CLIPS if shows else 0,
        )
        self.model.eval()
        try:
            return validate(scorer, self.loader, self.engine, stop_signal=self.stop_signal)
        finally:
            self.model.train()

    def _keep_best(self, progress: Progress, result: ValidationResult, train_loss: float | None) -> bool:
        """Write ``best_model/``; whether this is the best model from now on. A full disk does not end the run here:
        three failed checkpoints do that. If no checkpoint of this step holds the model, the earlier one stays the best.
        """
        step = progress.step
        metrics: dict[str, float | None] = dict.fromkeys(ROUND_TRIP_METRICS)
        metrics |= {name: result.metrics[name] for name in SHOWN_METRICS if name in result.metrics}
        try:
            with averaged_weights(self.model, self.average):
                write_best_model(self.folder, self.model, {"step": step, **metrics, "train_loss": train_loss})
            return True
        except WRITE_FAULTS as fault:
            two_files = 2 * sum(p.numel() * p.element_size() for p in self.model.parameters())
            why = why_not_written(fault, self.folder, needed_bytes=two_files)
            every, last = self.config.checkpointing_steps, self.config.max_train_steps
            has_checkpoint = step == last or (every > 0 and step % every == 0)
            holds = "it still holds the earlier best" if (self.folder / "best_model").is_dir() else "there is none yet"
            if has_checkpoint:
                further = "This step's own checkpoint, once written, is kept beside the newest ones."
            elif progress.best_step is None:
                further = "No checkpoint is due at this step, so the next validation counts as first."
            else:
                further = "No checkpoint is due at this step, so later models are compared with that one."
            log.error(f"COULD NOT WRITE best_model/ of step {step} ({why}): {holds}. {further}")
            return has_checkpoint

    def _record(
        self, progress: Progress, result: ValidationResult, train_loss: float | None, *, seconds: float
    ) -> None:
        improved = progress.best_step == progress.step
        values = {f"val/{name}": value for name, value in result.metrics.items()}
        values |= {f"val_raw/{name}": value for name, value in (result.raw_metrics or {}).items()}
        self.run_log.metrics(progress.step, values)
        self.run_log.videos(progress.step, result.shown)
        entry = {
            "step": progress.step,
            "timestamp": datetime.now(UTC).isoformat(),
            "num_clips": result.num_clips,
            "train_loss": train_loss,
            "is_best": improved,
            **result.metrics,
            "raw": result.raw_metrics,
        }
        self.history[:] = [*(old for old in self.history if old["step"] != progress.step), entry]
        self._write(HISTORY, self.history)
        measured = [(name, result.metrics[name]) for name in SHOWN_METRICS if name in result.metrics]
        scores = ", ".join(f"{name} {score_in_words(name, score)}" for name, score in measured)
        best = f"best {self.decided_by}"
        if progress.best_step is None:
            best = "no best model yet"
        elif not improved:
            best += f" {score_in_words(self.decided_by, progress.best_score)} at step {progress.best_step}"
        log.info("validation at step %d: %s (%s); %.1f s", progress.step, scores, best, seconds)

    def _record_early_stop(self, progress: Progress) -> None:
        """``early_stop_info.json`` is there only while the run has stopped early; a larger patience removes it."""
        name = "early_stop_info.json"
        if not stops_early(progress, self.config):
            (self.folder / name).unlink(missing_ok=True)
            return
        info = {
            "step": progress.step,
            "metric": self.decided_by,
            "best_score": progress.best_score,
            "best_step": progress.best_step,
            "validations_without_improvement": progress.stale_validations,
            "patience": self.config.early_stopping_patience,
            "timestamp": datetime.now(UTC).isoformat(),
        }
        self._write(name, info)
        log.info("stopping early: no better %s in %d validations", info["metric"], progress.stale_validations)

    def _write(self, name: str, content: object) -> None:
        try:
            write_json(self.folder / name, content)
        except OSError as fault:
            log.error("could not write %s: %s", name, why_not_written(fault, self.folder))


def stops_early(progress: Progress, config: TrainConfig) -> bool:
    """Whether the last validations brought no improvement."""
    return 0 < config.early_stopping_patience <= progress.stale_validations


def score_in_words(name: str, score: float | None) -> str:
    """``11.00 dB`` for psnr and snr, ``0.9314`` for all others; a dash where there is none."""
    if score is None:
        return "–"
    return f"{score:.2f} dB" if name.endswith(("psnr", "snr")) else f"{score:.4f}"


def validate(
    scorer: Scorer, loader: ValidationLoader, engine: Engine, *, stop_signal: Callable[[], int] = lambda: 0
) -> ValidationResult:
    """Score a model on the validation clips.

    Each rank measures its own clips; then all ranks hold all results. Before each batch the ranks ask each other
    whether to go on. Whatever stops one of them raises `ValidationCut` on all; what is wrong with the clips of all
    ranks together raises the same ``UserError`` on all.
    """
    own: dict[str, ScoresOfClip] = {}
    batches, batch = iter(loader), None
    status, trouble = Status.WELL, None
    anybody_has_more = 1
    while anybody_has_more:
        try:
            if batch is not None:
                own |= scorer.measure(batch)
            batch = next(batches, None)
        except Exception as fault:  # noqa: BLE001 (all ranks hear of it, then the loop raises it)
            if is_out_of_memory(fault):  # it is not kept: its traceback would hold the tensors of that moment
                status = Status.OUT_OF_MEMORY
            else:
                status, trouble = Status.HAS_TO_STOP, fault
        signal_number, worst, anybody_has_more = engine.worst(stop_signal(), status, batch is not None)
        if signal_number:
            raise ValidationCut(StopRequested(signal_number)) from trouble
        if worst == Status.OUT_OF_MEMORY:
            trouble = UserError(
                "out of memory in validation; the run is saved. Use --validation_batch_size 1 or a smaller "
                "--validation_height and --validation_width, then --resume latest."
            )
        if worst != Status.WELL:
            raise ValidationCut(trouble) from trouble
    everybody = engine.gather((own, loader.reads))
    loader.check([reads for _, reads in everybody])
    if scorer.teacher is not None:
        scorer.teacher.forget()
    return _result([scores for scores, _ in everybody], scorer.shown)


def _result(everybody: Sequence[Mapping[str, ScoresOfClip]], shown: Shown) -> ValidationResult:
    """The means over the clips of all ranks, each given by name."""
    clips = {name: scores for of_rank in everybody for name, scores in of_rank.items()}
    assert clips, "a validation without a clip that passed the loader's check"
    ordered = [clips[name] for name in sorted(clips)]  # so that the sums do not depend on how the clips were shared out
    raw = [without_average for _, without_average in ordered if without_average is not None]
    return ValidationResult(
        metrics=_means([scores for scores, _ in ordered]),
        raw_metrics=_means(raw) if raw else None,
        num_clips=len(clips),
        shown=shown,
    )


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Measures batches: a model with its own weights, and with the averaged ones if there are any.

    With a ``teacher``: also the model's decoder on teacher latents (``decoder_psnr`` and the like), and its latents
    against the teacher's (``latent_snr``). ``shown`` gets up to ``num_shown`` clips of this rank for pictures;
    ``shows_decoder``: of the decoder on teacher latents.
    """

    model: TAEHV
    device: torch.device
    lpips: LPIPS | None
    average: WeightAverage | None = None
    teacher: ValidationTeacher | None = None
    shows_decoder: bool = False
    num_shown: int = 0
    shown: Shown = field(default_factory=list)

    @torch.no_grad()
    def measure(self, batch: ClipBatch) -> dict[str, ScoresOfClip]:
        """Scores of each clip of a batch, by name."""
        frames = batch.model_input(self.device)
        raw: list[Scores] | list[None] = [None] * len(batch)
        if self.average is not None:
            raw, _ = self._score(batch.names, frames)
        with averaged_weights(self.model, self.average):
            scores, (target, decoded) = self._score(batch.names, frames)
        for i in range(min(len(batch), self.num_shown - len(self.shown))):
            self.shown.append((batch.names[i], target[i].cpu(), decoded[i].cpu()))
        return dict(zip(batch.names, zip(scores, raw, strict=True), strict=True))

    def _score(self, names: Sequence[str], frames: Tensor) -> tuple[list[Scores], tuple[Tensor, Tensor]]:
        """Scores of clips with the weights that the model has now, and what can be shown: input and output NTCHW."""
        model = self.model
        target, decoded = model.target(frames), model.reconstruct(frames).float()
        scores = [_scores(clip, RECORDED_METRICS) for clip in clip_metrics(decoded, target, lpips=self.lpips)]
        if self.teacher is None:
            return scores, (target, decoded)
        frames = self.teacher.frames(frames)
        latents, of_teacher = self.teacher.latents(names, frames), model.target(frames)
        taught = model.decode_video(latents)[:, : of_teacher.shape[1]].float()
        decoder = clip_metrics(taught, of_teacher, lpips=self.lpips)
        near = latent_snr(model.encode_video(frames), latents)
        for clip, of_decoder, snr in zip(scores, decoder, near, strict=True):
            clip.update(_scores(of_decoder, DECODER_METRICS, prefix=DECODER))
            clip[LATENT_SNR] = snr
        return scores, (of_teacher, taught) if self.shows_decoder else (target, decoded)


def _scores(clip: ClipMetrics, names: Sequence[str], *, prefix: str = "") -> Scores:
    """Those of these metrics that could be measured."""
    return {f"{prefix}{name}": value for name in names if (value := clip.value(name)) is not None}


def _means(clips: Sequence[Scores]) -> dict[str, float]:
    """Mean of each score over the clips that have it (LPIPS may be on some machines alone), its spread as NAME_std."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for clip in clips for name in clip):
        found = estimate([clip[name] for clip in clips if name in clip])
        metrics |= {name: found.mean, f"{name}_std": found.std or 0.0}
    return metrics


def write_best_model(run_folder: Path, model: TAEHV, info: Mapping[str, Any]) -> None:
    """Replace ``best_model/``: the new one is whole on disk before the old one goes."""
    best, fresh, old = (run_folder / name for name in ("best_model", ".best_model.fresh", ".best_model.old"))
    put_best_model_back(run_folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        save_model(model, fresh, training_step=int(info["step"]))
        write_json(fresh / "model_info.json", {**info, "timestamp": datetime.now(UTC).isoformat()})
    except WRITE_FAULTS:
        shutil.rmtree(fresh, ignore_errors=True)  # a full disk needs the room
        raise
    if best.exists():
        best.rename(old)
    fresh.rename(best)
    shutil.rmtree(old, ignore_errors=True)


def put_best_model_back(run_folder: Path) -> None:
    """After a kill between the two renames of `write_best_model`, the old best model gets its name again."""
    best, old = run_folder / "best_model", run_folder / ".best_model.old"
    if old.is_dir() and not best.exists():
        old.rename(best)


def write_json(file: Path, content: object) -> None:
    with atomic_write(file, "w") as stream:
        json.dump(content, stream, indent=1)
