"""Muon's update is orthogonal, the right weights get it, and both optimisers save and load as one."""

from __future__ import annotations

import copy

import pytest
import torch

from tinyvae import TAEHV
from tinyvae.config.schema import TrainConfig
from tinyvae.training.optim import Muon, inner_conv_weights, make_optimizers, orthogonalize, orthogonalize_all


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


def test_rates_follow_the_factor_and_keep_their_peaks_on_load() -> None:
    model = TAEHV("taehv", width=0.125)
    optimizers = make_optimizers(model, TrainConfig(optimizer="muon", learning_rate=1e-3, muon_learning_rate=0.02))
    optimizers.set_rates(0.5)
    assert [group["lr"] for group in optimizers.groups()] == [0.01, 0.0005]
    saved = optimizers.state_dict()
    changed = make_optimizers(model, TrainConfig(optimizer="muon", learning_rate=4e-3, muon_learning_rate=0.04))
    changed.load_state_dict(saved)
    changed.set_rates(1.0)
    assert [group["lr"] for group in changed.groups()] == [0.04, 0.004]


def test_state_of_another_grouping_is_refused_in_a_sentence() -> None:
    model = TAEHV("taehv", width=0.125)
    adamw, muon = (make_optimizers(model, TrainConfig(optimizer=name)) for name in ("adamw", "muon"))
    with pytest.raises(ValueError, match="use it as --pretrained_model_path"):
        muon.load_state_dict(adamw.state_dict())
