"""The networks as modules: width, gradients in every mode, checkpointing, and what bad input gets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.engines.live_memory import LiveMemory
from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.errors import UserError

ONE_OF_EACH = ["taehv", "taecvx", "taehv1_5_super", "taeltx_2", "taeh3"]


def loss_gradients(model: TAEHV, video: Tensor, *, parallel: bool = True) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    if parallel:
        decoded = model.decode(model.encode(video)).clamp(0, 1)
    else:
        encoder = StreamingEncoder(model, track_gradients=True)
        latents = torch.cat([*(encoder.push(frame) for frame in video.split(1, dim=1)), encoder.flush()], dim=1)
        decoder = StreamingDecoder(model, num_latents=latents.shape[1], track_gradients=True)
        decoded = torch.cat([decoder.push(latent) for latent in latents.split(1, dim=1)], dim=1)
    (decoded * torch.linspace(-1, 1, decoded.numel()).reshape(decoded.shape).to(decoded)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("width", [0.25, 0.5, 1.5])
@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
def test_width_scales_hidden_channels_only(variant: str, width: float) -> None:
    with torch.device("meta"):
        scaled, released = TAEHV(variant, width=width).state_dict(), TAEHV(variant).state_dict()
    assert list(scaled) == list(released)
    assert scaled["encoder.0.weight"].shape[0] == 64 * width
    assert scaled["encoder.17.weight"].shape[0] == released["encoder.17.weight"].shape[0]
    assert scaled["decoder.22.weight"].shape[0] == released["decoder.22.weight"].shape[0]
    hidden = released["decoder.17.conv.0.weight"].shape[0]
    assert scaled["decoder.17.conv.0.weight"].shape[0] == hidden * width


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_gradients_are_the_same_in_every_mode(variant: str) -> None:
    model = TAEHV(variant, width=0.125).double()
    size = model.spec.space_factor
    video = 0.4 + 0.2 * torch.rand(1, 17, 3, size, size, dtype=torch.double)
    expected = loss_gradients(model, video)
    assert set(expected) == {name for name, _ in model.named_parameters()}
    for name, gradient in loss_gradients(model, video, parallel=False).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-9, rtol=1e-7)
    model.gradient_checkpointing = True
    for name, gradient in loss_gradients(model, video).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-9)


def kept_for_backward(run: Callable[[], Tensor]) -> int:
    """How many tensors autograd keeps for a backward pass while ``run`` runs."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        made = run()
    assert made.requires_grad == bool(kept)
    return len(kept)


@pytest.mark.parametrize("variant", ONE_OF_EACH)
@pytest.mark.parametrize("fused", [False, True])
def test_videos_go_through_without_a_graph(variant: str, fused: bool) -> None:
    """49 frames of 480x720 kept 43 GB for a backward pass that nobody asked for."""
    model = TAEHV(variant, width=0.125)
    codec = model.fused() if fused else model
    size = model.spec.space_factor
    video = torch.rand(1, 18, 3, size, size, requires_grad=True)
    latents = torch.randn(1, 3, model.spec.latent_channels, 1, 1, requires_grad=True)
    calls: list[Callable[[], Tensor]] = [
        *(partial(codec.encode_video, video, parallel=parallel) for parallel in (True, False)),
        *(partial(codec.decode_video, latents, parallel=parallel) for parallel in (True, False)),
        lambda: codec.reconstruct(video),
        lambda: StreamingEncoder(codec).push(video),
        lambda: StreamingEncoder(codec, num_frames=18).push(video),
        lambda: StreamingDecoder(codec, num_latents=3).push(latents),
    ]
    assert [kept_for_backward(call) for call in calls] == [0] * len(calls)
    assert torch.is_grad_enabled()
    if not fused:
        assert kept_for_backward(lambda: model.encode(video)) and kept_for_backward(lambda: model.decode(latents))
        assert kept_for_backward(lambda: model(video)[0])
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_checkpointing_needs_less_memory() -> None:
    """Bytes of tensors alive at once in a training step. Seen: 0.5 of the plain step, at any size."""
    model = TAEHV("taehv", width=0.125)
    video = torch.rand(1, 8, 3, 32, 32)
    peaks = {}
    for checkpointing in (False, True):
        model.gradient_checkpointing = checkpointing
        with LiveMemory() as memory:
            model(video)[0].square().mean().backward()
        peaks[checkpointing] = memory.peak
        model.zero_grad()
    assert peaks[True] < 0.6 * peaks[False], peaks


def test_training_path_has_no_clamp() -> None:
    model = TAEHV("taehv", width=0.125)
    torch.nn.init.constant_(model.decoder[22].bias, 5.0)
    latents = torch.randn(1, 2, 16, 1, 1)
    decoded = model.decode(latents)
    assert decoded.max() > 1 and model.decode_video(latents).max() <= 1
    decoded.sum().backward()
    assert model.decoder[22].bias.grad.abs().min() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_follows_the_weights(variant: str) -> None:
    model = TAEHV(variant, width=0.125).to(torch.bfloat16).eval()
    size = model.spec.space_factor
    with torch.no_grad():
        decoded = model.reconstruct(torch.rand(1, 3, 3, size, size))
    assert decoded.dtype == torch.bfloat16 and decoded.isfinite().all()


@pytest.mark.parametrize(
    ("video", "says"),
    [
        (torch.rand(4, 3, 8, 8), r"x\[None\]"),
        (torch.rand(1, 3, 4, 8, 8), r"x.transpose\(1, 2\)"),
        (torch.rand(1, 4, 8, 8, 3), r"x.movedim\(-1, 2\)"),
        (torch.rand(1, 4, 4, 8, 8), "3 RGB channels"),
        (torch.rand(1, 0, 3, 8, 8), "empty"),
        (torch.rand(0, 1, 3, 8, 8), "empty"),
        (torch.rand(1, 1, 3, 12, 8), "8x8 or 16x8"),
        (torch.zeros(1, 1, 3, 8, 8, dtype=torch.uint8), r"x.float\(\) / 255"),
        (torch.rand(1, 1, 3, 8, 8).to(torch.float8_e4m3fn), r"float8_e4m3fn; convert with x.float\(\)"),
        (torch.rand(1, 1, 3, 8, 8, device="meta"), "is on meta"),
        (torch.rand(1, 1, 3, 8, 8).numpy(), r"torch.as_tensor\(x\)"),
    ],
)
def test_bad_videos_are_refused(video: Tensor, says: str) -> None:
    model = TAEHV("taehv", width=0.125)
    with pytest.raises(UserError, match=says):
        model.encode_video(video)
    if "16x8" not in says:  # that one is padded
        with pytest.raises(UserError, match=says):
            model.reconstruct(video)


def test_bad_latents_are_refused() -> None:
    with pytest.raises(ValueError, match="48 latent channels"):
        TAEHV("taew2_2", width=0.125).decode_video(torch.randn(1, 2, 16, 1, 1))


def test_values_of_another_range_warn_once() -> None:
    model = TAEHV("taehv", width=0.125)
    with pytest.warns(UserWarning, match=r"looks like 0\.\.255"):
        model.encode_video(255 * torch.rand(1, 1, 3, 8, 8))
    with pytest.warns(UserWarning, match=r"looks like -1\.\.1"):
        TAEHV("taehv", width=0.125).encode_video(2 * torch.rand(1, 1, 3, 8, 8) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encode_video(255 * torch.rand(1, 1, 3, 8, 8))
        TAEHV("taehv", width=0.125).encode_video(torch.rand(1, 1, 3, 8, 8))


@pytest.mark.parametrize(
    ("video", "span"),
    [(torch.linspace(-4, 4, 3 * 64), "-4..4"), (torch.linspace(0, 65535, 3 * 64), "0..6.55e+04")],
)
def test_values_of_no_known_range_are_told_what_is_expected(video: Tensor, span: str) -> None:
    """Noise is not told to divide by 255."""
    with pytest.warns(UserWarning, match=re.escape(f"in [0, 1] but span {span}; bring them to [0, 1]")) as seen:
        TAEHV("taehv", width=0.125).encode_video(video.reshape(1, 1, 3, 8, 8))
    assert seen[0].filename == __file__, "the line of the caller"


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinite"), (-torch.inf, "infinite"), (70000.0, "infinite")]
)
def test_values_that_are_no_numbers_are_refused(value: float, kind: str) -> None:
    model = TAEHV("taehv", width=0.125)
    with pytest.warns(UserWarning, match="divide by 255"):
        model.encode_video(torch.full((1, 1, 3, 8, 8), 255.0))  # what was said of the range stops no later look
    video = torch.rand(2, 6, 3, 8, 8).half()
    video[1, 4, 0, 2, 3] = value
    with pytest.raises(UserError, match=rf"frame 4 of video 1 in the batch has {kind} ones"):
        model.encode_video(video)
    with pytest.raises(UserError, match=kind):
        model.reconstruct(video)
    with pytest.raises(UserError, match=kind):
        StreamingEncoder(model.fused()).push(video)


def test_a_gpu_is_not_stalled_by_the_look_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """(Played: the values of a tensor that is not on the CPU are read back once.)"""
    model, looks = TAEHV("taehv", width=0.125), []
    whole = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: looks.append(x) or whole(torch.rand(3, device="cpu")))
    with torch.device("meta"):
        away = TAEHV("taehv", width=0.125)
        video = torch.rand(1, 1, 3, 8, 8)
        for _ in range(3):
            away.encode_video(video)
    assert len(looks) == 1
    for _ in range(3):
        model.encode_video(torch.rand(1, 1, 3, 8, 8))
    assert len(looks) == 4


def test_another_range_is_seen_behind_a_black_frame_and_in_a_later_call() -> None:
    model = TAEHV("taehv", width=0.125)
    model.encode_video(torch.rand(1, 1, 3, 8, 8))
    fades_in = torch.zeros(2, 3, 3, 8, 8)
    fades_in[1, 2] = 200
    with pytest.warns(UserWarning, match=r"looks like 0\.\.255"):
        model.encode_video(fades_in)


def test_progress_bar_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    model = TAEHV("taehv", width=0.125)
    with torch.no_grad():
        model.decode_video(torch.randn(1, 2, 16, 1, 1), parallel=False, show_progress_bar=True)
    assert "decode" in capsys.readouterr().err
