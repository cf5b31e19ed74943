"""`tinyvae latents` and a run from its store on a GPU, at 480x720; and a machine on which nothing can be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.gpu_runs import TIMEOUT_S, Runs, said_in_the_end, start


def losses(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def test_a_run_from_its_store_is_the_run_with_the_teacher(
    runs: Runs, recipe: Callable[..., list[str]], tmp_path: Path
) -> None:
    live, _ = runs.finished("recipe")
    store, log = tmp_path / "latents", tmp_path / "log"
    _, preset, *settings = recipe(tmp_path / "unused")
    said_in_the_end(start(["latents", preset, *settings, "--clips", "8", "--output", str(store)], log=log), log)
    stored = recipe(tmp_path / "run", latent_store=store, validation_steps=0, early_stopping_patience=0, report=False)
    said_in_the_end(start(stored, log=log), log)
    for with_store, with_teacher in zip(losses(tmp_path / "run"), losses(live), strict=True):
        for term in ("reconstruction", "encoder", "decoder"):
            name = f"train/{term}_loss"
            assert with_store[name] == pytest.approx(with_teacher[name], rel=0.02), name


def test_without_a_compiler_the_plain_step_runs(small_recipe: Callable[..., list[str]], tmp_path: Path) -> None:
    words = small_recipe(tmp_path / "run", max_train_steps=2, lr_warmup_steps=1, checkpointing_steps=0)
    nothing = {
        "CC": "/nowhere/cc",
        "TRITON_CACHE_DIR": str(tmp_path / "t"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i"),
    }
    command = [sys.executable, "-m", "tinyvae", *words]
    done = subprocess.run(
        command, env={**os.environ, **nothing, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compile_model is left out" in done.stderr and "torch.compile fails here" in done.stderr
