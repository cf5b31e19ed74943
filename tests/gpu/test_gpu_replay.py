"""Chunks replayed from CUDA graphs on a GPU: the same bits as launched ones."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.gpu_codecs import SHORT, by_latents, spread
from tinyvae import StreamingDecoder
from tinyvae.engines import fused as engines
from tinyvae.engines import replay


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a test before has run out of memory."""
    monkeypatch.setattr(replay.Replay, "records", True)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2", "taew2_2_super", "taeltx2_3_wide"])
def test_replayed_chunks_are_the_launched_ones(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole videos and interleaved streams, several times: the first time launches, later ones replay a CUDA graph."""
    model = spread(variant).to(dtype)
    fused = model.fused()
    monkeypatch.setattr(engines, "REPLAY_CHUNKS", False)
    launched = model.fused()
    assert not launched._replays
    length, side = 3 * fused.spec.time_factor, 6 * fused.spec.space_factor
    films = torch.rand(3, 1, length, 3, side, side, device="cuda").to(dtype)
    latents = [launched.encode_video(film) for film in films]
    frames = [launched.decode_video(one) for one in latents]
    for _ in range(4):
        for film, one, expected in zip(films, latents, frames, strict=True):
            assert torch.equal(fused.encode_video(film), one)
            assert torch.equal(fused.decode_video(one), expected)
    for part in fused._replays.values():
        assert any(isinstance(recording, replay._Recording) for recording in part._recordings.values())
    streams = [StreamingDecoder(fused, num_latents=one.shape[1]) for one in latents]
    pushes = zip(*(one.split(1, dim=1) for one in latents), strict=True)
    made = [[stream.push(part) for stream, part in zip(streams, row, strict=True)] for row in pushes]
    for number, one in enumerate(latents):
        assert torch.equal(torch.cat([row[number] for row in made], dim=1), by_latents(launched, one))


def test_recordings_go_while_other_streams_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in turn on two CUDA streams, with room for one recording: each goes while the GPU may still read it."""
    monkeypatch.setattr(replay, "MOST_SHAPES", 2)
    model = spread("taew2_2").half()
    fused = model.fused()
    films = [torch.randn(1, 2, fused.spec.latent_channels, 20, 20 + more, device="cuda").half() for more in range(3)]
    monkeypatch.setattr(engines, "REPLAY_CHUNKS", False)
    expected = [model.fused().decode_video(film) for film in films]
    torch.cuda.synchronize()
    made, sides = [], [torch.cuda.Stream() for _ in films]
    for _ in range(8):
        for number in (0, 0, 1, 1, 2, 2):
            with torch.cuda.stream(sides[number]):
                made.append((number, fused.decode_video(films[number])))
    torch.cuda.synchronize()
    for number, frames in made:
        assert torch.equal(frames, expected[number])


def test_large_recordings_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one recording each shape pushes out the other, and then no graph is left for a moment."""
    monkeypatch.setattr(replay, "MOST_BYTES", 1)
    model = spread("taew2_2").half()
    fused = model.fused()
    monkeypatch.setattr(engines, "REPLAY_CHUNKS", False)
    launched = model.fused()
    films = [torch.randn(1, 2, 48, 10, width, device="cuda").half() for width in (10, 12)]
    expected, num_recorded = [launched.decode_video(film) for film in films], 0
    for _ in range(3):
        for film, frames in zip(films, expected, strict=True):
            for _ in range(3):
                assert torch.equal(fused.decode_video(film), frames)
            kept = [*fused._replays["decoder"]._recordings.values()]
            num_recorded += isinstance(kept[-1], replay._Recording)
    assert num_recorded == 6


@pytest.mark.parametrize("pushed", [1, 3])
def test_pushes_that_wait_replay_whole_chunks(pushed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shapes come: the first chunk, those between, and the rest."""
    fused = spread("taew2_2").half().fused()
    monkeypatch.setattr(engines, "REPLAY_CHUNKS", False)
    launched = spread("taew2_2").half().fused()
    latents = torch.randn(1, 14, 48, 20, 20, device="cuda").half()
    expected = torch.cat([*map(StreamingDecoder(launched, chunk_latents=4).push, latents.split(4, dim=1))], dim=1)
    for _ in range(3):
        stream = StreamingDecoder(fused, whole_chunks=True, chunk_latents=4)
        made = [*map(stream.push, latents.split(pushed, dim=1)), stream.flush()]
        assert torch.equal(torch.cat(made, dim=1), expected)
    kept = [*fused._replays["decoder"]._recordings.values()]
    assert len(kept) == 3 and all(isinstance(one, replay._Recording) for one in kept)


def test_graphs_are_counted_and_freed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    fused = spread("taew2_2").half().fused()
    latents = torch.randn(1, 2, fused.spec.latent_channels, 20, 20, device="cuda").half()
    before = replay.idle_bytes(device)
    expected = fused.decode_video(latents)
    fused.decode_video(latents)
    assert replay.idle_bytes(device) > before
    replay.stop_recording()
    torch.cuda.empty_cache()
    assert replay.idle_bytes(device) <= before
    for _ in range(3):
        assert torch.equal(fused.decode_video(latents), expected)
    assert not any(isinstance(one, replay._Recording) for one in fused._replays["decoder"]._recordings.values())


def test_graphs_share_the_memory_of_results_in_between() -> None:
    """The longest chunk first: what it needed is enough for the shorter ones."""
    device = torch.device("cuda", torch.cuda.current_device())
    fused = spread("taew2_2").half().fused()
    before, held = replay.idle_bytes(device), []
    for length in (8, 3, 1):
        latents = torch.randn(1, length, fused.spec.latent_channels, 30, 46, device="cuda").half()
        for _ in range(2):
            fused.decode_video(latents)
        held.append(replay.idle_bytes(device) - before)
    assert len(fused._replays["decoder"]._recordings) == 3
    assert max(held) <= 1.1 * held[0], held
