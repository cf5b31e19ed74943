"""A model, opened, as evaluation and reconstruction use it: frames in, decoded frames out.

A network of the family runs as a stream. A teacher (the diffusers VAE that tiny networks stand in for) runs a clip as a
whole. A mixed round trip encodes with one and decodes with the other. In all of them, decoded frame j is input frame j.
A stream gives decoded frames as they become ready, so a bounded number of input frames waits for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from tinyvae.data.annotations import VIDEO_SUFFIXES
from tinyvae.engines.replay import stop_recording
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import ClipPart, frame_chunks
from tinyvae.evaluation.cost import StageTimes, fitting_in_memory
from tinyvae.files import sha256_of
from tinyvae.models.codec import VideoCodec, pad_to_multiple
from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VARIANTS, LatentSpaceName, VariantSpec, get_spec
from tinyvae.models.weights import find_weights, load_model, states_network
from tinyvae.teachers import Teacher, load_teacher

CHUNK_PIXELS = {"cpu": 1_400_000, "cuda": 12_000_000}
"""Pixels that go through the network at once. Larger chunks cost memory and gain nothing."""
MAX_CHUNK_FRAMES = 32
MAX_KNOWN_BYTES = 2**30  # of latents that are kept for a second pass: over 200 clips of 49 frames of 480x720
FAMILY_KIND, TEACHER_KIND, MIXED_KIND = "tinyvae", "teacher", "mixed"

OnLatents = Callable[[Tensor], None]  # gets the latents NTCHW as they are made


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was evaluated."""

    label: str
    path: str | None
    kind: str  # `FAMILY_KIND`, `TEACHER_KIND` or `MIXED_KIND`
    variant: str
    width: float | None
    parameters: int
    encoder_parameters: int | None
    decoder_parameters: int | None
    dtype: str
    sha256: str | None  # of the weights file
    latent_space: LatentSpaceName = "diffusion"
    latent_variant: str | None = None  # of a teacher: whose latents it makes; None: LTX-2's or LTX-2.3's


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
    def encode(self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes) -> Iterator[Tensor]:
        """Latents NTCHW, as they are made, of chunks of NTCHW frames in [0, 1] whose size fits; N is 1."""

    @abstractmethod
    def decode(self, latents: Iterable[Tensor], num_latents: int, times: StageTimes) -> Iterator[Tensor]:
        """Frames NTCHW in [0, 1], as they are made, of parts of ``num_latents`` latents NTCHW in all."""

    def run(
        self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes, on_latents: OnLatents | None = None
    ) -> Iterator[Piece]:
        """Pieces in order for chunks of uint8 TCHW frames, ``num_frames`` in all."""
        waiting: list[Tensor] = []  # input frames CHW without their decoded partners

        def read() -> Iterator[Tensor]:
            for frames_TCHW in chunks:
                target_TCHW = to_unit_range(frames_TCHW, self.device)
                waiting.extend(target_TCHW)
                yield pad_to_multiple(target_TCHW[None], self.spec.space_factor)

        def encoded() -> Iterator[Tensor]:
            for latents_NTCHW in self.encode(read(), num_frames, times):
                if on_latents is not None:
                    on_latents(latents_NTCHW)
                yield latents_NTCHW

        if self.spec.previews_space:
            what = "a preview decoder makes smaller frames than those that go in"
            raise UserError(f"{what}; load the model without preview= to compare it with its input.")
        left = wanted = self.aligned_frames(num_frames)
        for decoded_NTCHW in self.decode(encoded(), self.spec.latents(self.used_frames(num_frames)), times):
            # A decoder can make more frames than went in (taecvx).
            targets = waiting[: min(decoded_NTCHW.shape[1], left)]
            if targets:
                del waiting[: len(targets)]
                left -= len(targets)
                height, width = targets[0].shape[-2:]
                decoded_TCHW = decoded_NTCHW[0, : len(targets), :, :height, :width]
                yield Piece(decoded=decoded_TCHW.float(), target=torch.stack(targets))
        if left:
            place = Path(self.facts.path or self.facts.label)
            raise UnreadableVideoError(place, f"{self.facts.variant} gave back {wanted - left} of {wanted} frames")

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

    def encode(self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes) -> Iterator[Tensor]:
        encoder = StreamingEncoder(self.codec, num_frames=num_frames)
        for frames_NTCHW in chunks:
            with times.stage("encode", self.device):
                latents_NTCHW = encoder.push(frames_NTCHW)
            yield latents_NTCHW
        with times.stage("encode", self.device):
            latents_NTCHW = encoder.flush()
        yield latents_NTCHW

    def decode(self, latents: Iterable[Tensor], num_latents: int, times: StageTimes) -> Iterator[Tensor]:
        decoder = StreamingDecoder(self.codec, num_latents=num_latents)
        for latents_NTCHW in latents:
            height, width = (side * self.spec.space_factor for side in latents_NTCHW.shape[-2:])
            # A teacher's latents come all at once.
            size = max(1, self.chunk_frames(height, width) // self.spec.time_factor)
            for part_NTCHW in latents_NTCHW.split(size, dim=1):
                with times.stage("decode", self.device):
                    decoded_NTCHW = decoder.push(part_NTCHW)
                yield decoded_NTCHW
        decoder.flush()


# A teacher's latents of clips, in main memory, and the seconds that they took, by `frames_hash`.
KnownLatents = dict[str, tuple[Tensor, float]]


def frames_hash(frames_NTCHW: Tensor) -> str:
    """What tells frames NTCHW in [0, 1], which were bytes before, from all others."""
    frames = (frames_NTCHW * 255).round().to(torch.uint8).cpu().contiguous()
    return f"{tuple(frames.shape)} {hashlib.blake2b(frames.numpy().data).hexdigest()}"


class TeacherRoundTrip(RoundTrip):
    """A teacher. It holds a whole clip in memory, as diffusers does, and counts frames as its students do."""

    is_stream = False

    def __init__(
        self, teacher: Teacher, path: str | Path, *, label: str | None = None, known: KnownLatents | None = None
    ) -> None:
        """``path``: where ``teacher`` comes from. ``known``: latents that are not computed twice; None: they are."""
        family, packed = teacher.found.family, teacher.geometry.time_factor
        candidates = family.variant_candidates(teacher.geometry) or family.variants
        spec = get_spec(candidates[0], latent_space=teacher.latent_space)
        if spec.time_factor != packed:
            unlike = f"unlike any {teacher.class_name} that is known"
            raise UserError(f"{path} packs {packed} frames into a latent, {unlike}; its frames cannot be counted.")
        self.teacher, self._path, self._known = teacher, path, known
        facts = ModelFacts(
            label=label or label_of(Path(path)),
            path=str(path),
            kind=TEACHER_KIND,
            variant=teacher.class_name,
            width=None,
            parameters=teacher.num_parameters,
            encoder_parameters=None,
            decoder_parameters=None,
            dtype=str(teacher.dtype).removeprefix("torch."),
            sha256=None,
            latent_space=spec.latent_space,
            latent_variant=spec.name if len({VARIANTS[name].teacher for name in candidates}) == 1 else None,
        )
        super().__init__(facts, spec)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        label: str | None = None,
        spec: VariantSpec | None = None,
    ) -> TeacherRoundTrip:
        """``path``: a diffusers folder, a hub name or, with the student's ``spec``, weights of ours. Without ``dtype``:
        float32 on a CPU, bfloat16 on a GPU."""
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        with fitting_in_memory(path):
            return cls(load_teacher(None, path, dtype=dtype, device=device, spec=spec), path, label=label)

    def remembering(self) -> TeacherRoundTrip:
        """The same teacher, which encodes each clip once: further passes over it take the latents from memory."""
        return TeacherRoundTrip(self.teacher, self._path, label=self.facts.label, known={})

    @property
    def device(self) -> torch.device:
        return self.teacher.device

    def to(self, device: torch.device) -> TeacherRoundTrip:
        if device == self.device:
            return self
        teacher = load_teacher(None, self._path, dtype=self.teacher.dtype, device=device, spec=self.teacher.spec)
        return TeacherRoundTrip(teacher, self._path, label=self.facts.label, known=self._known)

    def used_frames(self, num_frames: int) -> int:
        """The longest part of a clip that teacher and students count alike: CogVideoX encodes other lengths in one
        mode and decodes them in another."""
        return self.spec.training_length(num_frames)

    def encode(self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes) -> Iterator[Tensor]:
        frames_NTCHW = self.teacher.clip_of(torch.cat(list(chunks), dim=1)[:, : self.used_frames(num_frames)])
        known = self._known
        key = "" if known is None else frames_hash(frames_NTCHW)
        if known is not None and key in known:
            latents_NTCHW, seconds = known[key]
            times.encode_s += seconds
            yield latents_NTCHW.to(self.device)
            return
        before = times.encode_s
        with times.stage("encode", self.device):
            latents_NTCHW = self.teacher.encode(frames_NTCHW)
        if known is not None and sum(kept.nbytes for kept, _ in list(known.values())) < MAX_KNOWN_BYTES:
            known[key] = latents_NTCHW.cpu(), times.encode_s - before
        yield latents_NTCHW

    def decode(self, latents: Iterable[Tensor], num_latents: int, times: StageTimes) -> Iterator[Tensor]:
        latents_NTCHW = torch.cat(list(latents), dim=1)
        with times.stage("decode", self.device):
            decoded_NTCHW = self.teacher.decode(latents_NTCHW)
        yield decoded_NTCHW


class MixedRoundTrip(RoundTrip):
    """The encoder of one model and the decoder of another: of a student and its teacher, in either order.

    Latents go from one latent space to the other exactly, where the two differ.
    """

    def __init__(self, encoder: RoundTrip, decoder: RoundTrip, *, label: str | None = None) -> None:
        """``label``: None for the student's, with the word for its part."""
        self._encoder, self._decoder = encoder, decoder
        if isinstance(encoder, TeacherRoundTrip):
            self._teacher, self._student, part = encoder, decoder, "decoder"
        else:
            assert isinstance(decoder, TeacherRoundTrip), "one of the two is the teacher"
            self._teacher, self._student, part = decoder, encoder, "encoder"
        of_student = self._student.facts
        parameters = of_student.decoder_parameters if part == "decoder" else of_student.encoder_parameters
        facts = replace(
            of_student,
            label=label or f"{of_student.label} {part}",
            kind=MIXED_KIND,
            parameters=parameters or of_student.parameters,
            encoder_parameters=parameters if part == "encoder" else None,
            decoder_parameters=parameters if part == "decoder" else None,
        )
        super().__init__(facts, self._student.spec)

    @property
    def device(self) -> torch.device:
        return self._encoder.device

    def to(self, device: torch.device) -> MixedRoundTrip:
        if device == self.device:
            return self
        return MixedRoundTrip(self._encoder.to(device), self._decoder.to(device), label=self.facts.label)

    def used_frames(self, num_frames: int) -> int:
        return self._teacher.used_frames(num_frames)

    def chunk_frames(self, height: int, width: int) -> int:
        # The student cuts latents into parts of this size too.
        self._student.chunk_pixels = self.chunk_pixels or self._student.chunk_pixels
        return self._student.chunk_frames(height, width)

    def encode(self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes) -> Iterator[Tensor]:
        return self._encoder.encode(chunks, num_frames, times)

    def decode(self, latents: Iterable[Tensor], num_latents: int, times: StageTimes) -> Iterator[Tensor]:
        return self._decoder.decode(map(self._converted, latents), num_latents, times)

    def _converted(self, latents_NTCHW: Tensor) -> Tensor:
        """Latents of the encoder's space in the decoder's."""
        space, wanted = self._teacher.teacher.space, self._decoder.spec.latent_space
        if wanted == self._encoder.spec.latent_space:
            return latents_NTCHW
        return space.normalize(latents_NTCHW) if wanted == "diffusion" else space.denormalize(latents_NTCHW)


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
    if path.suffix.lower() in VIDEO_SUFFIXES:
        raise UserError(f"{path} is a video and no model; name the model first.")
    if is_teacher(path):
        if variant is not None or fused:
            option = "variant" if variant is not None else "fused"
            raise UserError(f"{option} is for models of the family, and {path} is a teacher; leave it out.")
        return TeacherRoundTrip.open(path, device=device, dtype=dtype, label=label)
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
    """Whether a folder is a diffusers VAE other than our own export, or a pipeline folder with one in ``vae/``; told by
    ``_class_name``."""
    for config in (path / "config.json", path / "vae" / "config.json"):
        if config.is_file():
            try:
                content = json.loads(config.read_text())
            except (OSError, ValueError):  # the reader of the weights says what is wrong with it
                continue
            if isinstance(content, dict) and str(content.get("_class_name", "")).startswith("Autoencoder"):
                return not states_network(content)
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


def with_own_labels(round_trips: Sequence[RoundTrip]) -> list[RoundTrip]:
    """The same models, with a number behind a label that an earlier one has already."""
    labels: list[str] = []
    for round_trip in round_trips:
        given = label = round_trip.facts.label
        number = 1
        while label in labels:
            number += 1
            label = f"{given} ({number})"
        round_trip.facts = replace(round_trip.facts, label=label)
        labels.append(label)
    return list(round_trips)


def shared_part(part: ClipPart, round_trips: Sequence[RoundTrip]) -> ClipPart:
    """The frames of a clip that all of these models encode: a teacher and its students get the same ones."""
    return part.first(min(trip.used_frames(part.num_frames) for trip in round_trips))


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
        stop_recording()
        torch.cuda.empty_cache()
