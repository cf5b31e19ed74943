"""On one GPU: the same run twice, launched or not, has the same bits, and so has one that was stopped and resumed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_runs import EXACT, STEPS, TIMEOUT_S, Runs, said_in_the_end, start


def state(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, average, Seraena, random numbers of the last checkpoint, and the losses of each step."""
    found = {
        file.name: torch.load(file, weights_only=True) for file in sorted((folder / f"checkpoint-{STEPS}").glob("*.pt"))
    }
    assert len(found) == 2, "one shared file and one of the only rank"
    scores = json.loads((folder / "validation_history.json").read_text())
    return {**found, "losses": losses(folder), "psnr": [entry["psnr"] for entry in scores]}


def first_difference(a: Any, b: Any, place: str = "") -> str | None:
    """Where two nested values differ by a single bit; timings are left out."""
    if isinstance(a, torch.Tensor):
        return None if torch.equal(a, b) else place
    if isinstance(a, dict):
        assert a.keys() == b.keys(), place
        pairs = [(key, a[key], b[key]) for key in a if key not in ("training_s", "seconds")]
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), place
        pairs = [(str(i), x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b or (a != a and b != b) else place
    return next((found for key, x, y in pairs if (found := first_difference(x, y, f"{place}/{key}"))), None)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_twice_the_same_bits(runs: Runs) -> None:
    """The second time as the only process of torchrun, so that gradients and statuses go through NCCL and gloo."""
    again, said = runs.finished("torchrun")
    assert "destroy_process_group" not in said, "the process group was left open"
    assert first_difference(state(runs.finished("whole")[0]), state(again)) is None


def test_deepspeed_with_offload(runs: Runs) -> None:
    """ZeRO-2 with the optimizer in main memory: the same losses but for the rounding of another AdamW."""
    folder, _ = runs.finished("deepspeed")
    assert losses(folder) == pytest.approx(losses(runs.finished("whole")[0]), rel=0.02)
    assert len(losses(folder)) == STEPS and (folder / "final_model.safetensors").is_file()


def test_stopped_and_resumed_the_same_bits(runs: Runs, small_recipe: Callable[..., list[str]], tmp_path: Path) -> None:
    cut, log = tmp_path / "cut", tmp_path / "cut.log"
    process = start(small_recipe(cut, **EXACT), log=log)
    metrics, deadline = cut / "metrics.jsonl", time.monotonic() + TIMEOUT_S
    while not (metrics.is_file() and metrics.read_text().strip()):  # the first step is done
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM, log.read_text()[-4000:]
    saved = list(cut.glob("emergency_checkpoint-*"))
    assert len(saved) == 1 and saved[0].name != f"emergency_checkpoint-{STEPS}", saved
    said_in_the_end(start([*small_recipe(cut, **EXACT), "--resume", "latest"], log=log), log)
    assert first_difference(state(runs.finished("whole")[0]), state(cut)) is None
