"""The count behind a stream's default chunk, against what is alive in torch and against what an H200 showed."""

from __future__ import annotations

import functools
import math

import cudnn_stand_ins
import pytest
import torch
from live_memory import LiveMemory

from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.models import fused
from tinyvae.models.chunk_memory import FEW_LATENTS, STREAM_BYTES, Engine, chunk_bytes, chunk_latents
from tinyvae.models.folded_run import SLICE_BYTES, slice_bytes
from tinyvae.models.fused import FusedTAEHV, folded_copy
from tinyvae.models.hopper_engine import FULL_SIZE_BYTES
from tinyvae.models.streaming import Side

GIB = 2**30


@pytest.fixture(autouse=True)
def cudnn_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_stand_ins.stand_in(monkeypatch)
    monkeypatch.setattr(fused, "why_not_fused", lambda dtype, device: None)


@functools.cache
def weightless(
    variant: str, dtype: torch.dtype = torch.float16, width: float = 1.0, engine: Engine = "eager"
) -> FusedTAEHV:
    """A codec on the meta device: shapes without values, so that whole videos cost nothing."""
    return FusedTAEHV(TAEHV(variant, width=width).to("meta", dtype), engine=engine)


def latent_size(variant: str, height: int, width: int) -> tuple[int, int]:
    factor = VARIANTS[variant].space_factor
    return -(-height // factor), -(-width // factor)


def live_bytes(codec: FusedTAEHV, side: Side, num_latents: int, size: tuple[int, int]) -> int:
    """Most bytes alive in a stream of three pushes, with all that it remembers; the input is of another precision."""
    spec = codec.spec
    codec._values_were_seen = True  # nothing to look at on the meta device
    wider = torch.float32 if codec.dtype == torch.float16 else torch.float64
    shape = (1, num_latents, spec.latent_channels, *size)
    stream: StreamingDecoder | StreamingEncoder
    stream = StreamingDecoder(codec, num_latents=3 * num_latents, chunk_latents=num_latents)
    if side == "encoder":
        shape = (1, num_latents * spec.time_factor, 3, *(spec.space_factor * length for length in size))
        stream = StreamingEncoder(codec, chunk_latents=num_latents)
    video = torch.empty(shape, device="meta", dtype=wider)
    with LiveMemory() as memory:
        for _ in range(3):
            stream.push(video)
        if side == "encoder":  # frames that wait, and a push that is joined with them
            stream.push(video[:, :1])
            stream.push(video)
    return memory.peak


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", ["decoder", "encoder"])
@pytest.mark.parametrize("engine", ["eager", "cudnn"])
def test_count_is_what_is_alive(variant: str, side: Side, engine: Engine) -> None:
    for dtype in (torch.float16, torch.float32):
        codec = weightless(variant, dtype, engine=engine)
        size = latent_size(variant, 480, 720)
        chunk = codec.stream_chunk_latents(side, *size)
        for num_latents in (1, chunk, 3 * chunk):
            alive = live_bytes(codec, side, num_latents, size)
            counted = chunk_bytes(
                codec._stacks[side][1],
                codec.spec,
                engine,
                num_latents=num_latents,
                latent_pixels=size[0] * size[1],
                element_size=dtype.itemsize,
                slice_bytes=slice_bytes(codec.device),
            )
            # A taeh3 encoder never runs more than its 20 frames.
            most = math.inf if codec.spec.frame_rule == "chunked" and side == "encoder" else 1.3
            least = 0.75 if num_latents == 1 else 0.85
            assert least < counted / alive < most, (dtype, num_latents, alive / GIB, counted / GIB)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("engine", ["eager", "cudnn"])
def test_default_chunk_takes_half_a_gigabyte(variant: str, engine: Engine) -> None:
    """At 480x720; in float32 one latent of a patch-1 decoder is a little more, and so are narrow networks in the eager
    engine with a GPU's slices. Two more would be near the limit.
    """
    for width in (1.0, 0.25):
        for dtype, limit in ((torch.float16, 0.6), (torch.float32, 0.615)):
            codec = weightless(variant, dtype, width, engine)
            size = latent_size(variant, 480, 720)
            for side in ("decoder", "encoder"):
                chunk = codec.stream_chunk_latents(side, *size)
                alive = live_bytes(codec, side, chunk, size)
                assert alive < (limit if width == 1 else 0.62) * GIB, (dtype, width, side, chunk, alive / GIB)
                if not (codec.spec.frame_rule == "chunked" and side == "encoder"):
                    assert live_bytes(codec, side, chunk + 2, size) > 0.45 * GIB, (dtype, width, side, chunk)


def test_chunks_of_a_long_push_take_no_more() -> None:
    codec = weightless("taehv")
    size = latent_size("taehv", 480, 720)
    beside = []
    chunk = codec.stream_chunk_latents("decoder", *size)
    for num_latents in (3 * chunk, 9 * chunk):
        stream = StreamingDecoder(codec, num_latents=num_latents)
        latents = torch.empty(1, num_latents, 16, *size, device="meta", dtype=codec.dtype)
        with LiveMemory() as memory:
            frames = stream.push(latents)
        beside.append(memory.peak - frames.nbytes)
    assert beside[1] == beside[0] < 0.6 * GIB


MEASURED_GIB = [
    # side, engine, latents, size, peak of a whole-video call (the encoders' with a copy of the image, to fill the last
    # latent) or of a stream; benchmarks/results/2026-11-15-speed.md
    ("taehv", "decoder", "hopper", 8, (480, 720), 0.55),
    ("taehv", "decoder", "hopper", 13, (480, 720), 0.86),
    ("taehv", "decoder", "hopper", 49, (480, 720), 3.08),
    ("taehv", "decoder", "hopper", 1, (480, 720), 0.25),
    ("taehv", "decoder", "hopper", 4, (720, 1280), 0.80),
    ("taehv", "decoder", "hopper", 16, (720, 1280), 2.78),
    ("taehv", "decoder", "hopper", 1, (720, 1280), 0.44),
    ("taehv", "encoder", "hopper", 13, (480, 720), 0.93),
    ("taehv", "encoder", "hopper", 49, (480, 720), 3.44),
    ("taehv", "encoder", "hopper", 16, (720, 1280), 3.05),
    ("taew2_2", "decoder", "hopper", 13, (480, 720), 0.37),
    ("taew2_2", "decoder", "hopper", 29, (480, 720), 0.57),
    ("taew2_2", "decoder", "hopper", 49, (480, 720), 0.83),
    ("taew2_2", "decoder", "hopper", 1, (480, 720), 0.07),
    ("taew2_2", "encoder", "hopper", 13, (480, 720), 0.41),
    ("taew2_2", "encoder", "hopper", 49, (480, 720), 1.14),
    ("taeltx_2", "decoder", "hopper", 7, (480, 736), 0.28),
    ("taeltx_2", "decoder", "hopper", 18, (480, 736), 0.56),
    ("taeltx_2", "encoder", "hopper", 25, (480, 736), 0.81),
    ("taehv", "decoder", "cudnn", 49, (480, 720), 3.09),
    ("taehv", "encoder", "cudnn", 49, (480, 720), 3.45),
    ("taehv", "decoder", "cudnn", 8, (480, 720), 0.57),
    ("taew2_2_super", "decoder", "cudnn", 13, (480, 720), 0.97),
    ("taew2_2_super", "decoder", "cudnn", 49, (480, 720), 3.56),
    ("taew2_2_super", "decoder", "cudnn", 7, (480, 720), 0.54),
    ("taew2_2_super", "decoder", "cudnn", 1, (480, 720), 0.11),
]


@pytest.mark.parametrize(("variant", "side", "engine", "num_latents", "size", "measured"), MEASURED_GIB)
def test_count_is_what_a_gpu_showed(
    variant: str, side: str, engine: Engine, num_latents: int, size: tuple[int, int], measured: float
) -> None:
    model = TAEHV(variant).to("meta", torch.float16)
    height, width = latent_size(variant, *size)
    counted = chunk_bytes(
        folded_copy(model.decoder if side == "decoder" else model.encoder),
        model.spec,
        engine,
        num_latents=num_latents,
        latent_pixels=height * width,
        element_size=2,
        slice_bytes=FULL_SIZE_BYTES if engine == "hopper" else SLICE_BYTES,
    )
    if side == "encoder":
        counted += num_latents * model.spec.time_factor * 3 * size[0] * size[1] * 2
    assert abs(counted / GIB / measured - 1) < 0.15


def test_number_of_latents() -> None:
    budget = STREAM_BYTES
    assert chunk_latents(lambda n: n * budget // 8, few_cost_time=False) == 8
    assert chunk_latents(lambda n: n * budget // 2, few_cost_time=False) == 2
    assert chunk_latents(lambda n: n * budget // 2, few_cost_time=True) == FEW_LATENTS
    assert chunk_latents(lambda n: n * budget, few_cost_time=True) == 2  # twice the budget, not four times
    assert chunk_latents(lambda n: n * budget * 9, few_cost_time=True) == 1
    assert chunk_latents(lambda n: 1, few_cost_time=True) > 1000


def test_chunk_knows_size_videos_and_width() -> None:
    codec = weightless("taehv")
    at_480 = codec.stream_chunk_latents("decoder", 60, 90)
    assert codec.stream_chunk_latents("decoder", 30, 45) > 3 * at_480
    assert codec.stream_chunk_latents("decoder", 60, 90, num_videos=2) < at_480
    assert codec.stream_chunk_latents("decoder", 500, 500) == 1
    narrow = FusedTAEHV(TAEHV("taehv", width=0.25).to("meta", torch.float16), engine="eager")
    assert narrow.stream_chunk_latents("decoder", 60, 90) > 2 * at_480
