"""Small chunks as CUDA graphs: one launch instead of a hundred.

Where a network is small on the inside (taew2_2, taeltx_2), the GPU runs kernels faster than the host can launch them.
So the second chunk of a shape is recorded as a CUDA graph, and later chunks of that shape replay it. A shape that comes
once costs nothing. The graph works in memory of its own: a chunk and its state are copied in, and the results are
copied out, so results stay valid and any number of streams can take turns. An image that is larger than what lies
behind it is not copied: the layers that read or write it are launched, before an encoder's graph or behind a decoder's
(with copies taeltx_2 decodes a video in 1.05 times the time on an H200).

The thread that records has run the shape before: kernels are compiled then, and cuDNN, which chooses its kernels for
each thread, need not try any out while a graph is recorded. A process that runs out of GPU memory frees its graphs and
records no more (`stop_recording`).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from tinyvae.engines.stack import Stack, State

MOST_BYTES = 512 * 2**20
"""Of the inputs and outputs of all recordings of one side. The recording that was not used for longest goes first."""
MOST_BYTES_OF_ONE = MOST_BYTES // 3
"""A stream has three recordings (its first chunk, those between, its rest), which must not push each other out. A
larger chunk is launched each time: it keeps the GPU busy for milliseconds, so launches cost it little."""
TOO_LARGE = 0  # in place of a thread's number
MOST_SHAPES = 64


class _Thread(threading.local):
    """The number of the thread that asks. The system gives the number of a thread that has ended to a new one, which
    has not run the chunk: a server that starts a thread for each request would record there."""

    numbers: ClassVar[itertools.count[int]] = itertools.count(TOO_LARGE + 1)

    def __init__(self) -> None:  # runs once in each thread
        self.number = next(self.numbers)


_thread = _Thread()


@dataclass(frozen=True, kw_only=True)
class _Recording:
    """A graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # the chunk, then what its state holds
    outputs: list[Tensor | None]  # the frames, then the new state
    with_image: bool = True  # else the frames are those before the image

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs) if tensor is not None)


class Replay:
    """Runs a stack on a GPU, from recordings where there are any. Threads may share it.

    Example: ``frames, state = Replay(stack).run(latents_NTCHW, None)``
    """

    records: ClassVar[bool] = True  # in this process
    _alive: ClassVar[weakref.WeakSet[Replay]] = weakref.WeakSet()

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        # A number: the thread that ran this chunk last, or TOO_LARGE.
        self._recordings: OrderedDict[Any, _Recording | int] = OrderedDict()
        self._lock = threading.Lock()
        self._done: torch.cuda.Event | None = None  # when the GPU has finished with the memory of the graphs
        # One of each for all graphs, which never run at the same time. In a pool, memory that one stream gave back goes
        # to that stream only: with a stream for each graph, none would use another's.
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        Replay._alive.add(self)

    def __reduce__(self) -> tuple[type[Replay], tuple[Stack]]:
        return Replay, (self._stack,)  # a copy records for itself

    def run(self, chunk_NTCHW: Tensor, state: State | None) -> tuple[Tensor, State]:
        """As `Stack.run`."""
        if torch.cuda.is_current_stream_capturing():  # the caller records a graph of its own
            return self._stack.run(chunk_NTCHW, state)
        with_head = not self._stack.head_is_smaller(chunk_NTCHW.shape, state)
        if not with_head:
            chunk_NTCHW = self._stack.head(chunk_NTCHW)
        parts = [chunk_NTCHW, *(part for part in state or () if part is not None)]
        filled = None if state is None else tuple(part is not None for part in state)
        key = (with_head, filled, *((part.shape, part.dtype) for part in parts))
        with self._lock, torch.cuda.device(chunk_NTCHW.device):
            thread = _thread.number
            recording = self._recordings.get(key)
            if recording == thread and Replay.records:
                try:
                    recording = self._record(parts, filled, with_head)
                except torch.OutOfMemoryError:  # no room for memory of its own: chunks are launched from now on
                    Replay.records = False
            if isinstance(recording, _Recording):
                self._remember(key, recording)
                return self._replay(recording, parts)
        made, after = self._stack.run(chunk_NTCHW, state, with_head=with_head)
        num_bytes = sum(tensor.nbytes for tensor in (*parts, made, *after) if tensor is not None)
        with self._lock:
            if not isinstance(self._recordings.get(key), _Recording):  # else another thread has recorded it meanwhile
                self._remember(key, thread if num_bytes <= MOST_BYTES_OF_ONE else TOO_LARGE)
        return made, after

    def forget(self) -> None:
        """Free all recordings."""
        with self._lock:
            self._recordings.clear()

    def _remember(self, key: Any, recording: _Recording | int) -> None:
        self._recordings[key] = recording
        self._recordings.move_to_end(key)
        while len(self._recordings) > 1 and (len(self._recordings) > MOST_SHAPES or self._num_bytes() > MOST_BYTES):
            self._recordings.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(one.num_bytes for one in self._recordings.values() if isinstance(one, _Recording))

    def _record(self, parts: list[Tensor], filled: tuple[bool, ...] | None, with_head: bool) -> _Recording:
        # Tensors of inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            self._stream = stream = self._stream or torch.cuda.Stream()
            # A pool dies with its last graph, and torch fails where a dead one is named.
            if not any(isinstance(one, _Recording) for one in self._recordings.values()):
                self._pool = torch.cuda.graph_pool_handle()
            # `torch.cuda.graph` would also free all cached memory, which costs more than the recording.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # thread_local: other threads go on with their own work meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    # Made here, inputs lie in the graphs' own memory too: when a recording goes, a stream that still
                    # reads it shares that memory with nobody but later graphs, which wait for it.
                    inputs = [torch.empty_like(part) for part in parts]
                    held = iter(inputs[1:])
                    state = None if filled is None else [next(held) if is_there else None for is_there in filled]
                    with_image = not self._stack.image_is_larger(inputs[0].shape)
                    made, after = self._stack.run(inputs[0], state, with_head=with_head, with_image=with_image)
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        return _Recording(graph=graph, inputs=inputs, outputs=[made, *after], with_image=with_image)

    def _replay(self, recording: _Recording, parts: list[Tensor]) -> tuple[Tensor, State]:
        stream = torch.cuda.current_stream()
        if self._done is not None:
            stream.wait_event(self._done)  # another stream may still read from the graphs' memory
        torch._foreach_copy_(recording.inputs, parts)
        recording.graph.replay()
        made, *after = recording.outputs
        assert made is not None, "a stack always gives frames"
        # The state is copied out of the graph's memory, and the frames, or the image is made of them.
        kept = recording.outputs if recording.with_image else after
        copies = [None if output is None else torch.empty_like(output) for output in kept]
        torch._foreach_copy_(
            [copy for copy in copies if copy is not None], [output for output in kept if output is not None]
        )
        frames = copies.pop(0) if recording.with_image else self._stack.image(made, parts[0].shape[0])
        self._done = stream.record_event()
        return cast(Tensor, frames), copies


def stop_recording() -> None:
    """Free what all graphs of this process hold, and record no more: for a next try after out of memory."""
    Replay.records = False
    forget_recordings()


def forget_recordings() -> None:
    """Free what all graphs of this process hold; chunks that come again are recorded again."""
    for replay in list(Replay._alive):
        replay.forget()


def idle_bytes(device: torch.device) -> int:
    """What the graphs on a GPU keep for results in between, which torch does not count as allocated."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [part for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in segments if part["device"] == index)
