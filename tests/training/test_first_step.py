"""``debug`` tells what the first step works with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import SERAENA, arguments_for, run_differences, train_here
from tinyvae.training.diagnostics import describe


def test_debug_lines_of_the_first_step_alone(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    changes: dict[str, object] = {"gradient_accumulation_steps": 2, **SERAENA}
    train_here(arguments_for(clips, run, **changes, debug=True))
    lines = [line.split("debug: ", 1)[1] for line in (run / "train.log").read_text().splitlines() if "debug: " in line]
    assert capsys.readouterr().err.count("debug: ") == len(lines), "on the terminal as well"
    said = dict(line.split(": ", 1) for line in lines)
    assert len(said) == len(lines), "each thing once"
    assert said["frames"].startswith("2x4x3x32x32 float32 on cpu, min 0.")
    assert said["student latents"].startswith("2x1x16x4x4 float32 on cpu, min ")
    assert said["decoded frames"].startswith("2x1x3x32x32 float32") and said["teacher latents"] == "none"
    assert float(said["loss"]) > 0 and float(said["reconstruction_loss"]) > 0 and float(said["seraena_loss"]) >= 0
    assert said["gradient norm before clipping"].endswith("the step was applied")
    assert float(said["learning_rate"]) > 0
    train_here(arguments_for(clips, plain, **changes))
    assert run_differences(plain, run, 6) == [], "looking changes nothing"


def test_values_that_are_not_finite_are_counted() -> None:
    values = torch.tensor([1.0, 3.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    assert describe(values) == "4 bfloat16 on cpu, min 1, max 3, mean 2, 2 values are not finite"
    assert describe(values[2:]) == "2 bfloat16 on cpu, no value is finite"
