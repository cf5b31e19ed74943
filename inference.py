"""Look at what a model does with a few videos: comparison videos, pictures, MSE and PSNR, also in results.json.

A thin door to `tinyvae.evaluation`; `tinyvae eval` measures whole data sets, `tinyvae reconstruct` whole films. Of
annotations with splits the videos annotated as val are taken, unless --split says otherwise.

examples:
  python inference.py --model_path output/my_run --num_samples 5
  python inference.py --model_path taecvx.pth --variant taecvx --num_samples 8 --data_root videos \\
      --annotation_file videos/val.json --use_ref_vae --cogvideox_model_path THUDM/CogVideoX-2b \\
      --output_dir output/look --save_latents --benchmark
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tinyvae.cli.main import format_warning
from tinyvae.cli.options import Parser, add_options
from tinyvae.convert.sample_inference import InferenceOptions, run_inference
from tinyvae.errors import UserError


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path, required=True, help="weights file, model, checkpoint or run folder")
    parser.add_argument("--num_samples", type=int, default=5, help="how many videos (default 5)")
    parser.add_argument("--num_frames", type=int, default=49, help="frames of each sample at most (default 49)")
    parser.add_argument("--variant", help="which variant the weights are, where the file cannot tell")
    parser.add_argument("--use_ref_vae", action="store_true", help="run a reference VAE beside the model")
    parser.add_argument("--cogvideox_model_path", help="the reference VAE: a diffusers folder or a hub name")
    parser.add_argument("--data_root", type=Path, help="folder of videos; default: procedural sample clips")
    parser.add_argument("--annotation_file", type=Path, help="JSON or JSONL list of videos below data_root")
    add_options(parser, "--split", "--size")
    parser.add_argument("--output_dir", type=Path, default=Path("output/inference"), help="folder for what is written")
    parser.add_argument("--save_latents", action="store_true", help="also write each sample's latents (safetensors)")
    parser.add_argument("--benchmark", action="store_true", help="also time encoder and decoder")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: the first GPU, else the CPU")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    warnings.formatwarning = format_warning
    try:
        arguments = build_parser().parse_args(argv)
        if arguments.use_ref_vae and arguments.cogvideox_model_path is None:
            raise UserError("--use_ref_vae needs --cogvideox_model_path, the folder or hub name of the reference VAE.")
        if arguments.cogvideox_model_path is not None and not arguments.use_ref_vae:
            raise UserError("--cogvideox_model_path is given without --use_ref_vae; add it, or leave the path out.")
        skipped = run_inference(
            InferenceOptions(
                model_path=arguments.model_path,
                output_dir=arguments.output_dir,
                num_samples=arguments.num_samples,
                num_frames=arguments.num_frames,
                variant=arguments.variant,
                reference=arguments.cogvideox_model_path,
                data_root=arguments.data_root,
                annotation_file=arguments.annotation_file,
                split=arguments.split,
                size=arguments.size,
                save_latents=arguments.save_latents,
                benchmark=arguments.benchmark,
                device=arguments.device,
            )
        )
    except UserError as mistake:
        print(f"inference.py: error: {mistake}", file=sys.stderr)
        return 2
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
