"""Smaller students: trained from scratch, taught by the whole network, and pruned from it; dB lost and speed won.

python benchmarks/prune_students.py --clips CLIPS --work output/prune [--steps 9600] [--widths 0.5 0.25]

CLIPS is a folder with an annotations.json that has splits. Each step is a command of `tinyvae`, printed before it runs;
a model that is there already is not made again, so a run that was cut off continues. The table at the end has the PSNR
on the validation clips (first 20 frames, center 256x256) and the speed at 480x720 beside the whole network.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from tinyvae.evaluation.evaluating import evaluate


def tinyvae(*words: object) -> None:
    command = [str(word) for word in words]
    print("tinyvae " + shlex.join(command), flush=True)
    subprocess.run([sys.executable, "-m", "tinyvae", *command], check=True)


def train(run: Path, clips: Path, steps: int, extra: list[str], *settings: object) -> Path:
    """The final model of a run, which is made if it is not there."""
    final = run / "final_model.safetensors"
    if not final.is_file():
        data = ("--data_root", clips, "--annotation_file", clips / "annotations.json")
        tinyvae("train", "scratch", *data, "--max_train_steps", steps, "--output_dir", run, *settings, *extra)
    return final


def make_models(arguments: argparse.Namespace) -> dict[str, Path]:
    work, clips, steps, extra = arguments.work, arguments.clips, arguments.steps, arguments.settings
    whole = train(work / "whole", clips, steps, extra)
    models = {"whole": whole}
    taught = ("--use_ref_vae", "true", "--ref_vae_path", whole)
    taught += ("--encoder_loss_weight", 1, "--decoder_loss_weight", 1)
    for width in arguments.widths:
        narrow = ("--model_width", width)
        models[f"{width:g} from scratch"] = train(work / f"scratch_{width:g}", clips, steps, extra, *narrow)
        models[f"{width:g} taught"] = train(work / f"taught_{width:g}", clips, steps, extra, *narrow, *taught)
        pruned = work / f"pruned_{width:g}.safetensors"
        if not pruned.is_file():
            source = ("--data", clips / "annotations.json", "--split", "train")
            tinyvae("prune", whole, "--keep", width, "--output", pruned, *source)
        models[f"{width:g} pruned"] = pruned
        start = ("--pretrained_model_path", pruned)
        made = train(work / f"pruned_taught_{width:g}", clips, steps, extra, *narrow, *taught, *start)
        models[f"{width:g} pruned, taught"] = made
    return models


def psnr(model: Path, clips: Path) -> float:
    """The mean over the validation clips, in dB; `tinyvae eval` gives the same."""
    chosen = {"split": "val", "max_frames": 20, "size": (256, 256), "lpips": None}
    found = evaluate(model, clips / "annotations.json", **chosen, show_progress_bar=True).summary.value("psnr")
    assert found is not None
    return found.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--steps", type=int, default=9600)
    parser.add_argument("--widths", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--settings", nargs=argparse.REMAINDER, default=[], help="further settings of every run")
    parser.add_argument("--bench_size", default="480x720")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    models = make_models(arguments)
    files = list(models.values())
    scores = [psnr(file, arguments.clips) for file in files]
    bench = arguments.work / "bench.json"
    tinyvae("bench", files[0], "--against", *files[1:], "--size", arguments.bench_size, "--output", bench)
    timings = json.loads(bench.read_text())["timings"]
    speeds = {
        operation: [row["speed"] for row in timings if row["operation"] == operation]
        for operation in ("decode", "encode")
    }
    print("\n| student | dB | dB lost | decode | encode |\n|---|---|---|---|---|")
    for place, name in enumerate(models):
        score, lost = scores[place], scores[0] - scores[place]
        print(
            f"| {name} | {score:.2f} | {lost:.2f} | {speeds['decode'][place]:.2f}x | {speeds['encode'][place]:.2f}x |"
        )


if __name__ == "__main__":
    main()
