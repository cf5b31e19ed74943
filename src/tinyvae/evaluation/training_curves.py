"""The course of a training run, as a report shows it: from ``metrics.jsonl`` and ``validation_history.json``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MAX_POINTS = 400  # of one curve in a page; longer ones are thinned evenly, first and last kept

Curves = dict[str, list[tuple[float, float]]]


def find_run_folder(model_path: Path) -> Path | None:
    """The run that a model belongs to: the path itself, or up to two folders above it, that holds ``metrics.jsonl``."""
    for folder in (model_path, *model_path.absolute().parents[:2]):
        if (folder / "metrics.jsonl").is_file():
            return folder
    return None


def read_training_curves(run_folder: Path) -> Curves:
    """``{"train/loss": [(step, value), ...], ...}`` of a run; lines cut off by a crash are left out."""
    curves: dict[str, dict[float, float]] = {}
    metrics = run_folder / "metrics.jsonl"
    if metrics.is_file():
        for line in metrics.read_text(errors="replace").splitlines():
            _take(curves, _parsed(line), prefix="")
    history = run_folder / "validation_history.json"
    if history.is_file():
        content = _parsed(history.read_text(errors="replace"))
        entries = content if isinstance(content, list) else (content or {}).get("history", [])
        for entry in entries:
            _take(curves, entry, prefix="val/")
    return {key: thin(sorted(points.items())) for key, points in sorted(curves.items(), key=_order) if points}


def thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MAX_POINTS` points, evenly chosen, with the first and the last."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def is_detail(key: str, points: list[tuple[float, float]]) -> bool:
    """Whether a curve is for those who look closer: spreads, counts, weights without averaging, nothing but zero."""
    return (
        key.endswith(("_std", "/num_clips", "/train_loss"))
        or key.startswith("val_raw/")
        or not any(value for _, value in points)
    )


def _take(curves: dict[str, dict[float, float]], entry: Any, *, prefix: str) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int | float):
        return
    values = {**entry, **entry["metrics"]} if isinstance(entry.get("metrics"), dict) else entry
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "step" and is_number and math.isfinite(value):
            name = key if "/" in key else f"{prefix}{key}"
            curves.setdefault(name, {}).setdefault(float(entry["step"]), float(value))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _order(item: tuple[str, Any]) -> tuple[int, str]:
    key = item[0]
    groups = ("val/psnr", "val/ssim", "val/lpips", "val/flicker", "val/", "train/loss", "train/")
    return next((place for place, start in enumerate(groups) if key.startswith(start)), len(groups)), key
