"""The results of an evaluation or a comparison: tables that fit the terminal, and the content of ``results.json``.

``results.json`` is plain JSON for other programs: NaN and infinity become null (JSON has no word for them), numbers
keep seven significant digits.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyvae.evaluation.compare import Candidate, Comparison
from tinyvae.evaluation.evaluating import EvaluationResult
from tinyvae.evaluation.metrics import METRICS
from tinyvae.files import atomic_write
from tinyvae.terminal import in_columns

RESULTS_FORMAT, RESULTS_VERSION = "tinyvae-results", 1
NAMED_CLIPS = 3  # best clips and as many worst ones
FIRST_COLUMN = 22  # "Flicker energy /255²" and a gap
NARROWEST_NAME = 24  # as wide as most cells, "0.4128 (0.3146 … 0.5110)"

Result = EvaluationResult | Comparison
Row = Sequence[str]


def results_as_json(result: Result, *, command: str) -> dict[str, Any]:
    content: dict[str, Any] = {
        "format": RESULTS_FORMAT,
        "version": RESULTS_VERSION,
        "command": command,
        "evaluations": [asdict(evaluation) for evaluation in result.evaluations],
    }
    if isinstance(result, Comparison):
        content["comparison"] = {
            "baseline": result.baseline.model.label,
            "differences": [
                {
                    "model": candidate.label,
                    "baseline": candidate.baseline,
                    "by_metric": {d.metric: asdict(d) for d in candidate.differences},
                }
                for candidate in result.candidates
            ],
            "winners": result.winners,
        }
        if result.figures:
            content["comparison"]["teacher_figures"] = [asdict(figures) for figures in result.figures]
    return _plain(content)


def write_results(result: Result, file: Path, *, command: str) -> None:
    """Write ``results.json``; the file appears whole or not at all."""
    with atomic_write(file, "w") as stream:
        json.dump(results_as_json(result, command=command), stream, indent=1, allow_nan=False)
        stream.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def result_text(result: Result) -> str:
    """The means of all models; beside a teacher also the figures of each student."""
    table = evaluation_table(result.evaluations)
    return f"{table}\n\n{figures_text(result)}" if isinstance(result, Comparison) and result.figures else table


def evaluation_table(results: Sequence[EvaluationResult], width: int | None = None) -> str:
    """The means of one or several evaluations, one column for each; more than fit stand in tables below each other.

    ``width`` is in characters; None: that of the terminal ($COLUMNS overrules it), 80 where there is none.
    """
    width = width or shutil.get_terminal_size().columns
    names = short_names([result.model.label for result in results], width)
    rows = _evaluation_rows(results, names)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    tables: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        if tables[-1] and widths[0] + sum(2 + widths[c] for c in [*tables[-1], column]) > width:
            tables.append([])
        tables[-1].append(column)
    texts = ["\n".join(in_columns([[row[c] for c in (0, *columns)] for row in rows])) for columns in tables]
    legend = [f"{short.split(' ')[0]} {label}" for label, short in names.items() if short != label]
    return "\n\n".join([*texts, *(["\n".join(legend)] if legend else [])])


def short_names(labels: Sequence[str], width: int) -> dict[str, str]:
    """Label -> what stands for it in tables of this width: itself, or its number and its two ends."""
    room = max(NARROWEST_NAME, (width - FIRST_COLUMN) // len(labels) - 2)
    names: dict[str, str] = {}
    for number, label in enumerate(labels, start=1):
        kept = room - len(f"[{number}] …")
        ends = f"{label[: kept - kept // 2]}…{label[len(label) - kept // 2 :]}"
        names[label] = label if len(label) <= room else f"[{number}] {ends}"
    return names


def _evaluation_rows(results: Sequence[EvaluationResult], names: dict[str, str]) -> list[Row]:
    rows: list[Row] = [["", *(names[result.model.label] for result in results)]]
    for name, info in METRICS.items():
        cells = []
        for result in results:
            estimate = result.summary.value(name)
            cell = info.shown(estimate.mean if estimate else None)
            if estimate is not None and estimate.low is not None:
                cell += f" ({info.interval(estimate.low, estimate.high)})"
            cells.append(cell)
        rows.append([f"{info.label} {info.unit}".strip(), *cells])
    peaks = [result.cost.peak_memory_bytes for result in results]
    return [
        *rows,
        ["encode frames/s", *(f"{result.cost.encode_fps:.1f}" for result in results)],
        ["decode frames/s", *(f"{result.cost.decode_fps:.1f}" for result in results)],
        ["peak memory MiB", *("not measured" if peak is None else f"{peak / 2**20:.0f}" for peak in peaks)],
        ["parameters", *(f"{result.model.parameters:,}" for result in results)],
        ["clips / frames", *(f"{result.summary.num_clips} / {result.summary.num_frames}" for result in results)],
    ]


def comparison_text(comparison: Comparison, width: int | None = None) -> str:
    """Every candidate against its baseline, then which model is best in each metric.

    Beside a teacher: the students against each other; `figures_text` tells how far they are from the teacher.
    """
    labels = [evaluation.model.label for evaluation in comparison.evaluations]
    names = short_names(labels, width or shutil.get_terminal_size().columns)
    parts = []
    teachers = {figures.teacher.label for figures in comparison.figures}
    for candidate in comparison.candidates:
        if candidate.baseline in teachers:
            continue
        heading = f"{names[candidate.label]} against {names[candidate.baseline]}:"
        parts.append("\n".join([heading, *_difference_lines(candidate), *_clip_lines(comparison, candidate)]))
    winners = [
        [f"  {METRICS[metric].label}", names[label] if label else "tie"] for metric, label in comparison.winners.items()
    ]
    return "\n\n".join([*parts, "\n".join(["best mean:", *in_columns(winners)])])


def figures_text(comparison: Comparison) -> str:
    """Each student beside its teacher: PSNR of the four round trips, gaps to the teacher's, and speeds."""
    info, parts = METRICS["psnr"], []
    for figures in comparison.figures:
        rows: list[Row] = []
        for words, figure in figures.rows().items():
            gap = figure.gap.difference if figure.gap is not None else None
            shown = [info.shown_difference(gap.mean), f"({info.interval(gap.low, gap.high)})"] if gap else ["", ""]
            rows.append([f"  {words}", f"{figure.shown_psnr} dB", *shown])
        lines = [f"{figures.student.label} beside its teacher {figures.teacher.label}:", *in_columns(rows)]
        for verb, speed in (("encodes", figures.encode), ("decodes", figures.decode)):
            if speed is None:
                lines.append(f"  {verb}: speed not measured (the only clip is the warm-up)")
            else:
                clip = f"{in_ms(speed.student_ms)} a clip, the teacher {in_ms(speed.teacher_ms)}"
                lines.append(f"  {verb} {speed.times_as_fast:.3g}x as fast: {clip}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def in_ms(number: float) -> str:
    """``4.21 ms``, ``3,320 ms``."""
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


def _difference_lines(candidate: Candidate) -> list[str]:
    """Paired differences as lines: metric, difference, interval, verdict, clips won; under 80 columns."""
    rows: list[Row] = []
    for paired in candidate.differences:
        info, difference = METRICS[paired.metric], paired.difference
        name = f"  {info.label} {info.unit}".rstrip()
        interval = f"({info.interval(difference.low, difference.high)})"
        mean = info.shown_difference(difference.mean).rjust(9)
        rows.append([name, mean, interval, paired.verdict, f"wins {paired.wins}/{difference.count}"])
    return in_columns(rows)


def _clip_lines(comparison: Comparison, candidate: Candidate) -> Iterator[str]:
    """The clips on which a model gains and loses most against its baseline, by PSNR; of few clips each once."""
    tables = {evaluation.model.label: evaluation.by_name() for evaluation in comparison.evaluations}
    baseline, table = tables[candidate.baseline], tables[candidate.label]
    pairs = ((table[name].psnr - baseline[name].psnr, name) for name in table if name in baseline)
    gains = sorted((pair for pair in pairs if math.isfinite(pair[0])), reverse=True)
    lines = [f"    {gain:+7.2f} dB  {name}" for gain, name in gains]
    if not lines:
        yield "  no clip has numbers of both models"
    elif len(lines) <= 2 * NAMED_CLIPS:
        yield from ("  clips by difference of PSNR:", *lines)
    else:
        yield from ("  best clips, by difference of PSNR:", *lines[:NAMED_CLIPS])
        yield from ("  worst clips:", *lines[-NAMED_CLIPS:])
