"""How long a run takes besides its steps: start-up, validation and report, read from the log of real `scratch` runs.

  python benchmarks/validation.py CLIPS
  python benchmarks/validation.py CLIPS --runs 2 --annotation_file CLIPS/annotations.json
  python benchmarks/validation.py CLIPS --model_width 0.25 --compile_model false --mixed_precision no

CLIPS is a folder of videos. Each run has eight steps and four validations at the sizes of `scratch` (clips of
20 x 256x256, raw and averaged weights). A second run finds the compiler's cache and the decoded clips of the first.
Other words are settings of the run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 8
LINES = {
    "first step after the start": r"first step done ([\d.]+) s after the start",
    "validation": r"validation at step \d+: .*; ([\d.]+) s$",
    "report": r"report: .*; ([\d.]+) s$",
}


def run(clips: Path, folder: Path, settings: list[str]) -> dict[str, list[str]]:
    """Seconds of one run by what took them, each in the order of the log."""
    own = {"data_root": clips, "output_dir": folder, "max_train_steps": STEPS, "validation_steps": STEPS // 4}
    own |= {"checkpointing_steps": STEPS, "decoded_cache_dir": folder.parent / "decoded"}
    words = [word for key, value in own.items() for word in (f"--{key}", str(value))]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tinyvae", "train", "scratch", *words, *settings], check=True)
    seconds = time.perf_counter() - started
    log = (folder / "train.log").read_text()
    found = {what: re.findall(pattern, log, re.MULTILINE) for what, pattern in LINES.items()}
    files = re.findall(r"files train, (\d+) validate", log)
    return {"files for validation": files, **found, "whole command": [f"{seconds:.1f}"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("--runs", type=int, default=1)
    arguments, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as work:
        tables = [run(arguments.clips, Path(work) / f"run_{n}", settings) for n in range(arguments.runs)]
    for number, table in enumerate(tables):
        print(f"\n| run {number + 1} | seconds |\n|---|---|")
        for what, seconds in table.items():
            print(f"| {what} | {', '.join(seconds)} |")


if __name__ == "__main__":
    main()
