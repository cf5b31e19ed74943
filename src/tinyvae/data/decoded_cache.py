"""Whole files as raw frames on a fast disk, for data sets small enough to be read many times over.

Each file is decoded once, and later clips read only the rows that they need. A clip has the same frames with and
without the cache. Rows are read, not mapped: where page faults are slow (in a sandbox) a map cost 16 ms a clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from tinyvae.cache_folder import CacheFolder, open_copy
from tinyvae.data.clip import CropWindow
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.files import FULL_DISK_ERRORS, atomic_write
from tinyvae.storage import FileVersion, Place, absolute_text, local_file
from tinyvae.video.decode import VideoInfo, check_unchanged, iterate_frames

CHANNELS = 3


class DecodedCache(CacheFolder):
    """A folder of raw RGB frames, one file per video, never larger than ``max_gb`` GiB (and one file per worker).

    Copies of this run are not deleted for others. A run needs each of its videos equally often, so to delete one of
    them for another gains nothing: it would decode a whole video for each clip.
    """

    title = "the decoded cache"
    advice = (
        "decoded_cache_gb ({max_gb:.3g}) or the disk does not hold all files of this run, and clips of the others are "
        "decoded each time; raise decoded_cache_gb, or name another decoded_cache_dir"
    )

    def __init__(self, folder: Path, *, max_gb: float, run_start: float = math.inf) -> None:
        super().__init__(folder, max_gb=max_gb, run_start=run_start)
        self._not_whole: set[Path] = set()  # copies of videos that cannot be decoded to their end

    def clip(
        self,
        video: Place,
        info: VideoInfo,
        frame_indices: Sequence[int],
        window: CropWindow,
        *,
        timeout_s: float,
        version: FileVersion,
    ) -> Tensor | None:
        """The window of some frames of a video, uint8 TCHW RGB; None where the cache has no room for the video, or the
        video cannot be decoded to its end: these frames may be sound, and a clip must not depend on the cache.

        A video behind a URL is fetched only if its copy is not there.
        """
        # Another name for another version of the file, so that a replaced video is decoded again.
        file = self.place(f"{absolute_text(video)}\0{version.size}\0{version.tag}", ".rgb")
        stream = self._open(file, video, version, info, timeout_s=timeout_s)
        if stream is None:
            return None
        with stream:
            clip = np.empty((len(frame_indices), CHANNELS, window.height, window.width), dtype=np.uint8)
            for frame, index in zip(clip, frame_indices, strict=True):
                _read_window(stream, index, window, frame, frame_height=info.height, frame_width=info.width)
        return torch.from_numpy(clip)

    def _open(
        self, file: Path, video: Place, version: FileVersion, info: VideoInfo, *, timeout_s: float
    ) -> FileIO | None:
        """The copy of a video, decoded now if it is not there; None where there is no room, or no whole video."""
        if file in self._not_whole:
            return None
        size = info.frames * CHANNELS * info.height * info.width
        try:
            stream = open_copy(file, size)
            if stream is not None:
                return stream
            if self.make_room(size, keep_used_since=self.run_start):
                with atomic_write(file, sync=False) as out:
                    _decode_into(out, local_file(video, version), info, timeout_s=timeout_s)
                return open_copy(file, size)  # None: another process deleted it at once for its own video
        except UnreadableVideoError:
            self._not_whole.add(file)
            return None
        except OSError as fault:
            if fault.errno not in FULL_DISK_ERRORS:  # the disk may be full before the cache is
                place = Path(str(fault.filename))
                if not (place.is_relative_to(self.folder) or self.folder.is_relative_to(place)):
                    raise
                raise UserError(
                    f"{self.title} {self.folder} cannot be used ({fault.strerror}); name another decoded_cache_dir, or "
                    "do without (decoded_cache_gb=0)"
                ) from None
        self.event = "full"
        return None


def _decode_into(stream: IO[bytes], path: Path, info: VideoInfo, *, timeout_s: float) -> None:
    """Write all frames of a video; an error where it is not as the index says."""
    check_unchanged(path, info)
    count = 0
    for frame in iterate_frames(path, timeout_s=timeout_s):
        height, width = frame.shape[1:]
        if (height, width) != (info.height, info.width):
            shown = f"{width}x{height} pixels, in the index {info.width}x{info.height}"
            raise UnreadableVideoError(path, f"it shows {shown}; run `tinyvae data index` again")
        stream.write(frame.numpy().data)
        count += 1
    if count != info.frames:
        gave = f"{count} frames, in the index {info.frames}"
        raise UnreadableVideoError(path, f"it gave {gave}; run `tinyvae data index` again")


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
