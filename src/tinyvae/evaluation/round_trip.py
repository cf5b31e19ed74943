"""How a model turns frames into decoded frames, whatever it is: a network of the family, streaming, or a reference VAE.

The alignment is the codec's: decoded frame j is input frame j. A stream hands out decoded frames as they become
ready, so the input frames wait in a queue of bounded length until their partners come.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import ClipPart, frame_chunks
from tinyvae.evaluation.cost import StageTimes
from tinyvae.models.codec import VideoCodec, pad_to_multiple
from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec
from tinyvae.models.weights import find_weights

CHUNK_PIXELS = {"cpu": 1_400_000, "cuda": 12_000_000}
"""Pixels that go through the network at once: four frames of 480x720 on a CPU, 35 on a GPU. Larger chunks cost memory
and gain nothing."""
MAX_CHUNK_FRAMES = 32
FAMILY_KIND, REFERENCE_KIND = "tinyvae", "reference VAE"
REFERENCE_MAX_FRAMES = 49
"""Frames of each clip where a reference VAE takes part and the user set no limit: it holds a whole clip in memory."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was evaluated."""

    label: str
    path: str | None
    kind: str
    """`FAMILY_KIND` or `REFERENCE_KIND`."""
    variant: str
    width: float | None
    parameters: int
    encoder_parameters: int | None
    decoder_parameters: int | None
    dtype: str
    sha256: str | None
    """Of the weights file."""
    latent_variant: str | None = None
    """The variant whose latents these are, where it is not ``variant``: a reference VAE makes those of its students."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Decoded frames and the input frames they stand for: float TCHW in [0, 1], the same size and device."""

    decoded: Tensor
    target: Tensor


class RoundTrip(Protocol):
    """A model as the evaluation sees it."""

    facts: ModelFacts

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def aligned_frames(self, num_frames: int) -> int:
        """How many leading frames of a T-frame clip come back."""

    def latents(self, num_frames: int) -> int:
        """How many latents T frames make."""

    def frames_per_latent(self) -> int:
        """Input frames that one latent stands for: a shorter clip makes no whole latent."""

    def chunk_frames(self, height: int, width: int) -> int:
        """How many frames to hand over at a time."""

    def take_smaller_chunks(self, height: int, width: int) -> bool:
        """After memory did not suffice for `chunk_frames`: use half of it from now on. False where that cannot be."""

    def run(
        self,
        chunks: Iterable[Tensor],
        num_frames: int,
        times: StageTimes,
        on_latents: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Piece]:
        """Pieces in order for chunks of uint8 TCHW frames, ``num_frames`` in all."""

    def to(self, device: torch.device) -> RoundTrip:
        """The same model on a device (itself, where it is there already)."""


class StreamedCodec:
    """A network of the family, run as a stream: memory does not grow with the length of a clip."""

    def __init__(
        self, codec: VideoCodec, facts: ModelFacts, *, reopen: Callable[[torch.device], VideoCodec] | None = None
    ) -> None:
        """``reopen`` makes the codec anew on another device, for those that cannot be moved (fused ones)."""
        self.codec = codec
        self.facts = facts
        self._reopen = reopen
        self._chunk_pixels: int | None = None  # less than CHUNK_PIXELS where memory did not suffice for that

    @property
    def device(self) -> torch.device:
        return self.codec.device

    def aligned_frames(self, num_frames: int) -> int:
        return self.codec.spec.aligned_frames(num_frames)

    def latents(self, num_frames: int) -> int:
        return self.codec.spec.latents(num_frames)

    def frames_per_latent(self) -> int:
        return self.codec.spec.time_factor

    def chunk_frames(self, height: int, width: int) -> int:
        budget = self._chunk_pixels or CHUNK_PIXELS.get(self.device.type, CHUNK_PIXELS["cpu"])
        return max(1, min(MAX_CHUNK_FRAMES, budget // (height * width)))

    def take_smaller_chunks(self, height: int, width: int) -> bool:
        frames = self.chunk_frames(height, width)
        if frames == 1:
            return False
        self._chunk_pixels = frames // 2 * height * width
        return True

    def to(self, device: torch.device) -> StreamedCodec:
        if device == self.device:
            return self
        if self._reopen is not None:
            return StreamedCodec(self._reopen(device), self.facts, reopen=self._reopen)
        if not isinstance(self.codec, nn.Module):
            raise UserError(
                f"{self.facts.label} was made for {self.device} and cannot be moved to {device}; make it there."
            )
        from copy import deepcopy

        return StreamedCodec(deepcopy(self.codec).to(device), self.facts)

    def run(
        self,
        chunks: Iterable[Tensor],
        num_frames: int,
        times: StageTimes,
        on_latents: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Piece]:
        codec, spec = self.codec, self.codec.spec
        encoder = StreamingEncoder(codec)
        decoder = StreamingDecoder(codec, num_latents=spec.latents(num_frames))
        queue = _TargetQueue()
        for latents in self._latents(encoder, chunks, queue, times):
            if on_latents is not None:
                on_latents(latents)
            with times.watch(self.device) as watch:
                decoded_NTCHW = decoder.push(latents)
            times.add_decoding(watch)
            target_TCHW = queue.take(decoded_NTCHW.shape[1])
            if target_TCHW is not None:
                height, width = target_TCHW.shape[-2:]
                decoded_TCHW = decoded_NTCHW[0, : target_TCHW.shape[0], :, :height, :width].float()
                yield Piece(decoded=decoded_TCHW, target=target_TCHW)
        decoder.flush()

    def _latents(
        self, encoder: StreamingEncoder, chunks: Iterable[Tensor], queue: _TargetQueue, times: StageTimes
    ) -> Iterator[Tensor]:
        for frames_TCHW in chunks:
            target_TCHW = to_unit_range(frames_TCHW, self.device)
            queue.put(target_TCHW)
            padded = pad_to_multiple(target_TCHW[None], self.codec.spec.space_factor)
            with times.watch(self.device) as watch:
                latents = encoder.push(padded)
            times.add_encoding(watch)
            times.frames += frames_TCHW.shape[0]
            times.pixels += frames_TCHW.shape[0] * frames_TCHW.shape[-2] * frames_TCHW.shape[-1]
            yield latents
        with times.watch(self.device) as watch:
            latents = encoder.flush()
        times.add_encoding(watch)
        yield latents


@dataclass(kw_only=True)
class _TargetQueue:
    """Input frames that wait for their decoded partners."""

    waiting: list[Tensor] = field(default_factory=list)

    def put(self, frames_TCHW: Tensor) -> None:
        self.waiting.append(frames_TCHW)

    def take(self, count: int) -> Tensor | None:
        """The next ``count`` frames, fewer at the end of a clip (taecvx decodes more than went in); None for none."""
        taken: list[Tensor] = []
        while count and self.waiting:
            head = self.waiting[0]
            taken.append(head[:count])
            self.waiting[:1] = [head[count:]] if head.shape[0] > count else []
            count -= taken[-1].shape[0]
        return torch.cat(taken) if taken else None


def to_unit_range(frames_TCHW: Tensor, device: torch.device) -> Tensor:
    """uint8 0..255 -> float32 in [0, 1] on a device."""
    assert frames_TCHW.dtype == torch.uint8, frames_TCHW.dtype
    return frames_TCHW.to(device, non_blocking=True).float() / 255


def own_memory_bytes(facts: ModelFacts, device: torch.device, *, idle: int, peak: int) -> int:
    """Memory of one model: on a GPU its weights and what was allocated on top of ``idle`` while it ran, so that other
    models and metrics on that GPU do not count; on a CPU the whole process."""
    if device.type != "cuda":
        return peak
    itemsize: int = getattr(torch, facts.dtype).itemsize
    return peak - idle + facts.parameters * itemsize


def reference_limit(round_trips: Sequence[RoundTrip], max_frames: int | None) -> tuple[int | None, tuple[str, ...]]:
    """(max_frames, notes): a limit where the user set none and a reference VAE takes part."""
    if max_frames is not None or all(trip.facts.kind != REFERENCE_KIND for trip in round_trips):
        return max_frames, ()
    note = f"only the first {REFERENCE_MAX_FRAMES} frames of each clip: a reference VAE holds a whole clip in memory."
    return REFERENCE_MAX_FRAMES, (note,)


Model = str | os.PathLike[str] | VideoCodec | RoundTrip
"""What can be evaluated: a path that `open_model` takes, a codec in memory, or a model that is open already."""


def label_of(path: Path) -> str:
    """A short name for a model: its file's, or its folder's where every file is called model."""
    absolute = path.absolute()
    if absolute.stem in ("model", "final_model", "best_model") or absolute.name.startswith("checkpoint-"):
        parent = absolute.parent
        return f"{parent.name}/{absolute.name}"
    return absolute.stem if absolute.suffix in (".safetensors", ".pth") else absolute.name


def codec_facts(codec: VideoCodec, *, label: str, path: Path | None) -> ModelFacts:
    spec: VariantSpec = codec.spec
    network = codec
    if not isinstance(network, nn.Module):  # a folded network is counted as the one it came from
        with torch.device("meta"):
            network = TAEHV(spec.name, width=spec.width)
    assert isinstance(network, nn.Module)
    counts = {
        name: sum(p.numel() for p in getattr(network, name).parameters()) if hasattr(network, name) else None
        for name in ("encoder", "decoder")
    }
    return ModelFacts(
        label=label,
        path=str(path) if path is not None else None,
        kind=FAMILY_KIND,
        variant=spec.name,
        width=spec.width,
        parameters=sum(p.numel() for p in network.parameters()),
        encoder_parameters=counts["encoder"],
        decoder_parameters=counts["decoder"],
        dtype=str(codec.dtype).removeprefix("torch."),
        sha256=file_sha256(find_weights(path)) if path is not None else None,
    )


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


Made = TypeVar("Made")


def in_chunks_that_fit(round_trip: RoundTrip, part: ClipPart, attempt: Callable[[Iterator[Tensor]], Made]) -> Made:
    """What ``attempt`` makes of the clip's chunks of frames.

    It is called again from the clip's first frame, with chunks of half the size, until they fit or are single frames
    (a stream that failed has lost what it remembered). The model keeps the size that fits for the clips that follow.
    """
    while True:
        chunk_frames = round_trip.chunk_frames(part.height, part.width)
        try:
            return attempt(frame_chunks(part, chunk_frames=chunk_frames))
        except torch.OutOfMemoryError:
            if not round_trip.take_smaller_chunks(part.height, part.width):
                raise
        # Out here the failed attempt and its tensors are gone, so that what it held can be given back.
        torch.cuda.empty_cache()
