"""Latents on disk: one safetensors file, written and read piece by piece.

The tensor ``latents`` is N T C H W with N = 1, in the latent space that the file states. The header at the start of a
safetensors file states the shape, so the writer leaves room for it and writes it last, filled up with spaces (which the
format allows).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from pydantic import PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor

from tinyvae.errors import MissingFileError, UnreadableVideoError, UserError
from tinyvae.files import atomic_write, check_readable, refuse_existing
from tinyvae.models.variants import LatentSpaceName
from tinyvae.models.weights import LATENT_CONVENTIONS

TENSOR = "latents"
METADATA_KEY = "tinyvae_latents"
HEADER_ROOM = 4096  # bytes
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class LatentFacts:
    """Where latents come from, as far as a file states it."""

    variant: str | None = None
    latent_space: LatentSpaceName = "diffusion"
    num_frames: PositiveInt | None = None  # of the video; decoding can give more, which are cut off
    fps: PositiveFloat | None = None
    height: PositiveInt | None = None  # of the video in pixels, before padding to whole latent pixels
    width: PositiveInt | None = None
    source: str | None = None


@contextmanager
def write_latents(path: Path, facts: LatentFacts, *, overwrite: bool = False) -> Iterator[LatentWriter]:
    """A writer for the latents of one video; the file appears whole or not at all.

    Example: ``with write_latents(Path("film.safetensors"), LatentFacts()) as writer: writer.write(latents_NTCHW)``
    """
    refuse_existing([] if overwrite else [path])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write(b" " * HEADER_ROOM)
        writer = LatentWriter(stream)
        yield writer
        writer.write_header(facts)


class LatentWriter:
    """Appends latents to a stream and counts them; see `write_latents`."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.num_latents = 0
        self._frame_shape: tuple[int, ...] | None = None
        self._dtype: torch.dtype | None = None

    def write(self, latents_NTCHW: Tensor) -> None:
        """Append the next latents of one video (N = 1)."""
        assert latents_NTCHW.ndim == 5 and latents_NTCHW.shape[0] == 1, latents_NTCHW.shape
        if latents_NTCHW.shape[1] == 0:  # a stream that waits for more frames
            return
        shape = tuple(latents_NTCHW.shape[2:])
        assert self._frame_shape in (None, shape) and self._dtype in (None, latents_NTCHW.dtype)
        self._frame_shape, self._dtype = shape, latents_NTCHW.dtype
        # numpy has no bfloat16: the bytes are what counts.
        self._stream.write(latents_NTCHW.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        self.num_latents += latents_NTCHW.shape[1]

    def write_header(self, facts: LatentFacts) -> None:
        """Fill the room at the start of the stream."""
        assert self._frame_shape is not None and self._dtype is not None, "no latent was written"
        # A path of thousands of characters would not fit; its end says which file it was.
        source = facts.source[-500:] if facts.source else None
        stated = {**asdict(facts), "latent_convention": LATENT_CONVENTIONS[facts.latent_space], "source": source}
        header = {
            "__metadata__": {"format": "pt", METADATA_KEY: json.dumps(stated, ensure_ascii=False)},
            TENSOR: {
                "dtype": DTYPE_NAMES[self._dtype],
                "shape": [1, self.num_latents, *self._frame_shape],
                "data_offsets": [0, self._stream.tell() - HEADER_ROOM],
            },
        }
        # Names in other scripts stay short this way; a byte of a name that is no UTF-8 becomes a question mark.
        body = json.dumps(header, ensure_ascii=False).encode("utf-8", "replace")
        assert len(body) <= HEADER_ROOM - 8, "the metadata outgrew its room"
        self._stream.seek(0)
        self._stream.write(struct.pack("<Q", HEADER_ROOM - 8) + body.ljust(HEADER_ROOM - 8))


class LatentReader:
    """Latents of a file, read piece by piece; also of files that other programs wrote (their one 5-D or 4-D tensor)."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise MissingFileError(f"there is no latents file at {path}; make one with: tinyvae encode MODEL VIDEO")
        check_readable(path)
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as broken:
            raise UserError(_why_no_latents(path, broken)) from None
        self.path = path
        self._key = self._tensor_name()
        shape = self._file.get_slice(self._key).get_shape()
        if len(shape) == 5 and shape[0] != 1:
            raise UserError(f"{path} holds {shape[0]} videos in one tensor; save one video in a file.")
        self._has_batch = len(shape) == 5
        self.num_latents = shape[1] if self._has_batch else shape[0]
        if not self.num_latents:
            raise UserError(f"{path} holds no latent: its tensor {self._key!r} is {'x'.join(map(str, shape))}.")
        self.frame_shape: tuple[int, int, int] = tuple(shape[-3:])
        self.facts = self._facts()

    def chunks(self, num_latents: int) -> Iterator[Tensor]:
        """NTCHW pieces of at most ``num_latents`` latents, in order."""
        stored = self._file.get_slice(self._key)
        for start in range(0, self.num_latents, num_latents):
            stop = min(self.num_latents, start + num_latents)
            yield stored[:, start:stop] if self._has_batch else stored[start:stop][None]

    def _tensor_name(self) -> str:
        names = list(self._file.keys())
        fitting = [name for name in names if len(self._file.get_slice(name).get_shape()) in (4, 5)]
        if TENSOR in fitting:
            return TENSOR
        if len(fitting) != 1:
            what = f"no tensor named {TENSOR!r} with 4 or 5 dimensions (it has {', '.join(names[:4]) or 'none'})"
            advice = "latents are one tensor N T C H W, as `tinyvae encode` writes it"
            raise UserError(f"{self.path} holds {what}; {advice}.")
        return fitting[0]

    def _facts(self) -> LatentFacts:
        stated = (self._file.metadata() or {}).get(METADATA_KEY, "{}")
        try:
            return TypeAdapter(LatentFacts).validate_json(stated)
        except ValidationError:
            raise UserError(f"the metadata of {self.path} is damaged; encode the video again.") from None


def _why_no_latents(path: Path, broken: Exception) -> str:
    from tinyvae.video.decode import probe_video

    try:
        probe_video(path)
    except UnreadableVideoError:
        advice = "name a latents file, or make one with: tinyvae encode MODEL VIDEO"
        return f"{path} is not a whole safetensors file ({broken}); {advice}"
    advice = f"make them with `tinyvae encode MODEL {path}`, or use `tinyvae reconstruct MODEL {path}`"
    return f"{path} is a video, and decode takes latents; {advice}."
