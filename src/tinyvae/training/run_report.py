"""``report.html`` of a finished run: its model on its own validation files, with the training curves."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import torch

from tinyvae.config import TrainConfig
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import ClipSource, Middle
from tinyvae.evaluation.evaluating import EvaluationSettings, evaluate_round_trip
from tinyvae.evaluation.open_model import open_model
from tinyvae.evaluation.publish import publish
from tinyvae.losses.perceptual import LPIPS
from tinyvae.training.clips import RunData

log = logging.getLogger(__name__)


def write_run_report(
    config: TrainConfig, folder: Path, data: RunData, lpips: LPIPS | None, *, device: torch.device, command: str
) -> None:
    """Evaluate the run's best model (else its final one) and write ``results.json`` and ``report.html``.

    The same clips as in the run's validations, so that its numbers are those of the best validation.
    """
    clips = validation_clips(config, data)
    if not clips:
        log.info("no report: the run has no validation files")
        return
    try:
        _write(config, folder, clips, lpips, device=device, command=command)
    except Exception as fault:
        log.warning(
            "the run is complete, but its report could not be made: %s; make it again with: %s",
            str(fault) or type(fault).__name__,
            command_again(config, folder),
            exc_info=not isinstance(fault, UserError),  # a mistake of ours comes with the place
        )
        return
    log.info("report: %s", folder / "report.html")


def command_again(config: TrainConfig, folder: Path) -> str:
    """The command that makes a report of the run's model."""
    n_frames, height, width = config.validation_size
    words = ["--data", str(config.data_source), "--max_frames", str(n_frames), "--size", f"{height}x{width}"]
    return shlex.join(["tinyvae", "eval", str(_best_model(folder)), *words, "--output_dir", str(folder)])


def _best_model(folder: Path) -> Path:
    return folder / "best_model" if (folder / "best_model").is_dir() else folder


def _write(
    config: TrainConfig,
    folder: Path,
    clips: list[ClipSource],
    lpips: LPIPS | None,
    *,
    device: torch.device,
    command: str,
) -> None:
    n_frames, height, width = config.validation_size
    source = config.data_source
    settings = EvaluationSettings(
        data=str(source),
        max_frames=n_frames,
        size=(height, width),
        max_clips=len(clips),
        middle=Middle(frame_step=config.min_frame_delta, scaled=config.random_resize),
    )
    round_trip = open_model(_best_model(folder), variant=config.variant, device=device, label=config.variant)
    with torch.no_grad():
        result = evaluate_round_trip(round_trip, clips, settings, devices=[device], lpips=lpips)
    publish(result, [round_trip], folder, command=command)


def validation_clips(config: TrainConfig, data: RunData) -> list[ClipSource]:
    """The files of the run's validations, in the same order."""
    index = data.validation.index
    rows = [index.row(int(number)) for number in data.validation.rows[: config.num_validation_samples]]
    return [ClipSource(name=row.path, path=index.full_path(row)) for row in rows]
