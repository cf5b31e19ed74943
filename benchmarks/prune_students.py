"""Smaller students: trained from scratch, taught by the whole network, and pruned from it; dB lost and speed won.

    P="python benchmarks/prune_students.py --clips CLIPS --work output/prune"
    $P [--steps 9600] [--widths 0.5 0.25]
    $P --steps 2000 --at_once 6 --whole whole.safetensors

CLIPS is a folder with an annotations.json that has splits. Each step is a command of `tinyvae`, printed before it runs;
a model that is there already is not made again, so a run that was cut off continues. ``--whole`` takes a network that
is there already; without it one is trained for as many steps. ``--at_once`` trains that many networks at the same time
on one GPU, each with its output in WORK/NAME.log. Runs validate and report nothing. The pruned networks learn at a
third of the rates: they start near their goal.

The table at the end has the PSNR on the validation clips (20 frames in the middle, center 256x256; smaller clips are
enlarged), and the speed at 480x720 beside the whole network, measured when nothing else runs. Students of one width are
one network and have one speed.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from student_runs import Judge, Runs, slower_rates, tinyvae

from tinyvae.models.weights import load_model

PRUNED_RATE = 1 / 3  # of the preset's learning rates


class Workshop:
    """Makes the models of the table, several at the same time."""

    def __init__(self, arguments: argparse.Namespace, runs: Runs) -> None:
        self.arguments, self.runs = arguments, runs

    def prune(self, whole: Path, width: float) -> Path:
        name = f"pruned_{width:g}"
        pruned = self.runs.work / f"{name}.safetensors"
        if not pruned.is_file():
            source = ("--data", self.runs.clips / "annotations.json", "--split", "train")
            tinyvae("prune", whole, "--keep", width, "--output", pruned, *source, log=self.runs.log_of(name))
        return pruned

    def make_models(self) -> dict[str, Path]:
        """Name -> weights, the whole network first, then the students of each width."""
        ready: Path | None = self.arguments.whole
        first = None if ready is not None else self.runs.train("whole")
        scale = 1.0 if ready is None else load_model(ready).spec.width  # a width is a part of the whole network's
        narrow = {width: ("--model_width", width * scale) for width in self.arguments.widths}
        rows: dict[str, Future[Path]] = {}
        for width in self.arguments.widths:
            rows[f"{width:g} from scratch"] = self.runs.train(f"scratch_{width:g}", *narrow[width])
        whole = ready if first is None else first.result()
        assert whole is not None
        teacher = ("--use_ref_vae", "true", "--ref_vae_path", whole)
        teacher += ("--encoder_loss_weight", 1, "--decoder_loss_weight", 1)
        for width in self.arguments.widths:
            rows[f"{width:g} taught"] = self.runs.train(f"taught_{width:g}", *narrow[width], *teacher)
        models: dict[str, Path] = {}
        for width in self.arguments.widths:  # meanwhile the others train
            models[f"{width:g} pruned"] = self.prune(whole, width)
            start = (*narrow[width], "--pretrained_model_path", models[f"{width:g} pruned"], *slower_rates(PRUNED_RATE))
            rows[f"{width:g} pruned, taught"] = self.runs.train(f"pruned_taught_{width:g}", *teacher, *start)
        models |= {name: made.result() for name, made in rows.items()}
        kinds = ("from scratch", "taught", "pruned", "pruned, taught")
        names = [f"{width:g} {kind}" for width in self.arguments.widths for kind in kinds]
        return {"whole": whole} | {name: models[name] for name in names}


def measure_speeds(models: dict[str, Path], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Operation -> first word of a name (whole, 0.5, 0.25) -> how many times as fast as the whole network."""
    by_width: dict[str, Path] = {}
    for name, file in models.items():
        by_width.setdefault(name.split()[0], file)
    first, *others = by_width.values()
    bench = arguments.work / "bench.json"
    tinyvae("bench", first, "--against", *others, "--size", arguments.bench_size, "--output", bench)
    timings = json.loads(bench.read_text())["timings"]
    return {
        operation: dict(zip(by_width, [row["speed"] for row in timings if row["operation"] == operation], strict=True))
        for operation in ("decode", "encode")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--steps", type=int, default=9600, help="of each training")
    parser.add_argument("--widths", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--whole", type=Path, help="weights of the whole network; default: trained first")
    parser.add_argument("--at_once", type=int, default=1, help="trainings that share the GPU")
    parser.add_argument("--bench_size", default="480x720")
    parser.add_argument("--settings", nargs=argparse.REMAINDER, default=[], help="further settings of every run")
    arguments = parser.parse_args()
    if arguments.whole is not None and not arguments.whole.is_file():
        parser.error(f"--whole {arguments.whole}: there is no such file.")
    arguments.work.mkdir(parents=True, exist_ok=True)
    judge = Judge(arguments.clips, with_lpips=False)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        shared = {"steps": arguments.steps, "at_once": arguments.at_once, "settings": arguments.settings}
        models = Workshop(arguments, Runs(arguments.clips, arguments.work, pool, **shared)).make_models()
    scores = {name: judge.score(file, name).summary.means()["psnr"] for name, file in models.items()}
    speeds = measure_speeds(models, arguments)
    print(f"\nStudents learned for {arguments.steps} steps; the whole network is {models['whole']}.\n")
    lines = ["| student | M parameters | dB | dB lost | decode | encode |", "|---|---|---|---|---|---|"]
    for name, score in scores.items():
        size = sum(parameter.numel() for parameter in load_model(models[name]).parameters()) / 1e6
        decode, encode = (speeds[operation][name.split()[0]] for operation in ("decode", "encode"))
        lines.append(
            f"| {name} | {size:.2f} | {score:.2f} | {scores['whole'] - score:.2f} | {decode:.2f}x | {encode:.2f}x |"
        )
    print("\n".join(lines))
    (arguments.work / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
