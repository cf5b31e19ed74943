"""Videos that arrive piece by piece: one object per stream, the same numbers as the whole-video call.

Push any number of frames (or latents) at a time and get back all that is ready; flush at the end. Each object owns the
state of its stream, so several streams do not disturb each other, and the state does not grow with time.

    stream = StreamingDecoder(model)
    for part in latents.split(4, dim=1):
        show(stream.push(part))
    stream.flush()

Two variants need to know about the end of the stream. A CogVideoX (taecvx) decoder keeps its first three frames only if
the *total* number of latents is even, so it must be told ``num_latents`` at the start. A taeh3 encoder drops the last
three latents of the whole video, so it returns the last latents of a chunk only when the next chunk begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.models.variants import H3_CHUNK_FRAMES, H3_CHUNK_LATENTS, H3_CHUNK_ZEROS, H3_DROPPED_LATENTS, VariantSpec

if TYPE_CHECKING:
    from tinyvae.models.codec import CodecState, VideoCodec

    ChunkRun = Callable[[Tensor, CodecState | None], tuple[Tensor, CodecState]]

Side = Literal["encoder", "decoder"]
WARM_UPS = 2  # of a graph: one without a state, one with it


class _Stream:
    """What both directions share. ``length``: frames or latents of the whole stream, or None if it is not known."""

    unit: str

    def __init__(
        self, codec: VideoCodec, *, length: int | None, track_gradients: bool, chunk_latents: int | None
    ) -> None:
        if not hasattr(codec, "decode_chunk"):
            raise UserError(f"a stream needs a model (TAEHV(...), load_model(...), model.fused()), got {codec!r}.")
        for name, value in (("chunk_latents", chunk_latents), (f"num_{self.unit}s", length)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"{name} must be a whole number, at least 1, got {value!r}.")
        if track_gradients and not codec.records_gradients:
            raise UserError("a fused codec is for inference and records no gradients; stream through the model itself.")
        self._codec, self._length, self._chunk_latents = codec, length, chunk_latents
        self._track_gradients = track_gradients
        self._state: CodecState | None = None
        self._shape: tuple[int, ...] | None = None  # N C H W of the first push
        self._count = 0  # frames or latents pushed so far
        self._closed = self._failed = False

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Around what changes the stream. A run uses up the state, so a stream that failed cannot continue."""
        self._failed = True
        with torch.set_grad_enabled(self._track_gradients):
            yield
        self._failed = False

    def _run(self, run: ChunkRun, x_NTCHW: Tensor) -> Tensor:
        made, self._state = run(x_NTCHW, self._state)
        return made

    def _check_open(self) -> None:
        if self._failed:
            raise UserError("an earlier push of this stream failed; make a new object and push the video again.")
        if self._closed:
            raise UserError("this stream has been flushed; make a new object for the next video.")

    def _accept(self, x_NTCHW: Tensor) -> None:
        """Refuse a push that does not belong to this stream."""
        self._check_open()
        shape = (x_NTCHW.shape[0], *x_NTCHW.shape[2:])
        if self._shape is not None and self._shape != shape:
            raise UserError(
                f"this stream began with {self.unit}s of shape (N, C, H, W) = {self._shape} and was now given {shape}; "
                "use one object per stream."
            )
        if self._length is not None and self._count + x_NTCHW.shape[1] > self._length:
            stated = f"num_{self.unit}s={self._length} was stated"
            raise UserError(f"{stated} and more {self.unit}s were pushed; state all or leave it out.")
        self._shape = shape

    def _close(self) -> None:
        self._check_open()
        if self._count == 0:
            raise UserError(f"the stream is empty; push at least one {self.unit} before flush().")
        if self._length is not None and self._count != self._length:
            raise UserError(
                f"num_{self.unit}s={self._length} was stated and only {self._count} were pushed; push the others first."
            )
        self._closed = True

    def _chunk(self, side: Side, latent_height: int, latent_width: int) -> int | None:
        """Latents to run at once; None: all that a push brings."""
        assert self._shape is not None, "a chunk before the first push"
        choice = self._codec.stream_chunk_latents
        return self._chunk_latents or choice(side, latent_height, latent_width, num_videos=self._shape[0])


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
    """

    unit = "latent"

    def __init__(
        self,
        codec: VideoCodec,
        *,
        num_latents: int | None = None,
        track_gradients: bool = False,
        chunk_latents: int | None = None,
        low_latency: bool = False,
    ) -> None:
        super().__init__(codec, length=num_latents, track_gradients=track_gradients, chunk_latents=chunk_latents)
        if low_latency and track_gradients:
            raise UserError("low_latency=True replays a recorded graph and cannot track gradients; choose one.")
        if low_latency and codec.device.type != "cuda":
            raise UserError(f"low_latency=True records a CUDA graph and the model is on {codec.device}; leave it out.")
        self._low_latency = low_latency
        self._graph: DecodeGraph | None = None
        spec = codec.spec
        if num_latents is None and spec.frame_rule == "even_keeps_all" and not spec.previews_time:
            raise UserError(
                f"a {spec.name} stream must know whether its total latent count is even, because that decides if the "
                "first frames are kept; pass StreamingDecoder(model, num_latents=L)."
            )

    def push(self, latents_NTCHW: Tensor) -> Tensor:
        """Frames NTCHW in [0, 1] that these latents complete; T may be 0 at the start of a video."""
        self._codec.check_latents(latents_NTCHW, may_be_none=True)
        self._accept(latents_NTCHW)
        count, spec = latents_NTCHW.shape[1], self._codec.spec
        if count == 0:
            return self._no_frames()
        step = 1 if self._low_latency else self._chunk("decoder", *latents_NTCHW.shape[-2:])
        each = 1 if spec.previews_time else spec.time_factor
        places = range(self._count * each, (self._count + count) * each)
        total = sum(spec.frame_is_kept(place, self._length or 1) for place in places)
        with self._working():
            return join((self._decode(part) for part in latents_NTCHW.split(step or count, dim=1)), total)

    def _decode(self, latents_NTCHW: Tensor) -> Tensor:
        codec, count = self._codec, latents_NTCHW.shape[1]
        latents_NTCHW = latents_NTCHW.to(codec.dtype)
        if self._low_latency:
            self._graph = self._graph or DecodeGraph(codec, latents_NTCHW)
            raw = self._graph.step(latents_NTCHW)
        else:
            raw = self._run(codec.decode_chunk, latents_NTCHW)
        first_index = self._count * (raw.shape[1] // count)
        kept = keep_frames(raw, first_index=first_index, num_latents=self._length or 1, spec=codec.spec)
        self._count += count
        return kept.clamp(0, 1)

    def flush(self) -> Tensor:
        """End the stream. A decoder holds no frame back, so this returns T = 0 frames; it checks ``num_latents``."""
        self._close()
        self._state = self._graph = None
        return self._no_frames()

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

    Example: ``latents = [*(stream.push(part) for part in frames.split(8, dim=1)), stream.flush()]``
    """

    unit = "frame"

    def __init__(
        self,
        codec: VideoCodec,
        *,
        num_frames: int | None = None,
        track_gradients: bool = False,
        chunk_latents: int | None = None,
    ) -> None:
        super().__init__(codec, length=num_frames, track_gradients=track_gradients, chunk_latents=chunk_latents)
        self._last_frame: Tensor | None = None
        self._waiting: Tensor | None = None  # frames of a latent that is not complete
        self._held: list[Tensor] = []  # taeh3: latents that may turn out to be the last three
        self._num_run = 0  # taeh3: frames that the network has seen

    def push(self, frames_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW that these frames complete; T may be 0 while a latent waits for its frames."""
        self._codec.check_frames(frames_NTCHW, may_be_none=True)
        self._accept(frames_NTCHW)
        count = frames_NTCHW.shape[1]
        if count == 0:
            return self._join([])
        with self._working():
            if self._count + count == self._length:
                return self._encode(frames_NTCHW, self._filling(frames_NTCHW[:, -1:], self._length))
            if self._length is None:
                self._last_frame = frames_NTCHW[:, -1:].clone()
            return self._encode(frames_NTCHW, None)

    def flush(self) -> Tensor:
        """End the stream: the latents NTCHW that were still waiting for frames; checks ``num_frames``."""
        self._close()
        latents = self._join([])
        if self._last_frame is not None:  # the length was not stated: nothing is filled yet
            filling = self._filling(self._last_frame, self._count)
            with self._working():
                latents = latents if filling is None else self._encode(filling, None)
        self._state, self._held, self._last_frame, self._waiting = None, [], None, None
        return latents

    def _filling(self, last_N1CHW: Tensor, num_frames: int) -> Tensor | None:
        """The repeated frames that fill the last latent of a video of this many frames; None if it is full."""
        missing = self._codec.spec.padded_frames(num_frames) - num_frames
        return last_N1CHW.expand(-1, missing, -1, -1, -1) if missing else None

    def _encode(self, frames_NTCHW: Tensor, filling_NTCHW: Tensor | None) -> Tensor:
        """Run the frames that wait, these, and the filling. The frames of an incomplete latent wait again."""
        self._count += frames_NTCHW.shape[1]
        dtype, is_chunked = self._codec.dtype, self._codec.spec.frame_rule == "chunked"
        pieces = [piece for piece in (self._waiting, frames_NTCHW, filling_NTCHW) if piece is not None]
        total, start, ready = sum(piece.shape[1] for piece in pieces), 0, []
        size = (side // self._codec.spec.space_factor for side in frames_NTCHW.shape[-2:])
        chunk, has_filling = self._chunk("encoder", *size), filling_NTCHW is not None
        for length in self._h3_runs(total, chunk) if is_chunked else self._runs(total, chunk, has_filling):
            part = cut_out(pieces, start, start + length, dtype)
            ready += self._encode_in_h3_chunk(part) if is_chunked else [self._run(self._codec.encode_chunk, part)]
            start += length
        self._waiting = cut_out(pieces, start, total, dtype).to(dtype, copy=True) if start < total else None
        return self._join(ready)

    def _runs(self, num_frames: int, chunk: int | None, has_filling: bool) -> list[int]:
        """How many frames to run at a time: a chunk, or fewer where frames must be joined from several tensors."""
        if chunk is None:
            return [num_frames]
        unit = self._codec.spec.time_factor
        num_latents, most = num_frames // unit, joined_latents(chunk)
        first = min(most, num_latents) if self._waiting is not None else 0
        last = min(most, num_latents - first) if has_filling else 0
        between = num_latents - first - last
        return [n * unit for n in (first, *[chunk] * (between // chunk), between % chunk, last) if n]

    def _h3_runs(self, num_frames: int, chunk: int | None) -> Iterator[int]:
        """The same for taeh3, where each 17 frames, with zeros in front, are a video of their own."""
        unit, place = self._codec.spec.time_factor, self._num_run % H3_CHUNK_FRAMES
        while num_frames:
            zeros = 0 if place else H3_CHUNK_ZEROS
            length = min(num_frames, H3_CHUNK_FRAMES - place)
            if chunk is not None:
                length = min(length, chunk * unit - zeros)
                length -= (length + zeros) % unit
            if length == 0:
                return
            yield length
            num_frames -= length
            place = (place + length) % H3_CHUNK_FRAMES

    def _encode_in_h3_chunk(self, part_NTCHW: Tensor) -> list[Tensor]:
        """taeh3: the latents of frames inside one chunk; the last three latents of the whole video are never given."""
        ready: list[Tensor] = []
        place = self._num_run % H3_CHUNK_FRAMES
        self._num_run += part_NTCHW.shape[1]
        if place == 0:
            # A further chunk exists, so the held latents are not the last ones of the video.
            ready, self._held, self._state = self._held, [], None
            part_NTCHW = torch.nn.functional.pad(part_NTCHW, (0, 0, 0, 0, 0, 0, H3_CHUNK_ZEROS, 0))
        made = self._run(self._codec.encode_chunk, part_NTCHW)
        first = (place + H3_CHUNK_ZEROS) // self._codec.spec.time_factor if place else 0
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
