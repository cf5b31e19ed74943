"""A stream's default chunk: the stored lengths, what is alive in torch while a chunk runs, and what an H200 showed."""

from __future__ import annotations

import functools
from typing import get_args

import pytest
import torch

from tests.engines import cudnn_stand_ins
from tests.engines.live_memory import LiveMemory
from tests.engines.small_models import NETWORKS
from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.engines import fused, hopper
from tinyvae.engines.fused import Engine, FusedTAEHV, chunk_bytes, chunk_latents
from tinyvae.engines.stack import CPU_SLICE_BYTES, SLICE_BYTES
from tinyvae.models.streaming import Side
from tinyvae.models.variants import Activation

GIB = 2**30


@pytest.fixture(autouse=True)
def cudnn_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_stand_ins.stand_in(monkeypatch)
    monkeypatch.setattr(fused, "why_not_cudnn", lambda dtype, device: None)


@functools.cache
def weightless(
    variant: str,
    dtype: torch.dtype = torch.float16,
    width: float = 1.0,
    engine: Engine = "eager",
    activation: Activation = "relu",
) -> FusedTAEHV:
    """A codec on the meta device: shapes without values, so that whole videos cost nothing."""
    with torch.device("meta"):  # from the start: to draw weights takes a second
        model = TAEHV(variant, width=width, activation=activation)
    return FusedTAEHV(model.to(dtype), engine=engine)


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


SIZES = ((64, 64), (256, 256), (480, 720), (720, 1280))
SAME = {"taehv": ("taecvx", "taew2_1", "taeos1_3"), "taew2_2": ("taehv1_5",), "taeltx_2": ("taeltx2_3",),
        "taew2_2_super": ("taehv1_5_super",)}  # fmt: skip
STORED: dict[tuple[Engine, int], dict[str, dict[str, list[int]]]] = {
    ("hopper", 2): {
        "taehv": {"encoder": [809, 49, 8, 4], "decoder": [809, 49, 8, 4]},
        "taew2_2": {"encoder": [3241, 201, 37, 13], "decoder": [2661, 165, 30, 10]},
        "taeltx_2": {"encoder": [2852, 178, 32, 13], "decoder": [1621, 101, 18, 6]},
        "taeh3": {"encoder": [1209, 75, 13, 5], "decoder": [2161, 134, 25, 9]},
        "taew2_2_super": {"encoder": [3241, 201, 37, 13]},
        "taeltx2_3_wide": {"encoder": [2852, 178, 32, 13], "decoder": [1330, 82, 14, 5]},
    },
    ("cudnn", 2): {
        "taehv": {"encoder": [809, 49, 8, 2], "decoder": [809, 49, 8, 1]},
        "taew2_2": {"encoder": [3241, 201, 37, 13], "decoder": [2661, 165, 30, 10]},
        "taeltx_2": {"encoder": [2524, 158, 29, 11], "decoder": [1621, 101, 18, 6]},
        "taeh3": {"encoder": [1296, 80, 15, 5], "decoder": [2161, 134, 25, 9]},
        "taew2_2_super": {"encoder": [3241, 201, 37, 13], "decoder": [1215, 75, 13, 4]},
        "taeltx2_3_wide": {"encoder": [2524, 158, 29, 11], "decoder": [1330, 82, 14, 5]},
    },
    ("cudnn", 4): {
        "taehv": {"encoder": [404, 24, 3, 1], "decoder": [404, 24, 2, 1]},
        "taew2_2": {"encoder": [1620, 100, 18, 6], "decoder": [1330, 82, 14, 4]},
        "taeltx_2": {"encoder": [1262, 79, 14, 5], "decoder": [810, 50, 9, 3]},
        "taeh3": {"encoder": [648, 40, 7, 2], "decoder": [1080, 66, 12, 4]},
        "taew2_2_super": {"encoder": [1620, 100, 18, 6], "decoder": [607, 37, 6, 1]},
        "taeltx2_3_wide": {"encoder": [1262, 79, 14, 5], "decoder": [665, 41, 7, 2]},
    },
    ("eager", 2): {
        "taehv": {"encoder": [719, 44, 7, 1], "decoder": [809, 49, 8, 1]},
        "taew2_2": {"encoder": [2161, 134, 25, 8], "decoder": [3241, 201, 37, 13]},
        "taeltx_2": {"encoder": [1417, 88, 16, 6], "decoder": [1621, 101, 18, 6]},
        "taeh3": {"encoder": [1080, 67, 12, 3], "decoder": [2161, 134, 25, 9]},
        "taew2_2_super": {"encoder": [2161, 134, 25, 8], "decoder": [486, 30, 5, 1]},
    },
    ("eager", 4): {
        "taehv": {"encoder": [359, 21, 2, 1], "decoder": [404, 24, 2, 1]},
        "taew2_2": {"encoder": [1080, 67, 11, 2], "decoder": [1620, 100, 18, 4]},
        "taeltx_2": {"encoder": [708, 44, 8, 2], "decoder": [810, 50, 9, 3]},
        "taeh3": {"encoder": [540, 33, 5, 1], "decoder": [1080, 66, 12, 4]},
        "taew2_2_super": {"encoder": [1080, 67, 11, 2], "decoder": [242, 14, 2, 1]},
    },
}
"""Latents of a chunk at these sizes, by engine and bytes of a value (eager on a CPU)."""


@pytest.mark.parametrize(("engine", "element_size"), STORED)
def test_default_chunks_are_the_stored_ones(engine: Engine, element_size: int) -> None:
    slice_bytes = {"hopper": hopper.SLICE_BYTES, "cudnn": SLICE_BYTES, "eager": CPU_SLICE_BYTES}[engine]
    for variant, sides in STORED[engine, element_size].items():
        for name in (variant, *SAME.get(variant, ())):
            for side, stored in sides.items():
                found = []
                for size in SIZES:
                    height, width = latent_size(name, *size)
                    found.append(
                        chunk_latents(
                            VARIANTS[name],
                            side,  # type: ignore[arg-type]
                            engine,
                            latent_pixels=height * width,
                            element_size=element_size,
                            slice_bytes=slice_bytes,
                        )
                    )
                assert found == stored, (name, side)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("variant", "engine"),
    [
        *((name, engine) for name in NETWORKS if name != "taeltx2_3_wide" for engine in ("eager", "cudnn")),
        *(pytest.param("taeltx2_3_wide", engine, marks=SLOW) for engine in ("eager", "cudnn")),
    ],
)
@pytest.mark.parametrize(
    ("width", "dtype", "limit"),
    [
        (1.0, torch.float16, 0.6),
        pytest.param(1.0, torch.float32, 0.615, marks=SLOW),
        pytest.param(0.25, torch.float16, 0.62, marks=SLOW),
        pytest.param(0.25, torch.float32, 0.62, marks=SLOW),
    ],
)
def test_default_chunk_takes_half_a_gigabyte(
    variant: str, engine: Engine, width: float, dtype: torch.dtype, limit: float
) -> None:
    """At 480x720; in float32 one latent of a patch-1 decoder is a little more, and so are narrow networks in the eager
    engine with a GPU's slices. Two more would be near the limit.
    """
    check_half_a_gigabyte(weightless(variant, dtype, width, engine), limit)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super", "taeltx2_3_wide"])
def test_leaky_relu_takes_no_more(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_stand_ins.keep_layout(monkeypatch)
    check_half_a_gigabyte(weightless(variant, engine="cudnn", activation="leaky_relu"), 0.6)


def check_half_a_gigabyte(codec: FusedTAEHV, limit: float) -> None:
    size = latent_size(codec.spec.name, 480, 720)
    for side in get_args(Side):
        chunk = codec.stream_chunk_latents(side, *size)
        alive = live_bytes(codec, side, chunk, size)
        assert alive < limit * GIB, (side, chunk, alive / GIB)
        if not (codec.spec.frame_rule == "chunked" and side == "encoder"):
            assert live_bytes(codec, side, chunk + 2, size) > 0.45 * GIB, (side, chunk)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("variant", "engine"),
    [("taehv", "cudnn"), ("taew2_2", "cudnn"), ("taeltx_2", "cudnn"), ("taew2_2", "eager"), ("taeh3", "eager")],
)
def test_frames_that_wait_for_a_chunk_are_counted(variant: str, engine: Engine, dtype: torch.dtype) -> None:
    """Pushes of the codec's and of another precision, shorter and longer than what `whole_chunks` runs at once."""
    codec, spec = weightless(variant, engine=engine), VARIANTS[variant]
    codec._values_were_seen = True
    size = latent_size(variant, 480, 720)
    length = codec.stream_chunk_latents("encoder", *size) * spec.time_factor
    shape = (1, 3 * length, 3, *(spec.space_factor * side for side in size))
    video, stream = torch.empty(shape, device="meta", dtype=dtype), StreamingEncoder(codec, whole_chunks=True)
    with LiveMemory() as memory:
        for part in (*video[:, :length].split(1, dim=1), video[:, 1:length], video):
            stream.push(part)
        stream.flush()
    assert memory.peak < 0.6 * GIB


MEASURED_GIB = [
    # side, engine, latents, size, peak of a whole-video call (the encoders' with a copy of the image, to fill the last
    # latent) or of a stream; benchmarks/results/2026-11-15-speed.md, the last three: 2026-11-16-gpu.md
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
    ("taew2_2_super", "decoder", "cudnn", 1, (480, 720), 0.11),
    ("taew2_2_super", "decoder", "cudnn", 13, (480, 736), 0.52),
    ("taew2_2", "decoder", "hopper", 8, (480, 736), 0.29),
    ("taeltx2_3_wide", "decoder", "hopper", 7, (480, 736), 0.35),
]


@pytest.mark.parametrize(("variant", "side", "engine", "num_latents", "size", "measured"), MEASURED_GIB)
def test_count_is_what_a_gpu_showed(
    variant: str, side: Side, engine: Engine, num_latents: int, size: tuple[int, int], measured: float
) -> None:
    spec = VARIANTS[variant]
    height, width = latent_size(variant, *size)
    counted = chunk_bytes(
        spec,
        side,
        engine,
        num_latents=num_latents,
        latent_pixels=height * width,
        element_size=2,
        slice_bytes=hopper.SLICE_BYTES if engine == "hopper" else SLICE_BYTES,
    )
    if side == "encoder":
        counted += num_latents * spec.time_factor * 3 * size[0] * size[1] * 2
    assert abs(counted / GIB / measured - 1) < 0.16


def test_chunk_knows_size_videos_and_width() -> None:
    codec = weightless("taehv")
    at_480 = codec.stream_chunk_latents("decoder", 60, 90)
    assert codec.stream_chunk_latents("decoder", 30, 45) > 3 * at_480
    assert codec.stream_chunk_latents("decoder", 60, 90, num_videos=2) < at_480
    assert codec.stream_chunk_latents("decoder", 500, 500) == 1
    narrow = FusedTAEHV(TAEHV("taehv", width=0.25).to("meta", torch.float16), engine="eager")
    assert narrow.stream_chunk_latents("decoder", 60, 90) > 2 * at_480
