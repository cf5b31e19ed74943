"""Streams: any chunking of any variant gives the whole-video result; streams do not meet; memory stays put."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.errors import UserError
from tinyvae.models import streaming
from tinyvae.models.codec import VideoCodec

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


@contextlib.contextmanager
def recorded_runs(codec: VideoCodec) -> Iterator[list[Tensor]]:
    """What `encode_chunk` and `decode_chunk` of this codec are given meanwhile."""
    given: list[Tensor] = []

    def recording(run):
        return lambda x_NTCHW, state: (given.append(x_NTCHW), run(x_NTCHW, state))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("encode_chunk", "decode_chunk"):
            patch.setattr(codec, name, recording(getattr(codec, name)))
        yield given


def lengths_of(runs: list[Tensor]) -> list[int]:
    return [run.shape[1] for run in runs]


def whole(total: int, length: int) -> list[int]:
    """Runs of one length, and the rest."""
    return [length] * (total // length) + ([total % length] if total % length else [])


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    length=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 19), max_size=6),
    chunk=st.integers(1, 6),
    is_stated=st.booleans(),
    seed=st.integers(0, 999),
)
def test_encoder_chunking_changes_nothing(
    variant: str, length: int, sizes: list[int], chunk: int, is_stated: bool, seed: int
) -> None:
    """However the video is cut. Of whole chunks every run but the last has one length, for taeh3 inside its 17."""
    model = MODELS[variant]
    size, unit = model.spec.space_factor, model.spec.time_factor
    generator = torch.Generator().manual_seed(seed)
    video = torch.rand(2, length, 3, size, size, dtype=torch.double, generator=generator)
    with torch.no_grad():
        expected = model.encode_video(video)
    for options in ({}, {"chunk_latents": chunk}, {"chunk_latents": chunk, "whole_chunks": True}):
        stream = StreamingEncoder(model, num_frames=length if is_stated else None, **options)
        with recorded_runs(model) as runs:
            pieces = [stream.push(part) for part in cut(video, sizes)]
            end = stream.flush()
        torch.testing.assert_close(torch.cat([*pieces, end], 1), expected, atol=TOLERANCE, rtol=0)
        assert end.shape[1] == 0 or not is_stated
    padded = model.spec.padded_frames(length)
    if model.spec.frame_rule == "chunked":
        assert lengths_of(runs) == whole(20, chunk * unit) * (padded // 17)
    else:
        assert lengths_of(runs) == whole(padded, chunk * unit)


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    length=st.integers(1, 11),
    sizes=st.lists(st.integers(0, 5), max_size=6),
    chunk=st.integers(1, 6),
    is_stated=st.booleans(),
    seed=st.integers(0, 999),
)
def test_decoder_chunking_changes_nothing(
    variant: str, length: int, sizes: list[int], chunk: int, is_stated: bool, seed: int
) -> None:
    model = MODELS[variant]
    is_stated = is_stated or variant == "taecvx"
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(2, length, model.spec.latent_channels, 1, 1, dtype=torch.double, generator=generator)
    with torch.no_grad():
        expected = model.decode_video(latents)
    for options in ({}, {"chunk_latents": chunk, "whole_chunks": True}):
        stream = StreamingDecoder(model, num_latents=length if is_stated else None, **options)
        with recorded_runs(model) as runs:
            pieces = [stream.push(part) for part in cut(latents, sizes)]
            end = stream.flush()
        torch.testing.assert_close(torch.cat([*pieces, end], 1), expected, atol=TOLERANCE, rtol=0)
        assert end.shape[1] == 0 or not is_stated
    assert lengths_of(runs) == whole(length, chunk)


@torch.no_grad()
def test_whole_chunks_are_of_the_codecs_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder takes two thirds, which may be joined. Pushes of another precision make no other runs."""
    codec = TAEHV("taehv", width=0.125).fused()
    asked: set[object] = set()
    monkeypatch.setattr(codec, "stream_chunk_latents", lambda *size, num_videos: asked.add((*size, num_videos)) or 3)
    latents, frames = torch.randn(2, 8, 16, 2, 3).double(), torch.rand(2, 25, 3, 16, 24).double()
    with recorded_runs(codec) as runs:
        for sizes in ([1] * 8, [3, 3, 2], [7, 1]):
            decoder, encoder = StreamingDecoder(codec, whole_chunks=True), StreamingEncoder(codec, whole_chunks=True)
            decoded = [*(decoder.push(part) for part in latents.split(sizes, dim=1)), decoder.flush()]
            assert lengths_of(runs) == [3, 3, 2]
            runs.clear()
            encoded = [*(encoder.push(part) for part in cut(frames, sizes)), encoder.flush()]
            assert lengths_of(runs) == [8, 8, 8, 4]
            assert {run.dtype for run in runs} == {codec.dtype}
            runs.clear()
            torch.testing.assert_close(torch.cat(decoded, dim=1), codec.decode_video(latents), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(torch.cat(encoded, dim=1), codec.encode_video(frames), atol=1e-5, rtol=1e-4)
            runs.clear()
    assert asked == {("decoder", 2, 3, 2), ("encoder", 2, 3, 2)}


@pytest.mark.parametrize("preview", ["time", "space", "both"])
@pytest.mark.parametrize("options", [{}, {"whole_chunks": True, "chunk_latents": 4}])
def test_preview_streams(preview: str, options: dict[str, object]) -> None:
    model = TAEHV("taecvx", width=0.125, preview=preview).double().eval()
    latents = torch.randn(2, 6, 16, 2, 3, dtype=torch.double)
    stream = StreamingDecoder(model, num_latents=6, **options)  # type: ignore[arg-type]
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


def test_pushes_run_what_they_bring() -> None:
    """The default: nothing waits for later latents."""
    model, latents = MODELS["taehv"], torch.randn(1, 9, 16, 1, 1, dtype=torch.double)
    stream = StreamingDecoder(model, chunk_latents=2)
    with recorded_runs(model) as runs:
        counts = [stream.push(part).shape[1] for part in latents.split([1, 3, 5], dim=1)]
        assert stream.flush().shape[1] == 0
    assert counts == [1, 12, 20]
    assert lengths_of(runs) == [1, 2, 1, 2, 2, 1]


def test_frames_of_whole_chunks_come_later() -> None:
    model, latents = MODELS["taehv"], torch.randn(1, 7, 16, 1, 1, dtype=torch.double)
    for stated, expected in ((None, [0, 0, 9, 0, 0, 12, 0, 4]), (7, [0, 0, 9, 0, 0, 12, 4, 0])):
        stream = StreamingDecoder(model, num_latents=stated, chunk_latents=3, whole_chunks=True)
        counts = [stream.push(part).shape[1] for part in latents.split(1, dim=1)]
        assert [*counts, stream.flush().shape[1]] == expected
    encoder = StreamingEncoder(MODELS["taeh3"], chunk_latents=2, whole_chunks=True)
    counts = [encoder.push(torch.rand(1, 1, 3, 16, 16, dtype=torch.double)).shape[1] for _ in range(22)]
    # Runs end at frames 5, 13 and 17 of each 17. The last three latents of a chunk wait until the next run.
    assert counts == [0] * 4 + [2] + [0] * 16 + [5]


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
    for step in range(4):
        for _ in range(17):  # a whole number of latents and of taeh3 chunks, so the state repeats
            encoder.push(torch.rand(1, model.spec.time_factor, 3, size, size, dtype=torch.double))
        decoder.push(torch.randn(1, 3, model.spec.latent_channels, 1, 1, dtype=torch.double))
        if step >= 1:
            held.add(carried_bytes(encoder._state) + carried_bytes(decoder._state))
            assert sum(latents.shape[1] for latents in encoder._held) <= 5
    assert len(held) == 1


@pytest.mark.parametrize("variant", ["taehv", "taeh3"])
def test_what_waits_is_at_most_a_chunk(variant: str) -> None:
    model = MODELS[variant]
    size, unit, channels = model.spec.space_factor, model.spec.time_factor, model.spec.latent_channels
    encoder = StreamingEncoder(model, chunk_latents=3, whole_chunks=True)
    decoder = StreamingDecoder(model, chunk_latents=3, whole_chunks=True)
    held: set[int] = set()
    for step in range(4):
        for _ in range(3 * 17):  # whole chunks of both, so that the state repeats
            encoder.push(torch.rand(1, unit, 3, size, size, dtype=torch.double))
            decoder.push(torch.randn(1, 1, channels, 1, 1, dtype=torch.double))
            assert carried_bytes(encoder._waiting) <= 3 * unit * 3 * size * size * 8
            assert carried_bytes(decoder._waiting) <= 3 * channels * 8
        assert not encoder._waiting and not decoder._waiting
        if step >= 1:
            held.add(carried_bytes(encoder._state) + carried_bytes(decoder._state))
    assert len(held) == 1


def test_gradients_are_recorded_only_when_asked() -> None:
    model = TAEHV("taehv", width=0.125)
    latents = torch.randn(1, 2, 16, 1, 1)
    assert not StreamingDecoder(model).push(latents).requires_grad
    assert StreamingDecoder(model, track_gradients=True).push(latents).requires_grad


@pytest.mark.parametrize("kind", [StreamingDecoder, StreamingEncoder])
def test_what_waits_keeps_its_gradients(kind: type[StreamingDecoder | StreamingEncoder]) -> None:
    model = MODELS["taehv"]
    shape, whole_video = (1, 22, 3, 8, 8), model.encode
    if kind is StreamingDecoder:
        shape, whole_video = (1, 7, 16, 1, 1), lambda latents: model.decode(latents).clamp(0, 1)
    video = torch.rand(shape, dtype=torch.double, requires_grad=True)
    made = whole_video(video)
    weights = torch.randn_like(made)
    (expected,) = torch.autograd.grad((made * weights).sum(), video)
    stream = kind(model, track_gradients=True, chunk_latents=2, whole_chunks=True)
    parts = [*(stream.push(part) for part in cut(video, [1, 1, 1, 3])), stream.flush()]
    (found,) = torch.autograd.grad((torch.cat(parts, dim=1) * weights).sum(), video)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    silent = kind(model, chunk_latents=2, whole_chunks=True)
    assert not any(silent.push(part).requires_grad for part in cut(video, [1, 1, 1, 3]))


@pytest.mark.parametrize("kind", [StreamingDecoder, StreamingEncoder])
def test_what_waits_may_come_from_inference_mode(kind: type[StreamingDecoder | StreamingEncoder]) -> None:
    model = TAEHV("taehv", width=0.125)
    video = torch.randn(1, 5, 16, 1, 1) if kind is StreamingDecoder else torch.rand(1, 21, 3, 8, 8)
    stream, parts = kind(model, chunk_latents=2, whole_chunks=True), []
    for number, part in enumerate(video.split(1, dim=1)):
        with torch.inference_mode(number % 2 == 0):
            parts.append(stream.push(part.clone()))
    found = torch.cat([*parts, stream.flush()], dim=1)
    expected = model.decode_video(video) if kind is StreamingDecoder else model.encode_video(video)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda: StreamingDecoder(MODELS["taecvx"]), "num_latents=L"),
        (lambda: StreamingEncoder(MODELS["taehv"]).flush(), "empty"),
        (lambda: StreamingDecoder(MODELS["taehv"]).push(torch.randn(1, 1, 4, 1, 1)), "16 latent channels"),
        (lambda: StreamingDecoder(MODELS["taehv"]).push(torch.randn(1, 0, 4, 1, 1)), "16 latent channels"),
        (lambda: StreamingEncoder(MODELS["taehv"]).push(torch.rand(1, 0, 3, 9, 8)), "multiples of 8"),
        (lambda: push_twice(torch.rand(1, 1, 3, 8, 8), torch.rand(1, 1, 3, 16, 8)), "one object per stream"),
        (lambda: push_after_flush(), "has been flushed"),
        (lambda: push_frames(stated=3, pushed=4), "more frames"),
        (lambda: push_frames(stated=3, pushed=2), "only 2 were pushed"),
        (lambda: StreamingDecoder(MODELS["taehv"], low_latency=True, whole_chunks=True), "choose one"),
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


@torch.no_grad()
def test_whole_chunks_of_a_model_without_a_choice() -> None:
    model = TAEHV("taehv", width=0.125)
    for stream, video in (
        (StreamingDecoder(model, whole_chunks=True), torch.randn(1, 2, 16, 2, 3)),
        (StreamingEncoder(model, whole_chunks=True), torch.rand(1, 2, 3, 16, 24)),
    ):
        for part in (video, video[:, :0]):
            with pytest.raises(UserError, match="pass chunk_latents="):
                stream.push(part)
        with pytest.raises(UserError, match="the stream is empty"):
            stream.flush()


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "4", float("nan")])
def test_counts_are_whole_numbers(wrong: object) -> None:
    model = TAEHV("taehv", width=0.125)
    for make in (
        lambda: StreamingDecoder(model, chunk_latents=wrong),  # type: ignore[arg-type]
        lambda: StreamingEncoder(model, chunk_latents=wrong),  # type: ignore[arg-type]
        lambda: StreamingDecoder(model, num_latents=wrong),  # type: ignore[arg-type]
        lambda: StreamingEncoder(model, num_frames=wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="must be a whole number, at least 1"):
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
    for chunk, sizes in ((1, [16, 16, 8]), (2, [40]), (3, [7, 12, 21])):
        fused = model.fused()
        stream = StreamingEncoder(fused, chunk_latents=chunk)
        with recorded_runs(fused) as runs:
            latents = torch.cat([*(stream.push(part) for part in frames.split(sizes, dim=1)), stream.flush()], dim=1)
        torch.testing.assert_close(latents, expected, atol=1e-5, rtol=1e-4)
        assert max(lengths_of(runs)) == 4 * chunk


def run_out_of_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("no room")


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

    with monkeypatch.context() as patch:
        patch.setattr(*((codec, "decode_chunk") if what_fails == "the run" else (Tensor, "clamp")), run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            stream.push(latents)
    refuses_to_go_on(stream, latents)


def test_stream_whose_flush_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, latents = TAEHV("taehv", width=0.125).fused(), torch.randn(1, 2, 16, 2, 3)
    stream = StreamingDecoder(codec, chunk_latents=3, whole_chunks=True)
    stream.push(latents)

    with monkeypatch.context() as patch:
        patch.setattr(codec, "decode_chunk", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            stream.flush()
    refuses_to_go_on(stream, latents)


def test_encoder_whose_push_failed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a chunk could not even be joined: those before it have run."""
    stream = StreamingEncoder(TAEHV("taehv", width=0.125).fused(), num_frames=21)
    frames = torch.rand(1, 21, 3, 8, 16)
    stream.push(frames[:, :3])

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "cut_out", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            stream.push(frames[:, 3:])
    refuses_to_go_on(stream, frames[:, 3:])


@pytest.mark.parametrize("options", [{}, {"whole_chunks": True, "chunk_latents": 2}])
@pytest.mark.parametrize(
    ("variant", "kind"),
    [("taehv", StreamingEncoder), ("taeh3", StreamingEncoder), ("taehv", StreamingDecoder)],
)
@torch.no_grad()
def test_caller_may_use_the_buffer_of_a_push_again(
    variant: str, kind: type[StreamingDecoder | StreamingEncoder], options: dict[str, object]
) -> None:
    codec = TAEHV(variant, width=0.125).fused()
    size = codec.spec.space_factor
    video, whole_video = torch.rand(1, 25, 3, size, size), codec.encode_video
    if kind is StreamingDecoder:
        video, whole_video = torch.randn(1, 25, 16, 2, 3), codec.decode_video
    stream, buffer, made = kind(codec, **options), torch.empty_like(video[:, :3]), []  # type: ignore[arg-type]
    for part in video.split([3, 1, 2, 3, 3, 1, 3, 3, 3, 3], dim=1):
        here = buffer[:, : part.shape[1]].copy_(part)
        made.append(stream.push(here))
        buffer.fill_(0.5)
    made.append(stream.flush())
    torch.testing.assert_close(torch.cat(made, dim=1), whole_video(video), atol=1e-5, rtol=1e-5)


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

    with monkeypatch.context() as patch:
        patch.setattr(codec._stacks["decoder"], "compute", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            codec.decode_chunk(latents, state)
    with pytest.raises(AssertionError, match="this state has been used"):
        codec.decode_chunk(latents, state)
