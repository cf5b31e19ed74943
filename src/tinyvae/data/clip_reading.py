"""Reading the clips of a list of positions: choose, decode, cut, and put another in place of a bad one.

These data sets run inside loader workers. They never raise for a bad file: what went wrong travels to the main
process with the batch, so that the message is one sentence there and not a worker's traceback.
"""

from __future__ import annotations

import json
import logging
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from tinyvae.data.augment import to_model_input
from tinyvae.data.clip import ClipSettings, finish_clip
from tinyvae.data.clip_choice import ClipChoice, choose_clip, choose_validation_clip, epoch_of, file_of
from tinyvae.data.decoded_cache import CacheEvent, DecodedCache, default_cache_dir
from tinyvae.data.index import IndexRow, VideoIndex
from tinyvae.data.splits import DEFAULT_BAD_FILE_LIMIT, ClipSet
from tinyvae.data.workers import Loan, LoanBoard, SharedMemoryError, WorkerBuffers, WorkerMemory
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.files import lock_file
from tinyvae.video.decode import read_frames

log = logging.getLogger(__name__)

TRIES_BEFORE_JUDGEMENT = 64
"""A share means little over fewer reads than this."""


@dataclass(frozen=True, kw_only=True)
class BadFile:
    """A file (relative to the data root) and why it could not be used."""

    path: str
    reason: str


class BadFileLog:
    """``bad_files.jsonl``: one line ``{"path": ..., "reason": ...}`` for each bad file, however often it is met.

    Several ranks, and a resumed run, may write to the same file: each line is added under a lock, after a look at
    what is already there.
    """

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self._known: set[str] = set()
        self._read_up_to = 0

    def add(self, *bad_files: BadFile) -> None:
        fresh = [bad for bad in bad_files if bad.path not in self._known]
        if not fresh:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a+b") as stream:
            lock_file(stream, wait=True)
            stream.seek(self._read_up_to)
            for line in stream:
                if line.endswith(b"\n"):
                    self._known.add(json.loads(line)["path"])
                else:
                    # A kill cut this line off; the file it named is simply named again.
                    stream.truncate(stream.tell() - len(line))
            stream.seek(0, os.SEEK_END)
            for bad in fresh:
                if bad.path not in self._known:
                    self._known.add(bad.path)
                    line_out = json.dumps({"path": bad.path, "reason": bad.reason}, ensure_ascii=True)
                    stream.write(line_out.encode() + b"\n")
            stream.flush()
            self._read_up_to = stream.tell()

    def add_index(self, index: VideoIndex) -> int:
        """Write down every file that is bad in the index; returns how many there are."""
        batch: list[BadFile] = []
        for row in index.bad_rows():
            batch.append(BadFile(path=row.path, reason=row.reason))
            if len(batch) == 1024:
                self.add(*batch)
                batch.clear()
        self.add(*batch)
        return index.num_bad


@dataclass(kw_only=True)
class BadFileWatch:
    """Follows one loader: names each bad file once in the log, and stops the run when their share is too large.

    The share is bad reads / reads since the loader started, judged from ``TRIES_BEFORE_JUDGEMENT`` reads on.
    """

    limit: float = DEFAULT_BAD_FILE_LIMIT
    written_to: BadFileLog | None = None
    num_tries: int = 0
    num_bad_tries: int = 0
    named: dict[str, str] = field(default_factory=dict)
    """Path -> reason of every bad file met so far."""

    def see(self, bad_files: tuple[BadFile, ...], num_tries: int) -> None:
        self.num_tries += num_tries
        self.num_bad_tries += len(bad_files)
        for bad in bad_files:
            if bad.path not in self.named:
                self.named[bad.path] = bad.reason
                log.warning("bad file %s skipped: %s", bad.path, bad.reason)
        if self.written_to is not None:
            self.written_to.add(*bad_files)
        share = self.num_bad_tries / max(1, self.num_tries)
        if self.num_tries >= TRIES_BEFORE_JUDGEMENT and share > self.limit:
            path, reason = next(iter(self.named.items()))
            raise UserError(
                f"{self.num_bad_tries} of {self.num_tries} clips read so far ({share:.1%}) were bad, above the limit "
                f"of {self.limit:.1%}; the first was {path!r}: {reason}; mend the data (all bad files are named in "
                f"{self.written_to.file if self.written_to else 'the log'}) or raise bad_file_limit"
            )


MAX_ATTEMPTS = 8
"""Files tried for one position. Eight bad ones in a row are no accident below the bad-file limit (0.05^8)."""


@dataclass(frozen=True, kw_only=True)
class ClipBatch:
    """A batch as the trainer gets it."""

    frames: Tensor
    """uint8 RGB, NTCHW, 0..255, on the CPU; without colour jitter and blur, which ``model_input`` applies."""
    color_and_blur: Tensor
    """float32 (N, 5): brightness, contrast, saturation, hue, blur sigma of each sample, on the CPU."""
    names: list[str]
    """Each sample's file, relative to the data root."""
    positions: list[int]
    """Each sample's global position."""
    epoch: int
    """Of the first sample; a batch may run on into the next epoch."""

    def __len__(self) -> int:
        return len(self.names)

    def model_input(self, device: torch.device | str | None = None) -> Tensor:
        """float32 NTCHW in [0, 1] on ``device``, with colour jitter and blur: what the model is fed."""
        # Only out of pinned memory, which is a copy: a worker may write over its own once the batch is let go of.
        frames = self.frames if device is None else self.frames.to(device, non_blocking=self.frames.is_pinned())
        return to_model_input(frames, self.color_and_blur)

    def pin_memory(self) -> ClipBatch:
        """Called by the loader's pinning thread."""
        return ClipBatch(
            frames=self.frames.pin_memory(),
            color_and_blur=self.color_and_blur,
            names=self.names,
            positions=self.positions,
            epoch=self.epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ReadBatch:
    """What a worker hands over: the batch, and what happened on the way."""

    batch: ClipBatch | None
    """None when not a single clip could be read."""
    bad_files: tuple[BadFile, ...]
    num_tries: int
    failure: str = ""
    """Set when the run cannot go on: a training position found no readable file, or shared memory is full."""
    loan: Loan | None = None
    """Of the worker's buffer that the frames came in."""
    cache_event: CacheEvent = ""
    """What the decoded cache has met in this worker so far."""

    def pin_memory(self) -> ReadBatch:
        return replace(self, batch=None if self.batch is None else self.batch.pin_memory())


worker_memory = WorkerMemory()
"""Of this process; it does nothing outside a loader's worker."""


class _Clips(torch.utils.data.Dataset[ReadBatch], ABC):
    """Batches by position; subclasses fill them."""

    def __init__(self, clips: ClipSet, settings: ClipSettings, board: LoanBoard | None = None) -> None:
        self.clips = clips
        self.settings = settings
        self.cache = open_cache(settings)
        self._buffers = WorkerBuffers(board)

    def __getitems__(self, positions: list[int]) -> ReadBatch:
        try:
            reader = BatchReader(self.settings, len(positions), self._buffers, self.cache)
        except SharedMemoryError as full:
            return ReadBatch(batch=None, bad_files=(), num_tries=0, failure=str(full))
        return self._read(positions, reader)

    @abstractmethod
    def _read(self, positions: list[int], reader: BatchReader) -> ReadBatch:
        """Fill ``reader`` with the clips of ``positions``."""


class TrainClips(_Clips):
    """Training clips by global position."""

    def _read(self, positions: list[int], reader: BatchReader) -> ReadBatch:
        for position in positions:
            for attempt in range(MAX_ATTEMPTS):
                number = file_of(position, len(self.clips), self.settings.seed, attempt)
                row = self.clips.index.row(int(self.clips.rows[number]))
                choice = choose_clip(row, self.settings, position, len(self.clips), attempt)
                if reader.read(self.clips, row, choice, position):
                    break
            else:
                return reader.fail(f"{MAX_ATTEMPTS} files in a row could not be read at position {position}")
        return reader.finish(epoch=epoch_of(positions[0], len(self.clips)))


class ValidationClips(_Clips):
    """Validation clips; position i is the i-th file of the set. A bad file leaves its place empty."""

    def _read(self, positions: list[int], reader: BatchReader) -> ReadBatch:
        for position in positions:
            row = self.clips.index.row(int(self.clips.rows[position]))
            reader.read(self.clips, row, choose_validation_clip(row, self.settings), position)
        return reader.finish(epoch=0)


class BatchReader:
    """Fills one batch tensor, clip by clip."""

    def __init__(
        self, settings: ClipSettings, batch_size: int, buffers: WorkerBuffers, cache: DecodedCache | None
    ) -> None:
        self._settings = settings
        self._cache = cache
        shape = (batch_size, settings.n_frames, 3, settings.height, settings.width)
        self._frames, self._loan = buffers.take(shape)
        self._color_and_blur: list[tuple[float, ...]] = []
        self._names: list[str] = []
        self._positions: list[int] = []
        self._bad: list[BadFile] = []
        self._num_tries = 0

    def read(self, clips: ClipSet, row: IndexRow, choice: ClipChoice, position: int) -> bool:
        """Read one clip into the next place; False when the file is bad."""
        self._num_tries += 1
        try:
            read_clip(clips, row, choice, self._settings, self._frames[len(self._names)], self._cache)
        except UnreadableVideoError as refused:
            reason = str(refused).removeprefix(f"{clips.index.full_path(row)}: ")
            self._bad.append(BadFile(path=row.path, reason=reason))
            return False
        except OSError as failed:
            self._bad.append(BadFile(path=row.path, reason=f"cannot be read: {failed.strerror or failed}"))
            return False
        self._names.append(row.path)
        self._positions.append(position)
        self._color_and_blur.append(choice.color_and_blur.as_tuple())
        worker_memory.after_clip()
        return True

    def fail(self, reason: str) -> ReadBatch:
        """No batch: the files in a row that could not be read end the run."""
        last = self._bad[-1]
        failure = (
            f"{reason}; the last was {last.path!r}: {last.reason}; look whether the storage is still mounted, "
            "or run `tinyvae data check`"
        )
        return ReadBatch(batch=None, bad_files=tuple(self._bad), num_tries=self._num_tries, failure=failure)

    def finish(self, *, epoch: int) -> ReadBatch:
        batch = None
        if self._names:
            batch = ClipBatch(
                frames=self._frames[: len(self._names)],
                color_and_blur=torch.tensor(self._color_and_blur),
                names=self._names,
                positions=self._positions,
                epoch=epoch,
            )
        return ReadBatch(
            batch=batch,
            bad_files=tuple(self._bad),
            num_tries=self._num_tries,
            loan=self._loan,
            cache_event="" if self._cache is None else self._cache.event,
        )


def open_cache(settings: ClipSettings) -> DecodedCache | None:
    """The cache of decoded files that the settings ask for. What is used from now on stays there for this loader."""
    if settings.decoded_cache_gb <= 0:
        return None
    folder = settings.decoded_cache_dir or default_cache_dir()
    return DecodedCache(folder, max_gb=settings.decoded_cache_gb, keep_used_since=time.time())


def read_clip(
    clips: ClipSet,
    row: IndexRow,
    choice: ClipChoice,
    settings: ClipSettings,
    out_TCHW: Tensor,
    cache: DecodedCache | None,
) -> None:
    """Fill ``out_TCHW`` (uint8, of clip size); ``UnreadableVideoError`` or ``OSError`` when the file cannot."""
    path = clips.index.full_path(row)
    found = os.stat(path)
    if found.st_size != row.file_bytes:
        raise UnreadableVideoError(
            f"{path}: it has {found.st_size} bytes but had {row.file_bytes} when it was indexed; "
            "run `tinyvae data index` again"
        )
    window = choice.window
    info, timeout_s = clips.index.info(row), settings.decode_timeout_s
    cached = None if cache is None else cache.clip(path, info, choice.frame_indices, window, timeout_s=timeout_s)
    if cached is not None:
        finish_clip(cached, out_TCHW, choice.flip)
        return
    native = (window.height, window.width) == (settings.height, settings.width)
    frames = read_frames(
        path,
        choice.frame_indices,
        info=info,
        timeout_s=timeout_s,
        window=(window.top, window.left, window.height, window.width),
        out=out_TCHW if native else None,
    )
    finish_clip(frames, out_TCHW, choice.flip)
