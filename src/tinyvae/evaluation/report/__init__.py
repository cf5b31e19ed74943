"""``report.html``: one file that opens offline and holds everything: tables, curves, films, pictures, environment.

Its size is bounded. Films and pictures are those of `evidence` (at most `DEFAULT_FILMS` clips, under about 1 MB each);
the table lists at most `MAX_ROWS` clips and curves at most `MAX_CURVE_NUMBERS` values of at most `MAX_CURVE_FRAMES`
frames a clip, the worst and the best first (``results.json`` always has all of them).
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tinyvae.evaluation.compare import Comparison
from tinyvae.evaluation.evaluating import ClipResult, EvaluationResult
from tinyvae.evaluation.evidence import ClipEvidence, gather_evidence
from tinyvae.evaluation.metrics import METRICS, sortable
from tinyvae.evaluation.report.sections import (
    Curves,
    clip_section,
    curve_section,
    environment_section,
    find_run_folder,
    footer_text,
    header_html,
    latent_section,
    player_section,
    read_training_curves,
    summary_section,
    training_section,
    worst_section,
)
from tinyvae.evaluation.results import write_results, write_whole
from tinyvae.evaluation.round_trip import RoundTrip

DEFAULT_FILMS = 6
MAX_ROWS = 2000
MAX_CURVE_NUMBERS = 200_000
MAX_CURVE_FRAMES = 2000


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that goes into a page: one evaluation, or several with their comparison."""

    evaluations: tuple[EvaluationResult, ...]
    comparison: Comparison | None
    evidence: tuple[ClipEvidence, ...]
    training: Curves
    command: str
    training_of: str = ""
    """Label of the model whose run ``training`` is."""


def write_report(report: Report, file: Path) -> None:
    """Write the page; the file appears whole or not at all."""
    write_whole(file, report_html(report))


def report_html(report: Report) -> str:
    """The whole page as text."""
    listed = listed_clips(report.evaluations)
    sections = {
        "summary": summary_section(report.evaluations, report.comparison),
        "films": player_section(report.evidence),
        "clips": clip_section(report.evaluations, listed),
        "frames": curve_section(report.evaluations),
        "worst frames": worst_section(report.evidence, len(report.evaluations)),
        "latents": latent_section(report.evidence, len(report.evaluations)),
        "training": training_section(report.training, report.training_of if report.comparison else None),
        "environment": environment_section(report.evaluations, report.command),
    }
    shown = {name: html for name, html in sections.items() if html}
    links = [f'<a href="#{name.replace(" ", "-")}">{name.capitalize()}</a>' for name in shown]
    labels = " and ".join(evaluation.model.label for evaluation in report.evaluations)
    page = _asset("page.html")
    slots = {
        "title": _escaped_title(f"{labels} · tinyvae report"),
        "css": _asset("page.css"),
        "header": header_html(report.evaluations),
        "navigation": "".join(links),
        "sections": "".join(f'<section id="{name.replace(" ", "-")}">{html}</section>' for name, html in shown.items()),
        "footer": footer_text(report.evaluations),
        "data": _embedded_json(_page_data(report, listed)),
        "script": _asset("page.js"),
    }
    # One pass over the template, so that nothing inside a value is taken for a slot.
    before, *parts = page.split("{{slot:")
    pieces = [before]
    for part in parts:
        name, rest = part.split("}}", 1)
        pieces += [slots[name], rest]
    return "".join(pieces)


def listed_clips(evaluations: Sequence[EvaluationResult]) -> list[str]:
    """Names of the clips in the table: those of every model, worst first; of too many the worst and the best half."""
    tables = [evaluation.by_name() for evaluation in evaluations]
    shared = [name for name in tables[0] if all(name in table for table in tables)]

    shared.sort(key=lambda name: sortable(tables[-1][name].psnr))
    return shared if len(shared) <= MAX_ROWS else shared[: MAX_ROWS // 2] + shared[-MAX_ROWS // 2 :]


def _page_data(report: Report, listed: Sequence[str]) -> dict[str, Any]:
    curves = _curves(report, listed)
    with_film = {evidence.name for evidence in report.evidence}
    names = [curve["name"] for curve in curves]
    return {
        "models": [evaluation.model.label for evaluation in report.evaluations],
        "metrics": [
            {"name": m.name, "label": m.label, "unit": m.unit, "digits": m.digits, "scale": m.shown_scale}
            for m in METRICS.values()
        ],
        "curves": curves,
        "startClip": next((name for name in names if name in with_film), names[0] if names else None),
        "players": [
            {
                "name": evidence.name,
                "src": f"data:video/mp4;base64,{base64.b64encode(evidence.film.mp4).decode()}",
                "fps": evidence.film.fps,
                "firstFrame": evidence.film.first_frame,
                "numFrames": evidence.film.num_frames,
                "panels": evidence.film.panels,
                "panelWidth": evidence.film.panel_width,
                "panelHeight": evidence.film.panel_height,
            }
            for evidence in report.evidence
        ],
        "training": report.training,
    }


def _curves(report: Report, listed: Sequence[str]) -> list[dict[str, Any]]:
    """Per-frame values of the clips, those with a film first, until the budget of the page is spent."""
    tables = [{clip.name: clip for clip in evaluation.clips} for evaluation in report.evaluations]
    with_film = [evidence.name for evidence in report.evidence if evidence.name in listed]
    order = with_film + [name for name in listed if name not in with_film]
    curves: list[dict[str, Any]] = []
    spent = 0
    for name in order:
        frames = curve_frames(tables[-1][name])
        series = [_series(table[name], frames) for table in tables]
        spent += sum(len(values) for one in series for values in one.values())
        if spent > MAX_CURVE_NUMBERS and curves:
            break
        places = None if frames == range(len(frames)) else frames  # None: all of them
        curves.append({"name": name, "frames": places, "series": series})
    return curves


def curve_frames(clip: ClipResult) -> Sequence[int]:
    """The frames of a clip's curves: all, or of a long film the worst (by PSNR) of each stretch of equal length."""
    psnr = clip.metrics.psnr_by_frame
    if len(psnr) <= MAX_CURVE_FRAMES:
        return range(len(psnr))
    bounds = [round(i * len(psnr) / MAX_CURVE_FRAMES) for i in range(MAX_CURVE_FRAMES + 1)]
    return [
        min(range(start, stop), key=lambda place: sortable(psnr[place])) for start, stop in itertools.pairwise(bounds)
    ]


def _series(clip: ClipResult, frames: Sequence[int]) -> dict[str, list[float | None]]:
    """Values at ``frames``; None where a frame has none (flicker of the first)."""
    found: dict[str, list[float | None]] = {}
    for metric, info in METRICS.items():
        values = clip.metrics.by_frame(metric)
        if values:
            found[metric] = [_number_at(values, place - info.first_frame) for place in frames]
    return found


def _number_at(values: Sequence[float], place: int) -> float | None:
    if not (0 <= place < len(values) and math.isfinite(values[place])):
        return None
    return float(f"{values[place]:.5g}")


def _embedded_json(content: dict[str, Any]) -> str:
    # "</script>" inside a clip's name must not end the script element.
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _escaped_title(text: str) -> str:
    from html import escape

    return escape(text)


def _asset(name: str) -> str:
    return resources.files("tinyvae.evaluation.report").joinpath(name).read_text(encoding="utf-8")


def publish(
    result: EvaluationResult | Comparison,
    round_trips: Sequence[RoundTrip],
    output_dir: Path,
    *,
    command: str,
    num_films: int = DEFAULT_FILMS,
    show_progress_bar: bool = False,
) -> list[Path]:
    """Write both files and return their paths. The clips worth showing go through the models again for their films."""
    comparison = result if isinstance(result, Comparison) else None
    evaluations = (result,) if isinstance(result, EvaluationResult) else result.evaluations
    files = [output_dir / "results.json", output_dir / "report.html"]
    write_results(result, files[0], command=command)
    training_of, training = _training(evaluations)
    evidence = gather_evidence(round_trips, evaluations, limit=num_films, show_progress_bar=show_progress_bar)
    report = Report(
        evaluations=evaluations,
        comparison=comparison,
        evidence=tuple(evidence),
        training=training,
        training_of=training_of,
        command=command,
    )
    write_report(report, files[1])
    return files


def _training(evaluations: Sequence[EvaluationResult]) -> tuple[str, Curves]:
    """(label, curves) of the last model that comes from a run; ("", {}) where none does."""
    for evaluation in reversed(evaluations):
        path = evaluation.model.path
        run_folder = find_run_folder(Path(path)) if path is not None else None
        if run_folder is not None:
            return evaluation.model.label, read_training_curves(run_folder)
    return "", {}
