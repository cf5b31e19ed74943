"""Numbers and pictures that say how good a model is: metrics, statistics over clips, evaluation, comparison, report,
reconstruction of whole videos."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyvae.evaluation.evaluating import EvaluationResult, evaluate
    from tinyvae.evaluation.metrics import ClipMetrics, clip_metrics
    from tinyvae.evaluation.statistics import Summary, summarise

__all__ = ["ClipMetrics", "EvaluationResult", "Summary", "clip_metrics", "evaluate", "summarise"]

_HOMES = {
    "EvaluationResult": "evaluating",
    "evaluate": "evaluating",
    "ClipMetrics": "metrics",
    "clip_metrics": "metrics",
    "Summary": "statistics",
    "summarise": "statistics",
}


def __getattr__(name: str) -> Any:
    # At first use: measuring tensors needs no video library, and `evaluating` loads one.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
