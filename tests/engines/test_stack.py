"""The loop's own arithmetic: what a layer says of its output is what comes out, and slices hold what fits."""

from __future__ import annotations

import pytest
import torch

from tests.engines.small_models import PREVIEWS, small
from tinyvae import TAEHV, VARIANTS
from tinyvae.engines.eager import EagerStack
from tinyvae.engines.fold import Layer, MemLayer, Size, SuperMemLayer, fold_layers
from tinyvae.engines.stack import cut_runs, slice_frames


def check_sizes(layers: list[Layer], channels: int) -> None:
    x = torch.rand(1, 8, channels, 12, 20)
    for layer in layers:
        size = layer.output(Size(x.shape[1], *x.shape[2:]))
        x = EagerStack([layer], patch_size=None).run(x, None)[0]
        assert Size(x.shape[1], *x.shape[2:]) == size, type(layer).__name__


@pytest.mark.parametrize(("variant", "preview"), [*((name, None) for name in VARIANTS), *PREVIEWS])
@torch.no_grad()
def test_layers_say_their_own_output(variant: str, preview: str | None) -> None:
    model = small(variant, preview=preview)
    check_sizes(fold_layers(model.encoder), model.spec.image_channels)
    check_sizes(fold_layers(model.decoder), model.spec.latent_channels)


@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_hold_every_layer_once(variant: str) -> None:
    model = small(variant)
    for network in (model.encoder, model.decoder):
        layers = fold_layers(network)
        runs = cut_runs(layers)
        assert [place for start, stop, *_ in runs for place in range(start, stop)] == list(range(len(layers)))
        for start, stop, *_ in runs:
            blocks = [isinstance(layer, MemLayer | SuperMemLayer) for layer in layers[start:stop]]
            assert blocks == [True] or not any(blocks)


def test_slice_holds_as_many_frames_as_fit() -> None:
    model = TAEHV("taehv")
    grow_and_image = fold_layers(model.decoder)[-2:]
    frame = 2 * 64 * 20 * 20  # values that one frame becomes: two frames, 64 channels, doubled size
    for room, expected in ((frame - 1, 1), (frame, 1), (3 * frame, 3), (100 * frame, 100)):
        assert slice_frames(grow_and_image, Size(100, 64, 10, 10), room) == expected
    image_and_pool = fold_layers(model.encoder)[:2]
    five = 5 * 64 * 16 * 16
    assert slice_frames(image_and_pool, Size(100, 3, 16, 16), five) == 4  # five would fit, two are pooled
