"""A profiler's trace is of a few steps, never of a whole long run; ``debug`` tells what the first step works with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import SERAENA, arguments_for, run_differences, train_here
from tinyvae.training.diagnostics import SETTLING_STEPS, TRACED_STEPS, StepProfiler, describe


def traced_steps(file: Path) -> set[int]:
    names = {event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]}
    return {int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#")}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, {0}), (2, {1}), (4, {1, 2, 3}), (30, set(range(SETTLING_STEPS + 1, SETTLING_STEPS + 1 + TRACED_STEPS)))],
)
def test_which_steps_are_traced(tmp_path: Path, steps: int, expected: set[int]) -> None:
    profiler = StepProfiler(tmp_path / "profile.json", device=torch.device("cpu"), steps_left=steps)
    for _ in range(steps):
        torch.rand(4).sum()
        profiler.step()
    profiler.close()
    assert traced_steps(tmp_path / "profile.json") == expected


def test_a_run_that_ends_in_the_middle_leaves_what_there_is(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profile.json", device=torch.device("cpu"), steps_left=1000)
    for _ in range(SETTLING_STEPS + 3):
        profiler.step()
    profiler.close()
    assert traced_steps(tmp_path / "profile.json")


def test_a_run_writes_it_where_asked(clips: Path, tmp_path: Path) -> None:
    settings = {"enable_profiler": True, "max_train_steps": 2, "validation_steps": 0}
    run = train_here(arguments_for(clips, tmp_path / "run", **settings))
    assert traced_steps(run.folder / "profile.json") == {1}
    assert "conv" in (run.folder / "profile.json").read_text()


def test_debug_lines_of_the_first_step_alone(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    changes: dict[str, object] = {"gradient_accumulation_steps": 2, "max_train_steps": 2, "checkpointing_steps": 0}
    changes |= SERAENA
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
    assert run_differences(plain, run, 2) == [], "looking changes nothing"


def test_values_that_are_not_finite_are_counted() -> None:
    values = torch.tensor([1.0, 3.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    assert describe(values) == "4 bfloat16 on cpu, min 1, max 3, mean 2, 2 values are not finite"
    assert describe(values[2:]) == "2 bfloat16 on cpu, no value is finite"
