"""Pruning: the right channels go, and what clips are good for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engines.small_models import relative_error
from tinyvae import TAEHV, VARIANTS
from tinyvae.convert.channels import plan_cuts
from tinyvae.convert.prune import prune_model, pruned_spec
from tinyvae.errors import UserError
from tinyvae.models.variants import get_spec

PRUNABLE = [name for name, spec in VARIANTS.items() if spec.decoder != "wide"]


def trained_like(variant: str, *, width: float = 0.25) -> TAEHV:
    """Weights of which every layer matters to the output."""
    model = TAEHV(variant, width=width).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def clip_for(model: TAEHV, *, seed: int = 0, num_frames: int = 9) -> Tensor:
    factor = model.spec.space_factor
    return torch.rand(1, num_frames, 3, 3 * factor, 4 * factor, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super", "taeltx_2", "taeh3"])  # networks that differ
@torch.no_grad()
def test_channels_that_do_nothing_are_the_ones_to_go(variant: str) -> None:
    """A narrow network inside a wide one, its channels spread at random among dead ones, comes back out."""
    narrow = trained_like(variant, width=0.125)
    wide = TAEHV(variant, width=0.25).eval()
    generator = torch.Generator().manual_seed(1)
    for side in ("encoder", "decoder"):
        places: dict[str, Tensor] = {}
        for cut in plan_cuts(getattr(narrow, side), side):
            small, large = (model.get_submodule(cut.conv) for model in (narrow, wide))
            assert isinstance(small, torch.nn.Conv2d) and isinstance(large, torch.nn.Conv2d)
            large.weight.zero_()
            at_out, at_in = torch.arange(large.weight.shape[0]), torch.arange(large.weight.shape[1])
            if cut.out is not None:
                count = small.weight.shape[0] // (cut.out.outer * cut.out.inner)
                chosen = torch.randperm(2 * count, generator=generator)[:count].sort().values
                kept = places.setdefault(cut.out.group, chosen)
                at_out = cut.out.places(kept, len(at_out))
            if cut.into is not None:
                at_in = cut.into.places(places[cut.into.group], len(at_in))
            large.weight[at_out[:, None], at_in] = small.weight
            if large.bias is not None and small.bias is not None:
                large.bias.zero_()
                large.bias[at_out] = small.bias
    clip = clip_for(narrow)
    latents = narrow.encode(clip)
    assert relative_error(wide.encode(clip), latents) < 1e-5
    made = prune_model(wide, 0.5)
    assert made.spec == narrow.spec
    assert relative_error(made.encode(clip), latents) < 1e-5
    assert relative_error(made.decode(latents), narrow.decode(latents)) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_clips_make_the_result_better_on_others() -> None:
    """Also few clips, which tell less than the weights that are to be fitted: they do no harm."""
    model = trained_like("taehv")
    other = clip_for(model, seed=9)
    latents = model.encode(other)
    frames = model.decode(latents)

    def errors(made: TAEHV) -> list[float]:
        assert made.spec == get_spec("taehv", width=0.125) and made.dtype == model.dtype
        return [relative_error(made.encode(other), latents), relative_error(made.decode(latents), frames)]

    blind = errors(prune_model(model, 0.5))
    few = errors(prune_model(model, 0.5, clips=[clip_for(model, seed=1)]))
    more = errors(prune_model(model, 0.5, clips=[clip_for(model, seed=seed, num_frames=25) for seed in (1, 2)]))
    assert all(one < before for one, before in zip(few, blind, strict=True)), (few, blind)
    assert all(one < 0.7 * before for one, before in zip(more, blind, strict=True)), (more, blind)


@pytest.mark.parametrize(
    ("variant", "width", "keep", "words"),
    [
        ("taehv", 1.0, 0.3, "use one of 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875"),
        ("taehv", 1.0, 1.0, "gives no width"),
        ("taehv", 0.5, 0.125, "use one of 0.25, 0.5, 0.75"),
        ("taehv", 0.375, 0.5, "use one of 0.333333, 0.666667"),
        ("taehv", 1.0, float("nan"), "gives no width"),
        ("taehv", 0.125, 0.5, "smallest there is"),
        ("taeltx2_3_wide", 1.0, 0.5, "cannot be pruned: its decoder convolves groups"),
    ],
)
def test_what_cannot_be_made_is_refused(variant: str, width: float, keep: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pruned_spec(get_spec(variant, width=width), keep)


def test_a_third_may_be_rounded() -> None:
    assert pruned_spec(get_spec("taehv", width=0.375), 0.333333).width == 0.125
