"""The depthwise kernel on a GPU against float64, alone and inside the super decoders."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.gpu.gpu_codecs import FLOOR, SHORT, by_latents, error
from tests.models.test_golden import golden_cases, golden_model
from tinyvae import TAEHV
from tinyvae.engines import depthwise
from tinyvae.engines.cudnn import CudnnStack
from tinyvae.engines.depthwise import pack_bands, super_depthwise, why_not_depthwise
from tinyvae.engines.fused import FusedTAEHV

SUPER = ["taew2_2_super", "taehv1_5_super"]


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    if reason := why_not_depthwise(torch.float16, torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(reason)


def fused_with(model: TAEHV, own: bool, monkeypatch: pytest.MonkeyPatch) -> FusedTAEHV:
    if not own:
        monkeypatch.setattr(depthwise, "why_not_depthwise", lambda dtype, device: "an old card")
    codec = FusedTAEHV(model, engine="cudnn")
    decoder = codec._stacks["decoder"]
    assert isinstance(decoder, CudnnStack)
    assert [weights.bands is not None for weights in decoder._super.values()] == [own] * 9
    return codec


def in_float64(x: Tensor, depth: Tensor, past_depth: Tensor, past: Tensor | None, videos: int) -> tuple[Tensor, Tensor]:
    """What `super_depthwise` computes."""
    now, then = (
        F.conv2d(x.double().permute(0, 3, 1, 2), weight.double(), padding=3, groups=x.shape[3]).permute(0, 2, 3, 1)
        for weight in (depth, past_depth)
    )
    video = then.unflatten(0, (videos, -1))
    first = torch.zeros_like(video[:, 0]) if past is None else past.double()
    return torch.cat([now, torch.cat([first[:, None], video[:, :-1]], 1).flatten(0, 1)], 3), video[:, -1]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("has_past", [False, True])
@pytest.mark.parametrize("frames", [1, 3, 7, 8, 13])
def test_kernel_rounds_once(frames: int, has_past: bool, dtype: torch.dtype) -> None:
    """Its error is that of the rounded result, at odd sizes and for several videos; every value is written."""
    for videos, height, width, channels in ((1, 30, 45, 512), (1, 61, 91, 256), (2, 13, 7, 128), (3, 1, 1, 16)):
        x = torch.randn(videos * frames, height, width, channels, device="cuda").to(dtype)
        depth, past_depth = (torch.randn(2, channels, 1, 7, 7, device="cuda") / 7).to(dtype)
        past = torch.randn(videos, height, width, channels, device="cuda").to(dtype) if has_past else None
        poison = [x.new_full((2 * x.numel(),), torch.nan), x.new_full((x.numel() // frames,), torch.nan)]
        del poison  # the results take this memory
        made = super_depthwise(x, pack_bands(depth, past_depth), num_videos=videos, past_NHWC=past)
        for one, exact in zip(made, in_float64(x, depth, past_depth, past, videos), strict=True):
            assert error(one, exact) < 1.05 * error(exact.to(dtype), exact) + 1e-6, (videos, height, width, channels)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("variant", SUPER)
def test_golden_decoders(variant: str, dtype: torch.dtype, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_file(shared / "golden" / f"{variant}.safetensors")
    plain = golden_model(variant).to("cuda", dtype)
    own = fused_with(plain, True, monkeypatch)
    for name in (case["case"] for case in golden_cases(shared, variant) if case["case"] != "large"):
        latents, expected = golden[f"{name}.latents"].to("cuda", dtype), golden[f"{name}.decoded"].double().cuda()
        limit = 1.1 * max(error(plain.decode_video(latents), expected), FLOOR[dtype])
        assert error(own.decode_video(latents), expected) < limit, name
        assert error(by_latents(own, latents), expected) < limit, name


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("variant", SUPER)
def test_decoders_of_any_length(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two videos of an odd size, whole and latent by latent; with cuDNN's depthwise convolutions the same."""
    model = golden_model(variant).cuda()
    exact, plain = copy.deepcopy(model).double(), model.to(dtype)
    own = fused_with(plain, True, monkeypatch)
    library = fused_with(plain, False, monkeypatch)
    for num_latents in (1, 3, 7, 8, 13):
        latents = torch.randn(2, num_latents, plain.spec.latent_channels, 5, 7, device="cuda", dtype=dtype)
        expected = exact.decode_video(latents.double())
        limit = 1.1 * max(error(plain.decode_video(latents), expected), FLOOR[dtype])
        for codec in (own, library):
            assert error(codec.decode_video(latents), expected) < limit, num_latents
            assert error(by_latents(codec, latents), expected) < limit, num_latents
