"""Diffusion space and back, and draws that depend on the seed and the position alone."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tinyvae.teachers import LatentSpace, draw

SPACE = LatentSpace(mean=(0.5, -1.0), std=(2.0, 0.25), factor=0.7)


def test_the_way_to_diffusion_space_and_back() -> None:
    z = torch.randn(2, 3, 2, 4, 4).to(torch.bfloat16)
    found = SPACE.normalize(z)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, :, 1], (z[:, :, 1].float() + 1.0) * 0.7 / 0.25)
    torch.testing.assert_close(SPACE.denormalize(found), z.float())
    assert LatentSpace.of({"mean": [0.5, -1.0], "std": [2.0, 0.25], "factor": 0.7}) == SPACE


def test_a_first_call_by_a_compiler_spoils_no_later_one() -> None:
    space = LatentSpace(mean=(0.1, 0.2), std=(3.0, 4.0), factor=0.3)  # nobody else has these numbers
    with FakeTensorMode():
        assert space.normalize(torch.ones(1, 1, 2, 4, 4)).shape == (1, 1, 2, 4, 4)
    assert space.denormalize(space.normalize(torch.ones(1, 1, 2, 4, 4))).sub(1).abs().max() < 1e-6


def test_a_draw_depends_on_the_seed_and_the_position_alone() -> None:
    mean, std = torch.randn(3, 2, 2, 4, 4), torch.rand(3, 2, 2, 4, 4)
    stream = torch.random.get_rng_state()
    whole = draw(mean, std, seed=5, positions=[7, 8, 9])
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert torch.equal(draw(mean[1:2], std[1:2], seed=5, positions=[8]), whole[1:2])
    assert not torch.equal(draw(mean, std, seed=6, positions=[7, 8, 9]), whole)
    assert not torch.equal(draw(mean, std, seed=5, positions=[8, 7, 9])[:2], whole[:2])


def test_draws_are_normal() -> None:
    mean, std = torch.full((1, 8, 16, 32, 32), 3.0), torch.full((1, 8, 16, 32, 32), 0.5)
    noise = (draw(mean, std, seed=0, positions=[0]) - 3.0) / 0.5
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1.0) < 0.01
