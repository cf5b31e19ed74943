"""Whole files as raw frames on a fast disk, for data sets small enough to be read many times over.

Each file is decoded once, and later clips read only the rows that they need. A clip has the same frames with and
without the cache. Rows are read, not mapped: where page faults are slow (in a sandbox) a map cost 16 ms a clip.

Any number of processes share one folder without a lock: a copy appears by one rename and goes by one unlink. Each use
sets the file's time of change. Where room is needed, the copy that was not used for the longest time goes first.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tinyvae.data.clip import CropWindow
from tinyvae.errors import UnreadableVideoError
from tinyvae.files import atomic_write
from tinyvae.video.decode import VideoInfo, iterate_frames

GIB = 2**30
CHANNELS = 3
ABANDONED_S = 3600.0
"""An unfinished copy that was not written to for this long belongs to a process that was killed."""

CacheEvent = Literal["", "evicts", "full"]
"""What happened to a cache: nothing, copies were deleted for others, or a video found no room."""


def default_cache_dir() -> Path:
    """A folder of this user on the machine's own temporary disk; all runs there share it."""
    user = os.getuid() if hasattr(os, "getuid") else "cache"  # Windows: each user has a temporary folder
    return Path(tempfile.gettempdir()) / f"tinyvae-decoded-{user}"


class DecodedCache:
    """A folder of raw RGB frames, one file per video, never larger than ``max_gb`` GiB (and one file per worker).

    Copies used after ``keep_used_since`` (a time of `time.time`) are not deleted for others. A run sets it to its
    start: it needs each of its videos equally often, so to delete one of them for another gains nothing.
    """

    def __init__(self, folder: Path, *, max_gb: float, keep_used_since: float = math.inf) -> None:
        self.folder = folder
        self.max_bytes = int(max_gb * GIB)
        self.keep_used_since = keep_used_since
        self.event: CacheEvent = ""

    def clip(
        self, path: Path, info: VideoInfo, frame_indices: Sequence[int], window: CropWindow, *, timeout_s: float
    ) -> Tensor | None:
        """The window of some frames of a video, uint8 TCHW RGB; None where the cache has no room for the video."""
        file = self.folder / self._name(path)
        shape = (info.frames, CHANNELS, info.height, info.width)
        stream = _open_whole(file, math.prod(shape))
        if stream is None and self._fill(file, path, shape, timeout_s=timeout_s):
            stream = _open_whole(file, math.prod(shape))
        if stream is None:  # no room, or another process deleted it at once for its own video
            return None
        with stream:
            clip = np.empty((len(frame_indices), CHANNELS, window.height, window.width), dtype=np.uint8)
            for frame, index in zip(clip, frame_indices, strict=True):
                _read_window(stream, index, window, frame, frame_height=info.height, frame_width=info.width)
        return torch.from_numpy(clip)

    def _name(self, path: Path) -> str:
        """Another name for another version of the file, so that a replaced video is decoded again."""
        found = path.stat()
        key = f"{path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".rgb"

    def _fill(self, file: Path, path: Path, shape: tuple[int, ...], *, timeout_s: float) -> bool:
        """Decode the whole video into ``file``; False where there is no room for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._make_room(math.prod(shape)):
            self.event = "full"
            return False
        try:
            with atomic_write(file, sync=False) as stream:
                count = 0
                for frame in iterate_frames(path, timeout_s=timeout_s):
                    if tuple(frame.shape) != shape[1:]:
                        shown = f"{frame.shape[-1]}x{frame.shape[-2]} pixels, in the index {shape[3]}x{shape[2]}"
                        raise UnreadableVideoError(path, f"it shows {shown}; run `tinyvae data index` again")
                    stream.write(frame.numpy().data)
                    count += 1
                if count != shape[0]:
                    gave = f"{count} frames, in the index {shape[0]}"
                    raise UnreadableVideoError(path, f"it gave {gave}; run `tinyvae data index` again")
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.event = "full"  # the disk is full before the cache is; the video itself is good
            return False
        return True

    def _make_room(self, size: int) -> bool:
        """Delete copies, the least recently used first, until one of ``size`` fits; False where it cannot."""
        surplus = size - self.max_bytes
        deletable: list[tuple[float, int, str]] = []
        for entry in os.scandir(self.folder):
            if entry.name.endswith((".rgb", ".part")):
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    found = entry.stat()
                    surplus += found.st_size
                    is_part = entry.name.endswith(".part")
                    if found.st_mtime < (time.time() - ABANDONED_S if is_part else self.keep_used_since):
                        deletable.append((found.st_mtime, found.st_size, entry.path))
        if surplus > sum(copy_size for _, copy_size, _ in deletable):
            return False  # and nothing was deleted for it
        for _, copy_size, file in sorted(deletable):
            if surplus > 0:
                with suppress(PermissionError):  # not ours, or (on Windows) open: delete the next one
                    Path(file).unlink(missing_ok=True)
                    surplus -= copy_size
                    self.event = self.event or "evicts"
        return surplus <= 0


def _open_whole(file: Path, size: int) -> FileIO | None:
    """A copy to read from, marked as used now; None where there is none of that size."""
    try:
        stream = file.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    if os.fstat(stream.fileno()).st_size != size:
        stream.close()
        return None
    with suppress(OSError):  # deleted at this moment, or another user's: it can still be read
        os.utime(file)
    return stream


def _read_window(
    stream: FileIO, index: int, window: CropWindow, out_CHW: np.ndarray, *, frame_height: int, frame_width: int
) -> None:
    """Fill ``out_CHW`` with the window of frame ``index`` of a file of raw frames: whole rows, then their middle."""
    rows = np.empty((window.height, frame_width), dtype=np.uint8)
    for channel, plane in enumerate(out_CHW):
        first_row = (index * CHANNELS + channel) * frame_height + window.top
        stream.seek(first_row * frame_width)
        if stream.readinto(rows.data) != rows.nbytes:
            raise UnreadableVideoError(Path(stream.name), "this decoded copy became shorter during a read; delete it")
        plane[:] = rows[:, window.left : window.left + window.width]
