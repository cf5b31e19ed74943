"""Everything that a checkpoint must hold for the run to go on bit by bit, collected and put back.

Shared by all ranks: weights, their average, optimiser, loss scale, discriminator, progress. Each rank's own: the
random states and Seraena's replay buffer. Data order needs no state: it is a function of ``progress.samples_seen``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.losses.seraena import Seraena, saved_ranks_for
from tinyvae.losses.seraena.start import SeraenaStart
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model, plain_state
from tinyvae.training.checkpoint import SHARED_STATE, WRITE_FAULTS, read_state, what_is_broken
from tinyvae.training.clips import RunData
from tinyvae.training.engine import Engine
from tinyvae.training.optim import WeightAverage
from tinyvae.training.resume import SavedRun
from tinyvae.training.validation import write_best_model, write_json

HIGHER_IS_BETTER = {"psnr": True, "ssim": True, "lpips": False, "mse": False}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``step``: optimiser steps done (skipped ones included: they used up their clips). ``samples_seen``: clips that
    all ranks together have drawn. ``training_s``: seconds in training steps, without start-up and validation."""

    step: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_score: float | None = None
    best_step: int | None = None
    stale_validations: int = 0
    validated_step: int | None = None
    training_s: float = 0.0

    def improved_by(self, score: float, metric: str) -> bool:
        """Whether a validation's score beats the best so far; a first score always does."""
        if self.best_score is None:
            return True
        return score > self.best_score if HIGHER_IS_BETTER[metric] else score < self.best_score

    def with_scores_anew(self) -> Progress:
        """As before the first validation: the next one is the best so far."""
        return replace(self, best_score=None, best_step=None, stale_validations=0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """What the loop itself remembers. ``step_log``: this rank's numbers since the last log line, by
    `tinyvae.training.logs.StepLog.state_dict`; None: a new line starts."""

    progress: Progress
    seraena_start: SeraenaStart | None
    step_log: dict[str, Any] | None = None


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The objects whose state a checkpoint holds. ``optimizer``: its kind, by the configuration's name.
    ``scored_with``: what the scores of this run mean, by `what_scores_mean`."""

    model: TAEHV
    engine: Engine
    optimizer: str
    average: WeightAverage | None
    seraena: Seraena | None
    scored_with: Mapping[str, Any]

    def shared(self, loop: LoopState) -> dict[str, Any]:
        """What all ranks share; called on the main process."""
        return {
            "progress": loop.progress.to_dict(),
            "scored_with": dict(self.scored_with),
            "model": plain_state(self.model),
            "average": None if self.average is None else self.average.state_dict(),
            "engine": self.engine.state_dict(),
            "seraena": None if self.seraena is None else self.seraena.shared_state_dict(),
            "seraena_start": None if loop.seraena_start is None else loop.seraena_start.state_dict(),
        }

    def of_rank(self, loop: LoopState) -> dict[str, Any]:
        """What this rank has of its own."""
        on_gpu = self.engine.device.type == "cuda"
        return {
            "cpu_random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.engine.device) if on_gpu else None,
            "seraena": None if self.seraena is None else self.seraena.rank_state_dict(),
            "step_log": loop.step_log,
        }

    def restore(self, saved: SavedRun, seraena_start: SeraenaStart | None) -> LoopState:
        """Take a checkpoint's state over; where the run stood. ``seraena_start``: the rule of this configuration."""
        shared = saved.shared
        self._restore_model(saved)
        self._restore_engine(saved)
        if self.average is not None:
            if shared["average"] is None:
                raise UserError(
                    f"{saved.folder} was written without averaged weights; set ema_decay to 0 to go on from it."
                )
            self.average.load_state_dict(shared["average"])
        if seraena_start is not None and shared["seraena_start"] is not None:
            seraena_start = seraena_start.with_past_of(SeraenaStart.from_state_dict(shared["seraena_start"]))
        self._restore_seraena(saved)
        step_log = self._restore_own(saved)
        progress = Progress(**shared["progress"])
        if self._scores_mean_something_else(saved):
            progress = progress.with_scores_anew()
            if seraena_start is not None:
                seraena_start = replace(seraena_start, best=None, stale_validations=0)
        return LoopState(progress=progress, seraena_start=seraena_start, step_log=step_log)

    def _scores_mean_something_else(self, saved: SavedRun) -> bool:
        """Whether the checkpoint's scores cannot be compared with those to come; says so."""
        was = saved.shared.get("scored_with")  # one of an older version does not tell
        if was is None or was == self.scored_with:
            return False
        if self.engine.is_main and saved.shared["progress"]["best_score"] is not None:
            now = self.scored_with
            changes = [f"{key}: {was.get(key)} -> {now[key]}" for key in now if was.get(key) != now[key]]
            log.warning(
                "the scores so far cannot be compared with those to come (%s): best score, early stopping and the "
                "automatic start of Seraena begin anew with the next validation",
                "; ".join(changes),
            )
        return True

    def _restore_model(self, saved: SavedRun) -> None:
        wanted = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in saved.shared["model"].items()}
        if wanted != found:
            raise UserError(
                f"the weights in {saved.folder} are those of another network, so there is nothing to go on from; "
                "give variant and model_width as they were, or start a new run with --pretrained_model_path."
            )
        self.model.load_state_dict(saved.shared["model"])
        self.engine.weights_were_loaded()

    def _restore_engine(self, saved: SavedRun) -> None:
        was = saved.manifest["config"].get("optimizer")
        if was == self.optimizer:
            self.engine.load_state_dict(saved.shared["engine"])
        elif self.engine.is_main:
            log.warning("the checkpoint was written with %s: the moments of %s start anew", was, self.optimizer)

    def _restore_seraena(self, saved: SavedRun) -> None:
        if self.seraena is None or saved.shared["seraena"] is None:
            return
        self.seraena.load_shared_state_dict(saved.shared["seraena"])
        ranks = saved_ranks_for(self.engine.rank, saved.world_size, self.engine.world_size)
        states: list[Mapping[str, Any]] = [saved.rank_state(rank)["seraena"] for rank in ranks]
        self.seraena.load_rank_state_dicts(
            [dict(state) for state in states], num_ranks_saved=saved.world_size, num_ranks=self.engine.world_size
        )

    def _restore_own(self, saved: SavedRun) -> dict[str, Any] | None:
        """Take over the random states; this rank's unfinished log line."""
        if saved.world_size != self.engine.world_size:
            if self.engine.is_main:
                log.warning(
                    "the checkpoint was written with %d process(es) and the run goes on with %d: weights, optimiser, "
                    "schedule, data position and scores carry over; torch's random states, Seraena's draws and the "
                    "averages of the next log line start anew",
                    saved.world_size,
                    self.engine.world_size,
                )
            return None
        own = saved.rank_state(self.engine.rank)
        torch.set_rng_state(own["cpu_random"])
        if own["cuda_random"] is not None and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_random"], self.engine.device)
        return own["step_log"]


def what_scores_mean(config: TrainConfig, data: RunData) -> dict[str, Any]:
    """What two validations must have in common for their scores to be compared, in plain values."""
    n_frames, height, width = config.validation_size
    return {
        "metric_for_best_model": config.metric_for_best_model,
        "num_validation_samples": min(config.num_validation_samples, len(data.validation)),
        "validation_n_frames": n_frames,
        "validation_height": height,
        "validation_width": width,
        "min_frame_delta": config.min_frame_delta,
        "validation files": data.validation.fingerprint,
    }


def with_its_best_model(progress: Progress, saved: SavedRun, folder: Path) -> Progress:
    """Make ``best_model/`` in the run's folder that of ``progress``; main process only.

    After a resume from an earlier checkpoint it is of a future that did not happen, in a new folder it is not there.
    Where the right model is nowhere any more, the scores start anew: the next validation writes it.
    """
    if progress.best_step is None or _is_best_model(folder / "best_model", progress, saved):
        return progress
    run = saved.folder.parent
    source: Path | None = run / "best_model"
    try:
        if _is_best_model(run / "best_model", progress, saved):
            info = _read_json(run / "best_model" / "model_info.json")
        else:
            source, info = _checkpoint_of_best(progress, saved), _info_of_best(progress, saved)
        if source is not None:
            write_best_model(folder, load_model(source / "model.safetensors"), info)
            write_json(folder / "best_model" / "model_info.json", info)  # with the time of its validation, not of now
            log.info("best_model/ is that of step %d again, from %s", progress.best_step, source)
            return progress
        fault = f"no checkpoint of step {progress.best_step} is left in {run}"
    except (*WRITE_FAULTS, UserError) as reason:
        fault = str(reason).splitlines()[0]
    log.warning(
        "best_model/ cannot be made that of step %d (%s): best score and early stopping begin anew with the next "
        "validation, which writes it",
        progress.best_step,
        fault,
    )
    return progress.with_scores_anew()


def _metric(saved: SavedRun) -> str:
    return saved.manifest["config"].get("metric_for_best_model", "psnr")


def _is_best_model(folder: Path, progress: Progress, saved: SavedRun) -> bool:
    """Whether a ``best_model/`` is of the best step, and of this past of the run: another one has another score."""
    info = _read_json(folder / "model_info.json") or {}
    score = info.get(_metric(saved), progress.best_score)  # mse is not in there
    return info.get("step") == progress.best_step and score == progress.best_score


def _checkpoint_of_best(progress: Progress, saved: SavedRun) -> Path | None:
    """The checkpoint whose ``model.safetensors`` got the best score; None where it is gone, broken or of another past.

    Validations score what checkpoints hold there: averaged weights where there are any.
    """
    if progress.best_step == progress.step:
        return saved.folder
    folder = saved.folder.parent / f"checkpoint-{progress.best_step}"
    if not folder.is_dir() or what_is_broken(folder) is not None:
        return None
    then = read_state(folder / SHARED_STATE)["progress"]
    is_it = (then["best_step"], then["best_score"]) == (progress.best_step, progress.best_score)
    return folder if is_it else None


def _info_of_best(progress: Progress, saved: SavedRun) -> dict[str, Any]:
    """``model_info.json`` of the best step, as far as the history of the checkpoint's run tells it."""
    metric = _metric(saved)
    found = {metric: progress.best_score}
    for entry in _read_json(saved.folder.parent / "validation_history.json") or []:
        if entry["step"] == progress.best_step and entry.get(metric) == progress.best_score:
            found = entry
    names = ("psnr", "ssim", "lpips", "train_loss", "timestamp")
    return {"step": progress.best_step, **{name: found.get(name) for name in names}}


def _read_json(file: Path) -> Any:
    """A JSON file's content; None where it is not there or not whole."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
