"""Whole files as raw frames on a fast disk, for data sets small enough to be read many times over.

Decoding a clip of 12 frames out of a file with a key frame every 48 costs about 36 decoded frames; on a few gigabytes
of video that a GPU goes through hundreds of times it is the training step's bottleneck. With a cache each file is
decoded once, its frames are written as they are, and later clips are read from there, only the rows that they need.
What a clip holds does not change: the same frames come from the cache or from the file.

Rows are read, not mapped: a clip touches thousands of pages, and where page faults are dear (in a sandbox) a map cost
16 ms a clip.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinyvae.data.decode import VideoInfo, iterate_frames
from tinyvae.data.geometry import CropWindow
from tinyvae.errors import UnreadableVideoError

GIB = 2**30
CHANNELS = 3


def default_cache_dir() -> Path:
    """A folder of this user's on the machine's own temporary disk; shared by all runs there."""
    user = os.getuid() if hasattr(os, "getuid") else "cache"  # Windows: each user has a temporary folder
    return Path(tempfile.gettempdir()) / f"tinyvae-decoded-{user}"


class DecodedCache:
    """A folder of raw RGB frames, one file per video, never larger than ``max_gb`` GiB (give or take one file per
    worker that is just being written)."""

    def __init__(self, folder: Path, *, max_gb: float) -> None:
        self.folder = folder
        self.max_bytes = int(max_gb * GIB)

    def clip(
        self, path: Path, info: VideoInfo, frame_indices: Sequence[int], window: CropWindow, *, timeout_s: float
    ) -> Tensor | None:
        """The window of some frames of a video, uint8 TCHW RGB; None where the cache has no room for the video.

        Raises `UnreadableVideoError` where the file does not give the frames that its index entry promises.
        """
        file = self.folder / self._name(path)
        shape = (info.frames, CHANNELS, info.height, info.width)
        if not _has_size(file, math.prod(shape)) and not self._fill(file, path, shape, timeout_s=timeout_s):
            return None
        clip = np.empty((len(frame_indices), CHANNELS, window.height, window.width), dtype=np.uint8)
        with file.open("rb", buffering=0) as stream:
            for frame, index in zip(clip, frame_indices, strict=True):
                _read_window(stream, index, window, frame, frame_height=info.height, frame_width=info.width)
        return torch.from_numpy(clip)

    def _name(self, path: Path) -> str:
        """Another name for another version of the file, so that a replaced video is decoded anew."""
        found = path.stat()
        key = f"{path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".rgb"

    def _fill(self, file: Path, path: Path, shape: tuple[int, ...], *, timeout_s: float) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._bytes_held() + math.prod(shape) > self.max_bytes:
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
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _bytes_held(self) -> int:
        return sum(entry.stat().st_size for entry in os.scandir(self.folder) if entry.name.endswith(".rgb"))


def _has_size(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except FileNotFoundError:
        return False


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
