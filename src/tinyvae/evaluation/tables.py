"""What ``tinyvae eval`` and ``compare`` print: tables that fit the terminal."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence

from tinyvae.evaluation.compare import Candidate, Comparison
from tinyvae.evaluation.evaluating import EvaluationResult
from tinyvae.evaluation.metrics import METRICS

NAMED_CLIPS = 3  # best clips and as many worst ones
FIRST_COLUMN = 22  # "Flicker energy /255²" and a gap
NARROWEST_NAME = 24  # as wide as most cells, "0.4128 (0.3146 … 0.5110)"

Row = Sequence[str]


def terminal_width() -> int:
    """Columns of the terminal ($COLUMNS overrules it); 80 where there is none."""
    return shutil.get_terminal_size().columns


def short_names(labels: Sequence[str], width: int) -> dict[str, str]:
    """Label -> what stands for it in tables of this width: itself, or its number and its two ends.

    The number keeps apart what ends and begins alike; `name_legend` says what it stands for.
    """
    room = max(NARROWEST_NAME, (width - FIRST_COLUMN) // len(labels) - 2)
    return {label: _shortened(label, number, room) for number, label in enumerate(labels, start=1)}


def _shortened(label: str, number: int, room: int) -> str:
    if len(label) <= room:
        return label
    kept = room - len(f"[{number}] …")
    return f"[{number}] {label[: kept - kept // 2]}…{label[len(label) - kept // 2 :]}"


def name_legend(names: dict[str, str]) -> list[str]:
    """A line for each name that was shortened."""
    return [f"{short.split(' ')[0]} {label}" for label, short in names.items() if short != label]


def evaluation_table(results: Sequence[EvaluationResult], width: int | None = None) -> str:
    """The means of one or several evaluations, one column for each; more than fit stand in tables below each other."""
    width = width or terminal_width()
    names = short_names([result.model.label for result in results], width)
    rows = _evaluation_rows(results, names)
    widths = _column_widths(rows)
    tables: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        if tables[-1] and widths[0] + sum(2 + widths[c] for c in [*tables[-1], column]) > width:
            tables.append([])
        tables[-1].append(column)
    texts = [aligned([[row[c] for c in (0, *columns)] for row in rows]) for columns in tables]
    return "\n\n".join([*texts, *(["\n".join(legend)] if (legend := name_legend(names)) else [])])


def _evaluation_rows(results: Sequence[EvaluationResult], names: dict[str, str]) -> list[Row]:
    rows: list[Row] = [["", *(names[result.model.label] for result in results)]]
    for name, info in METRICS.items():
        cells = []
        for result in results:
            estimate = result.summary.value(name)
            interval = ""
            if estimate is not None and estimate.low is not None:
                interval = f" ({info.shown(estimate.low)} … {info.shown(estimate.high)})"
            cells.append(info.shown(estimate.mean if estimate else None) + interval)
        rows.append([f"{info.label} {info.unit}".strip(), *cells])
    for label, cost in (("encode frames/s", "encode_fps"), ("decode frames/s", "decode_fps")):
        rows.append([label, *(f"{getattr(result.cost, cost):.1f}" for result in results)])
    peaks = [result.cost.peak_memory_bytes for result in results]
    rows.append(["peak memory MiB", *("not measured" if p is None else f"{p / 2**20:.0f}" for p in peaks)])
    rows.append(["parameters", *(f"{result.model.parameters:,}" for result in results)])
    rows.append(["clips / frames", *(f"{r.summary.num_clips} / {r.summary.num_frames}" for r in results)])
    return rows


def comparison_text(comparison: Comparison, width: int | None = None) -> str:
    """Every candidate against the baseline, then which model is best in each metric."""
    labels = [evaluation.model.label for evaluation in comparison.evaluations]
    names = short_names(labels, width or terminal_width())
    parts = []
    for candidate in comparison.candidates:
        heading = f"{names[candidate.label]} against {names[comparison.baseline.model.label]}:"
        parts.append("\n".join([heading, difference_table(candidate), *_clip_lines(comparison, candidate.label)]))
    return "\n\n".join([*parts, winner_table(comparison, names)])


def difference_table(candidate: Candidate) -> str:
    """Paired differences as text: metric, difference, interval, verdict, clips won; under 80 columns."""
    rows: list[Row] = []
    for paired in candidate.differences:
        info, difference = METRICS[paired.metric], paired.difference
        interval = "one clip, no interval"
        if difference.low is not None and difference.high is not None:
            interval = f"{info.shown(difference.low)} … {info.shown(difference.high)}"
        mean = info.shown_difference(difference.mean)
        name = f"{info.label} {info.unit}".strip()
        wins = f"wins {paired.wins}/{difference.count}"
        rows.append([f"  {name}", mean.rjust(9), f"({interval})", paired.verdict, wins])
    return aligned(rows)


def winner_table(comparison: Comparison, names: dict[str, str]) -> str:
    """The model with the best mean, metric by metric."""
    rows = [
        [f"  {METRICS[metric].label}", names[label] if label else "tie"] for metric, label in comparison.winners.items()
    ]
    return f"best mean:\n{aligned(rows)}"


def _clip_lines(comparison: Comparison, label: str) -> Iterator[str]:
    """The clips on which a model gains and loses most against the baseline, by PSNR; of few clips each once."""
    baseline = comparison.baseline.by_name()
    table = next(e.by_name() for e in comparison.evaluations if e.model.label == label)
    pairs = ((table[name].psnr - baseline[name].psnr, name) for name in table if name in baseline)
    gains = sorted((pair for pair in pairs if math.isfinite(pair[0])), reverse=True)
    if not gains:
        yield "  no clip has numbers of both models"
    elif len(gains) <= 2 * NAMED_CLIPS:
        yield "  clips by difference of PSNR:"
        yield from _gain_lines(gains)
    else:
        yield "  best clips, by difference of PSNR:"
        yield from _gain_lines(gains[:NAMED_CLIPS])
        yield "  worst clips:"
        yield from _gain_lines(gains[-NAMED_CLIPS:])


def _gain_lines(gains: Sequence[tuple[float, str]]) -> Iterator[str]:
    for gain, name in gains:
        yield f"    {gain:+7.2f} dB  {name}"


def aligned(rows: Sequence[Row]) -> str:
    """Rows of cells as text, each column as wide as its widest cell."""
    widths = _column_widths(rows)
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _column_widths(rows: Sequence[Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]
