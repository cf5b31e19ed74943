"""The teacher's latents of a run's clips on disk, so that training need not run the teacher.

Clip p of a run is a pure function of its position p. A store holds the teacher's latents of positions 0..N-1, in the
run's own order. Position N is clip 0 again. The latents are those of the teacher's own space, before normalization:
the mean, and the spread where the recipe samples.

A store is a folder::

    store.json                    what was stored, from what, by which teacher
    latents-00000.safetensors     positions 0..K-1: ``mean`` (K, T, C, h, w), perhaps ``std``; K = CLIPS_PER_SHARD
    latents-00001.safetensors     ...

Shards are written whole or not at all, in any order, by any number of processes.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tinyvae.errors import MissingFileError, UserError
from tinyvae.files import atomic_write

MANIFEST = "store.json"
VERSION = 1
CLIPS_PER_SHARD = 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What two stores must have in common to hold the same latents. Plain values, for JSON.

    ``teacher``: class, sha256 of the weights, dtype that it runs in. ``clips``: the settings that decide over the
    pixels. ``data``: fingerprint of the training files. ``latent_shape``: (T, C, h, w) of one clip.
    """

    teacher: dict[str, Any]
    clips: dict[str, Any]
    data: dict[str, Any]
    latent_shape: tuple[int, int, int, int]
    has_std: bool

    def difference(self, other: StoreFacts) -> str | None:
        """The first thing in which ``other`` differs, as ``key is X, not Y`` (X is ours); None where all is equal."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return f"{key} is {mine.get(key)}, not {theirs.get(key)}"
        return None


@dataclass(frozen=True, kw_only=True)
class LatentStore:
    """A store that is open for reading or writing. Safe to share with forked workers.

    Example::

        store = LatentStore.open(Path("latents"))
        mean_NTCHW, std_NTCHW = store.read([0, 1, 2, 3])
    """

    folder: Path
    facts: StoreFacts
    dtype: str
    num_clips: int

    @classmethod
    def open(cls, folder: Path) -> LatentStore:
        """A store that exists; ``UserError`` where there is none, or one of another version."""
        file = folder / MANIFEST
        try:
            values = json.loads(file.read_text())
            if values["version"] != VERSION:
                raise UserError(f"{folder} is a latent store of version {values['version']}; this is {VERSION}.")
            facts = StoreFacts(**values["facts"] | {"latent_shape": tuple(values["facts"]["latent_shape"])})
            return cls(folder=folder, facts=facts, dtype=values["dtype"], num_clips=values["num_clips"])
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(
                f"there is no latent store in {folder} (no {MANIFEST}); make one with: tinyvae latents"
            ) from None
        except (KeyError, TypeError, json.JSONDecodeError):
            raise UserError(f"{file} is not the manifest of a latent store; make the store again.") from None

    @classmethod
    def create(cls, folder: Path, facts: StoreFacts, *, dtype: str, num_clips: int) -> LatentStore:
        """A store to write into: a new one, or one that was begun with the same facts. It may have grown."""
        assert dtype in DTYPES
        if (folder / MANIFEST).exists():
            begun = cls.open(folder)
            differs = facts.difference(begun.facts)
            if begun.dtype != dtype:
                differs = differs or f"dtype is {dtype}, not {begun.dtype}"
            if differs is not None:
                raise UserError(f"{folder} holds latents of something else: {differs}; name another folder.")
            num_clips = max(num_clips, begun.num_clips)
        store = cls(folder=folder, facts=facts, dtype=dtype, num_clips=num_clips)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / MANIFEST, "w") as stream:
            json.dump(
                {"version": VERSION, "num_clips": num_clips, "dtype": dtype, "facts": asdict(facts)}, stream, indent=1
            )
        return store

    @property
    def num_shards(self) -> int:
        return -(-self.num_clips // CLIPS_PER_SHARD)

    @property
    def num_bytes(self) -> int:
        """What the whole store takes on disk, without its few headers."""
        values = torch.Size(self.facts.latent_shape).numel() * (2 if self.facts.has_std else 1)
        return self.num_clips * values * DTYPES[self.dtype].itemsize

    def positions(self, shard: int) -> range:
        return range(shard * CLIPS_PER_SHARD, min((shard + 1) * CLIPS_PER_SHARD, self.num_clips))

    def missing_shards(self, part: int = 0, num_parts: int = 1) -> Iterator[int]:
        """The shards that are not there or not complete, of every ``num_parts``-th shard from ``part`` on."""
        for shard in range(part, self.num_shards, num_parts):
            if not self._is_complete(shard):
                yield shard

    def check_fits(self, facts: StoreFacts) -> None:
        """Refuse a run whose clips or teacher are not those of the store, and a store that is not complete."""
        differs = facts.difference(self.facts)
        if differs is not None:
            raise UserError(
                f"the latent store {self.folder} does not fit this run: {differs}; make one for this run with "
                "tinyvae latents, or change the setting."
            )
        missing = len(list(self.missing_shards()))
        if missing:
            raise UserError(
                f"the latent store {self.folder} lacks {missing} of its {self.num_shards} shards; run the same "
                "tinyvae latents command again, it goes on where it stopped."
            )

    def write(self, shard: int, mean_NTCHW: Tensor, std_NTCHW: Tensor | None, files: Sequence[str]) -> None:
        """Write a shard: the latents of `positions` in any float dtype, and which file each clip came from."""
        assert len(mean_NTCHW) == len(files) == len(self.positions(shard))
        assert tuple(mean_NTCHW.shape[1:]) == tuple(self.facts.latent_shape)
        assert (std_NTCHW is not None) == self.facts.has_std
        tensors = {"mean": mean_NTCHW} | ({} if std_NTCHW is None else {"std": std_NTCHW})
        tensors = {name: values.to("cpu", DTYPES[self.dtype]).contiguous() for name, values in tensors.items()}
        checksums = {name: [_checksum(clip) for clip in values] for name, values in tensors.items()}
        with atomic_write(self._file(shard)) as stream:
            stream.write(save(tensors, {"files": json.dumps(list(files)), "checksums": json.dumps(checksums)}))
        _open_shard.cache_clear()  # it may hold the shard as it was

    def read(self, positions: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """(mean, std) NTCHW in the store's dtype, on the CPU, of clips at any positions; std is None without spread."""
        rows = [self._read_clip(position % self.num_clips) for position in positions]
        means, stds = zip(*rows, strict=True)
        return torch.stack(means), torch.stack(stds) if self.facts.has_std else None

    def file_of(self, position: int) -> str:
        """The video file that the latents at a position were made from, relative to the data root."""
        shard, row = divmod(position % self.num_clips, CLIPS_PER_SHARD)
        return _open_shard(self._file(shard))[1][row]

    def _read_clip(self, position: int) -> tuple[Tensor, Tensor | None]:
        shard, row = divmod(position, CLIPS_PER_SHARD)
        tensors, _, checksums = _open_shard(self._file(shard))
        clips = {name: tensors.get_slice(name)[row] for name in checksums}
        for name, clip in clips.items():
            if _checksum(clip) != checksums[name][row]:
                raise damaged(self._file(shard), f"the {name} of clip {position} has changed")
        return clips["mean"], clips.get("std")

    def _file(self, shard: int) -> Path:
        return self.folder / f"latents-{shard:05}.safetensors"

    def _is_complete(self, shard: int) -> bool:
        """Whether a shard holds all of its positions: the last one of a store that has grown may not."""
        if not self._file(shard).exists():
            return False
        return len(_open_shard(self._file(shard))[1]) == len(self.positions(shard))


def damaged(file: Path, reason: str) -> UserError:
    return UserError(
        f"{file} is damaged ({reason}); delete it and run the same tinyvae latents command again, which makes it again."
    )


@functools.lru_cache(maxsize=64)
def _open_shard(file: Path) -> tuple[Any, list[str], dict[str, list[int]]]:
    """A shard's tensors (memory mapped), the file of each clip, and the checksums of each clip."""
    try:
        opened = safe_open(file, framework="pt")
        metadata = opened.metadata()
        return opened, json.loads(metadata["files"]), json.loads(metadata["checksums"])
    except FileNotFoundError:
        raise MissingFileError(f"{file} is gone; run the same tinyvae latents command again.") from None
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as fault:
        raise damaged(file, str(fault) or type(fault).__name__) from None


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with keys like ``clips.height``; lists and tuples compare as equal."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
