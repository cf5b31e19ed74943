"""The engine for CPUs: the numbers of the plain network in float32 and bfloat16, bands of rows, and what it refuses."""

from __future__ import annotations

import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engines.live_memory import LiveMemory
from tests.engines.small_models import NETWORKS, PREVIEWS, relative_error, small
from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.engines import fold, onednn
from tinyvae.engines import fused as fused_module
from tinyvae.engines import stack as stack_module
from tinyvae.engines.fused import FusedTAEHV, chunk_bytes, chunk_latents
from tinyvae.errors import UserError
from tinyvae.models.streaming import Side

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    onednn.why_not_onednn(torch.float32, CPU) is not None, reason="needs an x86 CPU and a torch with oneDNN"
)
needs_bfloat16 = pytest.mark.skipif(not onednn.has_bfloat16(), reason="needs a CPU with avx512_bf16")
TOLERANCE = 2e-6  # float32 rounding over the depth of the network, relative
FORTY_DB = 0.01  # of the range of values


def decibel_error(made: Tensor, expected: Tensor) -> float:
    """Root mean square error as a part of the range of the values: 0.01 is 40 dB."""
    return ((made.double() - expected.double()).square().mean().sqrt() / (expected.max() - expected.min())).item()


def frames_for(model: TAEHV, extra_frames: int = 1) -> Tensor:
    factor = model.spec.space_factor
    coarse = torch.rand(2 * (2 * model.spec.time_factor + extra_frames), 3, 3, 5)
    return F.interpolate(coarse, (factor, 2 * factor), mode="bilinear").unflatten(0, (2, -1))


@needs_bfloat16
@pytest.mark.parametrize(("variant", "preview"), [*((name, None) for name in NETWORKS), *PREVIEWS])
@torch.no_grad()
def test_bfloat16_stays_within_40_db_of_float32(variant: str, preview: str | None) -> None:
    model = small(variant, preview=preview)
    frames = frames_for(model)
    latents = model.encode(frames)
    decoded = model.decode(latents)
    plain = copy.deepcopy(model).bfloat16()
    fused = plain.fused()
    assert fused.engines == {"encoder": "onednn", "decoder": "onednn"}
    for made, of_plain, expected in (
        (fused.encode(frames), plain.encode(frames), latents),
        (fused.decode(latents), plain.decode(latents), decoded),
    ):
        assert made.dtype == torch.bfloat16
        assert decibel_error(made, expected) < FORTY_DB
        assert relative_error(made.float(), expected) < 1.25 * relative_error(of_plain.float(), expected)


@needs_bfloat16
@torch.no_grad()
def test_bfloat16_streams_are_the_whole_video() -> None:
    fused = small("taehv").bfloat16().fused()
    frames = frames_for(small("taehv"), extra_frames=3)
    latents = fused.encode_video(frames)
    encoder = StreamingEncoder(fused)
    parts = [encoder.push(part) for part in frames.split([1, 2, 5, 3], dim=1)]
    assert relative_error(torch.cat([*parts, encoder.flush()], 1).float(), latents.float()) < 1e-2
    decoder = StreamingDecoder(fused, num_latents=latents.shape[1])
    decoded = torch.cat([decoder.push(part) for part in latents.split(1, dim=1)], 1)
    assert relative_error(decoded.float(), fused.decode_video(latents).float()) < 1e-2


@pytest.mark.parametrize("rows", [8, 14])
@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2", "taew2_2_super", "taeltx2_3_wide"])
@torch.no_grad()
def test_bands_of_rows_change_nothing(variant: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands that end in the middle, at an odd height of the small grid; several videos."""
    model = small(variant)
    factor = model.spec.space_factor
    frames = torch.rand(2, model.spec.time_factor, 3, 5 * factor, factor)
    latents = model.encode(frames)
    decoded = model.decode(latents)
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", 1)
    monkeypatch.setattr(onednn, "FEWEST_ROWS", rows)
    fused = model.fused()
    assert relative_error(fused.encode(frames), latents) < TOLERANCE
    assert relative_error(fused.decode(latents), decoded) < TOLERANCE


@pytest.mark.parametrize("height", [15, 16, 29])
@torch.no_grad()
def test_bands_hold_every_row_once(height: int) -> None:
    model = TAEHV("taehv", width=0.125)
    encoder, decoder = fold.fold_layers(model.encoder), fold.fold_layers(model.decoder)
    for layers, height_out, halo in (
        (encoder[:2], -(-height // 2), 2),  # a 3x3 and a 3x3 of stride 2
        (decoder[-2:], 2 * height, 1),  # a 2x2 on the small grid and a 3x3 on the large one
        (decoder[-1:], height, 1),
    ):
        assert onednn.halo_of(layers)[0] == halo
        seen = [0] * height_out
        for read, kept, target in onednn.cut_bands(layers, height, height_out, 4):
            assert 0 <= read.start < read.stop <= height and kept.start >= 0
            assert kept.stop - kept.start == target.stop - target.start
            for row in range(target.start, target.stop):
                seen[row] += 1
        assert seen == [1] * height_out


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 1)])
@torch.no_grad()
def test_one_latent_pixel_and_thin_frames(size: tuple[int, int]) -> None:
    model = small("taehv")
    latents = torch.randn(1, 2, 16, *size)
    frames = torch.rand(1, 4, 3, 8 * size[0], 8 * size[1])
    assert relative_error(model.fused().decode(latents), model.decode(latents)) < TOLERANCE
    assert relative_error(model.fused().encode(frames), model.encode(frames)) < TOLERANCE


@torch.no_grad()
def test_threads_and_copies_share_nothing() -> None:
    fused = small("taew2_2").fused()
    latents = [torch.randn(1, 2, 48, 3, 4) for _ in range(4)]
    expected = [fused.decode(one) for one in latents]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fused.decode, latents))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(other.decode(latents[0]), expected[0])


@torch.no_grad()
def test_cpu_without_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(onednn, "has_bfloat16", lambda: False)
    onednn.why_not_onednn.cache_clear()
    try:
        model = small("taehv").bfloat16()
        with caplog.at_level(logging.WARNING, logger="tinyvae.engines.fused"):
            fused = model.fused()
        assert fused.engines["encoder"] == fused.engines["decoder"]
        assert fused.engines["decoder"].startswith("eager (this CPU has no instructions for bfloat16 (avx512_bf16)")
        assert len(caplog.records) == 1 and "float32 is faster here: use model.float()" in caplog.text
        latents = torch.randn(1, 1, 16, 2, 2)
        assert torch.isfinite(fused.decode(latents)).all()
        with pytest.raises(UserError, match="engine='onednn' cannot run here: this CPU has no instructions"):
            model.fused(engine="onednn")
    finally:
        onednn.why_not_onednn.cache_clear()


def test_float32_says_that_bfloat16_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for knows, words in ((True, "onednn (in bfloat16 it is about twice as fast on this CPU)"), (False, "onednn")):
        monkeypatch.setattr(fused_module, "has_bfloat16", lambda knows=knows: knows)
        assert small("taehv").fused().engines["decoder"] == words


def test_torch_without_these_operators_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("could not create a primitive\nwith details")

    monkeypatch.setattr(onednn.Conv, "add_to", refuse)
    reason = onednn.try_convolutions(torch.float32)
    assert reason is not None and "(could not create a primitive)" in reason
    assert "float16" in str(onednn.why_not_onednn(torch.float16, CPU))
    assert onednn.why_not_onednn(torch.float32, torch.device("meta")) == "the model is on meta"


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["taehv", "taeltx_2", "taew2_2_super"])
@torch.no_grad()
def test_chunk_takes_the_memory_that_is_counted(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same count as of a real stream, at a size at which slices and bands are small against the chunk."""
    room, num_latents = 2**18, 3
    monkeypatch.setattr(stack_module, "CPU_SLICE_BYTES", room)
    codec = FusedTAEHV(small(variant), engine="onednn")
    spec = codec.spec
    size = (96 // spec.space_factor, 128 // spec.space_factor)
    sides: list[Side] = ["decoder", "encoder"]
    for side in sides:
        stream: StreamingDecoder | StreamingEncoder
        if side == "decoder":
            video = torch.randn(1, num_latents, spec.latent_channels, *size)
            stream = StreamingDecoder(codec, num_latents=3 * num_latents, chunk_latents=num_latents)
        else:
            shape = (spec.space_factor * length for length in size)
            video = torch.rand(1, num_latents * spec.time_factor, 3, *shape)
            stream = StreamingEncoder(codec, chunk_latents=num_latents)
        with LiveMemory() as memory:
            for _ in range(3):
                stream.push(video)
        counted = chunk_bytes(spec, side, "onednn", num_latents, size[0] * size[1], 4, room)
        assert 0.6 < memory.peak / counted < 1.1, (side, memory.peak, counted)


def test_chunks_are_longer_than_torchs_own_operators_allow() -> None:
    lengths = [
        chunk_latents(
            VARIANTS["taehv"], "decoder", engine, latent_pixels=60 * 90, element_size=4, slice_bytes=16 * 2**20
        )
        for engine in ("eager", "onednn")
    ]
    assert lengths[0] < lengths[1]
