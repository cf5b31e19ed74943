"""A network with its channels filled up is the same function, and the Hopper engine takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engines.small_models import small
from tinyvae import TAEHV
from tinyvae.engines import fold
from tinyvae.engines.eager import EagerStack
from tinyvae.engines.fill import fill_channels
from tinyvae.engines.fused import folded_copy


def run(layers: list[fold.Layer], model: TAEHV, pushes: tuple[Tensor, ...]) -> Tensor:
    stack, state, made = EagerStack(layers, patch_size=model.spec.patch_size), None, []
    for part in pushes:
        frames, state = stack.run(part, state)
        made.append(frames)
    return torch.cat(made, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("width", [0.125, 0.5, 0.75])
@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2"])
def test_the_same_function(variant: str, width: float) -> None:
    model = small(variant, width=width, activation="leaky_relu").double()
    factor, each = model.spec.space_factor, model.spec.time_factor
    frames = torch.rand(2, 3 * each, 3, 2 * factor, 3 * factor, dtype=torch.double)
    latents = torch.randn(2, 3, model.spec.latent_channels, 2, 3, dtype=torch.double)
    for network, pushes in ((model.encoder, frames.split([2 * each, each], 1)), (model.decoder, latents.split(2, 1))):
        layers = folded_copy(network)
        filled = fill_channels(layers, 64)
        assert filled is not None
        assert {count % 64 for count in inner_channels(filled)} == {0}
        assert all(lies_as_folded(weight) for layer in filled for weight in vars(layer).values())
        torch.testing.assert_close(run(filled, model, pushes), run(layers, model, pushes), atol=1e-12, rtol=0)


def lies_as_folded(weight: object) -> bool:
    """Not a weight OIHW of another memory order: cuDNN would lay it out again at every call."""
    is_weight = isinstance(weight, Tensor) and weight.ndim == 4
    return not is_weight or weight.is_contiguous(memory_format=torch.channels_last)


def inner_channels(layers: list[fold.Layer]) -> list[int]:
    """What every layer but the last gives, and every block inside."""
    size, counts = fold.Size(8, layers_in(layers), 8, 8), []
    for layer in layers[:-1]:
        size = layer.output(size)
        if not isinstance(layer, fold.ClampLayer):
            counts.append(size.channels)
        if isinstance(layer, fold.MemLayer):
            counts += [*layer.second.shape[:2], layer.first.shape[0] // 2]
    return counts


def layers_in(layers: list[fold.Layer]) -> int:
    first = next(layer for layer in layers if isinstance(layer, fold.ConvLayer))
    return first.weight.shape[1]


@pytest.mark.parametrize("preview", ["time", "space", "both"])
@torch.no_grad()
def test_previews(preview: str) -> None:
    model = small("taehv", preview=preview)
    latents = torch.randn(1, 3, 16, 2, 3)
    layers = folded_copy(model.decoder)
    filled = fill_channels(layers, 64)
    assert filled is not None
    torch.testing.assert_close(run(filled, model, (latents,)), run(layers, model, (latents,)), atol=1e-5, rtol=0)


def test_what_has_its_channels_stays_as_it_is() -> None:
    layers = folded_copy(TAEHV("taehv").decoder)
    filled = fill_channels(layers, 64)
    assert filled is not None
    for old, new in zip(layers, filled, strict=True):
        for name, weight in vars(old).items():
            if isinstance(weight, Tensor):
                assert torch.equal(weight, getattr(new, name))


@pytest.mark.parametrize("variant", ["taew2_2_super", "taeltx2_3_wide"])
def test_other_networks_are_not_filled(variant: str) -> None:
    assert fill_channels(folded_copy(small(variant).decoder), 64) is None
