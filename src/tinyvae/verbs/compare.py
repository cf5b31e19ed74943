"""Compare two or more models on the same frames of the same videos; the first is the baseline.

Models and data are given as to `tinyvae eval`; a diffusers VAE folder can stand in any place. Differences are paired
clip by clip, with a 95 % confidence interval: "unclear" means that the interval holds zero. All models are compared on
the frames that every one of them gives back. With --output_dir, results.json and report.html are written.

example:
  tinyvae compare taehv.safetensors output/my_run --data videos/val --output_dir output/comparison
  tinyvae compare CogVideoX-2b/vae taecvx.pth output/my_run --variant - --variant taecvx --variant - --data videos/val

exit code: 0 all videos measured with all models; 1 some were skipped (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from tinyvae.errors import UserError
from tinyvae.verbs.eval import (
    add_data_arguments,
    data_options,
    evaluation_table,
    prepare_output,
    publish_results,
    report_problems,
)

WORST_AND_BEST = 3  # clips named in the terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="two or more models; the first is the baseline")
    parser.add_argument(
        "--variant", action="append", metavar="VARIANT", help="once for each model, where files cannot tell; - for none"
    )
    add_data_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.compare import compare, with_own_labels
    from tinyvae.evaluation.reference_vae import is_reference_vae
    from tinyvae.evaluation.resources import choose_devices
    from tinyvae.evaluation.round_trip import open_model

    options = data_options(arguments)
    if len(arguments.models) < 2:
        raise UserError("compare needs at least two models; for one, use: tinyvae eval MODEL --data DATA")
    prepare_output(arguments)
    devices, dtype = choose_devices(arguments.device), options.pop("dtype")
    round_trips = with_own_labels(
        [
            open_model(
                path,
                variant=variant,
                device=devices[0],
                dtype=dtype,
                fused=arguments.fused and not is_reference_vae(Path(path)),
            )
            for path, variant in zip(arguments.models, _variants(arguments), strict=True)
        ]
    )
    comparison = compare(round_trips, arguments.data, **{**options, "device": devices}, show_progress_bar=True)
    evaluations = list(comparison.evaluations)
    print(evaluation_table(evaluations))
    for candidate in comparison.candidates:
        print(f"\n{candidate.label} against {comparison.baseline.model.label}:\n{difference_table(candidate)}")
        print(best_and_worst(comparison, candidate.label))
    print("\n" + winner_line(comparison))
    report_problems(evaluations)
    publish_results(comparison, list(round_trips), arguments)
    return 0 if comparison.is_complete else 1


def _variants(arguments: argparse.Namespace) -> list[str | None]:
    named = arguments.variant
    if named is None:
        return [None] * len(arguments.models)
    if len(named) != len(arguments.models):
        raise UserError(
            f"--variant was given {len(named)} times for {len(arguments.models)} models; give it once for each, "
            "with - where the file tells."
        )
    return [None if variant == "-" else variant for variant in named]


def difference_table(candidate: Any) -> str:
    """Paired differences as text: metric, difference, interval, verdict, wins."""
    from tinyvae.evaluation.metrics import METRICS

    rows: list[list[str]] = []
    for paired in candidate.differences:
        info, difference = METRICS[paired.metric], paired.difference
        interval = "one clip, no interval"
        if difference.low is not None and difference.high is not None:
            interval = f"{info.shown(difference.low)} … {info.shown(difference.high)}"
        mean = info.shown_difference(difference.mean)
        name = f"{info.label} {info.unit}".strip()
        wins = f"(wins {paired.wins} of {difference.count} clips)"
        rows.append([f"  {name}", mean.rjust(9), f"({interval})", paired.verdict, wins])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def winner_line(comparison: Any) -> str:
    """The model with the best mean, metric by metric."""
    from tinyvae.evaluation.metrics import METRICS

    won = (f"{METRICS[metric].label} {label or 'tie'}" for metric, label in comparison.winners.items())
    return "winners by mean: " + ", ".join(won)


def best_and_worst(comparison: Any, label: str) -> str:
    """The clips on which a model gains and loses most against the baseline, by PSNR."""
    baseline = comparison.baseline.by_name()
    table = next(e.by_name() for e in comparison.evaluations if e.model.label == label)
    pairs = ((table[name].psnr - baseline[name].psnr, name) for name in table if name in baseline)
    gains = sorted((pair for pair in pairs if math.isfinite(pair[0])), reverse=True)
    if not gains:
        return "  no clip has numbers of both models"
    best = ", ".join(f"{name} {gain:+.2f} dB" for gain, name in gains[:WORST_AND_BEST])
    worst = ", ".join(f"{name} {gain:+.2f} dB" for gain, name in gains[::-1][:WORST_AND_BEST])
    return f"  best clips:  {best}\n  worst clips: {worst}"
