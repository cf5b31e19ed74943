"""Several networks of `tinyvae train scratch` at the same time on one GPU, and their figures on validation clips that
are read once; for `prune_students.py` and `seraena_effect.py`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from tinyvae.config import load_preset
from tinyvae.evaluation.clip_sources import ClipSource, Middle, find_clips, frame_chunks, measure_clip
from tinyvae.evaluation.cost import choose_devices
from tinyvae.evaluation.evaluating import EvaluationResult, EvaluationSettings, evaluate_round_trip
from tinyvae.evaluation.metrics import open_lpips
from tinyvae.evaluation.round_trip import open_model

FRAMES, SIDE = 20, 256  # of a validation clip: the middle of the file, pixels as they are
# What a run does beside its steps, and the tables do not need.
QUIET = {"validation_steps": 0, "checkpointing_steps": 0, "report": "false", "report_to": "none"}
QUIET |= {"save_model_card": "false", "log_every": 100}


def tinyvae(*words: object, log: Path | None = None) -> None:
    """Run a command; with ``log`` its output goes there, and its last lines are shown only if it fails."""
    command, began = [str(word) for word in words], time.perf_counter()
    print("tinyvae " + shlex.join(command), flush=True)
    output = None if log is None else log.open("w")
    ran = subprocess.run([sys.executable, "-m", "tinyvae", *command], stdout=output, stderr=output, check=False)
    if ran.returncode != 0:
        said = "" if log is None else "\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"tinyvae {shlex.join(command)} failed with exit code {ran.returncode}{said}")
    if log is not None:
        print(f"{log.stem}: {time.perf_counter() - began:.0f} s", flush=True)


class Runs:
    """Trainings in WORK/NAME, ``at_once`` of them together. ``settings``: words of the command line for all."""

    def __init__(
        self, clips: Path, work: Path, pool: ThreadPoolExecutor, *, steps: int, at_once: int, settings: Sequence[str]
    ) -> None:
        self.clips, self.work, self.steps, self._settings = clips, work, steps, settings
        self._pool, self._at_once = pool, at_once

    def train(self, name: str, *settings: object) -> Future[Path]:
        """The final model of a run, which is made if it is not there; one that was cut off begins again."""
        return self._pool.submit(self._train, name, *settings)

    def _train(self, name: str, *settings: object) -> Path:
        final = self.work / name / "final_model.safetensors"
        if final.is_file():
            return final
        shutil.rmtree(final.parent, ignore_errors=True)
        shared: dict[str, object] = {"data_root": self.clips, "annotation_file": self.clips / "annotations.json"}
        shared |= {"max_train_steps": self.steps, "output_dir": self.work / name, **QUIET}
        shared |= {"decoded_cache_dir": self.work / "decoded"}  # decoded once for all runs
        shared |= {"dataloader_num_workers": max(1, min(8, (os.cpu_count() or 1) // self._at_once))}
        words = [word for key, value in shared.items() for word in (f"--{key}", value)]
        tinyvae("train", "scratch", *words, *settings, *self._settings, log=self.log_of(name))
        return final

    def log_of(self, name: str) -> Path | None:
        """Where the output of a command goes that has others beside it."""
        return self.work / f"{name}.log" if self._at_once > 1 else None


def as_words(keys: str) -> list[str]:
    """``seed=1,lr_power=2`` -> the words ``--seed 1 --lr_power 2``."""
    return [word for pair in keys.split(",") if pair for word in f"--{pair}".split("=", 1)]


def slower_rates(factor: float) -> list[str]:
    """Words that set the learning rates of the preset `scratch` times a factor: for networks that are good already."""
    shipped = load_preset("scratch")
    rates = {key: getattr(shipped, key) * factor for key in ("learning_rate", "muon_learning_rate")}
    return [word for key, rate in rates.items() for word in (f"--{key}", f"{rate:.3g}")]


class Judge:
    """Scores networks on the validation clips: 20 frames in the middle of each file, the center 256x256."""

    def __init__(self, clips: Path, *, with_lpips: bool) -> None:
        self.settings = EvaluationSettings(
            data=str(clips / "annotations.json"),
            split="val",
            max_frames=FRAMES,
            size=(SIDE, SIDE),
            middle=Middle(scaled=False),
        )
        with ThreadPoolExecutor() as pool:
            self.clips = list(pool.map(self._read, find_clips(clips / "annotations.json", split="val")))
        self._lpips, notes = open_lpips("auto" if with_lpips else None)
        print(*notes, sep="\n", flush=True)

    def _read(self, clip: ClipSource) -> ClipSource:
        part = measure_clip(clip, max_frames=FRAMES, size=(SIDE, SIDE), middle=Middle(scaled=False))
        return replace(clip, frames=torch.cat(list(frame_chunks(part, chunk_frames=FRAMES))))

    def score(self, model: Path, label: str) -> EvaluationResult:
        devices = choose_devices(None)[:1]
        trip = open_model(model, variant=None, device=devices[0], dtype=None, label=label)
        shared = {"devices": devices, "lpips": self._lpips, "show_progress_bar": True}
        return evaluate_round_trip(trip, self.clips, self.settings, **shared)  # type: ignore[arg-type]
