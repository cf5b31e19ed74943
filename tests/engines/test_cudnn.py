"""The cuDNN engine with cuDNN's two calls replaced by plain torch: every variant, whole, in pieces, in small slices.

tests/gpu/test_gpu_engines.py compares cuDNN itself with float64.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines import cudnn_stand_ins
from tests.engines.small_models import NETWORKS, PREVIEWS, relative_error, small
from tinyvae import TAEHV
from tinyvae.engines import cudnn
from tinyvae.engines import stack as stack_module
from tinyvae.engines.cudnn import CudnnStack, PatchConv, try_convolutions
from tinyvae.engines.fold import ConvLayer
from tinyvae.engines.fused import FusedTAEHV, folded_copy
from tinyvae.errors import UserError

TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def cudnn_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_stand_ins.stand_in(monkeypatch)


def stacks(model: TAEHV) -> tuple[CudnnStack, CudnnStack]:
    patch = model.spec.patch_size
    encoder = CudnnStack(folded_copy(model.encoder), patch_size=patch)
    return encoder, CudnnStack(folded_copy(model.decoder), patch_size=patch)


def in_pieces(stack: CudnnStack, video: Tensor, sizes: list[int]) -> Tensor:
    state, parts = None, []
    for part in video.split(sizes, dim=1):
        made, state = stack.run(part, state)
        parts += [made] if made.shape[1] else []
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("num_videos", "slice_bytes"), [(1, 2**40), (2, 1)])
@pytest.mark.parametrize("variant", NETWORKS)
@torch.no_grad()
def test_every_variant(variant: str, num_videos: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", slice_bytes)
    check_whole_and_in_pieces(small(variant), num_videos)


@pytest.mark.parametrize(("num_videos", "variant"), [(1, "taehv"), (2, "taew2_2_super"), (2, "taeltx2_3_wide")])
@torch.no_grad()
def test_leaky_relu_without_cudnns_relu(num_videos: int, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of memory block; no call that has ReLU inside is left."""

    def refuse(*arguments: object) -> Tensor:
        raise AssertionError("cuDNN's ReLU in a network of LeakyReLU")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", refuse)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", refuse)
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", 1)
    check_whole_and_in_pieces(small(variant, activation="leaky_relu"), num_videos)


@torch.no_grad()
def test_groups_that_cudnn_does_not_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card without fused convolutions over groups: torch computes these, without a word; the others stay fused."""
    fused_before = torch.cudnn_convolution_add_relu

    def refuse_groups(*arguments: Any) -> Tensor:
        if arguments[-1] > 1:
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return fused_before(*arguments)

    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", refuse_groups)
    cudnn.fuses_groups.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_whole_and_in_pieces(small("taeltx2_3_wide"), 1)
    assert not cudnn.fuses_groups(torch.float32, torch.device("cpu"))
    cudnn.fuses_groups.cache_clear()


def check_whole_and_in_pieces(model: TAEHV, num_videos: int) -> None:
    encoder, decoder = stacks(model)
    factor, unit = model.spec.space_factor, model.spec.time_factor
    frames = torch.rand(num_videos, 3 * unit, 3, factor, 2 * factor)
    kept = frames.clone()
    latents = model.encode_chunk(frames, None)[0]
    assert relative_error(encoder.run(frames.double(), None)[0], latents) < TOLERANCE
    for sizes in ([2 * unit, unit], [1, unit, unit - 1, unit]):  # whole latents; frames that wait for partners
        assert relative_error(in_pieces(encoder, frames, sizes), latents) < TOLERANCE
    decoded = model.decode_chunk(latents, None)[0]
    before = latents.clone()
    made = decoder.run(latents, None)[0]
    assert made.is_contiguous() and relative_error(made, decoded) < TOLERANCE
    for sizes in ([1, 2], [1, 1, 1]):
        assert relative_error(in_pieces(decoder, latents, sizes), decoded) < TOLERANCE
    assert torch.equal(frames, kept) and torch.equal(latents, before), "the input was written over"


@pytest.mark.parametrize(("variant", "preview"), PREVIEWS)
@torch.no_grad()
def test_previews(variant: str, preview: str) -> None:
    model = small(variant, preview=preview)
    latents = torch.randn(2, 3, model.spec.latent_channels, 3, 4)
    expected = model.decode_chunk(latents, None)[0]
    assert relative_error(stacks(model)[1].run(latents, None)[0], expected) < TOLERANCE
    assert relative_error(in_pieces(stacks(model)[1], latents, [1, 2]), expected) < TOLERANCE


@torch.no_grad()
def test_what_is_remembered_is_not_written_over() -> None:
    """Two streams may go on from one state, if each gets a list of its own: a super block works in place."""
    model = small("taew2_2_super")
    decoder = stacks(model)[1]
    first, second = torch.randn(2, 1, 2, 48, 2, 3).unbind(0)
    _, state = decoder.run(first, None)
    once = decoder.run(second, list(state))[0]
    assert torch.equal(decoder.run(second, state)[0], once)
    assert not any(isinstance(part, Tensor) for part in state), "the state was not used up"


@pytest.mark.parametrize(("patch", "stacked"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (4, 1)])
def test_first_convolution_from_patches(patch: int, stacked: int) -> None:
    inputs = 3 * patch**2
    layer = ConvLayer(weight=torch.randn(5, inputs, 3, 3), bias=torch.randn(5), relu=True)
    image = torch.rand(4, 3, 4 * patch, 6 * patch)
    laid_out = torch.nn.functional.pixel_unshuffle(image, patch)
    expected = torch.relu(torch.nn.functional.conv2d(laid_out, layer.weight, layer.bias, padding=1))
    conv = PatchConv.of(layer, patch_size=patch, stacked=stacked)
    assert conv.weight.shape[1] % 8 == 0
    torch.testing.assert_close(conv(image), expected.unflatten(0, (-1, stacked)).flatten(1, 2), atol=1e-5, rtol=1e-5)


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UserError, match="engine='cudnn' cannot run here: the model is on cpu"):
        FusedTAEHV(small("taehv"), engine="cudnn")


def test_what_cudnn_says_becomes_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own calls, which refuse a CPU, stand for a card without these kernels; full memory is no such reason."""
    cpu = torch.device("cpu")
    assert try_convolutions(torch.float32, cpu) is None  # with the stand-ins
    monkeypatch.undo()
    assert "do not run in torch.float32 on this card (" in (try_convolutions(torch.float32, cpu) or "")

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", fail)
    with pytest.raises(torch.OutOfMemoryError):
        try_convolutions(torch.float32, cpu)


def refuse(monkeypatch: pytest.MonkeyPatch, error: RuntimeError, *, frames: int) -> list[tuple[int, ...]]:
    """Let cuDNN's calls refuse inputs of this many frames (images, or frames of one video); gives the shapes asked."""
    monkeypatch.setattr(cudnn, "_refused", set())
    asked: list[tuple[int, ...]] = []

    def refusing(real: Any) -> Any:
        def call(x: Tensor, *others: Any) -> Tensor:
            if x.shape[0 if x.ndim == 4 else 2] == frames:
                asked.append(tuple(x.shape))
                raise error
            return real(x, *others)

        return call

    for name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
        monkeypatch.setattr(torch, name, refusing(getattr(torch, name)))
    return asked


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
@torch.no_grad()
def test_a_refused_shape_is_computed_by_torch(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a stream too: what a block carries is the same. cuDNN is asked once for each shape."""
    refusal = RuntimeError("GET was unable to find an engine to execute this computation")
    asked = refuse(monkeypatch, refusal, frames=2)
    model = small(variant)
    encoder, decoder = stacks(model)
    factor, unit = model.spec.space_factor, model.spec.time_factor
    frames = torch.rand(1, 3 * unit, 3, 2 * factor, 3 * factor)
    latents = model.encode_chunk(frames, None)[0]
    expected = model.decode_chunk(latents, None)[0]
    with pytest.warns(UserWarning, match="cuDNN refuses a convolution of") as seen:
        assert relative_error(in_pieces(encoder, frames, [unit, 2 * unit]), latents) < TOLERANCE
        assert relative_error(in_pieces(decoder, latents, [1, 2]), expected) < TOLERANCE
    assert asked and len(seen) == len(asked) and len({str(item.message) for item in seen}) == len(seen)
    assert "unable to find an engine" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative_error(in_pieces(decoder, latents, [1, 2]), expected) < TOLERANCE
    assert len(seen) == len(asked), "a refused shape was tried again"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDNN_STATUS_NOT_SUPPORTED"), RuntimeError("CUDA error: misaligned address")]
)
@torch.no_grad()
def test_other_errors_stay_errors(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, error, frames=2)
    decoder = stacks(small("taehv"))[1]
    with pytest.raises(type(error), match=str(error)):
        decoder.run(torch.randn(1, 2, 16, 4, 4), None)
