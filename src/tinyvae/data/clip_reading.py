"""Reading the clips of a list of positions: choose, decode, cut, and put another in place of a bad one.

These data sets run inside loader workers. They never raise for a bad file: what went wrong travels to the main
process with the batch, so that the message is one sentence there and not a worker's traceback.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyvae.data.augment import to_model_input
from tinyvae.data.bad_files import BadFile
from tinyvae.data.clip_choice import ClipChoice, choose_clip, choose_validation_clip, epoch_of, file_of
from tinyvae.data.clip_settings import ClipSettings
from tinyvae.data.decode import read_frames
from tinyvae.data.decoded_cache import DecodedCache, default_cache_dir
from tinyvae.data.geometry import finish_clip
from tinyvae.data.index import IndexRow
from tinyvae.data.splits import ClipSet
from tinyvae.data.worker_process import WorkerMemory
from tinyvae.errors import UnreadableVideoError

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
        frames = self.frames if device is None else self.frames.to(device, non_blocking=True)
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
    """Set when a training position found no readable file; the run cannot go on."""

    def pin_memory(self) -> ReadBatch:
        return ReadBatch(
            batch=None if self.batch is None else self.batch.pin_memory(),
            bad_files=self.bad_files,
            num_tries=self.num_tries,
            failure=self.failure,
        )


worker_memory = WorkerMemory()
"""Of this process; it does nothing outside a loader's worker."""


class TrainClips(torch.utils.data.Dataset[ReadBatch]):
    """Training clips by global position."""

    def __init__(self, clips: ClipSet, settings: ClipSettings) -> None:
        self.clips = clips
        self.settings = settings

    def __getitems__(self, positions: list[int]) -> ReadBatch:
        reader = BatchReader(self.settings, len(positions))
        for position in positions:
            for attempt in range(MAX_ATTEMPTS):
                number = file_of(position, len(self.clips), self.settings.seed, attempt)
                row = self.clips.index.row(int(self.clips.rows[number]))
                choice = choose_clip(row, self.settings, position, len(self.clips), attempt)
                if reader.read(self.clips, row, choice, position):
                    break
            else:
                return reader.finish(
                    epoch=epoch_of(position, len(self.clips)),
                    failure=f"{MAX_ATTEMPTS} files in a row could not be read at position {position}",
                )
        return reader.finish(epoch=epoch_of(positions[0], len(self.clips)))


class ValidationClips(torch.utils.data.Dataset[ReadBatch]):
    """Validation clips; position i is the i-th file of the set. A bad file leaves its place empty."""

    def __init__(self, clips: ClipSet, settings: ClipSettings) -> None:
        self.clips = clips
        self.settings = settings

    def __getitems__(self, positions: list[int]) -> ReadBatch:
        reader = BatchReader(self.settings, len(positions))
        for position in positions:
            row = self.clips.index.row(int(self.clips.rows[position]))
            reader.read(self.clips, row, choose_validation_clip(row, self.settings), position)
        return reader.finish(epoch=0)


class BatchReader:
    """Fills one batch tensor, clip by clip."""

    def __init__(self, settings: ClipSettings, batch_size: int) -> None:
        self._settings = settings
        self._frames = _batch_memory((batch_size, settings.n_frames, 3, settings.height, settings.width))
        self._color_and_blur: list[tuple[float, ...]] = []
        self._names: list[str] = []
        self._positions: list[int] = []
        self._bad: list[BadFile] = []
        self._num_tries = 0

    def read(self, clips: ClipSet, row: IndexRow, choice: ClipChoice, position: int) -> bool:
        """Read one clip into the next place; False when the file is bad."""
        self._num_tries += 1
        try:
            read_clip(clips, row, choice, self._settings, self._frames[len(self._names)])
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

    def finish(self, *, epoch: int, failure: str = "") -> ReadBatch:
        batch = None
        if self._names and not failure:
            batch = ClipBatch(
                frames=self._frames[: len(self._names)],
                color_and_blur=torch.tensor(self._color_and_blur),
                names=self._names,
                positions=self._positions,
                epoch=epoch,
            )
        return ReadBatch(batch=batch, bad_files=tuple(self._bad), num_tries=self._num_tries, failure=failure)


def _batch_memory(shape: tuple[int, ...]) -> Tensor:
    """An empty uint8 tensor; in a worker it lies in shared memory, so that handing it over copies nothing."""
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


def read_clip(clips: ClipSet, row: IndexRow, choice: ClipChoice, settings: ClipSettings, out_TCHW: Tensor) -> None:
    """Fill ``out_TCHW`` (uint8, of clip size); ``UnreadableVideoError`` or ``OSError`` when the file cannot."""
    path = clips.index.full_path(row)
    found = os.stat(path)
    if found.st_size != row.file_bytes:
        raise UnreadableVideoError(
            f"{path}: it has {found.st_size} bytes but had {row.file_bytes} when it was indexed; "
            "run `tinyvae data index` again"
        )
    window = choice.window
    cached = _cached_window(clips, row, choice, settings) if settings.decoded_cache_gb > 0 else None
    if cached is not None:
        finish_clip(cached, out_TCHW, choice.flip)
        return
    native = (window.height, window.width) == (settings.height, settings.width)
    frames = read_frames(
        path,
        choice.frame_indices,
        info=clips.index.info(row),
        timeout_s=settings.decode_timeout_s,
        window=(window.top, window.left, window.height, window.width),
        out=out_TCHW if native else None,
    )
    finish_clip(frames, out_TCHW, choice.flip)


def _cached_window(clips: ClipSet, row: IndexRow, choice: ClipChoice, settings: ClipSettings) -> Tensor | None:
    """The clip's window of its frames, a view of the decoded cache; None where the file does not fit in there."""
    cache = DecodedCache(settings.decoded_cache_dir or default_cache_dir(), max_gb=settings.decoded_cache_gb)
    video = cache.frames(clips.index.full_path(row), clips.index.info(row), timeout_s=settings.decode_timeout_s)
    if video is None:
        return None
    first, *others = choice.frame_indices
    delta = others[0] - first if others else 1
    window = choice.window
    rows, columns = slice(window.top, window.top + window.height), slice(window.left, window.left + window.width)
    return video[first : choice.frame_indices[-1] + 1 : delta, :, rows, columns]
