"""Muon, the learning rate and the average of weights: their formulas, and that their states save and load."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from tinyvae import TAEHV
from tinyvae.config.schema import TrainConfig
from tinyvae.training.optim import (
    Muon,
    OptimizerSet,
    WeightAverage,
    inner_conv_weights,
    learning_rate_factor,
    make_optimizers,
    orthogonalize,
    orthogonalize_all,
)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 8, 20)))
    assert values.min() > 0.5 and values.max() < 1.3


def test_matrices_of_many_shapes_are_orthogonalized_as_if_alone() -> None:
    """Wide, square and tall ones, channels-last too, share a batch by their shorter side."""
    torch.manual_seed(0)
    shapes = [(8, 2, 3, 3), (8, 8, 1, 1), (8, 5, 3, 3), (32, 8, 1, 1), (24, 2, 2, 2)]
    updates = [torch.randn(shape) for shape in shapes]
    updates[0] = updates[0].contiguous(memory_format=torch.channels_last)
    for update, direction in zip(updates, orthogonalize_all(updates), strict=True):
        rows, columns = update.shape[0], update[0].numel()
        matrix = update.reshape(rows, columns)
        alone = orthogonalize((matrix.T if rows > columns else matrix)[None])[0]
        expected = alone.T * (rows / columns) ** 0.5 if rows > columns else alone
        torch.testing.assert_close(direction, expected.reshape(update.shape), atol=1e-5, rtol=1e-4)


def test_update_is_the_orthogonalized_nesterov_momentum() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 2, 3, 3))
    before = weight.detach().clone()
    muon = Muon([weight], lr=0.1, momentum=0.5)
    weight.grad = torch.randn_like(weight)
    muon.step()
    # One step from zero: momentum is g/2, Nesterov's look-ahead 0.75 g; the direction is that of g.
    direction = orthogonalize(weight.grad.reshape(1, 4, 18)).reshape(weight.shape)
    torch.testing.assert_close(weight.detach(), before - 0.1 * direction)


def test_a_proposed_step_is_the_step_and_can_be_forgotten() -> None:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 2, 3, 3)) for _ in range(3)]
    twins = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    proposing, plain = (Muon(group, lr=0.1, momentum=0.9) for group in (weights, twins))
    for turn in range(4):
        for weight, twin in zip(weights, twins, strict=True):
            twin.grad = torch.randn(twin.shape)
            weight.grad = twin.grad.clone()
        plain.step()
        proposing.propose()
        proposing.step()
        if turn == 1:  # gradients that turn out not to be fit: nothing of them may stay
            for weight in weights:
                weight.grad = torch.full_like(weight, torch.nan)
            proposing.propose()
            proposing.zero_grad()
    for weight, twin in zip(weights, twins, strict=True):
        assert torch.equal(weight, twin)
        assert torch.equal(proposing.state[weight]["momentum"], plain.state[twin]["momentum"])


def test_muon_takes_inner_matrices_only() -> None:
    names = inner_conv_weights(TAEHV("taehv", width=0.125))
    assert "decoder.3.conv.0.weight" in names and "encoder.2.conv.weight" in names
    assert "encoder.17.weight" in names and "decoder.1.weight" in names
    for edge in ("encoder.0.weight", "decoder.22.weight"):
        assert edge not in names
    assert not any(name.endswith("bias") for name in names)
    depthwise = inner_conv_weights(TAEHV("taew2_2_super", width=0.125))
    assert "decoder.1.conv.0.weight" not in depthwise and "decoder.1.conv.1.weight" in depthwise


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_is_trained_once_and_state_round_trips(optimizer: str) -> None:
    config = TrainConfig(optimizer=optimizer, model_width=0.125)
    model = TAEHV("taehv", width=0.125)
    optimizers = make_optimizers(model, config)
    trained = [id(p) for group in optimizers.groups() for p in group["params"]]
    assert sorted(trained) == sorted(id(p) for p in model.parameters())

    def step(target: TAEHV, which: object) -> None:
        generator = torch.Generator().manual_seed(3)
        for p in target.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for one in which.optimizers:  # type: ignore[attr-defined]
            one.step()

    step(model, optimizers)
    twin = TAEHV("taehv", width=0.125)
    twin.load_state_dict(model.state_dict())
    twin_optimizers = make_optimizers(twin, config)
    twin_optimizers.load_state_dict(copy.deepcopy(optimizers.state_dict()))  # as a file on disk would be
    step(model, optimizers)
    step(twin, twin_optimizers)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_rates_follow_the_factor_and_a_load_keeps_what_the_run_sets() -> None:
    """A changed setting of a resumed run takes effect, as its log says."""
    model = TAEHV("taehv", width=0.125)
    optimizers = make_optimizers(model, TrainConfig(optimizer="muon", learning_rate=1e-3, muon_learning_rate=0.02))
    optimizers.set_rates(0.5)
    assert [group["lr"] for group in optimizers.groups()] == [0.01, 0.0005]
    saved = optimizers.state_dict()
    rates = {"learning_rate": 4e-3, "muon_learning_rate": 0.04}
    others = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "muon_momentum": 0.5}
    changed = make_optimizers(model, TrainConfig(optimizer="muon", **rates, **others))  # type: ignore[arg-type]
    changed.load_state_dict(saved)
    changed.set_rates(1.0)
    muon, adamw = changed.groups()
    assert (muon["lr"], muon["momentum"]) == (0.04, 0.5)
    assert (adamw["lr"], adamw["weight_decay"], adamw["betas"], adamw["eps"]) == (0.004, 0.3, (0.8, 0.99), 1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_load_keeps_whether_the_step_is_fused(fused: bool) -> None:
    """Either way: a step counts on, and the saved one is not touched."""
    weight = torch.nn.Parameter(torch.ones(4))
    saving, loading = (OptimizerSet([torch.optim.AdamW([weight], fused=one)]) for one in (not fused, fused))
    for optimizers in (saving, loading):
        weight.grad = torch.ones(4)
        if optimizers is loading:
            saved = saving.state_dict()
            loading.load_state_dict(saved)
            assert saved["optimizers"][0]["param_groups"][0]["fused"] is not fused
        optimizers.optimizers[0].step()
    assert loading.optimizers[0].param_groups[0]["fused"] is fused
    assert loading.optimizers[0].state[weight]["step"] == 2


def test_state_of_another_grouping_is_refused_in_a_sentence() -> None:
    model = TAEHV("taehv", width=0.125)
    adamw, muon = (make_optimizers(model, TrainConfig(optimizer=name)) for name in ("adamw", "muon"))
    with pytest.raises(ValueError, match="use it as --pretrained_model_path"):
        muon.load_state_dict(adamw.state_dict())


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(max_train_steps=110, lr_warmup_steps=10, **changes)


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"])
def test_warm_up_rises_evenly_from_above_zero(name: str) -> None:
    factors = [learning_rate_factor(step, config(lr_scheduler=name)) for step in range(11)]
    assert factors == pytest.approx([(step + 1) / 11 for step in range(11)])


def test_shapes_at_the_middle_and_at_the_end() -> None:
    middle, last = 60, 109
    assert learning_rate_factor(middle, config(lr_scheduler="linear")) == pytest.approx(0.5)
    assert learning_rate_factor(middle, config(lr_scheduler="cosine")) == pytest.approx(0.5)
    assert learning_rate_factor(middle, config(lr_scheduler="polynomial", lr_power=2.0)) == pytest.approx(0.25)
    assert learning_rate_factor(middle, config(lr_scheduler="constant")) == 1.0
    assert learning_rate_factor(0, config(lr_scheduler="constant")) == 1.0
    for name in ("linear", "cosine", "polynomial"):
        assert 0 < learning_rate_factor(last, config(lr_scheduler=name)) < 0.02
    restarts = [learning_rate_factor(s, config(lr_scheduler="cosine_with_restarts", lr_num_cycles=2)) for s in (10, 60)]
    assert restarts == pytest.approx([1.0, 1.0])


def test_never_rises_again_after_the_end() -> None:
    """Schedules stepped once per process hit zero at an eighth of a run on eight GPUs and climb again."""
    factors = [learning_rate_factor(step, config(lr_scheduler="cosine")) for step in range(10, 200)]
    assert all(later <= earlier for earlier, later in pairwise(factors))
    assert all(math.isfinite(factor) for factor in factors)


def one_weight(value: float) -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def test_formula_with_warm_up() -> None:
    layer = one_weight(0.0)
    average = WeightAverage(layer, decay=0.5)
    expected = 0.0
    for n, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        torch.nn.init.constant_(layer.weight, value)
        average.update(layer)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value
    assert average.values["weight"].item() == pytest.approx(expected)


def test_swap_gives_the_weights_back_even_after_an_error() -> None:
    layer = one_weight(0.0)
    average = WeightAverage(layer, decay=0.9)
    torch.nn.init.constant_(layer.weight, 5.0)
    with pytest.raises(ZeroDivisionError), average.swapped_into(layer):
        assert layer.weight.item() == 0.0
        _ = 1 / 0
    assert layer.weight.item() == 5.0


def test_state_round_trip_goes_on_alike() -> None:
    layer = one_weight(1.0)
    first = WeightAverage(layer, decay=0.9)
    first.update(layer)
    second = WeightAverage(one_weight(9.0), decay=0.9)
    second.load_state_dict(first.state_dict())
    torch.nn.init.constant_(layer.weight, 3.0)
    for average in (first, second):
        average.update(layer)
    assert torch.equal(first.values["weight"], second.values["weight"])
