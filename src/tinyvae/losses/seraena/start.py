"""When the adversarial loss joins in: at a step, or when validation has stopped improving.

The rule is a value: every method returns the rule as it is afterwards, and a checkpoint holds it as plain JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SeraenaStart:
    """``at_step``: start there. ``patience``: start after that many validations in a row without improvement.

    With both, whichever comes first. Once started it never stops. The last three fields are the state so far.
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
        sign = 1 if self.higher_is_better else -1
        if math.isfinite(value) and (self.best is None or sign * value > sign * self.best):
            return replace(self, best=value, stale_validations=0)
        stale = self.stale_validations + 1
        starts = self.patience is not None and stale >= self.patience
        return replace(self, stale_validations=stale, started_at=step if starts else None)

    def with_past_of(self, earlier: SeraenaStart) -> SeraenaStart:
        """This rule with what ``earlier`` has seen: a resumed run may have another start step or patience."""
        seen = {name: getattr(earlier, name) for name in ("best", "stale_validations", "started_at")}
        return replace(self, **seen)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> SeraenaStart:
        """What `state_dict` gave; older checkpoints hold a key that is no more."""
        return cls(**{field.name: state[field.name] for field in fields(cls)})
