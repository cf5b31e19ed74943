"""Going on from a checkpoint: which one is meant, whether it fits, and taking its state over.

A checkpoint that was asked for and is not there is an error, never a fresh start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyvae.config.schema import FIELDS, TrainConfig, to_json
from tinyvae.errors import MissingFileError, UserError
from tinyvae.training.checkpoint import (
    REPLACED,
    SHARED_STATE,
    list_checkpoints,
    newest_intact,
    rank_file,
    read_manifest,
    read_state,
    what_is_broken,
)
from tinyvae.training.run_folder import earlier_run_folders

log = logging.getLogger(__name__)

SHOWN_NAMES = 3

SETTINGS_OF_THE_RUN = (
    "variant",
    "model_width",
    "n_frames",
    "height",
    "width",
    "train_split",
    "split_by",
    "min_frame_delta",
    "max_frame_delta",
    "random_crop",
    "random_resize",
    "random_flip",
    "color_jitter",
    "color_jitter_params",
    "gaussian_blur",
    "gaussian_blur_sigma",
    "gaussian_blur_probability",
    "seed",
    "optimizer",
    "use_seraena",
    "n_seraena_frames",
    "use_ref_vae",
)
"""Settings that make a run what it is: the model, the clips and the state that a checkpoint carries for them. Where the
videos lie is not one of them: the fingerprint of the training files tells whether they are the same."""

SETTINGS_OF_THE_START = (
    "resume_from_checkpoint",
    "allow_changed_settings",
    "allow_cpu",
    "output_dir",
    "data_root",
    "annotation_file",
    "index_path",
    "use_sample_clips",
)
"""Settings whose change is not worth a word."""


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint whose every file has been checked. ``passed_over``: what is wrong with newer ones."""

    folder: Path
    passed_over: list[str]


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """An intact checkpoint, opened."""

    folder: Path
    manifest: dict[str, Any]
    shared: dict[str, Any]

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])

    def tidied(self) -> SavedRun:
        """The same checkpoint, where `remove_unfinished` gave it back the name that a killed save took from it."""
        if self.folder.exists():
            return self
        return replace(self, folder=self.folder.with_name(self.folder.name.removesuffix(REPLACED)))

    def rank_state(self, rank: int) -> dict[str, Any]:
        return read_state(self.folder / rank_file(rank))


def find_checkpoint(asked: str, config: TrainConfig) -> FoundCheckpoint:
    """What ``resume_from_checkpoint`` means: a path, a run folder (its newest), a bare name, or ``latest``.

    Reads and hashes every file: let one process do it for all.
    """
    runs = earlier_run_folders(config.output_dir)
    path = Path(asked)
    if asked == "latest":
        return _newest_of(runs, "resume_from_checkpoint is 'latest', but", _named(runs, config))
    if path.is_dir():
        if list_checkpoints(path) and not (path / SHARED_STATE).exists():
            return _newest_of([path], f"resume_from_checkpoint is {asked!r}, but", str(path))
        return _intact(path)
    by_name = [run / asked for run in runs if (run / asked).is_dir()]
    if len(path.parts) == 1 and by_name:
        return _intact(by_name[0])
    infos = sorted(
        (info for run in runs for info in list_checkpoints(run)), key=lambda info: info.age_key, reverse=True
    )
    newest = _first_few([str(info.folder) for info in infos]) or "none"
    raise MissingFileError(
        f"resume_from_checkpoint is {asked!r}, but there is no such folder (looked at {path.absolute()} and in "
        f"{_named(runs, config)}); the newest checkpoints there: {newest}."
    )


def _newest_of(runs: list[Path], asked: str, place: str) -> FoundCheckpoint:
    folder, faults = newest_intact(runs)
    if folder is None:
        damaged = f" (damaged: {_first_few(faults)})" if faults else ""
        raise MissingFileError(
            f"{asked} there is no intact checkpoint in {place}{damaged}; start without --resume, or name a checkpoint."
        )
    return FoundCheckpoint(folder=folder, passed_over=faults)


def _intact(folder: Path) -> FoundCheckpoint:
    fault = what_is_broken(folder)
    if fault is not None:
        raise UserError(f"cannot resume from {folder}: {fault}; use --resume latest for the newest intact one.")
    return FoundCheckpoint(folder=folder, passed_over=[])


def _named(runs: list[Path], config: TrainConfig) -> str:
    return _first_few(list(map(str, runs))) or f"{config.output_dir} (no run folder yet)"


def _first_few(names: list[str]) -> str:
    """``a, b, c and 12 more``."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def open_checkpoint(folder: Path) -> SavedRun:
    """Read a checkpoint that `find_checkpoint` has found intact."""
    return SavedRun(folder=folder, manifest=read_manifest(folder), shared=read_state(folder / SHARED_STATE))


def changed_settings(saved: Mapping[str, Any], config: TrainConfig) -> tuple[list[str], list[str]]:
    """Differences from the checkpoint's settings as ``key: old -> new``: of the model and the data, and all others."""
    now = json.loads(to_json(config))
    of_the_run, others = [], []
    for key in FIELDS:
        if key in saved and saved[key] != now[key]:
            difference = f"{key}: {saved[key]!r} -> {now[key]!r}"
            if key in SETTINGS_OF_THE_RUN:
                of_the_run.append(difference)
            elif key not in SETTINGS_OF_THE_START:
                others.append(difference)
    return of_the_run, others


def asked_checkpoint(asked: str, config: TrainConfig) -> FoundCheckpoint:
    """`find_checkpoint`, if it has the run's settings; its list of files is not looked at. Nothing is touched."""
    found = find_checkpoint(asked, config)
    _check_same_settings(found.folder, read_manifest(found.folder), config)
    return found


def _check_same_settings(folder: Path, manifest: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse to go on with another model or other clips, unless ``allow_changed_settings``.

    A run that is to end before the checkpoint is refused always; one that ends at it only writes its last files.
    """
    if config.max_train_steps < manifest["step"]:
        raise UserError(
            f"the run in {folder} has already taken {manifest['step']} steps, and max_train_steps is "
            f"{config.max_train_steps}; raise --max_train_steps, or resume from an earlier checkpoint."
        )
    changes, _ = changed_settings(manifest["config"], config)
    _refuse(folder, changes, config)


def check_same_data(saved: SavedRun, config: TrainConfig, *, data_fingerprint: str) -> None:
    """Refuse to go on with other files, unless ``allow_changed_settings``; say what has changed and is allowed."""
    changes, others = changed_settings(saved.manifest["config"], config)
    if others:
        log.info("settings changed since the checkpoint: %s", "; ".join(others))
    if not changes and saved.manifest["data_fingerprint"] != data_fingerprint:
        changes = ["the list of training files (files were added, removed or replaced)"]
        _refuse(saved.folder, changes, config)
    if changes:
        log.warning("resuming with changed settings, as allowed: %s", "; ".join(changes))


def _refuse(folder: Path, changes: list[str], config: TrainConfig) -> None:
    if changes and not config.allow_changed_settings:
        raise UserError(
            f"{folder} belongs to a run with other settings: {'; '.join(changes)}. Set them back, or pass "
            "--allow_changed_settings to go on regardless."
        )
