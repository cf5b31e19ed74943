"""Run the teacher once over a run's first clips and keep its latents, so that training need not run it.

A preset's name or a settings file and --key value say what the run is, as for `tinyvae train`. The clips are those of
the run, in its own order: same files, frames, crops, flips and colors. Then train with --latent_store FOLDER. After the
last clip of the store a run begins again with its first one.

The command may be stopped at any time; the same command goes on where it stopped. A larger --clips lets a store grow.
Several machines make one store together: start the same command with --shard 1/8, 2/8, ... 8/8 (in a Slurm array with
--array=1-8: --shard $SLURM_ARRAY_TASK_ID/8). Or let a Ray cluster do it: --ray ADDRESS.

example:
  tinyvae latents h100 --data_root /data/videos --clips 100000 --output /data/latents
  tinyvae train h100 --data_root /data/videos --latent_store /data/latents
"""

from __future__ import annotations

import argparse
import shlex

from tinyvae.cli.options import add_options, full_dtype_name, number, place
from tinyvae.cli.train import only_preset
from tinyvae.config.load import load_config, parse_words
from tinyvae.terminal import count_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tinyvae latents PRESET_OR_FILE --clips N --output FOLDER [options] [--key value ...]"
    parser.add_argument("-h", "--help", action="help", help="show this text")
    clips = "how many clips to store: positions 0 to N-1 of the run; as many as a run's steps take need no clip twice"
    dtype = "of the stored latents (default: bfloat16, which keeps all that a teacher in bfloat16 says)"
    shard = "make only part I of N of the store, counted from 1: every N-th shard from the I-th on"
    gpus = (
        "processes of the run (default: 1); only counts with several sizes (--resolutions), see docs/configuration.md"
    )
    parser.add_argument("--clips", type=number(int, 1), metavar="N", required=True, help=clips)
    parser.add_argument("--output", type=place, metavar="FOLDER", required=True, help="folder of the store, or its URL")
    parser.add_argument("--dtype", type=stored_dtype, metavar="NAME", default="bfloat16", help=dtype)
    parser.add_argument("--shard", type=part_of, metavar="I/N", default=(1, 1), help=shard)
    parser.add_argument("--gpus", type=number(int, 1), metavar="N", default=1, help=gpus)
    add_options(parser, "--ray")


def stored_dtype(text: str) -> str:
    """``bf16`` -> ``bfloat16``: the two precisions of a store."""
    name = full_dtype_name(text)
    if name not in ("bfloat16", "float32"):
        raise argparse.ArgumentTypeError(f"{text!r} is no precision of a store; use bfloat16 or float32")
    return name


def part_of(text: str) -> tuple[int, int]:
    """``3/8`` -> (3, 8)."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: write I/N with I from 1 to N, e.g. 1/8 for the first")
    return int(part), int(parts)


def run(arguments: argparse.Namespace) -> int:
    names, settings = parse_words(arguments.words)
    loaded = load_config(only_preset(names, "latents", work="store the latents of"), settings)

    from tinyvae.training.latents import LatentJob, make_latents

    for notice in loaded.notices:
        print(f"note: {notice}")
    part, num_parts = arguments.shard
    folder = arguments.output.absolute()
    job = LatentJob(
        folder=folder,
        num_clips=arguments.clips,
        dtype=arguments.dtype,
        part=part - 1,
        num_parts=num_parts,
        processes=arguments.gpus,
        ray=arguments.ray,
    )
    missing = make_latents(loaded, job)
    if missing:
        print(f"part {part} of {num_parts} is done; {count_of(missing, 'shard')} of other parts still to make")
    else:
        print(f"the store is complete: train with --latent_store {shlex.quote(str(folder))}")
    return 0
