"""How close does a student come to its teacher, within a time? The preset `distill` against each teacher, as a table.

On one H200, with diffusers and PyAV installed (the teachers: `make_teacher.py wan cogvideox --output TEACHERS`):

    python benchmarks/distill_proof.py TEACHERS/wan TEACHERS/cogvideox --clips CLIPS --work FOLDER --seconds 260

CLIPS is a folder with an annotations.json that has splits. For each teacher a short run says how long a step takes here
(and fills the compiler's cache). Then the run takes as many steps as fit into ``--seconds``, so its learning rates fall
to zero in time. ``--set`` changes settings of every run, such as ``--set init=colors,seed=1``. A run that has its
report is not made again.

FOLDER gets table.md: PSNR of the teacher's own round trip, of the teacher's latents decoded by the student, of the
student's latents decoded by the teacher (each with its difference from the teacher) and of the student's own round trip
on the validation clips, and how many times as fast the student is. FOLDER/TEACHER/report.html has the pictures.

    python benchmarks/distill_proof.py TEACHER --clips CLIPS --work /tmp/proof --seconds 4 --trial_steps 4 \\
        --set allow_cpu=true,mixed_precision=no,height=32,width=32,train_batch_size=2,model_width=0.25,\\
validation_height=64,validation_width=64,num_validation_samples=2    # the whole way on a CPU, for a look
"""

from __future__ import annotations

import argparse
import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import torch
from student_runs import QUIET, as_words, tinyvae

RESERVE = 0.05  # whole runs took 2 and 5 % more a step than their trials (2026-11-20)
HEADS = "teacher | steps | seconds | ms a step | round trip | student decoder | student encoder | own round trip"
HEADS += " | encodes | decodes"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged of its steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/frames_per_second" in line]


def step_seconds(folder: Path) -> list[tuple[int, float]]:
    """(steps, seconds of one of them) of each logged line of a run: validations and checkpoints are not in it."""
    config = json.loads((folder / "config.json").read_text())
    frames = config["train_batch_size"] * config["gradient_accumulation_steps"] * config["n_frames"]
    found, before = [], 0
    for line in lines_of(folder):
        found.append((line["step"] - before, frames / line["train/frames_per_second"]))
        before = line["step"]
    return found


def train(teacher: Path, folder: Path, arguments: argparse.Namespace, **more: object) -> None:
    shared: dict[str, object] = {"teacher": teacher, "data_root": arguments.clips, "output_dir": folder}
    shared |= {"annotation_file": arguments.clips / "annotations.json"}
    words = [word for key, value in (shared | more).items() for word in (f"--{key}", value)]
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
    tinyvae("train", "distill", *words, *as_words(arguments.set), log=folder.with_suffix(".log"))


def prove(teacher: Path, arguments: argparse.Namespace) -> str:
    """Train the student of one teacher; its row of the table."""
    folder = arguments.work / teacher.name
    if not (folder / "results.json").is_file():
        trial = arguments.work / f"{teacher.name}_trial"
        quiet = {**QUIET, "log_every": max(1, arguments.trial_steps // 4)}
        train(teacher, trial, arguments, max_train_steps=arguments.trial_steps, **quiet)
        steps = max(1, int(arguments.seconds * (1 - RESERVE) / step_seconds(trial)[-1][1]))
        train(teacher, folder, arguments, max_train_steps=steps)
    timed = step_seconds(folder)[1:] or step_seconds(folder)  # the first line holds the compilation
    ms = 1000 * sum(steps * seconds for steps, seconds in timed) / sum(steps for steps, _ in timed)
    steps = lines_of(folder)[-1]["step"]
    (figures,) = json.loads((folder / "results.json").read_text())["comparison"]["teacher_figures"]
    cells = [
        teacher.name,
        f"{steps:,}",
        f"{steps * ms / 1000:.0f}",
        f"{ms:.1f}",
        f"{figures['teacher']['psnr']['mean']:.2f} dB",
    ]
    for part in ("decoder", "encoder", "student"):
        gap = figures[part]["gap"]["difference"]["mean"]
        cells.append(f"{figures[part]['psnr']['mean']:.2f} ({gap:+.2f})")
    speeds = [figures[verb] for verb in ("encode", "decode")]
    cells += [f"{speed['times_as_fast']:.1f}x" if speed else "not measured" for speed in speeds]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teachers", nargs="+", type=Path, metavar="TEACHER", help="diffusers folders")
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and the table")
    parser.add_argument("--seconds", type=float, default=260, help="of steps, for each teacher")
    parser.add_argument("--trial_steps", type=int, default=200, help="of the run that times a step")
    parser.add_argument("--set", default="", help="key=value,... for every run")
    arguments = parser.parse_args()
    for folder in (*arguments.teachers, arguments.clips):
        if not folder.is_dir():
            parser.error(f"there is no folder {folder}.")
    if len({teacher.name for teacher in arguments.teachers}) < len(arguments.teachers):
        parser.error("two teachers have one name; their runs need folders of their own: rename one.")
    arguments.work.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows = [f"{date.today()}, {machine}, torch {torch.__version__}", ""]
    rows += [f"| {HEADS} |", "|" + "---|" * len(HEADS.split("|"))]
    for teacher in arguments.teachers:
        rows.append(prove(teacher, arguments))
        (arguments.work / "table.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
