"""``results.json`` and ``report.html``: everything that an evaluation or a comparison found.

The page is one file that opens offline. ``page.html`` is its jinja2 template; this file prepares the values. The
constants below bound the size of the page. ``results.json`` always has all clips and frames.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from tinyvae.evaluation.clip_sources import ClipSource
from tinyvae.evaluation.compare import Comparison
from tinyvae.evaluation.evaluating import ClipResult, EvaluationResult
from tinyvae.evaluation.metrics import METRICS, MetricInfo, sortable
from tinyvae.evaluation.pictures import HEAT_FULL_SCALE, HEAT_STOPS, ClipEvidence, gather_evidence
from tinyvae.evaluation.results import Result, in_ms, write_results
from tinyvae.evaluation.round_trip import RoundTrip
from tinyvae.files import atomic_write
from tinyvae.terminal import in_utf8

DEFAULT_FILMS = 6  # clips with a film and pictures, under about 1 MB each
MAX_ROWS = 2000  # of the table of clips
MAX_CURVE_NUMBERS = 200_000
MAX_CURVE_FRAMES = 2000  # of one clip
MAX_TRAINING_POINTS = 400  # of one curve; longer ones are thinned evenly, the first and the last point stay
SPARK_POINTS = 48
CURVE_GROUPS = ("val/psnr", "val/ssim", "val/lpips", "val/flicker", "val/", "train/loss", "train/")  # in this order

Curves = dict[str, list[tuple[float, float]]]  # of a run: name -> (step, value) in the order of steps


def publish(
    result: Result,
    round_trips: Sequence[RoundTrip],
    folder: Path,
    *,
    command: str,
    num_films: int = DEFAULT_FILMS,
    clips: Sequence[ClipSource] = (),
    show_progress_bar: bool = False,
) -> list[Path]:
    """Write ``results.json`` and ``report.html`` into a folder and return their paths.

    The clips that the page shows go through the models again for their films; those of ``clips`` are not probed again,
    nor read if their frames are there. ``command`` is printed on the page.

    Example: ``publish(evaluate(round_trip, "videos/val"), [round_trip], Path("out"), command="my script")``
    """
    folder.mkdir(parents=True, exist_ok=True)
    results_file, report_file = folder / "results.json", folder / "report.html"
    write_results(result, results_file, command=command)
    evidence = gather_evidence(
        round_trips, result.evaluations, limit=num_films, clips=clips, show_progress_bar=show_progress_bar
    )
    training_of, training = _training(result.evaluations)
    text = report_html(result, evidence, command=command, training=training, training_of=training_of)
    with atomic_write(report_file, "w") as stream:
        stream.write(in_utf8(text))
    return [results_file, report_file]


def report_html(
    result: Result, evidence: Sequence[ClipEvidence] = (), *, command: str, training: Curves, training_of: str = ""
) -> str:
    """The whole page. ``training_of``: the label of the model whose run the training curves are of."""
    evaluations = result.evaluations
    tables = [{clip.name: clip for clip in evaluation.clips} for evaluation in evaluations]
    listed = {name: [table[name] for table in tables] for name in listed_clips(evaluations)}
    measured = [info for name, info in METRICS.items() if any(e.summary.value(name) for e in evaluations)]
    figures = result.figures if isinstance(result, Comparison) else ()
    worst_cards = [(clip, worst) for clip in evidence for worst in clip.worst_frames]
    main_curves = [name for name, points in training.items() if not _is_detail(name, points)]
    page = _environment().get_template("page.html")
    return page.render(
        evaluations=evaluations,
        comparison=result if isinstance(result, Comparison) else None,
        figures=figures,
        row_words={figure.label: words for one in figures for words, figure in one.rows().items()},
        by_label={evaluation.model.label: evaluation for evaluation in evaluations},
        metrics=METRICS,
        measured=measured,
        best_and_worst=best_and_worst,
        skipped=list({skip.name: skip.reason for e in evaluations for skip in e.skipped}.values()),
        notes=list(dict.fromkeys(note for e in evaluations for note in e.notes)),
        rows=[_clip_row(name, clips, measured) for name, clips in listed.items()],
        evidence=evidence,
        worst_cards=sorted(worst_cards, key=lambda card: sortable(card[1].psnr)),
        heat_stops=[" ".join(f"{value:.0f}" for value in color) for color in HEAT_STOPS.tolist()],
        heat_levels=f"{HEAT_FULL_SCALE * 255:.0f}",
        training_of=training_of,
        main_curves=main_curves,
        more_curves=[name for name in training if name not in main_curves],
        command=command,
        data=_page_data(evaluations, evidence, listed, training),
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["in_ms"] = in_ms
    environment.filters["rate"] = lambda number: f"{number:,.1f}" if number < 100 else f"{number:,.0f}"
    return environment


def listed_clips(evaluations: Sequence[EvaluationResult]) -> list[str]:
    """Names of the clips in the table: those of every model, worst first; of too many the worst and the best half."""
    tables = [evaluation.by_name() for evaluation in evaluations]
    shared = [name for name in tables[0] if all(name in table for table in tables)]
    shared.sort(key=lambda name: sortable(tables[-1][name].psnr))
    return shared if len(shared) <= MAX_ROWS else shared[: MAX_ROWS // 2] + shared[-MAX_ROWS // 2 :]


def best_and_worst(result: EvaluationResult, info: MetricInfo) -> tuple[ClipResult, ClipResult]:
    """The clips with the best and the worst value of a metric that at least one clip has; NaN is the worst."""
    found = [(value, clip) for clip in result.clips if (value := clip.metrics.value(info.name)) is not None]
    found.sort(key=lambda pair: (math.isnan(pair[0]), info.badness(pair[0])))
    return found[0][1], found[-1][1]


def _clip_row(name: str, clips: Sequence[ClipResult], measured: Sequence[MetricInfo]) -> dict[str, Any]:
    """One row of the table of clips; ``clips``: the results of all models."""
    cells = []
    for info in measured:
        values = [clip.metrics.value(info.name) for clip in clips]
        cells += [_cell(info, value, info.shown) for value in values]
        if len(clips) > 1:
            first, last, difference = values[0], values[-1], None
            if first is not None and last is not None and math.isfinite(last - first):
                difference = info.difference(first, last)
            cells.append(_cell(info, difference, info.shown_difference))
    psnr = [value for value in clips[-1].metrics.psnr_by_frame if math.isfinite(value)]
    return {
        "name": name,
        "frames": clips[0].metrics.num_frames,
        "height": clips[0].height,
        "width": clips[0].width,
        "cells": cells,
        "spark": ",".join(f"{value:.2f}" for value in psnr[:: max(1, len(psnr) // SPARK_POINTS)]),
    }


def _cell(info: MetricInfo, value: float | None, shown: Callable[[float], str]) -> dict[str, str]:
    """A number as it is shown, and as the table sorts it: what has none is last."""
    sorted_by = f"{value:.8g}" if value is not None and math.isfinite(value) else ""
    return {"metric": info.name, "value": sorted_by, "text": "–" if value is None else shown(value)}


def _page_data(
    evaluations: Sequence[EvaluationResult],
    evidence: Sequence[ClipEvidence],
    listed: dict[str, list[ClipResult]],
    training: Curves,
) -> dict[str, Any]:
    """What the script of the page reads. The curves of the clips with a film come first."""
    with_film = {clip.name: listed[clip.name] for clip in evidence if clip.name in listed}
    return {
        "models": [evaluation.model.label for evaluation in evaluations],
        "metrics": [info._asdict() for info in METRICS.values()],
        "curves": _curves({**with_film, **listed}),
        "players": [{"name": clip.name, **asdict(clip.film)} for clip in evidence],
        "training": training,
    }


def _curves(listed: dict[str, list[ClipResult]]) -> list[dict[str, Any]]:
    """Values of the frames of the clips, in this order, until the budget of the page is spent."""
    curves: list[dict[str, Any]] = []
    spent = 0
    for name, clips in listed.items():
        frames = curve_frames(clips[-1])
        series = [_series(clip, frames or range(clips[-1].metrics.num_frames)) for clip in clips]
        spent += sum(len(values) for one in series for values in one.values())
        if spent > MAX_CURVE_NUMBERS and curves:
            break
        curves.append({"name": name, "frames": frames, "series": series})
    return curves


def curve_frames(clip: ClipResult) -> list[int] | None:
    """The frames of a long film's curves: the worst (by PSNR) of each stretch of equal length; None: all frames."""
    psnr = clip.metrics.psnr_by_frame
    if len(psnr) <= MAX_CURVE_FRAMES:
        return None
    bounds = [round(i * len(psnr) / MAX_CURVE_FRAMES) for i in range(MAX_CURVE_FRAMES + 1)]
    return [
        min(range(start, stop), key=lambda place: sortable(psnr[place])) for start, stop in itertools.pairwise(bounds)
    ]


def _series(clip: ClipResult, frames: Sequence[int]) -> dict[str, list[float | None]]:
    """Values at ``frames``; None where a frame has none (flicker of the first)."""
    found: dict[str, list[float | None]] = {}
    for metric, info in METRICS.items():
        if values := getattr(clip.metrics, f"{metric}_by_frame"):
            found[metric] = [
                float(f"{values[place]:.5g}") if 0 <= place < len(values) and math.isfinite(values[place]) else None
                for place in (frame - info.first_frame for frame in frames)
            ]
    return found


def _training(evaluations: Sequence[EvaluationResult]) -> tuple[str, Curves]:
    """(label, curves) of the last model that comes from a run; ("", {}) where none does."""
    for model in (evaluation.model for evaluation in reversed(evaluations)):
        if model.path is not None and (run_folder := find_run_folder(Path(model.path))) is not None:
            return model.label, read_training_curves(run_folder)
    return "", {}


def find_run_folder(model_path: Path) -> Path | None:
    """The run that a model belongs to: the path itself, or up to two folders above it, that holds ``metrics.jsonl``."""
    folders = (model_path, *model_path.absolute().parents[:2])
    return next((folder for folder in folders if (folder / "metrics.jsonl").is_file()), None)


def read_training_curves(run_folder: Path) -> Curves:
    """``{"train/loss": [(step, value), ...], ...}`` of a run. Lines that a crash cut off are left out."""
    curves: dict[str, dict[float, float]] = {}
    for line in (run_folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        _add_entry(curves, _parsed(line), prefix="")
    history = run_folder / "validation_history.json"
    for entry in (_parsed(history.read_text(errors="replace")) if history.is_file() else None) or []:
        _add_entry(curves, entry, prefix="val/")
    names = sorted(curves, key=lambda name: ([not name.startswith(group) for group in CURVE_GROUPS], name))
    return {name: _thinned(sorted(curves[name].items())) for name in names}


def _add_entry(curves: dict[str, dict[float, float]], entry: Any, *, prefix: str) -> None:
    """The finite numbers of one entry; ``prefix`` is for names that have none. The first value of a step counts."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int | float):
        return
    for key, value in entry.items():
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            name = key if "/" in key else f"{prefix}{key}"
            curves.setdefault(name, {}).setdefault(float(entry["step"]), float(value))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_TRAINING_POINTS:
        return points
    step = (len(points) - 1) / (MAX_TRAINING_POINTS - 1)
    return [points[round(i * step)] for i in range(MAX_TRAINING_POINTS)]


def _is_detail(name: str, points: list[tuple[float, float]]) -> bool:
    """Whether a curve is for those who look closer: spreads, counts, weights without averaging, nothing but zero."""
    is_side_number = name.endswith(("_std", "/num_clips", "/train_loss")) or name.startswith("val_raw/")
    return is_side_number or not any(value for _, value in points)
