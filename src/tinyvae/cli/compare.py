"""Compare two or more models on the same frames of the same videos; the first is the baseline.

Models and data are given as to `tinyvae eval`; a diffusers VAE folder can stand in any place. Differences are paired
clip by clip, with a 95 % confidence interval: "unclear" means that the interval holds zero. All models are compared on
the frames that every one of them gives back. With --output, results.json and report.html are written.

example:
  tinyvae compare taehv.safetensors output/my_run --data videos/val --output output/comparison
  tinyvae compare CogVideoX-2b/vae taecvx.pth output/my_run --variant - --variant taecvx --variant - --data videos/val

exit code: 0 all videos measured with all models; 1 some were skipped (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse

from tinyvae.cli.eval import add_data_arguments, finish, open_models
from tinyvae.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="two or more models; the first is the baseline")
    variant = "once for each model, where files cannot tell; - for none"
    parser.add_argument("--variant", action="append", metavar="NAME", help=variant)
    add_data_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.compare import compare, with_own_labels
    from tinyvae.evaluation.results import comparison_text, evaluation_table

    models, variants = arguments.models, arguments.variant or ["-"] * len(arguments.models)
    if len(models) < 2:
        raise UserError("compare needs at least two models; for one, use: tinyvae eval MODEL --data DATA")
    if len(variants) != len(models):
        what = f"--variant was given {len(variants)} times for {len(models)} models"
        raise UserError(f"{what}; give it once for each, with - where the file tells.")
    named = [None if variant == "-" else variant for variant in variants]
    opened, settings = open_models(arguments, list(zip(models, named, strict=True)))
    round_trips = with_own_labels(opened)
    comparison = compare(round_trips, arguments.data, **settings, show_progress_bar=True)
    evaluations = list(comparison.evaluations)
    print(evaluation_table(evaluations))
    print("\n" + comparison_text(comparison))
    return finish(comparison, evaluations, list(round_trips), arguments)
