"""Exact resume: what a run remembers, which checkpoint it goes on from, and how it takes its state back.

Ranks have random states and a Seraena replay buffer of their own; all else is shared. The data order needs no state: it
follows from ``Progress.samples_seen``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tinyvae.config.schema import FIELDS, TrainConfig, to_json
from tinyvae.errors import MissingFileError, UserError, closed_paths_told
from tinyvae.losses.seraena import Seraena, saved_ranks_for
from tinyvae.losses.seraena.start import SeraenaStart
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model, plain_state, save_model
from tinyvae.training.checkpoint import (
    SHARED_STATE,
    WRITE_FAULTS,
    CheckpointWriter,
    broken_reason,
    list_checkpoints,
    newest_intact,
    rank_file,
    read_json,
    read_manifest,
    read_state,
)
from tinyvae.training.clips import RunData
from tinyvae.training.engine import Engine
from tinyvae.training.optim import WeightAverage, averaged_weights
from tinyvae.training.run_folder import earlier_run_folders
from tinyvae.training.validation import write_best_model, write_json

log = logging.getLogger(__name__)

HIGHER_IS_BETTER = {"psnr": True, "ssim": True, "lpips": False, "mse": False}
VALIDATION_SIZE = ("validation_n_frames", "validation_height", "validation_width")
SHOWN_NAMES = 3

FIXED_SETTINGS = {
    "variant", "model_width", "latent_space", "activation", "n_frames", "height", "width", "resolutions",
    "train_split", "split_by", "seed", "optimizer", "min_frame_delta", "max_frame_delta",
    "random_crop", "random_resize", "crop_candidates", "random_flip", "random_turn", "random_reverse", "color_jitter",
    "color_jitter_params",
    "gaussian_blur", "gaussian_blur_sigma", "gaussian_blur_probability",
    "use_seraena", "n_seraena_frames", "use_ref_vae",
}  # fmt: skip
"""A resumed run must have the same. Whether its videos are the same, their fingerprint tells, not their place."""

UNTOLD_SETTINGS = {
    "resume_from_checkpoint", "allow_changed_settings", "allow_cpu", "output_dir",
    "data_root", "annotation_file", "index_path", "use_sample_clips",
}  # fmt: skip
"""Settings that may change without a line in the log."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is. ``step``: optimizer steps done, with the skipped ones. ``samples_seen``: clips that all ranks
    together have drawn. ``training_s``: seconds in training steps, without start-up and validation."""

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
        """Whether a validation's score is better than the best so far; the first score always is."""
        best = self.best_score
        return best is None or (score > best if HIGHER_IS_BETTER[metric] else score < best)

    def without_scores(self) -> Progress:
        """The same, as before the first validation: the next one is the best so far."""
        return replace(self, best_score=None, best_step=None, stale_validations=0)


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """What the loop remembers. ``step_log``: this rank's `StepLog.state_dict` since the last log line, if any."""

    progress: Progress
    seraena_start: SeraenaStart | None
    step_log: dict[str, Any] | None = None


class SavedRun:
    """An intact checkpoint, opened; `asked_checkpoint` has found it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, _manifest_of(folder)
        self.shared = read_state(folder / SHARED_STATE)
        self.world_size: int = self.manifest["world_size"]

    def rank_state(self, rank: int) -> dict[str, Any]:
        return read_state(self.folder / rank_file(rank))


@closed_paths_told()
def asked_checkpoint(asked: str, config: TrainConfig) -> tuple[Path, list[str]]:
    """The checkpoint that ``--resume`` asks for, if this configuration can go on from it, and what is wrong with newer
    ones. Nothing is written. It reads and hashes every file: let one process do it for all.

    Example: ``folder, faults = asked_checkpoint("latest", config)``.
    """
    folder, faults = _find(asked, config)
    manifest = _manifest_of(folder)
    if config.max_train_steps < manifest["step"]:
        raise UserError(
            f"the run in {folder} has already taken {manifest['step']} steps, and max_train_steps is "
            f"{config.max_train_steps}; raise --max_train_steps, or resume from an earlier checkpoint."
        )
    changes, _ = _changed_settings(manifest["config"], config)
    _refuse(folder, changes, config)
    return folder, faults


def _manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that the main process has found intact."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} is not visible here; all machines must share the storage of the run.")
    return manifest


def _find(asked: str, config: TrainConfig) -> tuple[Path, list[str]]:
    """``asked``: a path, a run folder (its newest checkpoint), a bare name, or ``latest``."""
    runs = earlier_run_folders(config.output_dir)
    places = _first_few(list(map(str, runs))) or f"{config.output_dir} (no run folder yet)"
    path = Path(asked)
    is_run = path.is_dir() and list_checkpoints(path) and not (path / SHARED_STATE).exists()
    if asked == "latest" or is_run:
        newest, faults = newest_intact(runs if asked == "latest" else [path])
        if newest is not None:
            return newest, faults
        damaged = f" (damaged: {_first_few(faults)})" if faults else ""
        raise MissingFileError(
            f"resume_from_checkpoint is {asked!r}, but there is no intact checkpoint in "
            f"{places if asked == 'latest' else path}{damaged}; start without --resume, or name a checkpoint."
        )
    by_name = [run / asked for run in runs if len(path.parts) == 1]
    folder = next((place for place in (path, *by_name) if place.is_dir()), None)
    if folder is None:
        known = _first_few([str(info.folder) for info in reversed(list_checkpoints(*runs))]) or "none"
        weights = next((place for place in (path, *by_name) if place.is_file()), None)
        hint = f" To begin a run with the weights of a file: --pretrained_model_path {weights}." if weights else ""
        raise MissingFileError(
            f"resume_from_checkpoint is {asked!r}, but there is no such folder (looked at {path.absolute()} and in "
            f"{places}); the newest checkpoints there: {known}.{hint}"
        )
    if (fault := broken_reason(folder)) is not None:
        raise UserError(f"cannot resume from {folder}: {fault}; use --resume latest for the newest intact one.")
    return folder, []


def _first_few(names: list[str]) -> str:
    """``a, b, c and 12 more``."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def check_same_data(saved: SavedRun, config: TrainConfig, data: RunData) -> None:
    """Refuse other training files, unless ``allow_changed_settings``; log what has changed and is allowed."""
    changes, others = _changed_settings(saved.manifest["config"], config)
    if others:
        log.info("settings changed since the checkpoint: %s", "; ".join(others))
    stored = (saved.manifest.get("stored_clips"), data.stored_clips)
    if not changes:
        if saved.manifest["data_fingerprint"] != data.train.fingerprint:
            changes = ["the list of training files (files were added, removed or replaced, or others validate now)"]
        elif None not in stored and stored[0] != stored[1]:
            changes = [f"clips in the latent store: {stored[0]} -> {stored[1]}, which changes their order"]
        _refuse(saved.folder, changes, config)
    if changes:
        log.warning("resuming with changed settings, as allowed: %s", "; ".join(changes))


def _changed_settings(saved: Mapping[str, Any], config: TrainConfig) -> tuple[list[str], list[str]]:
    """Differences from the checkpoint's settings as ``key: old -> new``: of the fixed settings, and of the others."""
    # A setting that is younger than the checkpoint had its default.
    old, now = json.loads(to_json(TrainConfig())) | dict(saved), json.loads(to_json(config))
    changed = {key: f"{key}: {old[key]!r} -> {now[key]!r}" for key in FIELDS if old[key] != now[key]}
    fixed = [text for key, text in changed.items() if key in FIXED_SETTINGS]
    if (parts := _saved_parts(saved)) != config.trained_parts:
        fixed.append(f"what the losses train: {parts} -> {config.trained_parts}")
    return fixed, [text for key, text in changed.items() if key not in FIXED_SETTINGS | UNTOLD_SETTINGS]


def _saved_parts(saved: Mapping[str, Any]) -> str:
    """`TrainConfig.trained_parts` of a checkpoint's settings."""
    return TrainConfig(**{key: value for key, value in saved.items() if key in FIELDS}).trained_parts


def _refuse(folder: Path, changes: list[str], config: TrainConfig) -> None:
    if changes and not config.allow_changed_settings:
        way_out = "Set them back, or pass --allow_changed_settings to go on regardless"
        raise UserError(f"{folder} belongs to a run with other settings: {'; '.join(changes)}. {way_out}.")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The objects whose state a checkpoint holds."""

    config: TrainConfig
    engine: Engine
    writer: CheckpointWriter
    data: RunData
    model: TAEHV
    average: WeightAverage | None
    seraena: Seraena | None
    decided_by: str  # the validation score that decides on the best model

    def save(self, loop: LoopState, is_emergency: bool) -> bool:
        """Write a checkpoint, all ranks together; tell whether it is on disk."""
        progress = loop.progress
        written = self.writer.save(
            step=progress.step,
            emergency=is_emergency,
            shared_state=lambda: self._shared(loop),
            rank_state=self._of_rank(loop),
            write_model=lambda target: self._write_model(target, progress.step),
            facts=lambda: {
                "step": progress.step,
                "world_size": self.engine.world_size,
                "engine": self.engine.kind,
                "data_fingerprint": self.data.train.fingerprint,
                "stored_clips": self.data.stored_clips,
                "best_model": self._best_model(progress),
                "config": json.loads(to_json(self.config)),
            },
            best_step=progress.best_step,
        )
        return written is not None

    def _shared(self, loop: LoopState) -> dict[str, Any]:
        return {
            "progress": asdict(loop.progress),
            "scored_with": self._meaning_of_scores(),
            "model": plain_state(self.model),
            "average": None if self.average is None else self.average.state_dict(),
            "engine": self.engine.state_dict(),
            "seraena": None if self.seraena is None else self.seraena.shared_state_dict(),
            "seraena_start": None if loop.seraena_start is None else loop.seraena_start.state_dict(),
        }

    def _of_rank(self, loop: LoopState) -> dict[str, Any]:
        device = self.engine.device
        return {
            "cpu_random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "seraena": None if self.seraena is None else self.seraena.rank_state_dict(),
            "step_log": loop.step_log,
        }

    def _write_model(self, target: Path, step: int) -> None:
        with averaged_weights(self.model, self.average):
            save_model(self.model, target, overwrite=True, training_step=step, formats=(".safetensors",))

    def _best_model(self, progress: Progress) -> dict[str, Any] | None:
        """What identifies ``best_model/``: its ``model_info.json``, or step and score if a full disk prevented it."""
        if progress.best_step is None:
            return None
        info = _best_info(self.writer.run_folder)
        if info is not None and info["step"] == progress.best_step:
            return info
        return {"step": progress.best_step, self.decided_by: progress.best_score}

    def _meaning_of_scores(self) -> dict[str, Any]:
        """What two validations must have in common for their scores to be compared, in plain values."""
        config, validation = self.config, self.data.validation
        return {
            "metric_for_best_model": self.decided_by,
            "num_validation_samples": min(config.num_validation_samples, len(validation)),
            **dict(zip(VALIDATION_SIZE, config.validation_size, strict=True)),
            "min_frame_delta": config.min_frame_delta,
            "validation files": validation.fingerprint,
        }

    def restore(self, saved: SavedRun, fresh: LoopState) -> LoopState:
        """Take over a checkpoint's state; return where the loop was. ``fresh``: the loop of a new run."""
        shared, seraena_start = saved.shared, fresh.seraena_start
        self._restore_model(saved)
        settings, config = saved.manifest["config"], self.config
        old, new = settings["optimizer"], str(config.optimizer)
        if (parts := _saved_parts(settings)) != config.trained_parts:
            old, new = f"{old} for {parts}", f"{new} for {config.trained_parts}"
        if old == new:
            self.engine.load_state_dict(shared["engine"])
        elif self.engine.is_main:
            log.warning("the checkpoint was written with %s: the moments of %s start from zero", old, new)
        if seraena_start is not None and shared["seraena_start"] is not None:
            seraena_start = seraena_start.with_past_of(SeraenaStart.from_state_dict(shared["seraena_start"]))
        self._restore_seraena(saved)
        step_log = self._restore_rank(saved)
        progress = Progress(**shared["progress"])
        if not self._scores_compare(saved):
            progress = progress.without_scores()
            if seraena_start is not None:
                seraena_start = replace(seraena_start, best=None, stale_validations=0)
        return LoopState(progress=progress, seraena_start=seraena_start, step_log=step_log)

    def _restore_model(self, saved: SavedRun) -> None:
        wanted = {name: value.shape for name, value in self.model.state_dict().items()}
        if wanted != {name: value.shape for name, value in saved.shared["model"].items()}:
            raise UserError(
                f"the weights in {saved.folder} are those of another network; give variant and model_width as they "
                "were, or start a new run with --pretrained_model_path."
            )
        self.model.load_state_dict(saved.shared["model"])
        self.engine.weights_were_loaded()
        if self.average is not None:
            if saved.shared["average"] is None:
                raise UserError(f"{saved.folder} has no averaged weights; set ema_decay to 0 to go on from it.")
            self.average.load_state_dict(saved.shared["average"])

    def _restore_seraena(self, saved: SavedRun) -> None:
        if self.seraena is None or saved.shared["seraena"] is None:
            return
        self.seraena.load_shared_state_dict(saved.shared["seraena"])
        ranks = saved_ranks_for(self.engine.rank, saved.world_size, self.engine.world_size)
        self.seraena.load_rank_state_dicts(
            [dict(saved.rank_state(rank)["seraena"]) for rank in ranks],
            num_ranks_saved=saved.world_size,
            num_ranks=self.engine.world_size,
        )

    def _restore_rank(self, saved: SavedRun) -> dict[str, Any] | None:
        """Take over the random states; return this rank's unfinished log line."""
        if saved.world_size != self.engine.world_size:
            if self.engine.is_main:
                counts = f"{saved.world_size} process(es) and the run goes on with {self.engine.world_size}"
                kept = "weights, optimizer, schedule, data position and scores carry over"
                lost = "torch's random states, Seraena's draws and the averages of the next log line start again"
                log.warning("the checkpoint was written with %s: %s; %s", counts, kept, lost)
            return None
        own = saved.rank_state(self.engine.rank)
        torch.set_rng_state(own["cpu_random"])
        if own["cuda_random"] is not None and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_random"], self.engine.device)
        return own["step_log"]

    def _scores_compare(self, saved: SavedRun) -> bool:
        """Whether the checkpoint's scores can be compared with those to come; a warning says it if not."""
        new = self._meaning_of_scores()
        old = saved.shared.get("scored_with", new)  # older versions did not write it
        if old == new:
            return True
        if self.engine.is_main and saved.shared["progress"]["best_score"] is not None:
            changes = "; ".join(f"{key}: {old[key]} -> {new[key]}" for key in new if old[key] != new[key])
            what = "best score, early stopping and the automatic start of Seraena start again"
            log.warning("old and new scores cannot be compared (%s): %s with the next validation", changes, what)
        return False


def restore_best_model(progress: Progress, saved: SavedRun, folder: Path) -> Progress:
    """Make ``best_model/`` in the run's folder the one that the checkpoint names; main process only.

    A checkpoint of an older version names none: then the ``best_model/`` beside it counts if its step is right. If the
    model is nowhere to be found, the scores start again and the next validation writes it.
    """
    if progress.best_step is None:
        return progress
    best = saved.manifest.get("best_model") or _best_info(saved.folder.parent) or {}
    is_known = best.get("step") == progress.best_step
    if is_known and best == _best_info(folder):
        return progress
    try:
        source = _find_best(best, saved) if is_known else None
        if source is not None:
            write_best_model(folder, load_model(source / "model.safetensors"), best)
            write_json(folder / "best_model" / "model_info.json", best)  # with the time of its validation, not of now
            log.info("best_model/ is that of step %d again, from %s", progress.best_step, source)
            return progress
        fault = f"no checkpoint of step {progress.best_step} is left in {saved.folder.parent}"
    except (*WRITE_FAULTS, UserError) as reason:
        fault = str(reason).splitlines()[0]
    what = "best score and early stopping start again with the next validation, which writes it"
    log.warning("best_model/ cannot be made that of step %d (%s): %s", progress.best_step, fault, what)
    return progress.without_scores()


def _find_best(best: Mapping[str, Any], saved: SavedRun) -> Path | None:
    """The folder whose ``model.safetensors`` is the best model, as its validation scored it; None if there is none."""
    run = saved.folder.parent
    if best == _best_info(run):
        return run / "best_model"
    for folder in (saved.folder, run / f"checkpoint-{best['step']}"):
        manifest = read_manifest(folder)
        if manifest is not None and (manifest["step"], manifest.get("best_model")) == (best["step"], best):
            return folder if broken_reason(folder) is None else None
    return None


def _best_info(run_folder: Path) -> dict[str, Any] | None:
    """``best_model/model_info.json``; None if it is missing or damaged."""
    return read_json(run_folder / "best_model" / "model_info.json")
