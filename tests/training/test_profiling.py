"""A profiler's trace is of a few steps, also of a short run, and never of a whole long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import arguments_for, train_here
from tinyvae.training.diagnostics import SETTLING_STEPS, TRACED_STEPS, StepProfiler


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
