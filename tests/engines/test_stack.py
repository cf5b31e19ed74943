"""The loop's own arithmetic: what a layer says of its output is what comes out, and slices hold what fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engines.small_models import NETWORKS, PREVIEWS, small
from tinyvae import TAEHV
from tinyvae.engines import stack as stack_module
from tinyvae.engines.eager import EagerStack
from tinyvae.engines.fold import Layer, MemLayer, Size, SuperMemLayer, fold_layers
from tinyvae.engines.stack import cut_runs, widest_values


def check_sizes(layers: list[Layer], channels: int) -> None:
    x = torch.rand(1, 8, channels, 12, 20)
    for layer in layers:
        size = layer.output(Size(x.shape[1], *x.shape[2:]))
        x = EagerStack([layer], patch_size=None).run(x, None)[0]
        assert Size(x.shape[1], *x.shape[2:]) == size, type(layer).__name__


@pytest.mark.parametrize(("variant", "preview"), [*((name, None) for name in NETWORKS), *PREVIEWS])
@torch.no_grad()
def test_layers_say_their_own_output(variant: str, preview: str | None) -> None:
    model = small(variant, preview=preview)
    check_sizes(fold_layers(model.encoder), model.spec.image_channels)
    check_sizes(fold_layers(model.decoder), model.spec.latent_channels)


@pytest.mark.parametrize("variant", NETWORKS)
def test_runs_hold_every_layer_once(variant: str) -> None:
    model = small(variant)
    for network in (model.encoder, model.decoder):
        layers = fold_layers(network)
        runs = cut_runs(layers)
        assert [place for start, stop, *_ in runs for place in range(start, stop)] == list(range(len(layers)))
        for start, stop, *_ in runs:
            blocks = [isinstance(layer, MemLayer | SuperMemLayer) for layer in layers[start:stop]]
            assert blocks == [True] or not any(blocks)


def test_widest_place_of_a_slice() -> None:
    model = TAEHV("taehv")
    grow_and_image, image_and_pool = fold_layers(model.decoder)[-2:], fold_layers(model.encoder)[:2]
    # one frame becomes two with 64 channels on the doubled grid; two frames with 64 channels are pooled
    assert widest_values(grow_and_image, 64) == (2 * 4 * 64, 1)
    assert widest_values(image_and_pool, 3) == (2 * 64, 2)


@torch.no_grad()
def test_slice_holds_as_many_frames_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TAEHV("taehv")
    seen: list[int] = []
    compute = EagerStack.compute

    def watched(self: EagerStack, start: int, stop: int, x: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return compute(self, start, stop, x)

    monkeypatch.setattr(EagerStack, "compute", watched)
    grown = 2 * 64 * 20 * 20 * 4  # bytes that one frame becomes
    image = 64 * 16 * 16 * 4  # bytes of one frame after the first convolution
    for layers, shape, room, expected in (
        (fold_layers(model.decoder)[-2:], (1, 7, 64, 10, 10), grown - 1, [1] * 7),
        (fold_layers(model.decoder)[-2:], (1, 7, 64, 10, 10), 3 * grown, [3, 3, 1]),
        (fold_layers(model.decoder)[-2:], (1, 7, 64, 10, 10), 7 * grown, [7]),
        (fold_layers(model.encoder)[:2], (1, 6, 3, 16, 16), 5 * image, [4, 2]),  # five would fit, two are pooled
    ):
        seen.clear()
        monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", room)
        EagerStack(layers, patch_size=1).run(torch.rand(shape), None)
        assert seen == expected
