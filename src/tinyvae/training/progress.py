"""Where a run stands: everything that counts, in values that a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyvae.losses.seraena_start import SeraenaStart

HIGHER_IS_BETTER = {"psnr": True, "ssim": True, "lpips": False, "mse": False}


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``step``: optimiser steps done (skipped ones included: they used up their clips). ``samples_seen``: clips that
    all ranks together have drawn. ``training_s``: seconds in training steps, without start-up and validation."""

    step: int = 0
    samples_seen: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_score: float | None = None
    best_step: int | None = None
    stale_validations: int = 0
    validated_step: int | None = None
    training_s: float = 0.0

    def improved_by(self, score: float, metric: str) -> bool:
        """Whether a validation's score beats the best so far; a first score always does."""
        if self.best_score is None:
            return True
        return score > self.best_score if HIGHER_IS_BETTER[metric] else score < self.best_score

    def with_scores_anew(self) -> Progress:
        """As before the first validation: the next one is the best so far."""
        return replace(self, best_score=None, best_step=None, stale_validations=0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """What the loop itself remembers. ``step_log``: this rank's numbers since the last log line, by
    `tinyvae.training.step_log.StepLog.state_dict`; None: a new line starts."""

    progress: Progress
    seraena_start: SeraenaStart | None
    step_log: dict[str, Any] | None = None
