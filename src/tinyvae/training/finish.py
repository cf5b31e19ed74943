"""What a finished run leaves: the final model in both formats, a card that describes it, and a report of its scores."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib import resources
from pathlib import Path

import jinja2
import torch
from torch import Tensor

from tinyvae import __version__
from tinyvae.config.schema import FIELDS, TrainConfig, to_json
from tinyvae.data.clip import choose_validation_clip
from tinyvae.data.clip_reading import read_clip
from tinyvae.data.index import IndexRow
from tinyvae.data.loader import MAX_KEPT_BYTES
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import ClipSource, Middle
from tinyvae.evaluation.compare import Comparison, compare_results
from tinyvae.evaluation.evaluating import EvaluationSettings, evaluate_round_trip
from tinyvae.evaluation.report import publish
from tinyvae.evaluation.results import Result
from tinyvae.evaluation.round_trip import TeacherRoundTrip, open_model
from tinyvae.evaluation.teacher_figures import beside_teacher
from tinyvae.files import why_not_written
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import save_model
from tinyvae.terminal import count_of
from tinyvae.training.checkpoint import WRITE_FAULTS, state_bytes
from tinyvae.training.clips import RunData, loading_processes, validation_settings
from tinyvae.training.optim import WeightAverage, averaged_weights
from tinyvae.training.resume import Progress
from tinyvae.training.validation import SHOWN_METRICS, Validator, score_in_words
from tinyvae.training.validation_teacher import uncompiled

log = logging.getLogger(__name__)


def write_final_model(
    config: TrainConfig, folder: Path, model: TAEHV, average: WeightAverage | None, progress: Progress, *, command: str
) -> None:
    """``final_model.safetensors``, ``final_model.pth`` (averaged weights if there are any) and ``model_card.md``."""
    try:
        with averaged_weights(model, average):
            for name in ("final_model.safetensors", "final_model.pth"):
                save_model(model, folder / name, overwrite=True, training_step=progress.step)
        if config.save_model_card:
            card = model_card(config, folder, model, progress, command=command)
            (folder / "model_card.md").write_text(card, encoding="utf-8", errors="backslashreplace")
    except WRITE_FAULTS as fault:
        reason = why_not_written(fault, folder, needed_bytes=2 * state_bytes(config)[0])
        raise UserError(
            f"the final model could not be written to {folder} ({reason}); make room and go on with --resume latest: "
            "only the last files are missing."
        ) from None
    log.info("final model: %s", folder / "final_model.safetensors")


def model_card(config: TrainConfig, folder: Path, model: TAEHV, progress: Progress, *, command: str) -> str:
    """A model card in Markdown: what the weights are, how they were made, how good they are, how to use them."""
    history = folder / "validation_history.json"
    entries = json.loads(history.read_text()) if history.is_file() else []
    weights = {key.removesuffix("_loss_weight"): getattr(config, key) for key in FIELDS if key.endswith("_loss_weight")}
    template = resources.files("tinyvae.training").joinpath("model_card.md").read_text(encoding="utf-8")
    return jinja2.Template(template, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).render(
        config=config,
        spec=model.spec,
        progress=progress,
        command=command,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        tinyvae=__version__,
        torch=torch.__version__,
        duration=timedelta(seconds=round(progress.training_s)),
        losses=", ".join(f"{name} ({weight:g})" for name, weight in weights.items() if weight > 0),
        entries=entries,
        # A run that is resumed with LPIPS weights has the score from there on.
        metrics=[name for name in SHOWN_METRICS if any(name in entry for entry in entries)],
        best_step=next((entry["step"] for entry in reversed(entries) if entry["is_best"]), None),
        validation_size=config.validation_size,
        count_of=count_of,
        score_in_words=score_in_words,
        settings=to_json(config),
    )


def write_run_report(validator: Validator, data: RunData, *, command: str) -> None:
    """Evaluate the run's best model (else its final one) on its validation clips: ``results.json``, ``report.html``.

    Clips that the validations have in memory are not read again. With a teacher the model stands beside it. If the
    report cannot be made, that is a warning.
    """
    config, folder, teacher = validator.config, validator.folder, validator.teacher
    started = time.perf_counter()
    if not len(data.validation):
        log.info("no report: the run has no validation files")
        return
    best = folder / "best_model" if (folder / "best_model").is_dir() else folder
    try:
        result = _evaluate(best, validator, data, command=command)
    except Exception as fault:
        n_frames, height, width = config.validation_size
        words = ["--data", str(config.data_source), "--frames", str(n_frames), "--size", f"{height}x{width}"]
        words += ["--teacher", teacher.path] if teacher is not None else []
        log.warning(
            "the run is complete, but its report could not be made: %s; make it again with: %s",
            str(fault) or type(fault).__name__,
            shlex.join(["tinyvae", "eval", str(best), *words, "--output", str(folder)]),
            exc_info=not isinstance(fault, UserError),  # a bug of ours comes with its traceback
        )
        return
    for figures in result.figures if isinstance(result, Comparison) else ():
        log.info("%s", figures.sentence())
    log.info("report: %s; %.1f s", folder / "report.html", time.perf_counter() - started)


def _evaluate(best: Path, validator: Validator, data: RunData, *, command: str) -> Result:
    """Evaluate the model in ``best`` as the validations did, and write the report into the run's folder."""
    config, teacher, device = validator.config, validator.teacher, validator.engine.device
    n_frames, height, width = config.validation_size
    clips = report_clips(config, data.validation, validator.known_clips)
    settings = EvaluationSettings(
        data=str(config.data_source),
        max_frames=n_frames,
        size=(height, width),
        max_clips=len(clips),
        middle=Middle(frame_step=config.min_frame_delta, scaled=config.random_resize),
    )
    models = [open_model(best, variant=config.variant, device=device, label=config.variant)]
    with torch.no_grad(), uncompiled():
        if teacher is not None:
            models = beside_teacher(models, TeacherRoundTrip(teacher.open(), teacher.path))
        results = [
            evaluate_round_trip(model, clips, settings, devices=[device], lpips=validator.lpips, compared_with=models)
            for model in models
        ]
        result = results[0] if teacher is None else compare_results(results)
        publish(result, models, validator.folder, command=command, clips=clips)
    return result


def report_clips(config: TrainConfig, validation: ClipSet, known: Mapping[str, Tensor]) -> list[ClipSource]:
    """The validation clips with their frames: from memory, else read by threads (FFmpeg works beside Python).

    Those that cannot be read are without frames: the evaluation says why. So are all others that are not ``known``
    where the clips together are larger than what a process keeps.
    """
    index, settings = validation.index, validation_settings(config)
    rows = [index.row(int(number)) for number in validation.rows[: config.num_validation_samples]]
    fits = len(rows) * settings.clip_bytes <= MAX_KEPT_BYTES

    def clip_of(row: IndexRow) -> ClipSource:
        clip = ClipSource(name=row.path, path=index.full_path(row))
        if (frames := known.get(row.path)) is None and fits:
            try:
                frames = read_clip(index, row, choose_validation_clip(row, settings), settings)
            except (UnreadableVideoError, OSError):
                return clip
        return clip if frames is None else replace(clip, info=index.info(row), frames=frames)

    with ThreadPoolExecutor(max_workers=max(1, loading_processes(config))) as pool:
        return list(pool.map(clip_of, rows))
