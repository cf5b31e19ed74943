"""Whole training runs of a few seconds, in this process or as ranks of their own, and what to compare of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.processes import HANGS_S, free_port
from tinyvae.cli.main import main
from tinyvae.config.load import load_config
from tinyvae.training.checkpoint import SHARED_STATE
from tinyvae.training.start import FinishedRun, run_training
from tinyvae.video.write import VideoWriter

TIMINGS = {
    "training_s",
    "seconds",
    "train/frames_per_second",
    "train/waiting_for_clips",
    "train/gpu_memory_gb",
    "timestamp",
    "written_at",
}
"""What no two runs have in common."""

SERAENA = {"use_seraena": True, "seraena_loss_weight": 0.1, "n_seraena_frames": 4, "seraena_buffer_mb": 1}

TWO_SIZES = {"resolutions": "8x32x32,4x24x40", "n_frames": 8}

DECODER_ALONE = {
    "variant": "taecvx",
    "n_frames": 8,
    "reconstruction_loss_weight": 0.0,
    "decoder_loss_weight": 10.0,
    "ref_vae_dtype": "float32",
}
"""With a CogVideoX ``teacher``: no loss needs the encoder."""


def write_clips(folder: Path, *, num_clips: int = 8) -> Path:
    """Small moving pictures of 48x40, 14 frames each."""
    folder.mkdir(parents=True, exist_ok=True)
    y, x = torch.meshgrid(torch.arange(40.0), torch.arange(48.0), indexing="ij")
    for number in range(num_clips):
        frames = []
        for t in range(14):
            waves = [torch.sin((x * (1 + c) + y * number + 4 * t) / 9) for c in range(3)]
            frames.append(torch.stack(waves) / 2.2 + 0.5)
        pixels = (torch.stack(frames) * 255).to(torch.uint8)
        with VideoWriter(folder / f"clip_{number}.mp4", fps=24, width=48, height=40) as writer:
            writer.write(pixels)
    return folder


def arguments_for(clips: Path, output_dir: Path, **changes: object) -> list[str]:
    """The command line behind ``tinyvae train`` of a run of six steps on tiny clips."""
    settings: dict[str, object] = {
        "data_root": clips,
        "use_sample_clips": False,
        "output_dir": output_dir,
        "model_width": 0.125,
        "init": "he",
        "optimizer": "adamw",
        "height": 32,
        "width": 32,
        "n_frames": 4,
        "train_split": 0.7,
        "train_batch_size": 2,
        "max_train_steps": 6,
        "lr_warmup_steps": 1,
        "validation_steps": 2,
        "num_validation_samples": 2,
        "validation_batch_size": 1,
        "save_validation_videos": False,
        "checkpointing_steps": 3,
        "log_every": 4,
        "report_to": "none",
        "report": False,
        "dataloader_num_workers": 0,
        "nccl_timeout": 240,
        **changes,
    }
    return ["quickstart", *(word for key, value in settings.items() for word in (f"--{key}", _text(value)))]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def train_here(arguments: list[str]) -> FinishedRun:
    """The run, in this process."""
    return run_training(load_config(arguments[0], arguments[1:]), command="test")


def copy_as_killed(run: Path, copy: Path, *, before: int) -> None:
    """Copy a finished run as a kill before its last checkpoint, of step ``before``, would have left it."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(f"checkpoint-{before}", "final_model.*"))


# ranks of their own

_server = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes a second.
_server.set_forkserver_preload(["tinyvae.training.start", "tinyvae.cli.main", "accelerate", "torch._dynamo"])


def nothing(rank: int) -> None:
    """No fault."""


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    words: list[str],
    log_file: str,
    prepare: Callable[[int], None],
    entry: Callable[[list[str]], None],
) -> None:
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that no server has started
    prepare(rank)
    entry(words)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Ranks under a watchdog: they are killed when ``wait`` runs out of time, and their logs are shown.

    As a context it kills those that are left at its end.
    """

    processes: list[BaseProcess]
    logs: list[Path]

    def log(self, rank: int = 0) -> str:
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""

    def wait(self, timeout_s: float = HANGS_S) -> list[int]:
        """The exit codes of all ranks (minus a signal's number where one killed it)."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        if hanging:
            self.kill()
            raise AssertionError(f"ranks {hanging} did not end within {timeout_s} s\n{self.both_logs()}")
        return [process.exitcode for process in self.processes if process.exitcode is not None]

    def ends_with(self, *codes: int) -> Launch:
        """Wait for the exit codes of all ranks and compare them; the same launch, for a look at its logs."""
        assert self.wait() == list(codes), self.both_logs()
        return self

    def wait_for(self, text: str, *, rank: int = 0, timeout_s: float = HANGS_S) -> None:
        """Wait until a rank's log holds a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log(rank):
            if time.monotonic() > deadline or not self.processes[rank].is_alive():
                self.kill()
                raise AssertionError(f"rank {rank} never said {text!r}\n{self.both_logs()}")
            time.sleep(0.02)

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def both_logs(self) -> str:
        return "\n".join(f"--- rank {rank}:\n{self.log(rank)}" for rank in range(len(self.logs)))


def launch(
    arguments: list[str],
    logs: Path,
    *,
    ranks: int = 1,
    prepare: Callable[[int], None] = nothing,
    entry: Callable[[list[str]], None] = main,
) -> Launch:
    """Start ``tinyvae train`` with this many ranks; ``prepare(rank)`` is called in each before it begins."""
    logs.mkdir(parents=True, exist_ok=True)
    files = [logs / f"rank_{rank}_{time.monotonic_ns()}.log" for rank in range(ranks)]
    port = free_port()
    words = ["train", *arguments]
    processes: list[BaseProcess] = [
        _server.Process(target=_rank_main, args=(rank, ranks, port, words, str(files[rank]), prepare, entry))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return Launch(processes=processes, logs=files)


# comparing


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint's state files, by file name."""
    files = [checkpoint / SHARED_STATE, *sorted(checkpoint.glob("rank_*.pt"))]
    assert len(files) > 1, f"no state in {checkpoint}"
    return {file.name: torch.load(file, weights_only=True) for file in files}


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two nested structures differ by a single bit, leaving out timings."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [place]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if list(map(str, a)) != list(map(str, b)):
            return [f"{place}: keys {sorted(map(str, a))} and {sorted(map(str, b))}"]
        return [found for key in a if key not in TIMINGS for found in differences(a[key], b[key], f"{place}/{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{place}: {len(a)} and {len(b)} items"]
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{place}/{i}")]
    both_nan = isinstance(a, float) and isinstance(b, float) and a != a and b != b
    return [] if a == b or both_nan else [f"{place}: {a!r} and {b!r}"]


def run_differences(run_a: Path, run_b: Path, step: int) -> list[str]:
    """Where two runs' states at a step, their histories, metric lines and final models differ."""
    found = differences(state_of(newest_of_step(run_a, step)), state_of(newest_of_step(run_b, step)))
    for name in ("metrics.jsonl", "validation_history.json"):
        found += differences(read_lines(run_a / name), read_lines(run_b / name), name)
    for name in ("final_model.pth", "best_model/model.pth"):
        both = [torch.load(run / name, weights_only=True) for run in (run_a, run_b)]
        found += differences(*both, name)
    return found


def newest_of_step(run: Path, step: int) -> Path:
    names = [run / f"checkpoint-{step}", run / f"emergency_checkpoint-{step}"]
    return next(folder for folder in names if folder.is_dir())


def read_lines(file: Path) -> list[Any]:
    """The entries of a JSONL or JSON list file."""
    if file.suffix == ".json":
        return json.loads(file.read_text())
    return [json.loads(line) for line in file.read_text().splitlines()]
