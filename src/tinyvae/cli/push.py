"""Push a model to the Hugging Face hub: weights, model card, settings and report.

RUN is the folder of a run (its best model is pushed), or any model. The repository is made if it does not exist.
Afterwards `load_model("owner/name")` and every verb that takes a model read it from there.

example:
  tinyvae push output/my_run me/my-vae
  tinyvae push output/my_run me/my-vae --private

exit code: 0 pushed; 2 a mistake in the command, no token, or no network.
"""

from __future__ import annotations

import argparse

from tinyvae.cli.options import MODEL, add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=MODEL)
    parser.add_argument("repo", metavar="OWNER/NAME", help="the repository on the hub")
    parser.add_argument("--private", action="store_true", help="make a new repository private; refuse a public one")
    add_options(parser, "--variant")


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.push import push

    print(push(arguments.run, arguments.repo, variant=arguments.variant, private=arguments.private).message)
    return 0
