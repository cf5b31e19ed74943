"""Which chunks are recorded and replayed, and what is copied in and out, without a GPU: the stand-in for a graph runs
the stack again in the recording's own memory. tests/gpu/test_gpu_replay.py compares real graphs."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines import cudnn_stand_ins
from tests.engines.small_models import small
from tinyvae import TAEHV
from tinyvae.engines import replay
from tinyvae.engines.cudnn import CudnnStack
from tinyvae.engines.eager import EagerStack
from tinyvae.engines.fused import folded_copy
from tinyvae.engines.replay import Replay
from tinyvae.engines.stack import Stack, State


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Stands for a CUDA graph: it reads the inputs and writes the outputs of its recording, wherever they are."""

    run: Callable[[], list[Tensor | None]]
    outputs: list[Tensor | None]

    def replay(self) -> None:
        for output, made in zip(self.outputs, self.run(), strict=True):
            if output is not None and made is not None:
                output.copy_(made)


def record(self: Replay, parts: list[Tensor], filled: tuple[bool, ...] | None, with_head: bool) -> replay._Recording:
    inputs = [torch.full_like(part, torch.nan) for part in parts]

    def run() -> list[Tensor | None]:
        held = iter(inputs[1:])
        state: State | None = None if filled is None else [next(held).clone() if there else None for there in filled]
        made, after = self._stack.run(inputs[0], state, with_head=with_head, with_image=with_image)
        return [made, *after]

    with_image = not self._stack.image_is_larger(inputs[0].shape)
    outputs = run()
    graph: Any = Graph(run=run, outputs=outputs)
    return replay._Recording(graph=graph, inputs=inputs, outputs=outputs, with_image=with_image)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Stack:
    """A decoder, and stand-ins for what `Replay` asks of CUDA."""
    stream = types.SimpleNamespace(wait_event=lambda event: None, record_event=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Replay, "_record", record)
    monkeypatch.setattr(Replay, "records", True)
    model = small("taew2_2")
    return EagerStack(folded_copy(model.decoder), patch_size=model.spec.patch_size)


def random_latents(number: int, width: int = 2) -> Tensor:
    return torch.randn(1, number, 48, 2, width)


def recorded(runner: Replay) -> list[bool]:
    return [isinstance(recording, replay._Recording) for recording in runner._recordings.values()]


@torch.no_grad()
def test_interleaved_streams_get_their_own_frames(stack: Stack) -> None:
    """Chunks of two lengths with and without a state; results stay as they are when the next chunk has run."""
    runner = Replay(stack)
    films = [random_latents(6).split([1, 2, 1, 1, 1], dim=1) for _ in range(3)]
    states: list[State | None] = [None] * 3
    made: list[list[Tensor]] = [[], [], []]
    for place in range(5):
        for number, film in enumerate(films):
            frames, states[number] = runner.run(film[place], states[number])
            made[number].append(frames)
    assert recorded(runner) == [True] * 3, "a first chunk, one of two latents, one of one"
    for film, parts in zip(films, made, strict=True):
        assert torch.equal(torch.cat(parts, dim=1), torch.cat(launched(stack, film), dim=1))


def launched(stack: Stack, film: tuple[Tensor, ...]) -> list[Tensor]:
    state, parts = None, []
    for part in film:
        frames, state = stack.run(part, state)
        parts.append(frames)
    return parts


@torch.no_grad()
@pytest.mark.usefixtures("stack")
def test_the_image_is_made_behind_the_graph_where_it_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """taew2_2's image has more values than what it is made of. taehv's has fewer: there the graph makes it."""
    cudnn_stand_ins.stand_in(monkeypatch)
    for variant, is_larger in (("taew2_2", True), ("taehv", False)):
        model = TAEHV(variant, width=0.5).eval()
        stack = CudnnStack(folded_copy(model.decoder), patch_size=model.spec.patch_size)
        runner, film = Replay(stack), torch.randn(2, 3, model.spec.latent_channels, 2, 3)
        assert stack.image_is_larger(film.shape) is is_larger
        expected = stack.run(film, None)[0]
        kept = [runner.run(film + number, None)[0] for number in (0, 1, 0, 2, 0)]
        (recording,) = runner._recordings.values()
        assert isinstance(recording, replay._Recording) and recording.with_image is not is_larger
        for made in (kept[0], kept[2], kept[4]):
            torch.testing.assert_close(made, expected)
        assert not kept[1].allclose(expected) and not kept[3].allclose(kept[1])


@torch.no_grad()
@pytest.mark.usefixtures("stack")
def test_an_encoder_starts_in_front_of_the_graph_where_that_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """taew2_2 makes fewer values of its image at once, and taehv more. Frames that wait for partners stay in the state:
    such chunks go whole."""
    cudnn_stand_ins.stand_in(monkeypatch)
    for variant, is_smaller in (("taew2_2", True), ("taehv", False)):
        model = TAEHV(variant, width=0.5).eval()
        stack = CudnnStack(folded_copy(model.encoder), patch_size=model.spec.patch_size)
        film = torch.rand(2, 14, 3, 2 * model.spec.space_factor, 2 * model.spec.space_factor)
        assert stack.head_is_smaller(film[:, :4].shape, None) is is_smaller
        assert not stack.image_is_larger(film.shape)
        runner = Replay(stack)
        for _ in range(4):  # the last times from recordings
            ours: State | None = None
            plain: State | None = None
            for part in film.split([4, 4, 3, 3], dim=1):
                made, ours = runner.run(part, ours)
                expected, plain = stack.run(part, plain)
                torch.testing.assert_close(made, expected)
        inputs = [one.inputs[0].shape for one in runner._recordings.values() if isinstance(one, replay._Recording)]
        assert len(inputs) == 4 and [shape[2] != 3 for shape in inputs] == [is_smaller, is_smaller, False, False]


@torch.no_grad()
def test_a_thread_records_only_what_it_has_run(stack: Stack) -> None:
    runner, latents = Replay(stack), random_latents(1)
    runner.run(latents, None)
    for _ in range(5):
        thread = threading.Thread(target=runner.run, args=(latents, None))
        thread.start()
        thread.join()
        assert recorded(runner) == [False]
        time.sleep(0.02)  # so that the system most often gives the next one its number again
    runner.run(latents, None)
    assert recorded(runner) == [False], "the other thread was the last to run it"
    runner.run(latents, None)
    assert recorded(runner) == [True]
    assert recorded(copy.copy(runner)) == [], "a copy records for itself"


@torch.no_grad()
def test_the_recording_not_used_for_longest_goes_first(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, shapes = Replay(stack), [random_latents(1, width) for width in (2, 3, 4)]
    for latents in (*shapes[:2], *shapes[:2], shapes[0]):
        runner.run(latents, None)
    monkeypatch.setattr(replay, "MOST_SHAPES", 2)
    runner.run(shapes[2], None)
    assert recorded(runner) == [True, False]
    monkeypatch.setattr(replay, "MOST_BYTES", 1)
    runner.run(shapes[2], None)
    assert recorded(runner) == [True], "the newest one always stays"


@torch.no_grad()
def test_large_chunks_are_never_recorded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, small_chunk, large = Replay(stack), random_latents(1), random_latents(1, width=8)
    made, after = stack.run(small_chunk, None)
    kept = (small_chunk, made, *(part for part in after if part is not None))
    monkeypatch.setattr(replay, "MOST_BYTES_OF_ONE", sum(tensor.nbytes for tensor in kept))
    for _ in range(4):
        runner.run(small_chunk, None)
        frames, _ = runner.run(large, None)
        assert torch.equal(frames, stack.run(large, None)[0])
    assert recorded(runner) == [True, False]


def no_room(*arguments: object) -> None:
    raise torch.OutOfMemoryError("no room")


@torch.no_grad()
def test_without_room_for_a_graph_chunks_are_launched(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, latents, others = Replay(stack), random_latents(1), random_latents(2)
    expected = stack.run(latents, None)[0]
    runner.run(others, None)
    runner.run(others, None)
    monkeypatch.setattr(Replay, "_record", no_room)
    for _ in range(3):
        assert torch.equal(runner.run(latents, None)[0], expected)
    assert recorded(runner) == [True, False] and not Replay.records


@torch.no_grad()
def test_out_of_memory_frees_all_graphs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that tries again with less has their memory too."""
    other = Replay(stack)
    other.run(random_latents(1), None)
    other.run(random_latents(1), None)
    assert recorded(other) == [True]
    codec = small("taew2_2").fused(engine="eager")
    assert codec._replays == {}, "there are none on a CPU"
    monkeypatch.setattr(codec._stacks["decoder"], "run", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        codec.decode_video(random_latents(1))
    assert recorded(other) == []
    for _ in range(3):
        other.run(random_latents(1), None)
    assert recorded(other) == [False]
