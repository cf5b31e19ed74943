"""Compare two or more models on the same frames of the same videos; the first is the baseline.

Models and data are given as to `tinyvae eval`; a diffusers VAE folder can stand in any place. Differences are paired
clip by clip, with a 95 % confidence interval: "unclear" means that the interval holds zero. All models are compared on
the frames that every one of them gives back. With --output, results.json and report.html are written.

With --teacher FOLDER each MODEL is a student of that teacher, and one is enough: its decoder (on the teacher's latents)
and its encoder (whose latents the teacher decodes) are compared too, with the teacher and with those of the first
student.

example:
  tinyvae compare taehv.safetensors output/my_run --data videos/val --output output/comparison
  tinyvae compare CogVideoX-2b/vae taecvx.pth output/my_run --variant - --variant taecvx --variant - --data videos/val

exit code: 0 all videos measured with all models; 1 some were skipped (they are named); 2 a mistake in the command.
"""

from __future__ import annotations

import argparse

from tinyvae.cli.eval import add_data_arguments, finish, open_models
from tinyvae.cli.options import variant_of_each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="two or more models (beside a --teacher one or more); the first is the baseline",
    )
    variant = "once for each model, where files cannot tell; - for none"
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help=variant)
    add_data_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.compare import check_enough, compare
    from tinyvae.evaluation.results import comparison_text, result_text

    check_enough(arguments.models, arguments.teacher)
    variants = variant_of_each(arguments.models, arguments.variant)
    round_trips, settings = open_models(arguments, list(zip(arguments.models, variants, strict=True)))
    comparison = compare(round_trips, arguments.data, **settings)
    print(f"{result_text(comparison)}\n\n{comparison_text(comparison)}")
    return finish(comparison, round_trips, arguments)
