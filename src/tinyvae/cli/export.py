"""Write a model as another program loads it: file name, dtype, keys, latent space and range.

The result is read back under that program's rules and compared with the model before it gets its name. What cannot work
there is refused, with the reason and the way out. `--to list` shows which variants go where.

example:
  tinyvae export --to list
  tinyvae export output/my_run --to comfyui --output ComfyUI/models/vae_approx
  tinyvae export output/my_run --to onnx --output my_model_onnx

exit code: 0 written and checked; 2 a mistake in the command, or an export that cannot work.
"""

from __future__ import annotations

import argparse

from tinyvae.cli.options import DTYPES, MODEL, add_options
from tinyvae.convert.programs import PROGRAMS, get_program, program_table
from tinyvae.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help=MODEL)
    parser.add_argument("--to", required=True, metavar="PROGRAM", help=f"{', '.join(PROGRAMS)}; or list")
    add_options(
        parser, "--output", metavar="PATH", help="a folder (the file gets the name that the program wants), or a file"
    )
    parser.add_argument("--slot", help="vae (default), or preview: ComfyUI's live preview alone")
    add_options(parser, "--dtype", help=f"{', '.join(DTYPES)}; default: what the program wants")
    add_options(parser, "--variant", "--overwrite")


def run(arguments: argparse.Namespace) -> int:
    if arguments.to == "list":
        print(program_table())
        return 0
    get_program(arguments.to)
    if arguments.model is None:
        raise UserError(f"name the model to export: tinyvae export MODEL --to {arguments.to} --output PATH")
    if arguments.output is None:
        raise UserError("name the place to write to with --output: a folder or a file.")
    from tinyvae.convert.export import export

    done = export(
        arguments.model,
        to=arguments.to,
        output=arguments.output,
        slot=arguments.slot,
        dtype=None if arguments.dtype is None else str(arguments.dtype).removeprefix("torch."),
        variant=arguments.variant,
        overwrite=arguments.overwrite,
    )
    print(done.message)
    return 0
