"""Streams: any chunking of any variant gives the whole-video result; streams do not meet; memory stays put."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.errors import UserError
from tinyvae.models import streaming

# fp64: the parallel and the chunked pass may use convolution kernels that round differently; at this tolerance
# a wrong or missing carried frame (errors around 1e-2) cannot hide.
TOLERANCE = 1e-12
MODELS = {name: TAEHV(name, width=0.125).double().eval() for name in VARIANTS}


def cut(x_NTCHW: Tensor, sizes: list[int]) -> list[Tensor]:
    """Cut along time into chunks of the given sizes, the last taking what is left."""
    chunks, start = [], 0
    for size in sizes:
        chunks.append(x_NTCHW[:, start : start + size])
        start += size
    return [*chunks, x_NTCHW[:, start:]]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(1, 40), sizes=st.lists(st.integers(0, 19), max_size=6), seed=st.integers(0, 999))
def test_encoder_chunking_changes_nothing(variant: str, length: int, sizes: list[int], seed: int) -> None:
    model = MODELS[variant]
    size = model.spec.space_factor
    generator = torch.Generator().manual_seed(seed)
    video = torch.rand(1, length, 3, size, size, dtype=torch.double, generator=generator)
    with torch.no_grad():
        whole = model.encode_video(video)
    for options in ({}, {"num_frames": length}, {"chunk_latents": 2}, {"chunk_latents": 1, "num_frames": length}):
        stream = StreamingEncoder(model, **options)
        pieces = [stream.push(chunk) for chunk in cut(video, sizes)]
        end = stream.flush()
        torch.testing.assert_close(torch.cat([*pieces, end], 1), whole, atol=TOLERANCE, rtol=0)
        assert end.shape[1] == 0 or "num_frames" not in options


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(length=st.integers(1, 11), sizes=st.lists(st.integers(0, 5), max_size=6), seed=st.integers(0, 999))
def test_decoder_chunking_changes_nothing(variant: str, length: int, sizes: list[int], seed: int) -> None:
    model = MODELS[variant]
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, length, model.spec.latent_channels, 1, 1, dtype=torch.double, generator=generator)
    stream = StreamingDecoder(model, num_latents=length)
    pieces = [stream.push(chunk) for chunk in cut(latents, sizes)]
    pieces.append(stream.flush())
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(pieces, 1), model.decode_video(latents), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("preview", ["time", "space", "both"])
def test_preview_streams(preview: str) -> None:
    model = TAEHV("taecvx", width=0.125, preview=preview).double().eval()
    latents = torch.randn(2, 6, 16, 2, 3, dtype=torch.double)
    stream = StreamingDecoder(model, num_latents=6)
    pieces = [stream.push(latents[:, :0]), stream.push(latents[:, :1]), stream.push(latents[:, 1:]), stream.flush()]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(pieces, 1), model.decode_video(latents), atol=TOLERANCE, rtol=0)


def test_frames_come_as_soon_as_they_are_ready() -> None:
    model = MODELS["taehv"]
    stream = StreamingDecoder(model)
    counts = [stream.push(torch.randn(1, 1, 16, 1, 1, dtype=torch.double)).shape[1] for _ in range(3)]
    assert counts == [1, 4, 4]
    encoder = StreamingEncoder(MODELS["taeh3"])
    counts = [encoder.push(torch.rand(1, 1, 3, 16, 16, dtype=torch.double)).shape[1] for _ in range(18)]
    # Latents 0 and 1 of a chunk are safe at once; the other three wait until frame 17 opens the next chunk, which
    # also completes that chunk's first latent.
    assert counts == [1, 0, 0, 0, 1] + [0] * 12 + [4]


def test_interleaved_streams_do_not_meet() -> None:
    model = MODELS["taew2_1"]
    videos = [torch.rand(1, 9, 3, 8, 8, dtype=torch.double) for _ in range(2)]
    streams = [StreamingEncoder(model) for _ in videos]
    pieces: list[list[Tensor]] = [[], []]
    for t in range(9):
        for stream, video, got in zip(streams, videos, pieces, strict=True):
            got.append(stream.push(video[:, t : t + 1]))
    for stream, video, got in zip(streams, videos, pieces, strict=True):
        got.append(stream.flush())
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(got, 1), model.encode_video(video), atol=TOLERANCE, rtol=0)


def carried_bytes(state: object) -> int:
    """Bytes of storage (not of the view) that a stream's state keeps alive."""
    assert isinstance(state, list)
    return sum(entry.untyped_storage().nbytes() for entry in state if isinstance(entry, Tensor))


@pytest.mark.parametrize("variant", ["taehv", "taeltx_2", "taeh3", "taew2_2_super"])
def test_memory_does_not_grow(variant: str) -> None:
    model = MODELS[variant]
    size = model.spec.space_factor
    encoder, decoder = StreamingEncoder(model), StreamingDecoder(model)
    held: set[int] = set()
    for step in range(12):
        for _ in range(17):  # a whole number of latents and of taeh3 chunks, so the state repeats
            encoder.push(torch.rand(1, model.spec.time_factor, 3, size, size, dtype=torch.double))
        decoder.push(torch.randn(1, 3, model.spec.latent_channels, 1, 1, dtype=torch.double))
        if step >= 1:
            held.add(carried_bytes(encoder._state) + carried_bytes(decoder._state))
            assert sum(latents.shape[1] for latents in encoder._held) <= 5
    assert len(held) == 1


def test_gradients_are_recorded_only_when_asked() -> None:
    model = TAEHV("taehv", width=0.125)
    latents = torch.randn(1, 2, 16, 1, 1)
    assert not StreamingDecoder(model).push(latents).requires_grad
    assert StreamingDecoder(model, track_gradients=True).push(latents).requires_grad


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda: StreamingDecoder(MODELS["taecvx"]), "num_latents=L"),
        (lambda: StreamingDecoder(MODELS["taehv"], num_latents=0), "at least 1"),
        (lambda: StreamingEncoder(MODELS["taehv"]).flush(), "empty"),
        (lambda: StreamingDecoder(MODELS["taehv"]).push(torch.randn(1, 1, 4, 1, 1)), "16 latent channels"),
        (lambda: StreamingDecoder(MODELS["taehv"]).push(torch.randn(1, 0, 4, 1, 1)), "16 latent channels"),
        (lambda: StreamingEncoder(MODELS["taehv"]).push(torch.rand(1, 0, 3, 9, 8)), "multiples of 8"),
        (lambda: push_twice(torch.rand(1, 1, 3, 8, 8), torch.rand(1, 1, 3, 16, 8)), "one object per stream"),
        (lambda: push_after_flush(), "has been flushed"),
        (lambda: push_stated(stated=1, pushed=2), "more latents"),
        (lambda: push_stated(stated=3, pushed=2), "only 2 were pushed"),
        (lambda: push_frames(stated=3, pushed=4), "more frames"),
        (lambda: push_frames(stated=3, pushed=2), "only 2 were pushed"),
    ],
)
def test_misuse_is_refused(misuse, says: str) -> None:
    with pytest.raises(UserError, match=says):
        misuse()


def push_twice(first: Tensor, second: Tensor) -> None:
    stream = StreamingEncoder(MODELS["taehv"])
    stream.push(first.double())
    stream.push(second.double())


def push_after_flush() -> None:
    stream = StreamingDecoder(MODELS["taehv"])
    stream.push(torch.randn(1, 1, 16, 1, 1, dtype=torch.double))
    stream.flush()
    stream.push(torch.randn(1, 1, 16, 1, 1, dtype=torch.double))


def push_stated(*, stated: int, pushed: int) -> None:
    stream = StreamingDecoder(MODELS["taehv"], num_latents=stated)
    stream.push(torch.randn(1, pushed, 16, 1, 1, dtype=torch.double))
    stream.flush()


def push_frames(*, stated: int, pushed: int) -> None:
    stream = StreamingEncoder(MODELS["taehv"], num_frames=stated, chunk_latents=1)
    for _ in range(pushed):
        stream.push(torch.rand(1, 1, 3, 8, 8, dtype=torch.double))
    stream.flush()


def test_refused_call_leaves_the_stream_as_it_was() -> None:
    model = TAEHV("taehv", width=0.125)
    latents = torch.randn(1, 3, 16, 2, 3)
    stream = StreamingDecoder(model, num_latents=3)
    with pytest.raises(ValueError, match="more latents"):
        stream.push(torch.randn(1, 4, 16, 5, 5))  # too many, and of another size
    first = stream.push(latents[:, :2])
    with pytest.raises(ValueError, match="only 2 were pushed"):
        stream.flush()
    frames = torch.cat([first, stream.push(latents[:, 2:]), stream.flush()], dim=1)
    torch.testing.assert_close(frames, model.decode_video(latents).detach())


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "4", float("nan")])
def test_counts_are_whole_numbers(wrong: object) -> None:
    model = TAEHV("taehv", width=0.125)
    for make in (
        lambda: StreamingDecoder(model, chunk_latents=wrong),  # type: ignore[arg-type]
        lambda: StreamingEncoder(model, chunk_latents=wrong),  # type: ignore[arg-type]
        lambda: StreamingDecoder(model, num_latents=wrong),  # type: ignore[arg-type]
        lambda: StreamingEncoder(model, num_frames=wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="must be a whole number"):
            make()


def test_stream_of_no_model() -> None:
    for kind in (StreamingDecoder, StreamingEncoder):
        with pytest.raises(ValueError, match="needs a model"):
            kind("taehv")  # type: ignore[arg-type]


@torch.no_grad()
def test_frames_of_another_precision_in_one_long_push() -> None:
    model = TAEHV("taehv", width=0.125)
    fused = model.fused()
    frames = torch.rand(2, 21, 3, 16, 24, dtype=torch.float64)
    stream = StreamingEncoder(fused, chunk_latents=2)
    latents = torch.cat([stream.push(frames), stream.flush()], dim=1)
    torch.testing.assert_close(latents, model.encode_video(frames), atol=1e-5, rtol=1e-4)
    decoded = StreamingDecoder(fused, chunk_latents=2).push(latents)
    torch.testing.assert_close(decoded, model.decode_video(latents), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_chunk_of_a_taeh3_encoder_is_as_small_as_asked() -> None:
    model = TAEHV("taeh3", width=0.125)
    frames = torch.rand(1, 40, 3, 16, 32)
    expected = model.encode_video(frames)
    for chunk, sizes in ((1, [16, 32, 40]), (2, [40]), (3, [7, 19, 40])):
        fused, ran = model.fused(), []
        run = fused.encode_chunk
        fused.encode_chunk = lambda x, state, run=run, ran=ran: (ran.append(x.shape[1]), run(x, state))[1]
        stream, before, parts = StreamingEncoder(fused, chunk_latents=chunk), 0, []
        for size in sizes:
            parts.append(stream.push(frames[:, before:size]))
            before = size
        latents = torch.cat([*parts, stream.flush()], dim=1)
        torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-4)
        assert max(ran) == 4 * chunk


def refuses_to_go_on(stream: StreamingDecoder | StreamingEncoder, video: Tensor) -> None:
    with pytest.raises(UserError, match="an earlier push of this stream failed"):
        stream.push(video)
    with pytest.raises(UserError, match="an earlier push of this stream failed"):
        stream.flush()


@pytest.mark.parametrize("what_fails", ["the run", "the clamp behind it"])
def test_decoder_whose_push_failed_is_refused(what_fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it remembered is used up by then: going on would give wrong frames."""
    codec = TAEHV("taehv", width=0.125).fused()
    stream = StreamingDecoder(codec)
    latents = torch.randn(1, 1, 16, 2, 3)
    stream.push(latents)

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(*((codec, "decode_chunk") if what_fails == "the run" else (Tensor, "clamp")), fail)
        with pytest.raises(torch.OutOfMemoryError):
            stream.push(latents)
    refuses_to_go_on(stream, latents)


def test_encoder_whose_push_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a chunk could not even be joined: those before it have run."""
    stream = StreamingEncoder(TAEHV("taehv", width=0.125).fused(), num_frames=21)
    frames = torch.rand(1, 21, 3, 8, 16)
    stream.push(frames[:, :3])

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "cut_out", fail)
        with pytest.raises(torch.OutOfMemoryError):
            stream.push(frames[:, 3:])
    refuses_to_go_on(stream, frames[:, 3:])


@pytest.mark.parametrize("variant", ["taehv", "taeh3"])
@torch.no_grad()
def test_caller_may_use_the_buffer_of_a_push_again(variant: str) -> None:
    codec = TAEHV(variant, width=0.125).fused()
    size = codec.spec.space_factor
    frames = torch.rand(1, 25, 3, size, size)
    stream, buffer, latents = StreamingEncoder(codec), torch.empty(1, 3, 3, size, size), []
    for part in frames.split([3, 1, 2, 3, 3, 1, 3, 3, 3, 3], dim=1):
        here = buffer[:, : part.shape[1]].copy_(part)
        latents.append(stream.push(here))
        buffer.fill_(0.5)
    latents.append(stream.flush())
    torch.testing.assert_close(torch.cat(latents, dim=1), codec.encode_video(frames), atol=1e-5, rtol=1e-5)


def test_the_recording_of_a_graph_leaves_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's default mode what they allocate meanwhile fails, and breaks the recording. (CUDA is played.)"""
    asked: dict[str, object] = {}

    def graph(recorded: object, **options: object) -> contextlib.nullcontext[None]:
        asked.update(options)
        return contextlib.nullcontext()

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda of: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    streaming.DecodeGraph(MODELS["taehv"], torch.randn(1, 1, 16, 2, 2, dtype=torch.double))
    assert asked == {"capture_error_mode": "thread_local"}


def test_used_state_is_no_fresh_start() -> None:
    codec = TAEHV("taehv", width=0.125).fused()
    latents = torch.randn(1, 1, 16, 2, 3)
    _, state = codec.decode_chunk(latents, None)
    assert isinstance(state, list)
    once = codec.decode_chunk(latents, list(state))[0]
    assert torch.equal(codec.decode_chunk(latents, state)[0], once)
    with pytest.raises(AssertionError, match="this state has been used"):
        codec.decode_chunk(latents, state)


def test_the_state_of_a_run_that_failed_is_used_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first blocks have taken theirs: a second try would begin a new video in these and go on in the others."""
    codec = TAEHV("taehv", width=0.125).fused(engine="eager")
    latents = torch.randn(1, 1, 16, 2, 3)
    _, state = codec.decode_chunk(latents, None)

    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(codec._stacks["decoder"], "compute", fail)
        with pytest.raises(torch.OutOfMemoryError):
            codec.decode_chunk(latents, state)
    with pytest.raises(AssertionError, match="this state has been used"):
        codec.decode_chunk(latents, state)
