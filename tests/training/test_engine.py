"""The plain engine: one process and two give the same numbers; guards that agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.engine_runs import largest_difference, results, run_plan, same_weights
from tinyvae.config.schema import TrainConfig
from tinyvae.models.taehv import TAEHV
from tinyvae.training.engine import Engine
from tinyvae.training.optim import make_optimizers


def prepared(**settings: Any) -> tuple[Engine, TAEHV]:
    config = TrainConfig(model_width=0.125, **settings)
    engine = Engine(config)
    model = TAEHV("taehv", width=0.125)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    return engine, model


def test_clipping_happens_once_and_the_norm_is_the_one_before() -> None:
    engine, model = prepared(max_grad_norm=0.25, learning_rate=1e-3)
    frames = torch.rand(1, 4, 3, 16, 16)
    seen: list[float] = []
    optimizer = engine._optimizers.optimizers[0]
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())))  # type: ignore[union-attr]
    )
    decoded, _ = model(frames)
    engine.backward(100 * (decoded - model.target(frames)).square().mean())
    result = engine.finish_step(max_grad_norm=0.25)
    assert result.stepped and result.gradient_norm > 1
    assert seen == [pytest.approx(0.25, rel=1e-4)]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("compile_mode", "moves"), [("reduce-overhead", True), ("default", False)])
def test_gradients_leave_the_memory_that_a_cuda_graph_writes_again(compile_mode: str, moves: bool) -> None:
    engine, model = prepared(compile_model=True, compile_mode=compile_mode)
    weight = next(iter(model.parameters()))
    made: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: made.append(p.grad))
    decoded, _ = model(torch.rand(1, 4, 3, 16, 16))
    engine.backward(decoded.square().mean())
    assert weight.grad is not None and torch.equal(weight.grad, made[0])
    assert (weight.grad.data_ptr() != made[0].data_ptr()) == moves


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer: str) -> None:
    engine, model = prepared(optimizer=optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    decoded, _ = model(torch.rand(1, 4, 3, 16, 16))
    engine.backward(decoded.sum() * math.inf)
    result = engine.finish_step(max_grad_norm=1.0)
    assert not result.stepped and not math.isfinite(result.gradient_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_one_process_and_two_train_alike_and_skip_together(tmp_path: Path) -> None:
    plan = [
        {"name": "run", "zero": None, "steps": 6, "save_at": 3},
        {"name": "parts", "zero": None, "steps": 6, "micro_batches": 2},
        {"name": "again", "zero": None, "steps": 6, "load": "run.saved.pt"},
    ]
    two = tmp_path / "two"
    one = tmp_path / "one"
    two.mkdir()
    one.mkdir()
    run_plan([*plan, {"name": "nan", "zero": None, "steps": 3, "nan_at": [1, 1]}], two, processes=2)
    run_plan([*plan[:1], {**plan[2], "load": "../two/run.saved.pt"}], one, processes=1)
    ranks = results(two, "run", processes=2)
    (alone,) = results(one, "run", processes=1)
    assert same_weights(*ranks) and same_weights(ranks[0], results(two, "again", processes=2)[0])
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert len(set(alone["losses"])) == 6  # it moves
    assert largest_difference(ranks[0], results(two, "parts", processes=2)[0]) < 1e-6
    assert largest_difference(ranks[0], results(one, "again", processes=1)[0]) < 1e-6  # from two ranks to one
    skipped = results(two, "nan", processes=2)
    assert [rank["stepped"] for rank in skipped] == [[True, False, True]] * 2
    assert [rank["unchanged"] for rank in skipped] == [[False, True, False]] * 2
    assert same_weights(*skipped)


def test_moments_of_another_engine_are_laid_out_like_the_weights() -> None:
    """Fused steps refuse moments in another memory order than their weights."""
    config = TrainConfig(model_width=0.125)
    engine = Engine(config)
    model = TAEHV("taehv", width=0.125).to(memory_format=torch.channels_last)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    decoded, _ = model(torch.rand(1, 4, 3, 16, 16))
    engine.backward(decoded.square().mean())
    engine.finish_step(max_grad_norm=1.0)
    state = engine.state_dict()
    (saved,) = state["optimizers"]["optimizers"]
    wanted = {i: moments["exp_avg"].clone() for i, moments in saved["state"].items()}
    for moments in saved["state"].values():
        moments["exp_avg"] = moments["exp_avg"].clone(memory_format=torch.contiguous_format)
    engine.load_state_dict(state)
    own = optimizers.optimizers[0].state
    for i, weight in enumerate(model.parameters()):
        assert own[weight]["exp_avg"].stride() == weight.stride()
        assert torch.equal(own[weight]["exp_avg"], wanted[i])
