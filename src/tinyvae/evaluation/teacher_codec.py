"""A reference VAE (a diffusers folder) in the place of a model: what the tiny network stands in for.

It runs a clip as a whole, as diffusers does, so its memory grows with the clip: use ``max_frames``. Its frame rule is
that of the student it teaches; of a clip it sees the longest part on which both agree (CogVideoX encodes other lengths
in one mode and decodes them in another).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.round_trip import (
    MAX_CHUNK_FRAMES,
    REFERENCE_KIND,
    ModelFacts,
    Piece,
    to_unit_range,
)
from tinyvae.models.codec import pad_to_multiple
from tinyvae.models.variants import VariantSpec, get_spec
from tinyvae.teachers import ReferenceVAE, load_teacher
from tinyvae.teachers.diffusers_vae import find_teacher


def is_reference_vae(path: Path) -> bool:
    """Whether a folder is a diffusers VAE, or a pipeline folder with one in ``vae/``; told by ``_class_name``."""
    for folder in (path, path / "vae"):
        config = folder / "config.json"
        if config.is_file():
            try:
                content = json.loads(config.read_text())
            except json.JSONDecodeError:
                continue
            if isinstance(content, dict) and str(content.get("_class_name", "")).startswith("Autoencoder"):
                return True
    return False


def open_reference_vae(
    path: Path, *, device: torch.device, dtype: torch.dtype | None, label: str | None
) -> ReferenceRoundTrip:
    """The VAE of a diffusers folder. Without ``dtype``: float32 on a CPU, bfloat16 on a GPU."""
    found = find_teacher(path, None)
    candidates = found.family.variant_candidates(found.geometry) or found.family.variants
    spec = get_spec(candidates[0])
    if spec.time_factor != found.geometry.time_factor:
        raise UserError(
            f"{path} packs {found.geometry.time_factor} frames into a latent, unlike any {found.family.class_name} "
            "that is known; its frames cannot be counted."
        )
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    teacher = load_teacher(None, path, dtype=dtype, device=device)
    facts = ModelFacts(
        label=label or _label_of(path),
        path=str(path),
        kind=REFERENCE_KIND,
        variant=teacher.class_name,
        width=None,
        parameters=teacher.num_parameters,
        encoder_parameters=None,
        decoder_parameters=None,
        dtype=str(dtype).removeprefix("torch."),
        sha256=None,
        latent_variant=spec.name,
    )
    return ReferenceRoundTrip(teacher, spec, facts, path)


def _label_of(path: Path) -> str:
    """The folder's name; a folder that is only called vae says nothing, so then that of the pipeline around it."""
    absolute = path.absolute()
    return absolute.parent.name if absolute.name == "vae" else absolute.name


class ReferenceRoundTrip:
    """A `RoundTrip` around a teacher."""

    def __init__(self, teacher: ReferenceVAE, spec: VariantSpec, facts: ModelFacts, path: Path) -> None:
        self._teacher, self._spec, self._path = teacher, spec, path
        self.facts = facts

    @property
    def device(self) -> torch.device:
        return self._teacher.device

    def aligned_frames(self, num_frames: int) -> int:
        return self._spec.aligned_frames(self._agreed_length(num_frames))

    def latents(self, num_frames: int) -> int:
        return self._spec.latents(self._agreed_length(num_frames))

    def frames_per_latent(self) -> int:
        return self._spec.time_factor

    def chunk_frames(self, height: int, width: int) -> int:
        return MAX_CHUNK_FRAMES  # only how the file is read: the clip is joined again before it is encoded

    def take_smaller_chunks(self, height: int, width: int) -> bool:
        return False

    def to(self, device: torch.device) -> ReferenceRoundTrip:
        if device == self.device:
            return self
        other = open_reference_vae(self._path, device=device, dtype=self._teacher.dtype, label=self.facts.label)
        other.facts = self.facts
        return other

    def run(
        self,
        chunks: Iterable[Tensor],
        num_frames: int,
        times: StageTimes,
        on_latents: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Piece]:
        wanted = self.aligned_frames(num_frames)
        target_TCHW = to_unit_range(torch.cat(list(chunks))[:wanted], self.device)
        height, width = target_TCHW.shape[-2:]
        padded = pad_to_multiple(target_TCHW[None], self._teacher.space_factor)
        with times.watch(self.device) as watch:
            latents = self._teacher.encode(padded)
        times.add_encoding(watch)
        if on_latents is not None:
            on_latents(latents)
        with times.watch(self.device) as watch:
            decoded = self._teacher.decode(latents)
        times.add_decoding(watch)
        times.frames += wanted
        times.pixels += wanted * height * width
        if decoded.shape[1] < wanted:
            raise UnreadableVideoError(
                self._path, f"{self.facts.variant} gave back {decoded.shape[1]} of {wanted} frames"
            )
        yield Piece(decoded=decoded[0, :wanted, :, :height, :width].float(), target=target_TCHW)

    def _agreed_length(self, num_frames: int) -> int:
        """The longest part of a clip on which this VAE and its students count alike."""
        return next((t for t in range(num_frames, 0, -1) if self._spec.is_training_length(t)), num_frames)
