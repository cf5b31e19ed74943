"""When the adversarial loss joins in: at a step, or when validation has stopped improving.

From the first step on it would fight a student that cannot yet tell sky from sea. The rule is a value: every method
returns the rule as it is afterwards, so a checkpoint holds it as plain JSON and a resumed run goes on the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SeraenaStart:
    """``at_step``: start there. ``patience``: start after that many validations in a row without improvement.

    With both, whichever comes first. Once started it never stops. ``best``, ``stale_validations`` and ``started_at``
    are the state so far.
    """

    at_step: int | None = None
    patience: int | None = None
    higher_is_better: bool = True
    best: float | None = None
    stale_validations: int = 0
    started_at: int | None = None

    def __post_init__(self) -> None:
        assert self.at_step is not None or self.patience is not None, "neither a step nor a patience"

    @property
    def has_started(self) -> bool:
        return self.started_at is not None

    def before_step(self, step: int) -> SeraenaStart:
        """The rule at the beginning of training step ``step`` (the first is 0)."""
        if not self.has_started and self.at_step is not None and step >= self.at_step:
            return replace(self, started_at=step)
        return self

    def after_validation(self, step: int, value: float) -> SeraenaStart:
        """The rule after a validation at ``step`` scored ``value``; a value that is not finite is no improvement."""
        if self.has_started:
            return self
        if math.isfinite(value) and self._improves(value):
            return replace(self, best=value, stale_validations=0)
        stale = self.stale_validations + 1
        starts = self.patience is not None and stale >= self.patience
        return replace(self, stale_validations=stale, started_at=step if starts else None)

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        return value > self.best if self.higher_is_better else value < self.best

    def with_past_of(self, earlier: SeraenaStart) -> SeraenaStart:
        """This rule with what ``earlier`` has seen: a resumed run may have another start step or patience."""
        return replace(
            self, best=earlier.best, stale_validations=earlier.stale_validations, started_at=earlier.started_at
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> SeraenaStart:
        """What `state_dict` gave; older checkpoints hold a key that is no more."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})
