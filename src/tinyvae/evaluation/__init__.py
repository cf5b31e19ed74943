"""Numbers and pictures that say how good a model is: metrics, statistics over clips, evaluation, comparison, report,
reconstruction of whole videos."""

# Imported eagerly: `evaluate` is a function and a module, and the function must win whoever imports what first.
from tinyvae.evaluation.evaluate import EvaluationResult, evaluate
from tinyvae.evaluation.metrics import ClipMetrics, clip_metrics
from tinyvae.evaluation.statistics import Summary, summarise

__all__ = ["ClipMetrics", "EvaluationResult", "Summary", "clip_metrics", "evaluate", "summarise"]
