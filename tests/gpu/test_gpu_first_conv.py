"""The first convolution of encoders on a GPU against float64 and what it replaces, alone and inside the encoders."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.gpu_codecs import FLOOR, SHORT, by_frames, error, needs_hopper, spread
from tinyvae.engines import first_rows, fold, hopper, hopper_kernels
from tinyvae.engines.cudnn import PatchConv
from tinyvae.engines.fused import FusedTAEHV


@pytest.fixture(autouse=True)
def only_on_hopper() -> None:
    needs_hopper()


def before(image: Tensor, weight: Tensor, bias: Tensor, patch: int, stacked: int, slope: float) -> Tensor:
    """The convolution as it was done without the kernel."""
    if patch == 1:
        packed = hopper_kernels.pack_first_weights(weight, bias)
        return hopper_kernels.first_conv(image, packed, stacked=stacked, slope=slope)
    layer = fold.ConvLayer(weight=weight, bias=bias, relu=True, slope=slope)
    return PatchConv.of(layer, patch_size=patch, stacked=stacked)(image).permute(0, 2, 3, 1)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize(
    ("patch", "frames", "height", "width", "stacked"),
    [
        (1, 1, 1, 8, 1),
        (2, 1, 1, 4, 1),
        (4, 1, 1, 2, 1),
        (1, 6, 37, 40, 2),
        (2, 6, 37, 28, 2),
        (4, 6, 37, 30, 3),
        (1, 4, 5, 136, 1),
        (2, 4, 5, 68, 4),
        (4, 4, 5, 34, 1),
        (1, 4, 480, 720, 2),
        (2, 14, 240, 368, 2),
        (4, 24, 120, 184, 2),
    ],
)
def test_first_rows_against_float64(
    patch: int, frames: int, height: int, width: int, stacked: int, slope: float, dtype: torch.dtype
) -> None:
    """As near to float64 as what it replaces, every value written, and the same bits each time; sizes in patches."""
    torch.manual_seed(height)
    inputs = 3 * patch**2
    image = torch.randn(frames, 3, height * patch, width * patch, device="cuda").to(dtype)
    weight = (torch.randn(64, inputs, 3, 3, device="cuda") / (9 * inputs) ** 0.5).to(dtype)
    bias = torch.randn(64, device="cuda").to(dtype)
    packed = first_rows.pack_weights(weight, bias, patch)
    made = first_rows.first_rows(image, packed, stacked=stacked, slope=slope)
    for _ in range(20):
        # The memory of the result before, which torch gives out again, is full of NaN.
        again = first_rows.first_rows(image, packed, stacked=stacked, slope=slope)
        assert torch.equal(made, again)
        again.fill_(torch.nan)
        del again
    apart = before(image, weight, bias, patch, stacked, slope)
    assert error(made, apart.double()) < FLOOR[dtype] * 2
    few = min(frames, 2 * stacked)
    unshuffled = F.pixel_unshuffle(image[:few].double(), patch)
    exact = F.leaky_relu(F.conv2d(unshuffled, weight.double(), bias.double(), padding=1), slope)
    side_by_side = exact.unflatten(0, (-1, stacked)).flatten(1, 2).permute(0, 2, 3, 1)
    errors = [error(frames_made[: len(side_by_side)], side_by_side) for frames_made in (made, apart)]
    assert errors[0] < 1.05 * max(errors[1], FLOOR[dtype])


@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2"])
def test_encoders_with_it(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as with the other kernels: two videos, whole and as streams, and images in float32."""
    model = spread(variant).half()
    exact = copy.deepcopy(model).double()
    frames = torch.rand(2, 2 * model.spec.time_factor + 1, 3, 160, 224, device="cuda", dtype=torch.float16)
    expected = exact.encode_video(frames.double())
    errors = []
    for patches in (frozenset[int](), frozenset({1, 2, 4})):
        monkeypatch.setattr(hopper, "FIRST_ROWS", patches)
        fused = FusedTAEHV(model, engine="hopper")
        encoder = fused._stacks["encoder"]
        assert isinstance(encoder, hopper.HopperStack)
        assert isinstance(encoder._packed[0], first_rows.FirstRowWeights) == bool(patches)
        made = [fused.encode_video(frames), by_frames(fused, frames), fused.encode_video(frames.float())]
        errors.append([error(latents, expected) for latents in made])
    for old, new in zip(*errors, strict=True):
        assert new < 1.1 * max(old, FLOOR[torch.float16])
