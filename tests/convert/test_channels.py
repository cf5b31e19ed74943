"""The groups of channels, and the exact turn of linear pairs."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.convert.test_prune import PRUNABLE, clip_for, trained_like
from tests.engines.small_models import relative_error
from tinyvae.convert.channels import Axis, plan_cuts, turn_linear_pairs
from tinyvae.models.taehv import build_decoder
from tinyvae.models.variants import get_spec


def test_places_of_kept_channels() -> None:
    kept = torch.tensor([0, 2])
    assert Axis(group="x").places(kept, 3).tolist() == [0, 2]
    assert Axis(group="x", outer=2).places(kept, 6).tolist() == [0, 2, 3, 5]  # two frames, one after the other
    assert Axis(group="x", inner=4).places(kept, 12).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]  # pixel-shuffle
    assert Axis(group="x", outer=2).by_channel(torch.arange(6.0)).tolist() == [3.0, 5.0, 7.0]


@pytest.mark.parametrize("variant", PRUNABLE)
def test_every_convolution_is_planned_once(variant: str) -> None:
    decoder = build_decoder(get_spec(variant, width=0.125))
    names = [f"decoder.{name}" for name, module in decoder.named_modules() if isinstance(module, torch.nn.Conv2d)]
    assert [cut.conv for cut in plan_cuts(decoder, "decoder")] == names


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super", "taeltx_2"])
@torch.no_grad()
def test_turned_pairs_compute_what_they_did(variant: str) -> None:
    model = trained_like(variant)
    turned = copy.deepcopy(model)
    turn_linear_pairs(turned)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), turned.parameters(), strict=True))
    clip = clip_for(model)
    latents = model.encode(clip)
    assert relative_error(turned.encode(clip), latents) < 1e-5
    assert relative_error(turned.decode(latents), model.decode(latents)) < 1e-5
