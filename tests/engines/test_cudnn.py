"""The cuDNN engine with cuDNN's two calls replaced by plain torch: every variant, whole, in pieces, in small slices.

cuDNN itself is compared with the plain network by benchmarks/speed_engines.py on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engines import cudnn_stand_ins
from tests.engines.small_models import PREVIEWS, relative_error, small
from tinyvae import TAEHV, VARIANTS
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


@pytest.mark.parametrize("slice_bytes", [1, 2**40])
@pytest.mark.parametrize("num_videos", [1, 2])
@pytest.mark.parametrize("variant", [name for name, spec in VARIANTS.items() if spec.decoder != "wide"])
@torch.no_grad()
def test_every_variant(variant: str, num_videos: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", slice_bytes)
    model = small(variant)
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
    """Two streams may go on from one memory, if each gets a list of its own: a super block works in place."""
    model = small("taew2_2_super")
    decoder = stacks(model)[1]
    first, second = torch.randn(2, 1, 2, 48, 2, 3).unbind(0)
    _, memory = decoder.run(first, None)
    once = decoder.run(second, list(memory))[0]
    assert torch.equal(decoder.run(second, memory)[0], once)
    assert not any(isinstance(part, Tensor) for part in memory), "the memory was not let go"


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
