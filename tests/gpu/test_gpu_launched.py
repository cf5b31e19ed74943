"""One process under torchrun (NCCL) and under DeepSpeed's ZeRO-2 with the optimizer in main memory."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_runs import run_ok

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def alone(small_recipe: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched") / "alone"
    run_ok(small_recipe(folder), log=folder.with_suffix(".log"))
    return folder


def test_torchrun_and_nccl(small_recipe: Callable[..., list[str]], alone: Path, tmp_path: Path) -> None:
    torchrun = [shutil.which("torchrun") or "torchrun", "--standalone", "--nproc_per_node", "1"]
    run_ok(small_recipe(tmp_path / "run"), log=tmp_path / "log", launcher=torchrun)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=0.02)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_with_offload(small_recipe: Callable[..., list[str]], alone: Path, tmp_path: Path) -> None:
    launch = [
        shutil.which("accelerate") or "accelerate",
        "launch",
        "--config_file",
        str(CONFIGS / "deepspeed_1gpu.yaml"),
    ]
    run_ok(small_recipe(tmp_path / "run"), log=tmp_path / "log", launcher=launch)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=0.02)
    assert (tmp_path / "run" / "final_model.safetensors").is_file()
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "training_state.pt", weights_only=True)
    assert state, "a checkpoint in the plain engine's form"
