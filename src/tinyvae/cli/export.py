"""Write a model as another program loads it: file name, dtype, keys, latent space and range.

The result is read back under that program's rules and compared with the model before it gets its name. What cannot work
there is refused, with the reason and the way out. `--to list` shows which variants go where.

example:
  tinyvae export --to list
  tinyvae export output/my_run --to comfyui --output ComfyUI/models/vae_approx
  tinyvae export output/my_run --to onnx --output my_model_onnx
  tinyvae export output/my_run --to onnx --output my_model_int8 --dtype int8 --data my_clips

exit code: 0 written and checked; 2 a mistake in the command, or an export that cannot work.
"""

from __future__ import annotations

import argparse

from tinyvae.cli.options import DTYPES, MODEL, add_options, full_dtype_name, place
from tinyvae.convert.programs import PROGRAMS, get_program, program_table
from tinyvae.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL)
    parser.add_argument("--to", required=True, metavar="PROGRAM", help=f"{', '.join(PROGRAMS)}; or list")
    add_options(
        parser, "--output", metavar="PATH", help="a folder (the file gets the name that the program wants), or a file"
    )
    parser.add_argument("--slot", metavar="NAME", help="vae (default), or preview: ComfyUI's live preview alone")
    dtypes = f"{', '.join(DTYPES)}, or int8 for onnx and web (the decoder); default: what the program wants"
    parser.add_argument("--dtype", type=full_dtype_name, metavar="NAME", help=dtypes)
    videos = "for int8: videos to calibrate on, like those that will be decoded; folder, video, annotations or index"
    parser.add_argument("--data", type=place, metavar="DATA", help=videos)
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
        dtype=arguments.dtype,
        data=arguments.data,
        variant=arguments.variant,
        overwrite=arguments.overwrite,
    )
    print(done.message)
    return 0
