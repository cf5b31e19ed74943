"""Start `engine_process` with one or two processes and read back what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.processes import free_port

SCRIPT = Path(__file__).with_name("engine_process.py")


def run_plan(plan: list[dict[str, Any]], folder: Path, *, processes: int, timeout_s: float = 400) -> None:
    """Run the cases in one group of processes; all output is shown where it fails."""
    file = folder / f"plan_{processes}.json"
    file.write_text(json.dumps(plan))
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)),
        *("--master_port", str(free_port()), str(SCRIPT), str(file), str(folder)),
    ]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def results(folder: Path, name: str, *, processes: int) -> list[dict[str, Any]]:
    """What each rank wrote for a case."""
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(processes)]


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(value, other["model"][key]) for key, value in one["model"].items())


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((value - other["model"][key]).abs().max()) for key, value in one["model"].items())
