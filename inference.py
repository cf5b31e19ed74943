"""Look at what a model does with a few videos: comparison videos, pictures, MSE and PSNR, also in results.json.

It maps its arguments to what `tinyvae eval` (or `compare`, with a teacher) and `tinyvae reconstruct` do; use those for
whole data sets and whole films. Of annotations with splits the videos annotated as val are taken, unless --split says
otherwise.

examples:
  python inference.py --model_path output/my_run --num_samples 5
  python inference.py --model_path taecvx.pth --variant taecvx --num_samples 8 --data_root videos \\
      --annotation_file videos/val.json --use_ref_vae --cogvideox_model_path THUDM/CogVideoX-2b \\
      --output_dir output/look --save_latents --benchmark
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tinyvae.cli.main import format_warning
from tinyvae.cli.options import Parser, add_options
from tinyvae.convert.reconstruct import Outputs, reconstruct_video
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError
from tinyvae.evaluation import EvaluationResult, evaluate
from tinyvae.evaluation.compare import compare
from tinyvae.evaluation.cost import choose_devices, command_line, fitting_in_memory
from tinyvae.evaluation.results import Result, write_results
from tinyvae.evaluation.round_trip import RoundTrip, TeacherRoundTrip, open_model
from tinyvae.files import make_output_folder, writing_to
from tinyvae.terminal import count_of

SAMPLE_FILES = (".mp4", ".png", "_latents.safetensors", "_teacher_latents.safetensors")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_path", type=Path, required=True, help="weights file, model, checkpoint or run folder")
    parser.add_argument("--num_samples", type=int, default=5, help="how many videos (default 5)")
    parser.add_argument("--num_frames", type=int, default=49, help="frames of each sample at most (default 49)")
    parser.add_argument("--variant", help="which variant the weights are, where the file cannot tell")
    parser.add_argument("--use_ref_vae", action="store_true", help="run a teacher beside the model")
    parser.add_argument("--cogvideox_model_path", help="the teacher: a diffusers folder or a hub name")
    parser.add_argument("--data_root", type=Path, help="folder of videos; default: procedural sample clips")
    parser.add_argument("--annotation_file", type=Path, help="JSON or JSONL list of videos below data_root")
    add_options(parser, "--split", "--size")
    words = "folder for what is written; the samples of an earlier run there are removed"
    parser.add_argument("--output_dir", type=Path, default=Path("output/inference"), help=words)
    parser.add_argument("--save_latents", action="store_true", help="also write each sample's latents (safetensors)")
    parser.add_argument("--benchmark", action="store_true", help="also print the speed of encoder and decoder")
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: the first GPU, else the CPU")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    warnings.formatwarning = format_warning
    try:
        return run(build_parser().parse_args(argv))
    except UserError as mistake:
        print(f"inference.py: error: {mistake}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 where a sample could not be read."""
    if arguments.num_samples < 1 or arguments.num_frames < 1:
        raise UserError("--num_samples and --num_frames must be at least 1.")
    folder: Path = arguments.output_dir
    make_output_folder(folder, option="--output_dir")
    models = open_models(arguments)
    result = measure(models, arguments)
    for note in result.evaluations[0].notes:
        print(f"note: {note}")
    names = [name for name in result.evaluations[0].by_name() if all(name in e.by_name() for e in result.evaluations)]
    skipped = {skip.name: skip.reason for e in result.evaluations for skip in e.skipped}
    with writing_to(folder):
        remove_earlier_samples(folder, inputs=[Path(clip.path) for clip in result.evaluations[0].clips])
        # Before the samples, so that the next run knows them even if this one is killed.
        write_results(result, folder / "results.json", command=command_line())
    for number, name in enumerate(names, start=1):
        print(f"sample {number} of {len(names) + len(skipped)}  {name}: {scores(result, name)}", flush=True)
        source = next(Path(clip.path) for clip in result.evaluations[0].clips if clip.name == name)
        with writing_to(folder), fitting_in_memory(source):
            write_sample(models, source, folder / sample_stem(number, source), arguments)
    for reason in skipped.values():
        print(f"skipped: {reason}")
    print(f"total over {count_of(len(names), 'sample')}: {scores(result)}")
    if arguments.benchmark:
        for evaluation, model in zip(result.evaluations, models, strict=True):
            print(speed_line(evaluation, model))
    print(f"comparison videos, pictures and results.json are in {folder}")
    return 1 if skipped else 0


def open_models(arguments: argparse.Namespace) -> list[RoundTrip]:
    """The model, and the teacher where one is asked for."""
    teacher = arguments.cogvideox_model_path
    if arguments.use_ref_vae and teacher is None:
        raise UserError("--use_ref_vae needs --cogvideox_model_path, the folder or hub name of the teacher.")
    if teacher is not None and not arguments.use_ref_vae:
        raise UserError("--cogvideox_model_path is given without --use_ref_vae; add it, or leave the path out.")
    device = choose_devices(arguments.device)[0]
    models: list[RoundTrip] = [open_model(arguments.model_path, variant=arguments.variant, device=device)]
    if teacher is not None:
        models.append(TeacherRoundTrip.open(teacher, device=device, dtype=None))
    return models


def measure(models: Sequence[RoundTrip], arguments: argparse.Namespace) -> Result:
    """The metrics of `tinyvae eval`, or of `tinyvae compare` where there is a teacher."""
    data = arguments.annotation_file or arguments.data_root
    if data is None:
        data = arguments.output_dir / "sample_clips"
        print(f"no --data_root and no --annotation_file: using the procedural sample clips, written to {data}")
        write_sample_clips(data, count=max(5, arguments.num_samples), overwrite=True)
    options = {
        "device": [models[0].device],
        "lpips": None,
        "max_clips": arguments.num_samples,
        "max_frames": arguments.num_frames,
        "size": arguments.size,
        "split": arguments.split,
        "data_root": arguments.data_root if arguments.annotation_file is not None else None,
    }
    return compare(models, data, **options) if len(models) > 1 else evaluate(models[0], data, **options)


def sample_stem(number: int, source: Path) -> str:
    """What the names of one sample's files begin with."""
    return f"sample_{number:02d}_{source.stem}"


def remove_earlier_samples(folder: Path, *, inputs: Sequence[Path]) -> None:
    """Remove the samples that an earlier run of this script left, as its ``results.json`` lists them; no other file.

    If they are ``inputs`` of this run, they stay.
    """
    try:
        content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        if not content["command"].startswith("inference.py "):
            return
        first, *others = [{clip["name"]: Path(clip["path"]) for clip in e["clips"]} for e in content["evaluations"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # there are no results, or others than ours
    sources = [source for name, source in first.items() if all(name in clips for clips in others)]
    stems = [sample_stem(number, source) for number, source in enumerate(sources, start=1)]
    files = [file for stem in stems for kind in SAMPLE_FILES if (file := folder / f"{stem}{kind}").is_file()]
    files = [file for file in files if not any(path.exists() and path.samefile(file) for path in inputs)]
    for file in files:
        file.unlink()
    if files:
        print(f"removed {count_of(len(files), 'file')} that the earlier run of inference.py left in {folder}")


def write_sample(models: Sequence[RoundTrip], source: Path, stem: Path, arguments: argparse.Namespace) -> None:
    """The files of one sample: film, picture of its middle frame, and latents of each model where they are wanted."""
    limits = {"max_frames": arguments.num_frames, "size": arguments.size}
    outputs = Outputs(
        side_by_side=stem.with_name(f"{stem.name}.mp4"),
        picture=stem.with_name(f"{stem.name}.png"),
        latents=stem.with_name(f"{stem.name}_latents.safetensors") if arguments.save_latents else None,
        labels=True,
        overwrite=True,
    )
    reconstruct_video(models[0], source, outputs, beside=models[1:], **limits)
    for teacher in models[1:] if arguments.save_latents else ():
        latents = stem.with_name(f"{stem.name}_teacher_latents.safetensors")
        reconstruct_video(teacher, source, Outputs(latents=latents, overwrite=True), **limits)


def scores(result: Result, name: str | None = None) -> str:
    """MSE and PSNR of one sample, or the means over all, of each model."""
    words: dict[str, str] = {}
    for evaluation in result.evaluations:
        found = vars(evaluation.by_name()[name]) if name is not None else evaluation.summary.means()
        words[evaluation.model.label] = f"MSE {found['mse']:.6f}, PSNR {found['psnr']:.2f} dB"
    return "; ".join(f"{label} {said}" for label, said in words.items()) if len(words) > 1 else "".join(words.values())


def speed_line(evaluation: EvaluationResult, model: RoundTrip) -> str:
    cost = evaluation.cost
    peak = "not measured" if cost.peak_memory_bytes is None else f"{cost.peak_memory_bytes / 2**20:.0f} MiB"
    return (
        f"benchmark of {evaluation.model.label} on {model.device}: encode {cost.encode_fps:.1f} frames/s, "
        f"decode {cost.decode_fps:.1f} frames/s, peak {cost.memory_kind} {peak}"
    )


if __name__ == "__main__":
    sys.exit(main())
