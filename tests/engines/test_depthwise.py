"""The depthwise kernel's packing, its cutting into strips, and the cuDNN engine around it, without a GPU.

The stand-in reads the *packed* bands, as the kernel does, and multiplies rows of pixels by them. The kernel itself is
compared with float64 by tests/gpu/test_gpu_depthwise.py.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engines import cudnn_stand_ins
from tests.engines.small_models import relative_error, small
from tinyvae.engines import depthwise, nvrtc
from tinyvae.engines import stack as stack_module
from tinyvae.engines.cudnn import CudnnStack
from tinyvae.engines.depthwise import cut_work, pack_bands, why_not_depthwise
from tinyvae.engines.fused import folded_copy


def band_matrices(bands: Tensor) -> Tensor:
    """(2, C, 7, 16 inputs, 8 outputs), by the places in which m16n8k16 takes its second operand."""
    matrices = bands.new_zeros(*bands.shape[:3], 16, 8)
    for thread in range(32):
        for place, row in enumerate((0, 1, 8, 9)):
            matrices[..., 2 * (thread % 4) + row, thread // 4] = bands[..., thread, place]
    return matrices


def torch_super_depthwise(
    x_BHWC: Tensor, bands: Tensor, *, num_videos: int, past_NHWC: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Strip by strip, as the kernel: rows of 16 pixels times a band matrix, and sums over seven rows."""
    _, height, width, _ = x_BHWC.shape
    tiles = -(-width // 8)
    filled = F.pad(x_BHWC, (0, 0, 3, 8 * tiles + 5 - width, 3, 3))
    strips = filled.unfold(2, 16, 8)  # frame, row with halo, tile, channel, one of 16 columns
    rows = torch.stack([strips[:, tap : tap + height] for tap in range(7)])
    made = torch.einsum("tfhxck,sctkn->sfhxnc", rows, band_matrices(bands))
    now, then = made.flatten(3, 4)[:, :, :, :width]
    video = then.unflatten(0, (num_videos, -1))
    first = torch.zeros_like(video[:, 0]) if past_NHWC is None else past_NHWC
    shifted = torch.cat([first[:, None], video[:, :-1]], dim=1).flatten(0, 1)
    return torch.cat([now, shifted], dim=3), video[:, -1].contiguous()


@pytest.mark.parametrize(("num_videos", "frames", "height", "width"), [(1, 1, 1, 1), (2, 3, 9, 13), (1, 2, 4, 16)])
def test_bands_are_a_depthwise_convolution(num_videos: int, frames: int, height: int, width: int) -> None:
    x, past = torch.randn(num_videos * frames, height, width, 16), torch.randn(num_videos, height, width, 16)
    depth, past_depth = torch.randn(2, 16, 1, 7, 7)
    both, last = torch_super_depthwise(x, pack_bands(depth, past_depth), num_videos=num_videos, past_NHWC=past)
    now, then = (
        F.conv2d(x.permute(0, 3, 1, 2), weight, padding=3, groups=16).permute(0, 2, 3, 1)
        for weight in (depth, past_depth)
    )
    torch.testing.assert_close(both[..., :16], now, atol=1e-4, rtol=1e-4)
    video, made = then.unflatten(0, (num_videos, -1)), both[..., 16:].unflatten(0, (num_videos, -1))
    torch.testing.assert_close(made[:, 1:], video[:, :-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, video[:, -1], atol=1e-4, rtol=1e-4)
    assert torch.equal(made[:, 0], past)


@pytest.mark.parametrize("own", [True, False, None])
@pytest.mark.parametrize("slice_bytes", [1, 2**40])
@pytest.mark.parametrize("variant", ["taew2_2_super", "taehv1_5_super"])
@torch.no_grad()
def test_decoders_with_and_without_it(
    variant: str, slice_bytes: int, own: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in pieces, two videos; not on cards that cannot. None: too many values for its offsets."""
    cudnn_stand_ins.stand_in(monkeypatch)
    asked = []

    def stand_in(*arguments: Tensor, **words: object) -> tuple[Tensor, Tensor]:
        asked.append(arguments)
        return torch_super_depthwise(*arguments, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(depthwise, "super_depthwise", stand_in)
    monkeypatch.setattr(depthwise, "why_not_depthwise", lambda dtype, device: "an old card" if own is False else None)
    monkeypatch.setattr(depthwise, "MOST_VALUES", 0 if own is None else depthwise.MOST_VALUES)
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", slice_bytes)
    model = small(variant)
    latents = torch.randn(2, 3, model.spec.latent_channels, 2, 3)
    expected = model.decode_chunk(latents, None)[0]
    decoder = CudnnStack(folded_copy(model.decoder), patch_size=model.spec.patch_size)
    assert relative_error(decoder.run(latents, None)[0], expected) < 2e-6
    state, parts = None, []
    for part in latents.split([1, 2], dim=1):
        made, state = decoder.run(part, state)
        parts.append(made)
    assert relative_error(torch.cat(parts, dim=1), expected) < 2e-6
    assert len(asked) == (27 if own else 0), "nine blocks, three runs"


@pytest.mark.parametrize("processors", [1, 5, 28, 132])
@pytest.mark.parametrize(
    ("frames", "height", "width", "channels"),
    [(1, 30, 45, 512), (1, 1, 1, 16), (7, 60, 90, 256), (26, 120, 180, 128), (3, 17, 23, 48), (2, 270, 480, 128)],
)
def test_strips_cover_every_pixel_once(frames: int, height: int, width: int, channels: int, processors: int) -> None:
    shape, blocks = cut_work(frames, 1, height, width, channels, processors=processors)
    assert shape.strips == frames * shape.tiles_x * shape.strips_y
    assert (shape.tiles_x - 1) * 8 < width <= shape.tiles_x * 8
    assert (shape.strips_y - 1) * shape.strip_height < height <= shape.strips_y * shape.strip_height
    groups = -(-shape.strips // depthwise.STRIPS)
    assert 1 <= shape.walkers <= groups and blocks == shape.walkers * channels // depthwise.CHANNELS
    assert blocks <= max(processors, channels // depthwise.CHANNELS)


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvrtc:
        """Stands for a library that compiles for two kinds of cards."""

        def nvrtcGetNumSupportedArchs(self, count: object) -> int:  # noqa: N802 (the library's own name)
            ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 2  # type: ignore[arg-type]
            return 0

        def nvrtcGetSupportedArchs(self, known: ctypes.Array[ctypes.c_int]) -> int:  # noqa: N802
            known[0], known[1] = 80, 90
            return 0

    capability = (9, 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: None)
    monkeypatch.setattr(nvrtc, "_nvrtc", Nvrtc)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this card")
    nvrtc._known_architectures.cache_clear()
    card, half = torch.device("cuda", 0), torch.float16
    assert why_not_depthwise(half, card) is None and why_not_depthwise(torch.bfloat16, card) is None
    assert why_not_depthwise(half, torch.device("cpu")) == "the model is on cpu"
    assert "the model is torch.float32" in (why_not_depthwise(torch.float32, card) or "")
    capability = (7, 5)
    assert why_not_depthwise(half, card) == "this card is older than compute capability 8.0"
    capability = (12, 0)
    assert "does not compile for compute capability 12.0" in (why_not_depthwise(half, card) or "")

    def missing() -> None:
        raise nvrtc.KernelBuildError("libnvrtc could not be opened.")

    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    assert why_not_depthwise(half, card) == "libnvrtc could not be opened"
    nvrtc._known_architectures.cache_clear()
