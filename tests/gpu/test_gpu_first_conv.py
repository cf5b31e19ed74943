"""The first convolution of encoders on a GPU, alone and with the pooling layer behind it: against float64 and what it
replaces, and inside the encoders."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.gpu_codecs import FLOOR, SHORT, by_frames, error, needs_hopper, spread
from tinyvae.engines import first_pool, first_rows, fold, hopper
from tinyvae.engines.cudnn import PatchConv
from tinyvae.engines.fused import FusedTAEHV


@pytest.fixture(autouse=True)
def only_on_hopper() -> None:
    needs_hopper()


def before(image: Tensor, weight: Tensor, bias: Tensor, patch: int, stacked: int, slope: float) -> Tensor:
    """The convolution by cuDNN."""
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


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize(
    ("patch", "pairs", "height", "width"),
    [
        (1, 1, 8, 8),
        (2, 1, 8, 8),
        (1, 3, 40, 136),
        (2, 3, 40, 132),
        (1, 2, 16, 240),
        (2, 2, 24, 124),
        (1, 4, 480, 720),
        (2, 25, 240, 368),
    ],
)
def test_first_pool_against_float64(
    patch: int, pairs: int, height: int, width: int, slope: float, dtype: torch.dtype
) -> None:
    """As near to float64 as two kernels, every value written, and the same bits each time; sizes in patches."""
    torch.manual_seed(height)
    inputs = 3 * patch**2
    image = torch.randn(2 * pairs, 3, height * patch, width * patch, device="cuda").to(dtype)
    weight = (torch.randn(64, inputs, 3, 3, device="cuda") / (9 * inputs) ** 0.5).to(dtype)
    first = fold.ConvLayer(weight=weight, bias=torch.randn(64, device="cuda").to(dtype), relu=True, slope=slope)
    assert first.bias is not None
    pool = fold.PoolLayer(weight=(torch.randn(64, 128, 3, 3, device="cuda") / 34).to(dtype), stride=2)
    packed = first_pool.pack_weights(first, pool, patch)
    made = first_pool.first_pool(image, packed, slope=slope)
    for _ in range(20):
        # The memory of the result before, which torch gives out again, is full of NaN.
        again = first_pool.first_pool(image, packed, slope=slope)
        assert torch.equal(made, again)
        again.fill_(torch.nan)
        del again
    hidden = before(image, first.weight, first.bias, patch, 2, slope).permute(0, 3, 1, 2)
    apart = F.conv2d(hidden, pool.weight, stride=2, padding=1).permute(0, 2, 3, 1)
    assert error(made, apart.double()) < FLOOR[dtype] * 3  # with LeakyReLU cuDNN's result is rounded before the bias
    few = min(pairs, 2)
    unshuffled = F.pixel_unshuffle(image[: 2 * few].double(), patch)
    exact = F.leaky_relu(F.conv2d(unshuffled, first.weight.double(), first.bias.double(), padding=1), slope)
    pooled = F.conv2d(exact.unflatten(0, (few, 2)).flatten(1, 2), pool.weight.double(), stride=2, padding=1)
    errors = [error(frames[:few], pooled.permute(0, 2, 3, 1)) for frames in (made, apart)]
    assert errors[0] < 1.05 * max(errors[1], FLOOR[dtype])


@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2"])
def test_encoders_with_it(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to float64 as with the other kernels: two videos, whole and as streams, and images in float32."""
    model = spread(variant).half()
    exact = copy.deepcopy(model).double()
    frames = torch.rand(2, 2 * model.spec.time_factor + 1, 3, 160, 224, device="cuda", dtype=torch.float16)
    expected = exact.encode_video(frames.double())
    errors = []
    for by_rows, joined in ((False, False), (True, False), (True, True)):
        with monkeypatch.context() as patch:
            if not by_rows:
                patch.setattr(first_rows, "fits", lambda *_: False)
            if not joined:
                patch.setattr(first_pool, "fits", lambda *_: False)
            fused = FusedTAEHV(model, engine="hopper")
        encoder = fused._stacks["encoder"]
        assert isinstance(encoder, hopper.HopperStack)
        assert isinstance(encoder._packed[0], first_rows.FirstRowWeights) == by_rows
        assert isinstance(encoder._packed[1], first_pool.FirstPoolWeights) == (joined and encoder.patch_size < 4)
        made = [fused.encode_video(frames), by_frames(fused, frames), fused.encode_video(frames.float())]
        errors.append([error(latents, expected) for latents in made])
    for old, *others in zip(*errors, strict=True):
        assert max(others) < 1.1 * max(old, FLOOR[torch.float16])
