"""Reading videos: exactly these frames, or all frames one by one.

``frames i..j`` always means what a full FFmpeg decode yields at these places, edit lists honoured. A file that cannot
give them gives an :class:`tinyvae.errors.UnreadableVideoError` with the reason, never a substitute. Interlaced files
are refused, since combed frames are bad training data. The rules for colour, rotation and aspect are in ``pixels``,
those for damage and order in ``frame_stream``, those for opening and deadlines in ``video_file``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import av
import torch

from tinyvae.video.frame_stream import count_frames, seek_frames
from tinyvae.video.opening import Deadline, ends_crc, open_video, unreadable
from tinyvae.video.pixels import RgbConverter
from tinyvae.video.probe import Look, VideoInfo, find_timeline, probe_video, same_look, uneven_times_s

__all__ = ["VideoInfo", "iterate_frames", "probe_video", "read_frames", "uneven_times_s"]


def read_frames(
    path: Path,
    indices: Sequence[int],
    *,
    info: VideoInfo | None = None,
    timeout_s: float = 30.0,
    window: tuple[int, int, int, int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exactly the frames ``indices`` (rising, no repeats): uint8 RGB, TCHW, 0..255.

    ``info`` (from :func:`probe_video` or an index) spares a scan of the file's packets. One seek to the key frame
    before the first index, then decoding forward; only the frames asked for are converted.

    ``window`` (top, left, height, width; of the picture as shown) takes a part of each frame. ``out`` is a tensor of
    the result's shape to write into and return: a loader that fills batches spares a copy of every clip with it.
    """
    path = Path(path)
    wanted = [int(i) for i in indices]
    assert wanted and wanted[0] >= 0, f"frame numbers start at 0: {wanted}"
    assert all(a < b for a, b in pairwise(wanted)), f"frame numbers must rise: {wanted}"
    if info is not None:
        if wanted[-1] >= info.frames:
            raise unreadable(path, f"it has {info.frames} frames, frame {wanted[-1]} was asked for")
        check_unchanged(path, info)
    places = {number: place for place, number in enumerate(wanted)}
    converter = RgbConverter()
    frames_TCHW: torch.Tensor | None = None
    for number, frame, look in _frames_from(path, wanted[0], info, Deadline(path, timeout_s)):
        if info is not None and look.shown_size != (info.width, info.height):
            shown = "{}x{}".format(*look.shown_size)
            raise unreadable(path, f"frame {number} is {shown}, not {info.width}x{info.height} as it was indexed")
        place = places.get(number)
        if place is not None:
            top, left, height, width = window or (0, 0, look.shown_size[1], look.shown_size[0])
            assert top + height <= look.shown_size[1] and left + width <= look.shown_size[0], "window out of picture"
            if frames_TCHW is None:
                shape = (len(wanted), 3, height, width)
                frames_TCHW = torch.empty(shape, dtype=torch.uint8) if out is None else out
                assert frames_TCHW.shape == shape and frames_TCHW.dtype == torch.uint8, "out does not fit"
            converter.write(frame, look.orientation, frames_TCHW[place].numpy(), top, left)
        if frames_TCHW is not None and number >= wanted[-1]:
            return frames_TCHW
    raise unreadable(path, f"it ends before frame {wanted[-1]}, which was asked for")


def iterate_frames(
    path: Path, *, start: int = 0, stop: int | None = None, timeout_s: float = 30.0
) -> Iterator[torch.Tensor]:
    """Frames ``start`` to ``stop`` (excluded; None: to the end), one by one: uint8 RGB, CHW. Constant memory.

    ``timeout_s`` holds for each frame. Damage is raised when it is reached, after the sound frames before it; a
    ``stop`` behind the end of the file is an error too, since the frames asked for are not there.
    """
    path = Path(path)
    assert start >= 0, f"frame numbers start at 0: {start}"
    if stop is not None and stop <= start:
        return
    deadline = Deadline(path, timeout_s)
    converter = RgbConverter()
    number = start - 1
    for number, frame, look in _frames_from(path, start, None, deadline):
        width, height = look.shown_size
        frame_CHW = torch.empty((3, height, width), dtype=torch.uint8)
        converter.write(frame, look.orientation, frame_CHW.numpy())
        yield frame_CHW
        deadline.restart()  # the time that the caller took with the frame does not count
        if stop is not None and number + 1 >= stop:
            return
    if number < start:
        raise unreadable(path, "no frames" if start == 0 else f"it ends before frame {start}")
    if stop is not None:
        raise unreadable(path, f"it ends after frame {number}, frames up to {stop - 1} were asked for")


def check_unchanged(path: Path, info: VideoInfo) -> None:
    """Refuse a file whose tables are not those that ``info`` was read from: its frames may have other numbers."""
    if info.ends_crc is not None and info.ends_crc != ends_crc(path):
        raise unreadable(path, "it has changed since it was indexed; run `tinyvae data index` again")


def _frames_from(
    path: Path, first: int, info: VideoInfo | None, deadline: Deadline
) -> Iterator[tuple[int, av.VideoFrame, Look]]:
    """(number, frame, look) from frame ``first`` on: by a seek where that is sound, else by counting."""
    timeline = find_timeline(path, info, deadline) if first > 0 else None
    if timeline is not None and timeline.may_hold(first):
        with open_video(path, deadline) as video:
            numbered = seek_frames(video, timeline, first)
            if numbered is not None:
                yield from same_look(path, numbered)
                return
    with open_video(path, deadline) as video:
        for number, frame, look in same_look(path, count_frames(video)):
            if number >= first:
                yield number, frame, look
