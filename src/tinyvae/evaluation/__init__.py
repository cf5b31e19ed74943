"""Numbers and pictures that say how good a model is: metrics, statistics over clips, evaluation, comparison, report,
reconstruction of whole videos."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyvae.evaluation.evaluate import EvaluationResult, evaluate
    from tinyvae.evaluation.metrics import ClipMetrics, clip_metrics
    from tinyvae.evaluation.statistics import Summary, summarise

__all__ = ["ClipMetrics", "EvaluationResult", "Summary", "clip_metrics", "evaluate", "summarise"]

# Fetched at first use: the trainer's validation needs the metrics and not the video readers.
_HOME = {
    "ClipMetrics": "metrics",
    "clip_metrics": "metrics",
    "Summary": "statistics",
    "summarise": "statistics",
    "EvaluationResult": "evaluate",
    "evaluate": "evaluate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tinyvae.evaluation' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tinyvae.evaluation.{_HOME[name]}"), name)
