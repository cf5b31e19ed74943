"""``results.json``: everything an evaluation or a comparison found, for other programs.

Plain JSON: NaN and infinity become null (JSON has no word for them), numbers keep seven significant digits.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinyvae.evaluation.compare import Comparison
from tinyvae.evaluation.evaluating import EvaluationResult

RESULTS_FORMAT = "tinyvae-results"
RESULTS_VERSION = 1


def results_as_json(result: EvaluationResult | Comparison, *, command: str) -> dict[str, Any]:
    """The content of ``results.json`` as plain dicts and lists."""
    evaluations = [result] if isinstance(result, EvaluationResult) else list(result.evaluations)
    content: dict[str, Any] = {
        "format": RESULTS_FORMAT,
        "version": RESULTS_VERSION,
        "command": command,
        "evaluations": [asdict(evaluation) for evaluation in evaluations],
    }
    if isinstance(result, Comparison):
        content["comparison"] = {
            "baseline": result.baseline.model.label,
            "differences": [
                {"model": candidate.label, "by_metric": {d.metric: asdict(d) for d in candidate.differences}}
                for candidate in result.candidates
            ],
            "winners": result.winners,
        }
    return plain_json(content)


def write_results(result: EvaluationResult | Comparison, file: Path, *, command: str) -> None:
    """Write ``results.json``; the file appears whole or not at all."""
    write_json(file, results_as_json(result, command=command))


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Plain JSON of what `plain_json` returns."""
    write_whole(file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_whole(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def plain_json(value: Any) -> Any:
    """Dicts, lists and numbers that JSON has: NaN and infinity become null, tuples lists."""
    if isinstance(value, dict):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
