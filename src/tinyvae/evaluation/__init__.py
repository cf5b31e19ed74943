"""Numbers and pictures that say how good a model is: metrics, statistics over clips, evaluation, comparison, report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinyvae.evaluation.metrics import ClipMetrics, clip_metrics
from tinyvae.evaluation.statistics import Summary, summarize

if TYPE_CHECKING:
    from tinyvae.evaluation.evaluating import EvaluationResult, evaluate

__all__ = ["ClipMetrics", "EvaluationResult", "Summary", "clip_metrics", "evaluate", "summarize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # At first use: measuring tensors needs no video library, and `evaluating` loads one.
    from tinyvae.evaluation import evaluating

    return getattr(evaluating, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
