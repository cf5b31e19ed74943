"""Whole files as raw frames on a fast disk, for data sets small enough to be read many times over.

Decoding a clip of 12 frames out of a file with a key frame every 48 costs about 36 decoded frames; on a few gigabytes
of video that a GPU goes through hundreds of times it is the training step's bottleneck. With a cache each file is
decoded once, its frames are written as they are, and later clips are read from there, only the rows that they need.
What a clip holds does not change: the same frames come from the cache or from the file.

Rows are read, not mapped: a clip touches thousands of pages, and where page faults are dear (in a sandbox) a map cost
16 ms a clip.

Any number of processes share one folder without a lock. A copy appears by one rename and goes by one unlink, so a
reader has a whole file or none, and one that has it open reads it to its end. A use sets the file's time of change;
where room is needed, the copy that was not used for the longest time goes first.
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
from tinyvae.video.decode import VideoInfo, iterate_frames

GIB = 2**30
CHANNELS = 3
ABANDONED_S = 3600.0
"""A copy in the making that was not written to for so long is that of a process that was killed."""

CacheEvent = Literal["", "evicts", "full"]
"""What a cache met: nothing, copies that had to go for others, or a video that found no room."""


def default_cache_dir() -> Path:
    """A folder of this user's on the machine's own temporary disk; shared by all runs there."""
    user = os.getuid() if hasattr(os, "getuid") else "cache"  # Windows: each user has a temporary folder
    return Path(tempfile.gettempdir()) / f"tinyvae-decoded-{user}"


class DecodedCache:
    """A folder of raw RGB frames, one file per video, never larger than ``max_gb`` GiB (give or take one file per
    worker that is just being written).

    ``keep_used_since`` (a time of `time.time`): copies that anybody used after it do not go for others. A run sets it
    to its start: it comes back to each of its videos equally often, so giving one of them up for another gains
    nothing and costs a whole file's decoding each time.
    """

    def __init__(self, folder: Path, *, max_gb: float, keep_used_since: float = math.inf) -> None:
        self.folder = folder
        self.max_bytes = int(max_gb * GIB)
        self.keep_used_since = keep_used_since
        self.event: CacheEvent = ""

    def clip(
        self, path: Path, info: VideoInfo, frame_indices: Sequence[int], window: CropWindow, *, timeout_s: float
    ) -> Tensor | None:
        """The window of some frames of a video, uint8 TCHW RGB; None where the cache has no room for the video.

        Raises `UnreadableVideoError` where the file does not give the frames that its index entry promises.
        """
        file = self.folder / self._name(path)
        shape = (info.frames, CHANNELS, info.height, info.width)
        stream = _open_whole(file, math.prod(shape))
        if stream is None and self._fill(file, path, shape, timeout_s=timeout_s):
            stream = _open_whole(file, math.prod(shape))
        if stream is None:  # no room, or it went again at once for the video of another process
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
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._make_room(math.prod(shape)):
            self.event = "full"
            return False
        unfinished = file.with_suffix(f".{os.getpid()}.part")
        try:
            with unfinished.open("wb") as stream:
                count = 0
                for frame in iterate_frames(path, timeout_s=timeout_s):
                    if tuple(frame.shape) != shape[1:]:
                        raise UnreadableVideoError(
                            f"{path}: it shows {frame.shape[-1]}x{frame.shape[-2]} pixels, in the index "
                            f"{shape[3]}x{shape[2]}; run `tinyvae data index` again"
                        )
                    stream.write(frame.contiguous().numpy().data)
                    count += 1
            if count != shape[0]:
                raise UnreadableVideoError(
                    f"{path}: it gave {count} frames, in the index {shape[0]}; run `tinyvae data index` again"
                )
            unfinished.replace(file)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.event = "full"  # the disk is, before the cache; the video itself is good
            return False
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _make_room(self, size: int) -> bool:
        """Let copies go, the least recently used first, until one of ``size`` fits; False where it cannot."""
        held = sorted(_copies_in(self.folder))
        surplus = sum(copy_size for _, copy_size, _ in held) + size - self.max_bytes
        may_go = [copy for copy in held if self._may_go(*copy)]
        if surplus > sum(copy_size for _, copy_size, _ in may_go):
            return False  # and nothing has gone for it
        for _, copy_size, file in may_go:
            if surplus <= 0:
                break
            with suppress(PermissionError):  # not ours, or (on Windows) open; the next one goes instead
                file.unlink(missing_ok=True)
                surplus -= copy_size
                self.event = self.event or "evicts"
        return surplus <= 0

    def _may_go(self, last_use: float, _size: int, file: Path) -> bool:
        if file.suffix == ".part":
            return last_use < time.time() - ABANDONED_S
        return last_use < self.keep_used_since


def _copies_in(folder: Path) -> list[tuple[float, int, Path]]:
    """(time of last use, bytes, file) of each copy, those in the making included."""
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith((".rgb", ".part")):
            with suppress(FileNotFoundError):  # it went while the folder was read
                stat = entry.stat()
                found.append((stat.st_mtime, stat.st_size, Path(entry.path)))
    return found


def _open_whole(file: Path, size: int) -> FileIO | None:
    """A copy to read from, marked as used just now; None where there is none of that size."""
    try:
        stream = file.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    if os.fstat(stream.fileno()).st_size != size:
        stream.close()
        return None
    with suppress(OSError):  # it went this moment, or is another user's: it can be read all the same
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
            raise UnreadableVideoError(f"{stream.name}: this decoded copy became shorter while it was read; delete it")
        plane[:] = rows[:, window.left : window.left + window.width]
