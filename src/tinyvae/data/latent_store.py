"""The teacher's latents of a run's clips on disk, so that training need not run the teacher.

Clip p of a run is a pure function of its position p. A store holds the teacher's latents of positions 0..N-1, in the
run's own order. Position N is clip 0 again. Where a run has several clip sizes (`tinyvae.data.sizes`), it holds the
first N positions of each stage of sizes, which come round again inside the stage. The latents are in the teacher's own
space, before normalization: the mean, and the spread where the recipe samples.

A store is a folder::

    store.json                    what was stored, from what, by which teacher
    latents-00000.safetensors     positions 0..K-1: ``mean-00000`` (T, C, h, w) ..., perhaps ``std-00000`` ...
    latents-00001.safetensors     positions K..2K-1; K = clips_per_shard

Shards are written whole or not at all, in any order, by any number of processes. The folder may be behind a URL; then
a shard is fetched when it is first read, and a store that is made cannot grow.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tinyvae.data.sizes import SizeSchedule, SizesOfPositions
from tinyvae.errors import MissingFileError, UserError
from tinyvae.files import lock_file
from tinyvae.storage import Place, Url, list_files, local_file, writing

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
    "clips.clips_per_step": "the number of clips of a step (tinyvae latents --gpus)",
    "data.files": "the number of training files",
    "data.hash": "the hash of the list of training files",
}
"""Fact -> what a message calls it; those of the clips have the names of their settings."""
OF_OLDER_STORES = {"clips.crop_candidates": 1, "clips.random_turn": False, "clips.random_reverse": False}
"""Fact -> what it was while stores did not state it."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class DamagedShardError(UserError):
    """A shard that is not what was written."""

    def __init__(self, file: Place, reason: str) -> None:
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
            stored = mine.get(key, OF_OLDER_STORES.get(key))
            if stored != value:
                label = LABELS.get(key, key.removeprefix("clips."))
                return f"{label} is {value} here and {stored} in the store"
        return None

    @property
    def digest(self) -> str:
        """Of all facts; every shard carries it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def sizes(self) -> SizesOfPositions | None:
        """The size of the clip at each position, where there are several."""
        if not self.clips.get("resolutions"):
            return None
        schedule = SizeSchedule.parse(self.clips["resolutions"])
        return SizesOfPositions(schedule=schedule, clips_per_step=self.clips["clips_per_step"])


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

    folder: Place
    facts: StoreFacts
    num_clips: int
    """Of each stage of sizes, at least; most runs have one stage."""
    clips_per_shard: int = CLIPS_PER_SHARD
    with_std: bool = True
    """Whether `read` gives the spread too, where it is stored."""

    @classmethod
    def open(cls, folder: Place) -> LatentStore:
        """A store that exists; ``UserError`` where there is none, or one of another version."""
        file = folder / MANIFEST
        try:
            values = json.loads(local_file(file).read_text())
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
        except OSError as fault:
            raise UserError(f"{file} cannot be read ({fault.strerror or fault}); fix its permissions.") from None
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
            raise UserError(f"{file} is not the manifest of a latent store; make the store again.") from None

    @classmethod
    def create(cls, folder: Place, facts: StoreFacts, *, num_clips: int, batch_size: int = 1) -> LatentStore:
        """A store to write into: a new one, or one that was begun with the same facts, which may grow.

        ``batch_size``: clips of a micro-batch; a shard of a new store holds whole ones. Processes that create the same
        store at the same time wait for each other.
        """
        assert facts.dtype in DTYPES
        clips_per_shard = batch_size * max(1, CLIPS_PER_SHARD // batch_size)
        store = cls(folder=folder, facts=facts, num_clips=num_clips, clips_per_shard=clips_per_shard)
        with _locked(folder):
            if (folder / MANIFEST).exists():
                begun = cls.open(folder)
                differs = begun.facts.difference(asdict(facts))
                if differs is not None:
                    raise UserError(f"{folder} holds latents of something else: {differs}; name another folder.")
                store = replace(begun, num_clips=max(num_clips, begun.num_clips))
                if store == begun:
                    return store
                if isinstance(folder, Url):
                    fix = "name another place, or make the store in a local folder and copy it"
                    raise UserError(f"{folder} holds {begun.num_clips} clips and cannot grow behind a URL; {fix}.")
            values = {"version": VERSION, "num_clips": store.num_clips, "clips_per_shard": store.clips_per_shard}
            with writing(folder / MANIFEST, "w") as stream:
                json.dump(values | {"facts": asdict(store.facts)}, stream, indent=1)
        return store

    @functools.cached_property
    def stages(self) -> list[range]:
        """The stored positions of each stage: whole steps, so that a step that comes round again has one size."""
        sizes = self.facts.sizes
        if sizes is None:
            return [range(self.num_clips)]
        wanted = self.num_clips + -self.num_clips % sizes.clips_per_step
        starts = [stage.first_step * sizes.clips_per_step for stage in sizes.schedule.stages]
        ends = [*starts[1:], starts[-1] + wanted]
        return [range(start, min(start + wanted, end)) for start, end in zip(starts, ends, strict=True)]

    def clip_of(self, position: int) -> int:
        """The stored position whose clip a position of the run gets."""
        stage = next(stage for stage in reversed(self.stages) if stage.start <= position)
        return stage.start + (position - stage.start) % len(stage)

    @functools.cached_property
    def shards(self) -> list[int]:
        """The numbers of all shards, in rising order."""
        size = self.clips_per_shard
        return sorted({shard for stage in self.stages for shard in range(stage.start // size, -(-stage.stop // size))})

    @property
    def num_bytes(self) -> int:
        """What the shards that are there take on the disk."""
        return sum(shard_sizes(self.folder).values())

    def pieces(self, shard: int) -> list[range]:
        """The positions of a shard: one range, or several where stages are short."""
        first, end = shard * self.clips_per_shard, (shard + 1) * self.clips_per_shard
        pieces = [range(max(stage.start, first), min(stage.stop, end)) for stage in self.stages]
        return [piece for piece in pieces if piece]

    def positions(self, shard: int) -> list[int]:
        return [position for piece in self.pieces(shard) for position in piece]

    def missing_shards(self, part: int = 0, num_parts: int = 1, *, skip_damaged: bool = False) -> Iterator[int]:
        """The shards that are not there or not complete, of every ``num_parts``-th shard from ``part`` on.

        A damaged one is an error; with ``skip_damaged`` it is named in the log and counts as missing.
        """
        there = shard_sizes(self.folder)
        _open_shard.cache_clear()  # another process may have written one again since
        for shard in self.shards[part::num_parts]:
            try:
                if self._file(shard).name in there and self._is_complete(shard):
                    continue
            except DamagedShardError as damage:
                if not skip_damaged:
                    raise
                log.warning("%s is damaged (%s) and counts as missing", damage.file, damage.reason)
            yield shard

    def _is_complete(self, shard: int) -> bool:
        """Of a shard that is there. The last one of a store that has grown may hold too few clips, but no store grows
        behind a URL, where to open a shard is to fetch it."""
        return isinstance(self.folder, Url) or len(self._open(shard).files) == len(self.positions(shard))

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
                f"the latent store {self.folder} lacks {missing} of its {len(self.shards)} shards; run the same "
                "tinyvae latents command again, it goes on where it stopped."
            )

    def write(self, shard: int, batches: Sequence[StoredLatents], files: Sequence[str]) -> None:
        """Write a shard: the latents of `positions` in any float dtype, and which file each clip came from."""
        clips = {"mean": [clip for batch in batches for clip in batch.mean]}
        assert len(clips["mean"]) == len(files) == len(self.positions(shard))
        if self.facts.has_std:
            clips["std"] = [clip for batch in batches if batch.std is not None for clip in batch.std]
            assert len(clips["std"]) == len(files)
        dtype = DTYPES[self.facts.dtype]
        clips = {name: [clip.to("cpu", dtype).contiguous() for clip in column] for name, column in clips.items()}
        checksums = {name: [_checksum(clip) for clip in column] for name, column in clips.items()}
        tensors = {f"{name}-{row:05}": clip for name, column in clips.items() for row, clip in enumerate(column)}
        lists = {"files": json.dumps(list(files)), "checksums": json.dumps(checksums)}
        with writing(self._file(shard)) as stream:
            stream.write(save(tensors, lists | {"facts": self.facts.digest}))
        _open_shard.cache_clear()  # it may hold the shard as it was

    def read(self, positions: Sequence[int]) -> StoredLatents:
        """The latents of clips at any positions, in the store's dtype, on the CPU; std is None without spread."""
        names = ("mean", "std") if self.facts.has_std and self.with_std else ("mean",)
        clips = [self.clip_of(position) for position in positions]
        return StoredLatents(**{name: torch.stack([self._read_one(name, clip) for clip in clips]) for name in names})

    def file_of(self, position: int) -> str:
        """The video file that the latents at a position were made from, relative to the data root."""
        shard, row = self._place_of(self.clip_of(position))
        return self._open(shard).files[row]

    def _place_of(self, position: int) -> tuple[int, int]:
        """(shard, row) of a stored position."""
        shard = position // self.clips_per_shard
        return shard, self.positions(shard).index(position)

    def _read_one(self, name: str, position: int) -> Tensor:
        """The ``mean`` or the ``std`` of the clip at a stored position."""
        shard, row = self._place_of(position)
        opened = self._open(shard)
        values = opened.tensors.get_tensor(f"{name}-{row:05}")
        if _checksum(values) != opened.checksums[name][row]:
            raise DamagedShardError(self._file(shard), f"the {name} of clip {position} has changed")
        return values

    def _file(self, shard: int) -> Place:
        return self.folder / f"latents-{shard:05}.safetensors"

    def _open(self, shard: int) -> _Shard:
        opened = _open_shard(self._file(shard))
        if opened.facts != self.facts.digest:
            raise DamagedShardError(self._file(shard), "it belongs to another store")
        return opened


def shard_sizes(folder: Place) -> dict[str, int]:
    """Name -> bytes of each shard that is there."""
    if isinstance(folder, Url):
        return {name: version.size for name, version in list_files(folder) if fnmatch(name, SHARDS)}
    return {file.name: file.stat().st_size for file in folder.glob(SHARDS)}


@contextmanager
def _locked(folder: Place) -> Iterator[None]:
    """Around the work on a manifest. Nothing is locked behind a URL: there all processes write the same manifest."""
    if isinstance(folder, Url):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "ab") as stream:
        lock_file(stream, wait=True)
        for part in folder.glob(".latents-*.part"):  # of a process that was killed as it wrote, or writes now
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > STALE_S:
                    part.unlink()
        yield


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """An open shard: its tensors are memory mapped."""

    tensors: Any
    files: list[str]
    checksums: dict[str, list[int]]
    facts: str


@functools.lru_cache(maxsize=64)
def _open_shard(file: Place) -> _Shard:
    try:
        opened = safe_open(local_file(file), framework="pt")
        about = opened.metadata()
        files, checksums = json.loads(about["files"]), json.loads(about["checksums"])
        return _Shard(tensors=opened, files=files, checksums=checksums, facts=about["facts"])
    except FileNotFoundError:
        raise MissingFileError(f"{file} is gone; run the same tinyvae latents command again.") from None
    except OSError as fault:
        raise UserError(f"{file} cannot be read ({fault.strerror or fault}); fix its permissions.") from None
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
