"""The image kernels on a GPU against float64 and the two kernels that they replace, alone and inside a decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.gpu_codecs import FLOOR, SHORT, error, needs_hopper, spread
from tinyvae.engines import fold, fused, grow_image, hopper_kernels
from tinyvae.engines.eager import interleave_phases
from tinyvae.engines.fused import FusedTAEHV


@pytest.fixture(autouse=True)
def only_on_hopper() -> None:
    needs_hopper()


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    ("patch", "slope", "sizes"),
    [
        (1, 0.0, [(1, 1, 1, 2), (3, 37, 29, 2), (2, 5, 63, 1), (2, 9, 64, 2), (5, 60, 90, 2), (26, 240, 360, 2)]),
        (1, 0.2, [(3, 37, 29, 2), (1, 3, 200, 1)]),
        (2, 0.0, [(1, 1, 1, 2), (3, 37, 29, 2), (2, 5, 62, 1), (2, 9, 63, 2), (26, 120, 184, 2), (26, 180, 320, 2)]),
        (2, 0.2, [(3, 37, 29, 2), (1, 3, 200, 1), (2, 120, 184, 2)]),
        (4, 0.0, [(1, 1, 1, 2), (3, 37, 29, 2), (2, 5, 62, 1), (2, 9, 63, 2), (28, 60, 92, 2), (28, 90, 160, 2)]),
        (4, 0.2, [(3, 37, 29, 2), (1, 3, 200, 1), (4, 60, 92, 2)]),
    ],
)
def test_grow_image_against_its_two_layers(
    patch: int, slope: float, sizes: list[tuple[int, int, int, int]], dtype: torch.dtype
) -> None:
    for size in sizes:
        check_against_two_layers(patch, slope, *size, dtype)


def check_against_two_layers(
    patch: int, slope: float, frames: int, height: int, width: int, grown: int, dtype: torch.dtype
) -> None:
    """As near to float64 as the two kernels that it replaces, every pixel written, and the same bits each time."""
    torch.manual_seed(height)
    weight = (torch.randn(256 * grown, 64, 2, 2, device="cuda") / 16).to(dtype)
    grow = fold.GrowLayer(weight=weight, frames=grown, relu=True, slope=slope)
    weight, bias = torch.randn(3 * patch**2, 64, 3, 3, device="cuda") / 24, torch.randn(3 * patch**2, device="cuda")
    image = fold.ConvLayer(weight=weight.to(dtype), bias=bias)
    x = torch.randn(frames, height, width, 64, device="cuda").to(dtype)
    shape = (frames * grown, 3, 2 * height * patch, 2 * width * patch)
    made, again, apart = (torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in range(3))
    weights = grow_image.pack_weights(grow, image)
    grow_image.grow_image(x, weights, made)
    for _ in range(20):
        grow_image.grow_image(x, weights, again.fill_(torch.nan))
        assert torch.equal(made, again)
    tiles = hopper_kernels.pack_tile_weights(grow.weight, None, grown=grown)
    between = hopper_kernels.conv_tiles(x, tiles, frames_per_video=1, relu=True, slope=slope)
    hopper_kernels.image_conv(between, hopper_kernels.pack_image_weights(image.weight, bias, patch), apart)
    exact = F.pixel_shuffle(exact_grow_image(x[:3], grow, image), patch)
    assert error(made[: len(exact)], exact) < 1.05 * error(apart[: len(exact)], exact)
    assert error(made, apart.double()) < FLOOR[dtype] * 2


def exact_grow_image(x_BHWC: Tensor, grow: fold.GrowLayer, image: fold.ConvLayer) -> Tensor:
    """Both layers in float64 through torch, without a rounding between them."""
    assert image.bias is not None
    cells = F.conv2d(x_BHWC.double().permute(0, 3, 1, 2), grow.weight.double(), padding=1)
    phases = interleave_phases(cells, grow.frames, x_BHWC.shape[1], x_BHWC.shape[2])
    between = F.leaky_relu(phases, grow.slope)
    return F.conv2d(between, image.weight.double(), image.bias.double(), padding=1)


@pytest.mark.parametrize(
    ("variant", "activation"), [("taehv", "relu"), ("taew2_2", "relu"), ("taew2_2", "leaky_relu"), ("taeltx_2", "relu")]
)
def test_a_decoder_on_hopper_has_one_kernel_at_the_image(
    variant: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames are those of the two kernels, with no more memory (taeltx_2 needs most elsewhere: 0.6 % more)."""
    monkeypatch.setattr(fused, "REPLAY_CHUNKS", False)  # a graph has memory of its own
    model = spread(variant, activation=activation).half()
    latents = torch.randn(1, 3, model.spec.latent_channels, 30, 45, device="cuda", dtype=torch.float16)
    made, peaks = [], []
    for joined in (False, True):
        with monkeypatch.context() as patch:
            if not joined:
                patch.setattr(grow_image, "fits", lambda *_: False)
            codec = FusedTAEHV(model, engine="hopper")
        codec.decode_video(latents)
        torch.cuda.reset_peak_memory_stats()
        made.append(codec.decode_video(latents))
        peaks.append(torch.cuda.max_memory_allocated())
    assert error(made[1], made[0].double()) < 2 * FLOOR[torch.float16]
    assert peaks[1] < 1.02 * peaks[0]
