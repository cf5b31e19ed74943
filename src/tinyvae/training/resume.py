"""Going on from a checkpoint: which one is meant, whether it fits, and taking its state over.

A checkpoint that was asked for and is not there is an error, never a fresh start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyvae.config import FIELDS, TrainConfig
from tinyvae.config_files.run_folder import earlier_run_folders
from tinyvae.config_files.saving import to_json
from tinyvae.errors import MissingFileError, UserError
from tinyvae.training.checkpoint import (
    SHARED_STATE,
    list_checkpoints,
    newest_intact,
    rank_file,
    read_manifest,
    read_state,
    what_is_broken,
)

log = logging.getLogger(__name__)

SETTINGS_OF_THE_RUN = (
    "variant",
    "model_width",
    "n_frames",
    "height",
    "width",
    "data_root",
    "annotation_file",
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
"""Settings that make a run what it is: the model, the clips and the state that a checkpoint carries for them."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """An intact checkpoint, opened."""

    folder: Path
    manifest: dict[str, Any]
    shared: dict[str, Any]

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])

    def rank_state(self, rank: int) -> dict[str, Any]:
        return read_state(self.folder / rank_file(rank))


def find_checkpoint(asked: str, config: TrainConfig) -> Path:
    """The folder that ``resume_from_checkpoint`` means: a path, a bare name, or ``latest``."""
    runs = earlier_run_folders(config.output_dir)
    if asked == "latest":
        found = newest_intact(runs)
        if found is None:
            raise MissingFileError(
                f"resume_from_checkpoint is 'latest', but there is no intact checkpoint in {_named(runs, config)}; "
                "start without --resume, or name a checkpoint."
            )
        return found
    path = Path(asked)
    if path.is_dir():
        if list_checkpoints(path) and not (path / SHARED_STATE).exists():  # a run folder: its newest
            newest = newest_intact([path])
            if newest is not None:
                return newest
        return path
    by_name = [run / asked for run in runs if (run / asked).is_dir()]
    if len(path.parts) == 1 and by_name:
        return by_name[0]
    available = ", ".join(info.folder.name for run in runs for info in list_checkpoints(run)) or "none"
    raise MissingFileError(
        f"resume_from_checkpoint is {asked!r}, but there is no such folder (looked at {path.absolute()} and in "
        f"{_named(runs, config)}); checkpoints there: {available}."
    )


def _named(runs: list[Path], config: TrainConfig) -> str:
    return ", ".join(map(str, runs)) if runs else f"{config.output_dir} (no run folder yet)"


def open_checkpoint(folder: Path) -> SavedRun:
    """Open a checkpoint after checking every file against its manifest."""
    fault = what_is_broken(folder)
    if fault is not None:
        raise UserError(f"cannot resume from {folder}: {fault}; use --resume latest for the newest intact one.")
    return SavedRun(folder=folder, manifest=read_manifest(folder), shared=read_state(folder / SHARED_STATE))


def changed_settings(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Settings of the model and the data that differ from the checkpoint's, as ``key: old -> new``."""
    now = json.loads(to_json(config))
    return [
        f"{key}: {saved.get(key)!r} -> {now[key]!r}"
        for key in SETTINGS_OF_THE_RUN
        if key in FIELDS and key in saved and saved[key] != now[key]
    ]


def check_same_run(saved: SavedRun, config: TrainConfig, *, data_fingerprint: str) -> None:
    """Refuse to go on with another model or other data, unless ``allow_changed_settings``."""
    changes = changed_settings(saved.manifest["config"], config)
    if not changes and saved.manifest["data_fingerprint"] != data_fingerprint:
        changes = ["the list of training files (files were added, removed or replaced)"]
    if not changes:
        return
    listed = "; ".join(changes)
    if not config.allow_changed_settings:
        raise UserError(
            f"{saved.folder} belongs to a run with other settings: {listed}. Set them back, or pass "
            "--allow_changed_settings to go on regardless."
        )
    log.warning("resuming with changed settings, as allowed: %s", listed)
