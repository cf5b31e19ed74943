"""The package: light to import, and its names are functions and classes whoever imports what first."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tinyvae.evaluation
import tinyvae.evaluation.evaluating

HEAVY = "{'av', 'torchmetrics', 'diffusers', 'PIL'}"


def loaded_after(statement: str) -> str:
    """Which of the heavy packages a fresh interpreter has loaded after a statement."""
    script = f"import sys\n{statement}\nprint(sorted({HEAVY} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def test_metrics_need_no_video_library() -> None:
    assert loaded_after("from tinyvae.evaluation import clip_metrics, summarize") == "[]"


def test_evaluate_is_the_function_after_any_import() -> None:
    assert callable(tinyvae.evaluation.evaluate)
    assert tinyvae.evaluation.evaluate is tinyvae.evaluation.evaluating.evaluate
    assert set(tinyvae.evaluation.__all__) <= set(dir(tinyvae.evaluation))
    for name in tinyvae.evaluation.__all__:
        assert callable(getattr(tinyvae.evaluation, name))
    with pytest.raises(AttributeError, match="no attribute 'evalute'"):
        _ = tinyvae.evaluation.evalute
