"""`model.fused()`: the same numbers as the plain network, for every variant, whole and in pieces."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from tests.engines.small_models import NETWORKS, PREVIEWS, relative_error, small
from tinyvae import TAEHV, StreamingDecoder, StreamingEncoder
from tinyvae.engines import eager
from tinyvae.engines import fused as fused_module
from tinyvae.engines import stack as stack_module
from tinyvae.engines.fold import ConvLayer, PoolLayer, fold_layers, split_phases
from tinyvae.engines.fused import FusedTAEHV, choose_engine, folded_copy
from tinyvae.errors import UserError

TOLERANCE = 2e-6  # float32 rounding over the depth of the network, relative


def video_for(model: TAEHV, num_videos: int = 2, extra_frames: int = 1) -> Tensor:
    factor = model.spec.space_factor
    return torch.rand(num_videos, 2 * model.spec.time_factor + extra_frames, 3, factor, 2 * factor)


@pytest.mark.parametrize("variant", NETWORKS)
@torch.no_grad()
def test_every_variant_whole_and_sequential(variant: str) -> None:
    model = small(variant)
    frames = video_for(model)
    latents = model.encode_video(frames)
    decoded = model.decode_video(latents)
    for engine, parallel in ((None, True), (None, False), ("eager", True), ("eager", False)):
        fused = model.fused(engine=engine)
        assert relative_error(fused.encode_video(frames, parallel=parallel), latents) < TOLERANCE
        assert relative_error(fused.decode_video(latents, parallel=parallel), decoded) < TOLERANCE


@pytest.mark.parametrize("variant", ["taehv1_5", "taew2_2_super", "taeltx2_3_wide"])
def test_leaky_relu_on_a_cpu(variant: str) -> None:
    model = small(variant, activation="leaky_relu")
    latents = torch.randn(2, 3, model.spec.latent_channels, 2, 3)
    with torch.no_grad():
        plain, relu = model.decode(latents), small(variant)
        relu.load_state_dict(model.state_dict())
        assert relative_error(relu.decode(latents), plain) > 0.01, "the activation matters"
        for engine in (None, "eager"):
            assert relative_error(model.fused(engine=engine).decode(latents), plain) < TOLERANCE
    model.folded_training = True
    folded = model.decode(latents)
    assert relative_error(folded, plain) < TOLERANCE
    folded.mean().backward()
    assert all(parameter.grad is not None for parameter in model.decoder.parameters())


@pytest.mark.parametrize(("variant", "preview"), PREVIEWS)
@torch.no_grad()
def test_previews(variant: str, preview: str) -> None:
    model = small(variant, preview=preview)
    latents = torch.randn(2, 3, model.spec.latent_channels, 3, 4)
    expected = model.decode_video(latents)
    for parallel in (True, False):
        assert relative_error(model.fused().decode_video(latents, parallel=parallel), expected) < TOLERANCE


@torch.no_grad()
def test_uneven_pushes_give_the_whole_video() -> None:
    model = small("taehv")
    fused = model.fused()
    frames = video_for(model, extra_frames=3)
    latents = fused.encode_video(frames)
    for sizes in ([1, 2, 5, 3], [11], [3, 3, 3, 2], [4, 7]):
        encoder = StreamingEncoder(fused)
        parts = [encoder.push(part) for part in frames.split(sizes, dim=1)]
        assert relative_error(torch.cat([*parts, encoder.flush()], 1), latents) < TOLERANCE
    decoded = fused.decode_video(latents)
    for chunk in (1, 2, None):
        decoder = StreamingDecoder(fused, chunk_latents=chunk)
        assert relative_error(decoder.push(latents), decoded) < TOLERANCE
        assert decoder.flush().shape[1] == 0


@torch.no_grad()
def test_encoder_stream_runs_whole_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of a latent that is not complete wait, so that no push makes a run of its own for them."""
    fused = small("taehv").fused()
    lengths: list[int] = []
    run = fused.encode_chunk

    def counted(frames: Tensor, state: object) -> tuple[Tensor, object]:
        lengths.append(frames.shape[1])
        return run(frames, state)

    monkeypatch.setattr(fused, "encode_chunk", counted)
    frames = torch.rand(1, 49, 3, 8, 16)
    expected = fused.encode(frames)
    for num_frames, sizes, runs in (
        (None, [32, 17], [32, 16, 4]),
        (49, [32, 17], [32, 20]),  # the end is known: no run for the last frame alone
        (49, [49], [32, 20]),
        (None, [3, 30, 16], [20, 12, 16, 4]),  # what is joined with frames that waited is copied: not a whole chunk
        (49, [3, 30, 16], [20, 12, 20]),
        (None, [1] * 49, [4] * 13),
        (49, [1] * 49, [4] * 13),
    ):
        lengths.clear()
        stream = StreamingEncoder(fused, num_frames=num_frames, chunk_latents=8)
        parts = [stream.push(part.double()) for part in frames.split(sizes, dim=1)]
        latents = torch.cat([*parts, stream.flush()], 1)
        assert lengths == runs
        assert latents.dtype == fused.dtype and relative_error(latents, expected) < TOLERANCE


@torch.no_grad()
def test_weights_are_a_copy_and_the_model_stays() -> None:
    model = small("taehv")
    frames = video_for(model)
    before = copy.deepcopy(model.state_dict())
    fused = model.fused()
    expected = fused.encode_video(frames)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(fused.encode_video(frames), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_error_at_low_precision_is_that_of_the_plain_network(dtype: torch.dtype) -> None:
    exact = small("taehv")
    plain = copy.deepcopy(exact).to(dtype)
    fused = plain.fused()
    assert fused.dtype == dtype
    latents = torch.randn(1, 2, 16, 4, 4).to(dtype)
    expected = exact.decode_video(latents.float())
    of_plain = relative_error(plain.decode_video(latents).float(), expected)
    assert relative_error(fused.decode_video(latents).float(), expected) < 1.25 * of_plain


@torch.no_grad()
def test_input_is_not_written_over() -> None:
    model = small("taehv")
    fused = model.fused()
    frames, latents = video_for(model), torch.randn(1, 2, 16, 3, 3)
    kept_frames, kept_latents = frames.clone(), latents.clone()
    fused.encode_video(frames)
    fused.decode_video(latents)
    assert torch.equal(frames, kept_frames) and torch.equal(latents, kept_latents)


def test_engine_is_chosen_and_said() -> None:
    model = small("taehv")
    assert "as asked" in FusedTAEHV(model, engine="eager").engines["encoder"]
    with pytest.raises(UserError, match="the model is on cpu"):
        FusedTAEHV(model, engine="hopper")
    engine, reason = choose_engine(folded_copy(model.decoder), torch.float32, torch.device("cpu"), None)
    assert engine in ("onednn", "eager") and engine in repr(model.fused()) and reason in repr(model.fused())
    engine, reason = choose_engine(folded_copy(model.decoder), torch.float16, torch.device("cpu"), None)
    assert engine == "eager" and reason and reason in repr(copy.deepcopy(model).half().fused())


def test_codec_says_where_it_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_module, "why_not_cudnn", lambda dtype, device: None)
    layers, device = folded_copy(small("taehv").decoder), torch.device("cpu")
    for tf32, dtype, says in (
        (True, torch.float32, False),
        (False, torch.float32, True),
        (False, torch.float16, False),
    ):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        engine, reason = choose_engine(layers, dtype, device, None)
        assert engine == "cudnn" and ("TF32" in reason) == says


def test_phases_of_a_known_kernel() -> None:
    """A 3x3 that copies the pixel to the left on the doubled grid, as 2x2 phases."""
    weight = torch.zeros(1, 1, 1, 3, 3)
    weight[..., 1, 0] = 1
    phases = split_phases(weight).reshape(2, 2, 2, 2)  # phase row, phase column, tap row, tap column
    # An even column's left neighbor lies in the small column before; an odd one's in its own.
    for row in (0, 1):
        own_row = torch.tensor([0.0, 1.0]) if row == 0 else torch.tensor([1.0, 0.0])
        for column in (0, 1):
            assert torch.equal(phases[row, column], torch.outer(own_row, torch.tensor([1.0, 0.0])))


def test_filled_up_channels_change_nothing() -> None:
    x, weight, bias = torch.randn(2, 3, 5, 6), torch.randn(5, 3, 3, 3), torch.randn(5)
    plain = eager.aligned_conv(x, weight, bias, multiple=1)
    filled = eager.aligned_conv(x, weight, bias, multiple=8)
    torch.testing.assert_close(filled, plain)


def test_first_convolution_over_stacked_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way CUDA takes: frames side by side through a block-diagonal first convolution, whole and in slices."""
    model = small("taehv")
    layers = fold_layers(model.encoder)
    assert isinstance(layers[0], ConvLayer) and isinstance(layers[1], PoolLayer)
    frames = video_for(model, extra_frames=0)
    stack = eager.EagerStack(layers, patch_size=1)
    expected = stack.run(frames, None)[0].detach()
    monkeypatch.setattr(eager.EagerStack, "stacking_of_first", lambda *arguments: 2)
    assert relative_error(stack.run(frames, None)[0].detach(), expected) < TOLERANCE
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", 1)
    with torch.no_grad():
        assert relative_error(stack.run(frames, None)[0], expected) < TOLERANCE


def test_gradients_are_not_promised() -> None:
    model = small("taehv")
    fused = model.fused()
    for kind in (StreamingDecoder, StreamingEncoder):
        with pytest.raises(UserError, match="records no gradients"):
            kind(fused, track_gradients=True)
    latents = torch.randn(1, 2, 16, 2, 3, requires_grad=True)
    assert not fused.decode(latents).requires_grad
    assert model.decode(latents).requires_grad


def test_unknown_engine_is_named() -> None:
    with pytest.raises(UserError, match="hopper, cudnn, onednn, eager"):
        FusedTAEHV(small("taehv"), engine="compiled")  # type: ignore[arg-type]


@torch.no_grad()
def test_eager_codec_can_be_sent_to_another_process() -> None:
    fused = small("taew2_2").fused()
    latents = torch.randn(1, 2, 48, 2, 3)
    assert torch.equal(pickle.loads(pickle.dumps(fused)).decode_video(latents), fused.decode_video(latents))


def test_low_latency_is_for_cuda() -> None:
    with pytest.raises(UserError, match="CUDA graph"):
        StreamingDecoder(small("taehv").fused(), low_latency=True)


@pytest.mark.parametrize("variant", NETWORKS)
@torch.no_grad()
def test_slices_change_nothing(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame (or one group to be pooled) at a time between two memory blocks: whole videos and odd pushes."""
    model = small(variant)
    fused = model.fused()
    frames = video_for(model, extra_frames=3)
    latents = model.encode_video(frames)
    decoded = model.decode_video(latents)
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", 1)
    assert relative_error(fused.encode_video(frames), latents) < TOLERANCE
    assert relative_error(fused.decode_video(latents), decoded) < TOLERANCE
    stream = StreamingEncoder(fused)
    parts = [stream.push(part) for part in frames.split([3, 1, frames.shape[1] - 4], dim=1)]
    assert relative_error(torch.cat([*parts, stream.flush()], dim=1), latents) < TOLERANCE
