"""On one GPU: the same run twice has the same bits, and so has a run that was stopped and resumed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import TIMEOUT_S, run_ok, start

STEPS = 6
EXACT = {"deterministic": True, "max_train_steps": STEPS, "validation_steps": 3, "checkpointing_steps": STEPS}


@pytest.fixture(scope="module")
def whole(small_recipe: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "whole"
    run_ok(small_recipe(folder, **EXACT), log=folder.with_suffix(".log"))
    return folder


def state(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, average, Seraena, random numbers of the last checkpoint, and the losses of each step."""
    found = {
        file.name: torch.load(file, weights_only=True) for file in sorted((folder / f"checkpoint-{STEPS}").glob("*.pt"))
    }
    assert len(found) == 2, "one shared file and one of the only rank"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        **found,
        "losses": [line.get("train/loss") for line in lines],
        "psnr": [line.get("val/psnr") for line in lines],
    }


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


def test_twice_the_same_bits(whole: Path, small_recipe: Callable[..., list[str]], tmp_path: Path) -> None:
    again = tmp_path / "again"
    run_ok(small_recipe(again, **EXACT), log=tmp_path / "again.log")
    assert first_difference(state(whole), state(again)) is None


def test_stopped_and_resumed_the_same_bits(whole: Path, small_recipe: Callable[..., list[str]], tmp_path: Path) -> None:
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
    run_ok([*small_recipe(cut, **EXACT), "--resume", "latest"], log=log)
    assert first_difference(state(whole), state(cut)) is None
