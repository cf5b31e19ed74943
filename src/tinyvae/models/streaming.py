"""Videos that arrive piece by piece: one object per stream, the same numbers as the whole-video call.

Push any number of frames (or latents) at a time and get back all that is ready; flush at the end. Each object owns the
state of its stream, so several streams do not disturb each other, and the state does not grow with time.

    stream = StreamingDecoder(model)
    for part in latents.split(4, dim=1):
        show(stream.push(part))
    stream.flush()

With ``whole_chunks=True`` what you push waits for a whole chunk: fast for pushes of any length, but results come late.

Two variants need to know about the end of the stream. A CogVideoX (taecvx) decoder keeps its first three frames only if
the *total* number of latents is even, so it must be told ``num_latents`` at the start. A taeh3 encoder drops the last
three latents of the whole video, so it returns the last latents of a chunk only when the next chunk begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.models.variants import H3_CHUNK_FRAMES, H3_CHUNK_LATENTS, H3_CHUNK_ZEROS, H3_DROPPED_LATENTS, VariantSpec

if TYPE_CHECKING:
    from tinyvae.models.codec import CodecState, VideoCodec

Side = Literal["encoder", "decoder"]
WARM_UPS = 2  # of a graph: one without a state, one with it


class _Stream:
    """What both directions share. ``total``: frames or latents of the whole stream, or None if it is not known."""

    unit: str
    side: Side

    def __init__(
        self, codec: VideoCodec, total: int | None, track_gradients: bool, chunk_latents: int | None, whole_chunks: bool
    ) -> None:
        if not hasattr(codec, "decode_chunk"):
            raise UserError(f"a stream needs a model (TAEHV(...), load_model(...), model.fused()), got {codec!r}.")
        for name, value in (("chunk_latents", chunk_latents), (f"num_{self.unit}s", total)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"{name} must be a whole number, at least 1, got {value!r}.")
        if track_gradients and not codec.records_gradients:
            raise UserError("a fused codec is for inference and records no gradients; stream through the model itself.")
        self._codec, self._total, self._track_gradients = codec, total, track_gradients
        self._chunk, self._whole_chunks = chunk_latents, whole_chunks  # latents to run at once; None: not chosen yet
        self._state: CodecState | None = None
        self._shape: tuple[int, ...] | None = None  # N C H W of the first push
        self._count = self._num_run = 0  # frames or latents pushed so far, and those that the network has seen
        self._waiting: list[Tensor] = []  # one tensor of those in between, or none
        self._num_filled = 0  # whole_chunks: that tensor has room for a chunk, and this many are there
        self._closed = self._failed = False

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Around what changes the stream. A run uses up the state, so a stream that failed cannot continue."""
        self._failed = True
        with torch.set_grad_enabled(self._track_gradients):
            yield
        self._failed = False

    def _check_open(self) -> None:
        if self._failed:
            raise UserError("an earlier push of this stream failed; make a new object and push the video again.")
        if self._closed:
            raise UserError("this stream has been flushed; make a new object for the next video.")

    def _accept(self, x_NTCHW: Tensor) -> None:
        """Count a push, or refuse it where it does not belong to this stream."""
        self._check_open()
        shape = (x_NTCHW.shape[0], *x_NTCHW.shape[2:])
        if self._shape is not None and self._shape != shape:
            raise UserError(
                f"this stream began with {self.unit}s of shape (N, C, H, W) = {self._shape} and was now given {shape}; "
                "use one object per stream."
            )
        if self._total is not None and self._count + x_NTCHW.shape[1] > self._total:
            stated = f"num_{self.unit}s={self._total} was stated"
            raise UserError(f"{stated} and more {self.unit}s were pushed; state all or leave it out.")
        if self._chunk is None:
            self._chunk = self._choose_chunk(*shape)
        self._shape = shape
        self._count += x_NTCHW.shape[1]

    def _choose_chunk(self, num_videos: int, _: int, height: int, width: int) -> int | None:
        pixels = self._codec.spec.space_factor if self.side == "encoder" else 1  # of a latent pixel, along a side
        choice = self._codec.stream_chunk_latents
        chunk = choice(self.side, height // pixels, width // pixels, num_videos=num_videos)
        if self._whole_chunks and chunk is None:
            raise UserError("whole_chunks=True needs a chunk length and this model chooses none; pass chunk_latents=.")
        return joined_latents(chunk) if chunk and self._whole_chunks and self.side == "encoder" else chunk

    def _run_length(self) -> int | None:
        """Frames or latents of the next whole run; None: all that a push brings."""
        return self._chunk

    def _whole_parts(self, pieces: list[Tensor], *, is_end: bool) -> Iterator[Tensor]:
        """Whole runs of what waits and of these pieces NTCHW, in the codec's dtype. The rest waits in a tensor of its
        own; at the end it is a run, too."""
        dtype = self._codec.dtype
        for number, piece in enumerate(pieces, start=1):
            while piece.shape[1]:
                length, start = self._run_length() or piece.shape[1], self._num_filled
                part, piece = piece[:, : length - start], piece[:, length - start :]
                if not start and (part.shape[1] == length or (is_end and number == len(pieces))):
                    yield part.to(dtype)
                    continue
                if not start:
                    with torch.inference_mode(False):  # so that a push outside of inference mode may write to it, too
                        self._waiting = [part.new_empty(len(part), length, *part.shape[2:], dtype=dtype)]
                self._num_filled += part.shape[1]
                self._waiting[0][:, start : self._num_filled] = part
                if self._num_filled == length:
                    self._num_filled = 0
                    yield self._waiting.pop()
        if is_end and self._waiting:
            yield self._waiting.pop()[:, : self._num_filled]

    def _close(self) -> None:
        self._check_open()
        if self._count == 0:
            raise UserError(f"the stream is empty; push at least one {self.unit} before flush().")
        if self._total is not None and self._count != self._total:
            raise UserError(
                f"num_{self.unit}s={self._total} was stated and only {self._count} were pushed; push the others first."
            )
        self._closed = True


class DecodeGraph:
    """`codec.decode_chunk` for one latent at a time, as a CUDA graph that owns the state of its stream.

    To launch the kernels one by one takes longer than to run them. ``latent_N1CHW`` gives shape, dtype and device.
    """

    def __init__(self, codec: VideoCodec, latent_N1CHW: Tensor) -> None:
        with torch.no_grad(), torch.cuda.device(codec.device):
            self._latent = torch.zeros_like(latent_N1CHW, memory_format=torch.contiguous_format)
            # Recording forbids what first calls do: choosing algorithms, compiling, loading kernels.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                state = None
                for _ in range(WARM_UPS):
                    _, state = codec.decode_chunk(self._latent, state)
            torch.cuda.current_stream().wait_stream(side)
            assert isinstance(state, list)
            # The frame before a video is zero, so a state of zeros is a fresh start.
            self._state = [torch.zeros_like(part) if isinstance(part, Tensor) else None for part in state]
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: other threads go on with their own work meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._frames, after = codec.decode_chunk(self._latent, list(self._state))
                assert isinstance(after, list)
                for kept, new in zip(self._state, after, strict=True):
                    if kept is not None:
                        kept.copy_(new)

    def step(self, latent_N1CHW: Tensor) -> Tensor:
        """Raw frames of the next latent. The tensor is the graph's own: the next step writes over it."""
        self._latent.copy_(latent_N1CHW)
        self._graph.replay()
        return self._frames


class StreamingDecoder(_Stream):
    """Latents in, frames out, as they come. The module shows an example.

    Args:
        num_latents: the length of the whole stream. taecvx needs it (see the module); for the others it is a check.
        track_gradients: record gradients. They need memory that grows with the stream.
        chunk_latents: how many latents of a long push run at once (default: the codec's choice).
        low_latency: run one latent at a time from a CUDA graph.
        whole_chunks: let latents wait until a whole chunk is there; the last push (of ``num_latents``) or `flush` runs
            the rest. So pushes of any length run at the speed of whole chunks, and a GPU replays one CUDA graph; but
            frames come later. The codec chooses hundreds of small latents, the plain model none: set ``chunk_latents``.

    Example: ``stream = StreamingDecoder(fast, whole_chunks=True); frames = [*map(stream.push, parts), stream.flush()]``
    """

    unit, side = "latent", "decoder"

    def __init__(
        self,
        codec: VideoCodec,
        *,
        num_latents: int | None = None,
        track_gradients: bool = False,
        chunk_latents: int | None = None,
        low_latency: bool = False,
        whole_chunks: bool = False,
    ) -> None:
        super().__init__(codec, num_latents, track_gradients, chunk_latents, whole_chunks)
        if low_latency and whole_chunks:
            raise UserError("low_latency=True runs each latent at once and whole_chunks=True lets it wait; choose one.")
        if low_latency and track_gradients:
            raise UserError("low_latency=True replays a recorded graph and cannot track gradients; choose one.")
        if low_latency and codec.device.type != "cuda":
            raise UserError(f"low_latency=True records a CUDA graph and the model is on {codec.device}; leave it out.")
        self._low_latency, self._chunk = low_latency, 1 if low_latency else self._chunk
        self._graph: DecodeGraph | None = None
        spec = codec.spec
        if num_latents is None and spec.frame_rule == "even_keeps_all" and not spec.previews_time:
            raise UserError(
                f"a {spec.name} stream must know whether its total latent count is even, because that decides if the "
                "first frames are kept; pass StreamingDecoder(model, num_latents=L)."
            )

    def push(self, latents_NTCHW: Tensor) -> Tensor:
        """Frames NTCHW in [0, 1] that these latents complete; T may be 0 at the start of a video or of a chunk."""
        self._codec.check_latents(latents_NTCHW, may_be_none=True)
        self._accept(latents_NTCHW)
        with self._working():
            return self._decode([latents_NTCHW], is_end=self._count == self._total)

    def flush(self) -> Tensor:
        """End the stream: the frames NTCHW of the latents that waited, T = 0 if none did; checks ``num_latents``."""
        self._close()
        with self._working():
            frames = self._decode([], is_end=True)
        self._state = self._graph = None
        return frames

    def _decode(self, pieces: list[Tensor], *, is_end: bool) -> Tensor:
        """Frames NTCHW of these latents, or with whole_chunks of the whole chunks of those that wait and these."""
        parts = [*self._whole_parts(pieces, is_end=is_end or not self._whole_chunks)]
        if not parts:
            return self._no_frames()
        spec, end = self._codec.spec, self._num_run + sum(part.shape[1] for part in parts)
        each = 1 if spec.previews_time else spec.time_factor
        total = sum(spec.frame_is_kept(place, self._total or 1) for place in range(self._num_run * each, end * each))
        return join((self._decode_part(part) for part in parts), total)

    def _decode_part(self, latents_NTCHW: Tensor) -> Tensor:
        codec, count = self._codec, latents_NTCHW.shape[1]
        if self._low_latency:
            self._graph = self._graph or DecodeGraph(codec, latents_NTCHW)
            raw = self._graph.step(latents_NTCHW)
        else:
            raw, self._state = codec.decode_chunk(latents_NTCHW, self._state)
        first_index = self._num_run * (raw.shape[1] // count)
        kept = keep_frames(raw, first_index=first_index, num_latents=self._total or 1, spec=codec.spec)
        self._num_run += count
        return kept.clamp(0, 1)

    def _no_frames(self) -> Tensor:
        assert self._shape is not None
        codec, (n, _, h, w) = self._codec, self._shape
        scale = codec.spec.patch_size if codec.spec.previews_space else codec.spec.space_factor
        return torch.empty(n, 0, 3, h * scale, w * scale, dtype=codec.dtype, device=codec.device)


class StreamingEncoder(_Stream):
    """Frames in, latents out, as they come; at the end the last frame is repeated to fill the last latent.

    Args:
        num_frames: the length of the whole stream, if it is known. Then the push of the last frame also fills the last
            latent; otherwise `flush` does.
        track_gradients: record gradients. They need memory that grows with the stream.
        chunk_latents: for how many latents the frames of a long push run at once (default: the codec's choice). The
            frames of an incomplete latent then wait for the others, because whole latents run fastest.
        whole_chunks: let frames wait for a whole chunk, as in `StreamingDecoder`. They are copied, which takes memory.
            So by default a chunk is two thirds of the codec's choice, and exactly ``chunk_latents`` if you set it.

    Example: ``latents = [*(stream.push(part) for part in frames.split(8, dim=1)), stream.flush()]``
    """

    unit, side = "frame", "encoder"

    def __init__(
        self,
        codec: VideoCodec,
        *,
        num_frames: int | None = None,
        track_gradients: bool = False,
        chunk_latents: int | None = None,
        whole_chunks: bool = False,
    ) -> None:
        super().__init__(codec, num_frames, track_gradients, chunk_latents, whole_chunks)
        self._is_chunked = codec.spec.frame_rule == "chunked"  # taeh3: each 17 frames, behind zeros, are a video
        self._last_frame: Tensor | None = None  # fills the last latent at `flush`; None where the last push has done so
        self._held: list[Tensor] = []  # taeh3: latents that may turn out to be the last three

    def push(self, frames_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW that these frames complete; T may be 0 while a latent or a chunk waits for its frames."""
        self._codec.check_frames(frames_NTCHW, may_be_none=True)
        self._accept(frames_NTCHW)
        if frames_NTCHW.shape[1] == 0:
            return self._join([])
        last, is_end = frames_NTCHW[:, -1:], self._count == self._total
        with self._working():
            if self._total is None:
                self._last_frame = last.clone()
            return self._encode([frames_NTCHW, *(self._filling(last) if is_end else [])], is_end=is_end)

    def flush(self) -> Tensor:
        """End the stream: the latents NTCHW that were still waiting for frames; checks ``num_frames``."""
        self._close()
        with self._working():
            filling = [] if self._last_frame is None else self._filling(self._last_frame)
            latents = self._encode(filling, is_end=True)
        self._state, self._held, self._last_frame = None, [], None
        return latents

    def _filling(self, last_N1CHW: Tensor) -> list[Tensor]:
        """The repeated frames that fill the last latent of the video, if it is not full."""
        missing = self._codec.spec.padded_frames(self._count) - self._count
        return [last_N1CHW.expand(-1, missing, -1, -1, -1)] if missing else []

    def _encode(self, pieces: list[Tensor], *, is_end: bool) -> Tensor:
        """Run the frames that wait and these, as far as they are enough; the others wait again."""
        ready: list[Tensor] = []
        for part in (self._whole_parts if self._whole_chunks else self._parts)(pieces, is_end=is_end):
            if self._is_chunked:
                ready += self._encode_in_h3_chunk(part)
            else:
                latents, self._state = self._codec.encode_chunk(part, self._state)
                ready.append(latents)
            self._num_run += part.shape[1]
            del part  # before the next one is made
        return self._join(ready)

    def _parts(self, pieces: list[Tensor], *, is_end: bool) -> Iterator[Tensor]:
        """The frames that wait and these, run by run. The frames of an incomplete latent wait again."""
        pieces = [*self._waiting, *pieces]
        dtype, total, start = self._codec.dtype, sum(piece.shape[1] for piece in pieces), 0
        for length in self._h3_runs(total) if self._is_chunked else self._runs(total, is_end):
            yield cut_out(pieces, start, start + length, dtype)
            start += length
        self._waiting = [cut_out(pieces, start, total, dtype).to(dtype, copy=True)] if start < total else []

    def _runs(self, num_frames: int, is_end: bool) -> list[int]:
        """How many frames to run at a time: a chunk, or fewer where frames must be joined from several tensors."""
        unit, chunk = self._codec.spec.time_factor, self._chunk
        if chunk is None:
            return [num_frames] if num_frames else []
        num_latents, most = num_frames // unit, joined_latents(chunk)
        first = min(most, num_latents) if self._waiting else 0
        last = min(most, num_latents - first) if is_end and self._count % unit else 0
        between = num_latents - first - last
        return [n * unit for n in (first, *[chunk] * (between // chunk), between % chunk, last) if n]

    def _h3_runs(self, num_frames: int) -> Iterator[int]:
        """The same for taeh3; each run ends before the next one is chosen."""
        unit = self._codec.spec.time_factor if self._chunk else 1  # with a chunk, whole latents only
        while num_frames:
            length = min(num_frames, self._run_length())
            length -= (self._num_run % H3_CHUNK_FRAMES + H3_CHUNK_ZEROS + length) % unit
            if length == 0:
                return
            yield length
            num_frames -= length

    def _run_length(self) -> int:
        unit, chunk = self._codec.spec.time_factor, self._chunk or H3_CHUNK_LATENTS
        if not self._is_chunked:
            return chunk * unit
        place = self._num_run % H3_CHUNK_FRAMES
        return min(H3_CHUNK_FRAMES - place, chunk * unit - (0 if place else H3_CHUNK_ZEROS))

    def _encode_in_h3_chunk(self, part_NTCHW: Tensor) -> list[Tensor]:
        """taeh3: the latents of frames inside one chunk; the last three latents of the whole video are never given."""
        ready: list[Tensor] = []
        place = self._num_run % H3_CHUNK_FRAMES
        if place == 0:
            # A further chunk exists, so the held latents are not the last ones of the video.
            ready, self._held, self._state = self._held, [], None
            part_NTCHW = torch.nn.functional.pad(part_NTCHW, (0, 0, 0, 0, 0, 0, H3_CHUNK_ZEROS, 0))
        made, self._state = self._codec.encode_chunk(part_NTCHW, self._state)
        first = (place + H3_CHUNK_ZEROS) // self._codec.spec.time_factor
        safe = max(0, H3_CHUNK_LATENTS - H3_DROPPED_LATENTS - first)
        self._held.append(made[:, safe:].clone())
        return [*ready, made[:, :safe]]

    def _join(self, parts: list[Tensor]) -> Tensor:
        filled = [part for part in parts if part.shape[1]]
        if filled:
            return filled[0] if len(filled) == 1 else torch.cat(filled, dim=1)
        assert self._shape is not None
        codec, (n, _, h, w), factor = self._codec, self._shape, self._codec.spec.space_factor
        shape = (n, 0, codec.spec.latent_channels, h // factor, w // factor)
        return torch.empty(shape, dtype=codec.dtype, device=codec.device)


# pieces of a video


def join(parts: Iterator[Tensor], num_frames: int, dtype: torch.dtype | None = None) -> Tensor:
    """Parts NTCHW of a video as one tensor; each is freed at once, while `torch.cat` would need all and the whole.
    Several parts are cast to ``dtype`` (None: that of the first); one alone stays as it is."""
    first = next(parts)
    if first.requires_grad:
        return torch.cat([first, *parts], dim=1).to(dtype or first.dtype)
    whole, place = first, first.shape[1]
    if place < num_frames:
        whole = first.new_empty(first.shape[0], num_frames, *first.shape[2:], dtype=dtype)
        whole[:, :place] = first
    del first
    for part in parts:
        whole[:, place : place + part.shape[1]] = part
        place += part.shape[1]
        del part  # before the next one is made
    assert place == num_frames, f"{place} of {num_frames} frames came"
    return whole


def joined_latents(chunk_latents: int) -> int:
    """How many latents of a chunk may be joined from several pushes; their frames are copied for it."""
    return max(1, 2 * chunk_latents // 3)


def cut_out(pieces: list[Tensor], start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Frames ``start`` to ``stop`` of pieces NTCHW that follow each other; copied, as ``dtype``, only if they lie in
    several."""
    parts, place = [], 0
    for piece in pieces:
        part = piece[:, max(0, start - place) : max(0, stop - place)]
        place += piece.shape[1]
        parts += [part] if part.shape[1] else []
    return join(iter(parts), stop - start, dtype)


def keep_frames(raw_NTCHW: Tensor, *, first_index: int, num_latents: int, spec: VariantSpec) -> Tensor:
    """Drop the raw decoded frames that the frame rule drops; ``first_index`` is the place of frame 0 in the video."""
    kept = [t for t in range(raw_NTCHW.shape[1]) if spec.frame_is_kept(first_index + t, num_latents)]
    if not kept:
        return raw_NTCHW[:, :0]
    is_slice = kept[-1] - kept[0] + 1 == len(kept)
    return raw_NTCHW[:, kept[0] : kept[-1] + 1] if is_slice else raw_NTCHW[:, kept]
