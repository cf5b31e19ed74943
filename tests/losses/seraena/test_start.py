"""When Seraena starts: at a step, or when validation stopped improving; and that a checkpoint keeps the rule."""

from __future__ import annotations

import json

from tinyvae.losses.seraena.start import SeraenaStart


def test_at_a_step() -> None:
    rule = SeraenaStart(at_step=100)
    assert not rule.before_step(99).has_started
    assert rule.before_step(100).started_at == 100
    assert rule.before_step(5000).started_at == 5000  # a resumed run may jump over the step itself
    assert SeraenaStart(at_step=0).before_step(0).has_started


def test_when_validation_stops_improving() -> None:
    rule = SeraenaStart(patience=2)
    for step, psnr in ((1, 20.0), (2, 21.0), (3, 20.9), (4, 22.0), (5, 22.0)):
        rule = rule.after_validation(step, psnr)
        assert not rule.has_started
        assert SeraenaStart.from_state_dict(json.loads(json.dumps(rule.state_dict()))) == rule
    rule = rule.after_validation(6, float("nan"))
    assert rule.started_at == 6 and rule.best == 22.0
    assert rule.after_validation(7, 30.0) == rule, "once started it never stops"


def test_a_metric_that_falls() -> None:
    rule = SeraenaStart(patience=1, higher_is_better=False)
    rule = rule.after_validation(1, 0.5).after_validation(2, 0.4)
    assert not rule.has_started
    assert rule.after_validation(3, 0.41).has_started


def test_whichever_comes_first() -> None:
    rule = SeraenaStart(at_step=10, patience=1).after_validation(2, 1.0)
    assert rule.before_step(10).started_at == 10
    assert rule.after_validation(4, 1.0).started_at == 4


def test_a_resumed_run_may_change_the_rule_and_keeps_the_past() -> None:
    past = SeraenaStart(patience=3).after_validation(1, 20.0).after_validation(2, 19.0)
    resumed = SeraenaStart(patience=2).with_past_of(past)
    assert resumed == SeraenaStart(patience=2, best=20.0, stale_validations=1)
    assert resumed.after_validation(3, 19.5).started_at == 3
    started = SeraenaStart(at_step=5).before_step(5)
    assert SeraenaStart(at_step=900).with_past_of(started).started_at == 5


def test_a_checkpoint_of_an_older_version_holds_a_key_more() -> None:
    rule = SeraenaStart(patience=3, best=20.0)
    assert SeraenaStart.from_state_dict({**rule.state_dict(), "min_improvement": 0.0}) == rule
