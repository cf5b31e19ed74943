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
from pathlib import Path

from tinyvae.cli.eval import (
    add_data_arguments,
    announced_split,
    data_options,
    prepare_output,
    publish_results,
    report_problems,
)
from tinyvae.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="two or more models; the first is the baseline")
    parser.add_argument(
        "--variant", action="append", metavar="VARIANT", help="once for each model, where files cannot tell; - for none"
    )
    add_data_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.evaluation.compare import compare, with_own_labels
    from tinyvae.evaluation.cost import choose_devices
    from tinyvae.evaluation.results import comparison_text, evaluation_table
    from tinyvae.evaluation.round_trip import is_teacher, open_model

    options = data_options(arguments)
    if len(arguments.models) < 2:
        raise UserError("compare needs at least two models; for one, use: tinyvae eval MODEL --data DATA")
    prepare_output(arguments)
    options["split"] = announced_split(arguments)
    devices, dtype = choose_devices(arguments.device), options.pop("dtype")
    round_trips = with_own_labels(
        [
            open_model(
                path,
                variant=variant,
                device=devices[0],
                dtype=dtype,
                fused=arguments.fused and not is_teacher(Path(path)),
            )
            for path, variant in zip(arguments.models, _variants(arguments), strict=True)
        ]
    )
    comparison = compare(round_trips, arguments.data, **{**options, "device": devices}, show_progress_bar=True)
    evaluations = list(comparison.evaluations)
    print(evaluation_table(evaluations))
    print("\n" + comparison_text(comparison))
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
