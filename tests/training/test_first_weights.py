"""First weights keep signals alive through every variant, and are drawn from the seed alone; colors pass, if asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae import TAEHV, VARIANTS
from tinyvae.config import TrainConfig, load_preset
from tinyvae.training.build import build_model
from tinyvae.training.first_weights import QUIET_BRANCH, initialize_he, pass_colors


@pytest.mark.parametrize("variant", VARIANTS)
def test_signals_neither_die_nor_explode(variant: str) -> None:
    model = TAEHV(variant, width=0.25)
    initialize_he(model, seed=0)
    size = model.spec.space_factor * 2
    with torch.no_grad():
        latents = model.encode(torch.rand(1, 17, 3, size, size))
        decoded = model.decode(torch.randn(1, 2, model.spec.latent_channels, 2, 2))
    assert 0.05 < latents.std() < 5
    assert 0.05 < decoded.std() < 5
    assert 0.0 < decoded.mean() < 1.0


def test_drawn_from_the_seed_and_nothing_else() -> None:
    drawn = []
    for global_seed, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(global_seed)
        model = TAEHV("taehv", width=0.125)
        initialize_he(model, seed=seed)
        drawn.append(model.state_dict())
    same = [all(torch.equal(drawn[0][k], other[k]) for k in drawn[0]) for other in drawn[1:]]
    assert same == [True, False]


def test_output_starts_at_mid_gray_and_branches_are_quiet() -> None:
    model = TAEHV("taehv", width=0.25)
    initialize_he(model, seed=0)
    state = model.state_dict()
    assert (state["decoder.22.bias"] == 0.5).all() and (state["encoder.0.bias"] == 0).all()
    inner, last = (state[f"decoder.3.conv.{i}.weight"].std().item() for i in (2, 4))
    assert last == pytest.approx(QUIET_BRANCH / 2**0.5 * inner, rel=0.1)
    assert last < 0.1 * inner


def smooth_video(size: int) -> Tensor:
    """N = 1, 17 frames, colors that change slowly over the picture and not in time."""
    small = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return F.interpolate(small, size=(size, size), mode="bilinear")[:, None].expand(1, 17, 3, size, size)


def psnr(made: Tensor, wanted: Tensor) -> float:
    return float(-10 * (made - wanted).square().mean().log10())


@pytest.mark.parametrize("width", [0.125, 0.25])
@pytest.mark.parametrize("variant", VARIANTS)
def test_colors_pass_from_the_start(variant: str, width: float) -> None:
    model = TAEHV(variant, width=width)
    initialize_he(model, seed=0)
    frames = smooth_video(model.spec.space_factor * 4)
    drawn = model.reconstruct(frames)
    pass_colors(model)
    decoded, target = model.reconstruct(frames), model.target(frames)
    if model.spec.frame_rule == "chunked":  # a chunk's first latent also averages the zero frames in front of it
        drawn, decoded, target = drawn[:, 1:], decoded[:, 1:], target[:, 1:]
    mean_color = target.mean(dim=(1, 3, 4), keepdim=True).expand_as(target)
    assert psnr(drawn, target) < psnr(mean_color, target) + 1
    assert psnr(decoded, target) > psnr(mean_color, target) + 4
    assert (model.encode_video(frames).abs().amax(dim=(0, 1, 3, 4))[:3] < 1.1).all()


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super", "taeltx_2"])
def test_the_other_channels_of_a_start_with_colors_learn(variant: str) -> None:
    """Nothing is cut off: every conv has a gradient from the first step on."""
    model = build_model(TrainConfig(variant=variant, model_width=0.25, init="colors"))
    frames = smooth_video(model.spec.space_factor * 2)
    (model.decode(model.encode(frames)) - model.target(frames)).square().mean().backward()
    silent = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not silent


def test_init_chooses() -> None:
    shipped = load_preset("quickstart")
    assert shipped.init == "colors"
    he, colors, again = (build_model(replace(shipped, init=init)).state_dict() for init in ("he", "colors", "colors"))
    assert all(torch.equal(colors[key], again[key]) for key in colors)
    changed = {key for key in he if not torch.equal(he[key], colors[key])}
    assert {"encoder.0.weight", "decoder.22.weight", "decoder.22.bias"} <= changed
    assert not any(".conv." in key and key.count(".") == 4 for key in changed)  # blocks begin as they were drawn
