"""The teacher's latents of a run's clips on disk, so that training need not run the teacher.

Clip p of a run is a pure function of its position p. A store holds the teacher's latents of positions 0..N-1, in the
run's own order. Position N is clip 0 again. The latents are those of the teacher's own space, before normalization:
the mean, and the spread where the recipe samples.

A store is a folder::

    store.json                    what was stored, from what, by which teacher
    latents-00000.safetensors     positions 0..K-1: ``mean`` (K, T, C, h, w), perhaps ``std``; K = clips_per_shard
    latents-00001.safetensors     ...

Shards are written whole or not at all, in any order, by any number of processes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tinyvae.errors import MissingFileError, UserError
from tinyvae.files import atomic_write, lock_file

log = logging.getLogger(__name__)

MANIFEST = "store.json"
SHARDS = "latents-*.safetensors"
LOCK = ".store.lock"
VERSION = 1
STALE_S = 600.0  # no shard takes this long to write
CLIPS_PER_SHARD = 64
"""At most; a shard holds whole micro-batches."""
LABELS = {
    "has_std": "ref_vae_sample",
    "teacher.dtype": "ref_vae_dtype",
    "teacher.class": "the teacher's class",
    "teacher.config": "the hash of the teacher's config.json",
    "teacher.weights": "the hash of the teacher's weights",
    "data.files": "the number of training files",
    "data.hash": "the hash of the list of training files",
}
"""Fact -> what a message calls it; those of the clips have the names of their settings."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class DamagedShardError(UserError):
    """A shard that is not what was written."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(file, reason)  # both as arguments: the error can then travel between processes
        self.file, self.reason = file, reason

    def __str__(self) -> str:
        remedy = "delete it and run the same tinyvae latents command again, which makes it again"
        return f"{self.file} is damaged ({self.reason}); {remedy}."


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What two stores must have in common to hold the same latents. Plain values, for JSON.

    ``teacher``: class, hashes of settings and weights, dtype that it runs in. ``clips``: the settings that decide over
    the pixels. ``data``: number and fingerprint of the training files. ``space``: how the teacher's own latents become
    those of diffusion space. ``dtype``: of the stored values. ``has_std``: whether the spread is stored too.
    """

    teacher: dict[str, Any]
    clips: dict[str, Any]
    data: dict[str, Any]
    space: dict[str, Any]
    dtype: str
    has_std: bool

    def difference(self, wanted: Mapping[str, Any]) -> str | None:
        """The first thing in which these facts are not as ``wanted`` (nested, as far as known); None: all is equal."""
        mine = _flat(asdict(self))
        for key, value in _flat(wanted).items():
            if mine.get(key) != value:
                label = LABELS.get(key, key.removeprefix("clips."))
                return f"{label} is {value} here and {mine.get(key)} in the store"
        return None

    @property
    def digest(self) -> str:
        """Of all facts; every shard carries it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class StoredLatents:
    """The distributions of a batch of clips: NTCHW in the teacher's own space, in the store's dtype."""

    mean: Tensor
    std: Tensor | None = None

    def __getitem__(self, rows: slice) -> StoredLatents:
        return self._each(lambda values: values[rows])

    def to(self, device: torch.device | str) -> StoredLatents:
        """On another device; without waiting where they are pinned."""
        return self._each(lambda values: values.to(device, non_blocking=values.is_pinned()))

    def pin_memory(self) -> StoredLatents:
        return self._each(lambda values: values.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> StoredLatents:
        return StoredLatents(mean=change(self.mean), std=None if self.std is None else change(self.std))


@dataclass(frozen=True, kw_only=True)
class LatentStore:
    """A store that is open for reading or writing. Safe to share with forked workers.

    Example::

        store = LatentStore.open(Path("latents"))
        mean_NTCHW = store.read([0, 1, 2, 3]).mean
    """

    folder: Path
    facts: StoreFacts
    num_clips: int
    clips_per_shard: int = CLIPS_PER_SHARD

    @classmethod
    def open(cls, folder: Path) -> LatentStore:
        """A store that exists; ``UserError`` where there is none, or one of another version."""
        file = folder / MANIFEST
        try:
            values = json.loads(file.read_text())
            if values["version"] != VERSION:
                raise UserError(
                    f"{folder} is a latent store of version {values['version']}, and this tinyvae reads version "
                    f"{VERSION}; make the store again with tinyvae latents."
                )
            return cls(
                folder=folder,
                facts=StoreFacts(**values["facts"]),
                num_clips=values["num_clips"],
                clips_per_shard=values["clips_per_shard"],
            )
        except (FileNotFoundError, NotADirectoryError):
            raise MissingFileError(
                f"there is no latent store in {folder} (no {MANIFEST}); make one with: tinyvae latents"
            ) from None
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            raise UserError(f"{file} is not the manifest of a latent store; make the store again.") from None

    @classmethod
    def create(cls, folder: Path, facts: StoreFacts, *, num_clips: int, batch_size: int = 1) -> LatentStore:
        """A store to write into: a new one, or one that was begun with the same facts, which may grow.

        ``batch_size``: clips of a micro-batch; a shard of a new store holds whole ones. Processes that create the same
        store at the same time wait for each other.
        """
        assert facts.dtype in DTYPES
        clips_per_shard = batch_size * max(1, CLIPS_PER_SHARD // batch_size)
        store = cls(folder=folder, facts=facts, num_clips=num_clips, clips_per_shard=clips_per_shard)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOCK, "ab") as stream:
            lock_file(stream, wait=True)
            for part in folder.glob(".latents-*.part"):  # of a process that was killed as it wrote, or writes now
                with suppress(FileNotFoundError):
                    if time.time() - part.stat().st_mtime > STALE_S:
                        part.unlink()
            if (folder / MANIFEST).exists():
                begun = cls.open(folder)
                differs = begun.facts.difference(asdict(facts))
                if differs is not None:
                    raise UserError(f"{folder} holds latents of something else: {differs}; name another folder.")
                store = replace(begun, num_clips=max(num_clips, begun.num_clips))
                if store == begun:
                    return store
            store._write_manifest()
        return store

    @property
    def num_shards(self) -> int:
        return -(-self.num_clips // self.clips_per_shard)

    @property
    def num_bytes(self) -> int:
        """What the shards that are there take on the disk."""
        return sum(file.stat().st_size for file in self.folder.glob(SHARDS))

    def positions(self, shard: int) -> range:
        return range(shard * self.clips_per_shard, min((shard + 1) * self.clips_per_shard, self.num_clips))

    def missing_shards(self, part: int = 0, num_parts: int = 1, *, skip_damaged: bool = False) -> Iterator[int]:
        """The shards that are not there or not complete, of every ``num_parts``-th shard from ``part`` on.

        A damaged one is an error; with ``skip_damaged`` it is named in the log and counts as missing.
        """
        there = {file.name for file in self.folder.glob(SHARDS)}
        for shard in range(part, self.num_shards, num_parts):
            try:
                is_missing = self._file(shard).name not in there or not self._is_complete(shard)
            except DamagedShardError as damage:
                if not skip_damaged:
                    raise
                log.warning("%s is damaged (%s); it is made again", damage.file, damage.reason)
                is_missing = True
            if is_missing:
                yield shard

    def check_fits(self, wanted: Mapping[str, Any]) -> None:
        """Refuse a run whose clips or teacher are not those of the store; ``wanted``: as `StoreFacts.difference`."""
        differs = self.facts.difference(wanted)
        if differs is not None:
            raise UserError(
                f"the latent store {self.folder} does not fit this run: {differs}; make one for this run with "
                "tinyvae latents, or change the setting."
            )

    def check_complete(self) -> None:
        missing = len(list(self.missing_shards()))
        if missing:
            raise UserError(
                f"the latent store {self.folder} lacks {missing} of its {self.num_shards} shards; run the same "
                "tinyvae latents command again, it goes on where it stopped."
            )

    def write(self, shard: int, latents: StoredLatents, files: Sequence[str]) -> None:
        """Write a shard: the latents of `positions` in any float dtype, and which file each clip came from."""
        assert len(latents.mean) == len(files) == len(self.positions(shard))
        assert (latents.std is not None) == self.facts.has_std
        tensors = {"mean": latents.mean} | ({} if latents.std is None else {"std": latents.std})
        dtype = DTYPES[self.facts.dtype]
        tensors = {name: values.to("cpu", dtype).contiguous() for name, values in tensors.items()}
        checksums = {name: [_checksum(clip) for clip in values] for name, values in tensors.items()}
        lists = {"files": json.dumps(list(files)), "checksums": json.dumps(checksums)}
        with atomic_write(self._file(shard)) as stream:
            stream.write(save(tensors, lists | {"facts": self.facts.digest}))
        _open_shard.cache_clear()  # it may hold the shard as it was

    def read(self, positions: Sequence[int]) -> StoredLatents:
        """The latents of clips at any positions, in the store's dtype, on the CPU; std is None without spread."""
        means, stds = zip(*(self._read_clip(position % self.num_clips) for position in positions), strict=True)
        return StoredLatents(mean=torch.stack(means), std=torch.stack(stds) if self.facts.has_std else None)

    def file_of(self, position: int) -> str:
        """The video file that the latents at a position were made from, relative to the data root."""
        shard, row = divmod(position % self.num_clips, self.clips_per_shard)
        return self._open(shard).files[row]

    def _read_clip(self, position: int) -> tuple[Tensor, Tensor | None]:
        shard, row = divmod(position, self.clips_per_shard)
        opened = self._open(shard)
        clips = {name: opened.tensors.get_slice(name)[row] for name in opened.checksums}
        for name, clip in clips.items():
            if _checksum(clip) != opened.checksums[name][row]:
                raise DamagedShardError(self._file(shard), f"the {name} of clip {position} has changed")
        return clips["mean"], clips.get("std")

    def _file(self, shard: int) -> Path:
        return self.folder / f"latents-{shard:05}.safetensors"

    def _open(self, shard: int) -> _Shard:
        opened = _open_shard(self._file(shard))
        if opened.facts != self.facts.digest:
            raise DamagedShardError(self._file(shard), "it belongs to another store")
        return opened

    def _is_complete(self, shard: int) -> bool:
        """Whether a shard holds all of its positions: the last one of a store that has grown may not."""
        return len(self._open(shard).files) == len(self.positions(shard))

    def _write_manifest(self) -> None:
        values = {"version": VERSION, "num_clips": self.num_clips, "clips_per_shard": self.clips_per_shard}
        with atomic_write(self.folder / MANIFEST, "w") as stream:
            json.dump(values | {"facts": asdict(self.facts)}, stream, indent=1)


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """An open shard: its tensors are memory mapped."""

    tensors: Any
    files: list[str]
    checksums: dict[str, list[int]]
    facts: str


@functools.lru_cache(maxsize=64)
def _open_shard(file: Path) -> _Shard:
    try:
        opened = safe_open(file, framework="pt")
        about = opened.metadata()
        files, checksums = json.loads(about["files"]), json.loads(about["checksums"])
        return _Shard(tensors=opened, files=files, checksums=checksums, facts=about["facts"])
    except FileNotFoundError:
        raise MissingFileError(f"{file} is gone; run the same tinyvae latents command again.") from None
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as fault:
        raise DamagedShardError(file, str(fault) or type(fault).__name__) from None


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with keys like ``clips.height``; lists and tuples compare as equal."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
