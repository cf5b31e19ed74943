"""On one GPU: the same run twice, launched or not, has the same bits, and so has one that was stopped and resumed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import EXACT, STEPS, TIMEOUT_S, run_ok, start

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


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
    """The second time as the only process of torchrun, so that gradients and statuses go through NCCL and gloo."""
    torchrun = [shutil.which("torchrun") or "torchrun", "--standalone", "--nproc_per_node", "1"]
    said = run_ok(small_recipe(tmp_path / "again", **EXACT), log=tmp_path / "log", launcher=torchrun)
    assert "destroy_process_group" not in said, "the process group was left open"
    assert first_difference(state(whole), state(tmp_path / "again")) is None


def test_deepspeed_with_offload(whole: Path, small_recipe: Callable[..., list[str]], tmp_path: Path) -> None:
    """ZeRO-2 with the optimizer in main memory: the same losses but for the rounding of another AdamW."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    accelerate = shutil.which("accelerate") or "accelerate"
    launch = [accelerate, "launch", "--config_file", str(CONFIGS / "deepspeed_1gpu.yaml")]
    run_ok(small_recipe(tmp_path / "run", **EXACT), log=tmp_path / "log", launcher=launch)
    found = state(tmp_path / "run")
    assert found["losses"] == pytest.approx(state(whole)["losses"], rel=0.02)


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
