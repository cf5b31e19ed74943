"""A model, opened, as evaluation and reconstruction use it: frames in, decoded frames out.

A network of the family runs as a stream. A teacher (the diffusers VAE that tiny networks stand in for) runs a clip as a
whole. In both, decoded frame j is input frame j. A stream gives decoded frames as they become ready, so a bounded
number of input frames waits for them.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import ClipPart, frame_chunks
from tinyvae.evaluation.cost import StageTimes, fitting_in_memory
from tinyvae.files import sha256_of
from tinyvae.models.codec import VideoCodec, pad_to_multiple
from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import LatentSpaceName, VariantSpec, get_spec
from tinyvae.models.weights import find_weights, load_model
from tinyvae.teachers import find_teacher, load_teacher

CHUNK_PIXELS = {"cpu": 1_400_000, "cuda": 12_000_000}
"""Pixels that go through the network at once. Larger chunks cost memory and gain nothing."""
MAX_CHUNK_FRAMES = 32
FAMILY_KIND, TEACHER_KIND = "tinyvae", "teacher"

OnLatents = Callable[[Tensor], None]  # gets the latents NTCHW as they are made


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was evaluated."""

    label: str
    path: str | None
    kind: str  # `FAMILY_KIND` or `TEACHER_KIND`
    variant: str
    width: float | None
    parameters: int
    encoder_parameters: int | None
    decoder_parameters: int | None
    dtype: str
    sha256: str | None  # of the weights file
    latent_space: LatentSpaceName = "diffusion"
    latent_variant: str | None = None  # where it is not ``variant``: a teacher makes the latents of its students


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Decoded frames and the input frames they stand for: float TCHW in [0, 1], the same size and device."""

    decoded: Tensor
    target: Tensor


class RoundTrip(ABC):
    """A model that can be evaluated; ``spec`` counts its frames and latents."""

    is_stream = True  # chunks go through one by one, so smaller chunks need less memory

    def __init__(self, facts: ModelFacts, spec: VariantSpec) -> None:
        self.facts, self.spec = facts, spec
        self.chunk_pixels: int | None = None  # less than CHUNK_PIXELS where memory did not suffice for that

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def to(self, device: torch.device) -> RoundTrip:
        """The same model on a device (itself if it is there already)."""

    @abstractmethod
    def run(
        self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes, on_latents: OnLatents | None = None
    ) -> Iterator[Piece]:
        """Pieces in order for chunks of uint8 TCHW frames, ``num_frames`` in all."""

    def used_frames(self, num_frames: int) -> int:
        """How many leading frames of a T-frame clip go into the encoder."""
        return num_frames

    def aligned_frames(self, num_frames: int) -> int:
        """How many leading frames of a T-frame clip come back."""
        return self.spec.aligned_frames(self.used_frames(num_frames))

    def chunk_frames(self, height: int, width: int) -> int:
        """How many frames to give to `run` at a time."""
        budget = self.chunk_pixels or CHUNK_PIXELS.get(self.device.type, CHUNK_PIXELS["cpu"])
        return max(1, min(MAX_CHUNK_FRAMES, budget // (height * width)))


class StreamedCodec(RoundTrip):
    """A network of the family, run as a stream: memory does not grow with the length of a clip."""

    def __init__(
        self, codec: VideoCodec, facts: ModelFacts, *, reopen: Callable[[torch.device], VideoCodec] | None = None
    ) -> None:
        """``reopen`` makes the codec again on another device, for those that cannot be moved (fused ones)."""
        super().__init__(facts, codec.spec)
        self.codec = codec
        self._reopen = reopen

    @property
    def device(self) -> torch.device:
        return self.codec.device

    def to(self, device: torch.device) -> StreamedCodec:
        if device == self.device:
            return self
        if self._reopen is not None:
            return StreamedCodec(self._reopen(device), self.facts, reopen=self._reopen)
        if not isinstance(self.codec, nn.Module):
            what = f"{self.facts.label} was made for {self.device}"
            raise UserError(f"{what} and cannot be moved to {device}; make it there.")
        return StreamedCodec(deepcopy(self.codec).to(device), self.facts)

    def run(
        self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes, on_latents: OnLatents | None = None
    ) -> Iterator[Piece]:
        decoder = StreamingDecoder(self.codec, num_latents=self.spec.latents(num_frames))
        waiting: list[Tensor] = []  # input frames CHW without their decoded partners
        for latents_NTCHW in self._encode(chunks, num_frames, waiting, times):
            if on_latents is not None:
                on_latents(latents_NTCHW)
            with times.stage("decode", self.device):
                decoded_NTCHW = decoder.push(latents_NTCHW)
            targets = waiting[: decoded_NTCHW.shape[1]]  # fewer at the end of a clip: taecvx decodes more than went in
            if targets:
                del waiting[: len(targets)]
                height, width = targets[0].shape[-2:]
                decoded_TCHW = decoded_NTCHW[0, : len(targets), :, :height, :width]
                yield Piece(decoded=decoded_TCHW.float(), target=torch.stack(targets))
        decoder.flush()

    def _encode(
        self, chunks: Iterable[Tensor], num_frames: int, waiting: list[Tensor], times: StageTimes
    ) -> Iterator[Tensor]:
        """The latents of each chunk and of the end; input frames are added to ``waiting``."""
        encoder = StreamingEncoder(self.codec, num_frames=num_frames)
        for frames_TCHW in chunks:
            target_TCHW = to_unit_range(frames_TCHW, self.device)
            waiting.extend(target_TCHW)
            padded = pad_to_multiple(target_TCHW[None], self.spec.space_factor)
            with times.stage("encode", self.device):
                latents_NTCHW = encoder.push(padded)
            yield latents_NTCHW
        with times.stage("encode", self.device):
            latents_NTCHW = encoder.flush()
        yield latents_NTCHW


class TeacherRoundTrip(RoundTrip):
    """A teacher. It holds a whole clip in memory, as diffusers does, and counts frames as its students do."""

    is_stream = False

    def __init__(self, path: Path, *, device: torch.device, dtype: torch.dtype | None, label: str | None) -> None:
        """``path``: a diffusers folder or a hub name. Without ``dtype``: float32 on a CPU, bfloat16 on a GPU."""
        found = find_teacher(path, None)
        candidates = found.family.variant_candidates(found.geometry) or found.family.variants
        spec, packed = get_spec(candidates[0]), found.geometry.time_factor
        if spec.time_factor != packed:
            known = f"unlike any {found.family.class_name} that is known"
            raise UserError(f"{path} packs {packed} frames into a latent, {known}; its frames cannot be counted.")
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        self._teacher = load_teacher(None, path, dtype=dtype, device=device)
        self._path = path
        facts = ModelFacts(
            label=label or label_of(path),
            path=str(path),
            kind=TEACHER_KIND,
            variant=self._teacher.class_name,
            width=None,
            parameters=self._teacher.num_parameters,
            encoder_parameters=None,
            decoder_parameters=None,
            dtype=str(dtype).removeprefix("torch."),
            sha256=None,
            latent_variant=spec.name,
        )
        super().__init__(facts, spec)

    @property
    def device(self) -> torch.device:
        return self._teacher.device

    def to(self, device: torch.device) -> TeacherRoundTrip:
        if device == self.device:
            return self
        return TeacherRoundTrip(self._path, device=device, dtype=self._teacher.dtype, label=self.facts.label)

    def used_frames(self, num_frames: int) -> int:
        """The longest part of a clip that teacher and students count alike: CogVideoX encodes other lengths in one
        mode and decodes them in another."""
        return next((t for t in range(num_frames, 0, -1) if self.spec.is_training_length(t)), num_frames)

    def run(
        self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes, on_latents: OnLatents | None = None
    ) -> Iterator[Piece]:
        wanted = self.aligned_frames(num_frames)
        target_TCHW = to_unit_range(torch.cat(list(chunks))[:wanted], self.device)
        height, width = target_TCHW.shape[-2:]
        padded = pad_to_multiple(target_TCHW[None], self._teacher.geometry.space_factor)
        with times.stage("encode", self.device):
            latents_NTCHW = self._teacher.encode(padded)
        if on_latents is not None:
            on_latents(latents_NTCHW)
        with times.stage("decode", self.device):
            decoded_NTCHW = self._teacher.decode(latents_NTCHW)
        if decoded_NTCHW.shape[1] < wanted:
            raise UnreadableVideoError(
                self._path, f"{self.facts.variant} gave back {decoded_NTCHW.shape[1]} of {wanted} frames"
            )
        yield Piece(decoded=decoded_NTCHW[0, :wanted, :, :height, :width].float(), target=target_TCHW)


Model = str | os.PathLike[str] | VideoCodec | RoundTrip  # a path that `open_model` takes, or what is open already


def open_model(
    model: Model,
    *,
    variant: str | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    label: str | None = None,
    fused: bool = False,
) -> RoundTrip:
    """Open a model: a path that `load_model` takes, a teacher's folder, or a codec in memory.

    Without ``dtype`` the weights run in float32 on a CPU and in the file's dtype on a GPU. ``fused`` runs the folded
    network (`TAEHV.fused`). A codec in memory stays as it is.

    Example: ``open_model("output/my_run", device=torch.device("cuda"))``
    """
    if isinstance(model, VideoCodec):
        return StreamedCodec(model, codec_facts(model, label=label or type(model).__name__, path=None))
    if isinstance(model, RoundTrip):
        return model
    path, device = Path(model), device or torch.device("cpu")
    if is_teacher(path):
        if variant is not None or fused:
            option = "variant" if variant is not None else "fused"
            raise UserError(f"{option} is for models of the family, and {path} is a teacher; leave it out.")
        with fitting_in_memory(path):
            return TeacherRoundTrip(path, device=device, dtype=dtype, label=label)
    if dtype is None and device.type == "cpu":
        dtype = torch.float32

    def reopen(where: torch.device) -> VideoCodec:
        plain = load_model(path, variant, device=where, dtype=dtype)
        return plain.fused() if fused else plain

    with fitting_in_memory(path):
        codec = reopen(device)
    label = label or label_of(path) + (" (fused)" if fused else "")
    return StreamedCodec(codec, codec_facts(codec, label=label, path=path), reopen=reopen)


def is_teacher(path: Path) -> bool:
    """Whether a folder is a diffusers VAE, or a pipeline folder with one in ``vae/``; told by ``_class_name``."""
    for config in (path / "config.json", path / "vae" / "config.json"):
        if config.is_file():
            try:
                content = json.loads(config.read_text())
            except json.JSONDecodeError:
                continue
            if isinstance(content, dict) and str(content.get("_class_name", "")).startswith("Autoencoder"):
                return True
    return False


def label_of(path: Path) -> str:
    """A short name for a model: its file's, with its folder's where every file is called model; vae says nothing."""
    absolute = path.absolute()
    if absolute.name == "vae":
        return absolute.parent.name
    if absolute.stem in ("model", "final_model", "best_model") or absolute.name.startswith("checkpoint-"):
        return f"{absolute.parent.name}/{absolute.name}"
    return absolute.stem if absolute.suffix in (".safetensors", ".pth") else absolute.name


def codec_facts(codec: VideoCodec, *, label: str, path: Path | None) -> ModelFacts:
    """What is known of a codec; ``path`` is where its weights come from."""
    spec = codec.spec
    with torch.device("meta"):  # a folded network is counted as the one it came from
        network = codec if isinstance(codec, nn.Module) else TAEHV.of(spec)
    counts = {
        part: sum(p.numel() for name, p in network.named_parameters() if name.startswith(part))
        for part in ("", "encoder.", "decoder.")
    }
    return ModelFacts(
        label=label,
        path=str(path) if path is not None else None,
        kind=FAMILY_KIND,
        variant=spec.name,
        width=spec.width,
        parameters=counts[""],
        encoder_parameters=counts["encoder."] or None,
        decoder_parameters=counts["decoder."] or None,
        dtype=str(codec.dtype).removeprefix("torch."),
        sha256=sha256_of(find_weights(path)) if path is not None else None,
        latent_space=spec.latent_space,
    )


def to_unit_range(frames_TCHW: Tensor, device: torch.device) -> Tensor:
    """uint8 0..255 -> float32 in [0, 1] on a device."""
    assert frames_TCHW.dtype == torch.uint8, frames_TCHW.dtype
    return frames_TCHW.to(device, non_blocking=True).float() / 255


Made = TypeVar("Made")


def in_chunks_that_fit(round_trip: RoundTrip, part: ClipPart, attempt: Callable[[Iterator[Tensor]], Made]) -> Made:
    """What ``attempt`` makes of the clip's chunks of frames.

    After out of memory it is called again from the first frame, with chunks of half the size, until they fit or are
    single frames. The model keeps the size that fits for later clips.
    """
    while True:
        chunk_frames = round_trip.chunk_frames(part.height, part.width)
        try:
            return attempt(frame_chunks(part, chunk_frames=chunk_frames))
        except torch.OutOfMemoryError:
            if chunk_frames == 1 or not round_trip.is_stream:
                raise
        round_trip.chunk_pixels = chunk_frames // 2 * part.height * part.width
        # Out here the failed attempt and its tensors are gone, so that their memory can be freed.
        torch.cuda.empty_cache()
