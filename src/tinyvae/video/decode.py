"""Reading videos: what is in a file, exactly these frames, or all frames one by one.

Frame i is always the i-th frame that a full FFmpeg decode gives, edit lists honored. A file that cannot give it raises
:class:`tinyvae.errors.UnreadableVideoError` with the reason. Interlaced files are refused: combed frames are bad
training data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import torch

from tinyvae.errors import UnreadableVideoError
from tinyvae.video.frame_stream import (
    CUT_OFF,
    ONE_FRAME_PER_PACKET,
    count_frames,
    end_proof,
    packets_have_times,
    seek_frames,
)
from tinyvae.video.opening import DamageError, Deadline, OpenVideo, check_regular_file, ends_crc, open_video
from tinyvae.video.pixels import Orientation, RgbConverter, frame_orientation
from tinyvae.video.timeline import EvenTimeline, Timeline, VariableTimeline, even_step, reorder_depth, rising_times

_COUNTED_STEP = -1.0
_SCANS_KEPT = 64  # packet scans that a process remembers, for files with uneven times


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """What is known of one video: what an index holds of it."""

    path: Path
    frames: int
    """What a full decode gives, edit list honored."""
    fps: float
    """Average frames per second; 0.0 where the file does not say (one frame and no rate)."""
    width: int
    """Shown width in stored pixels, after rotation; the sample aspect ratio is not applied."""
    height: int
    codec: str
    first_pts: int = 0
    """Presentation time of frame 0, in the stream's time base."""
    pts_step: float = 0.0
    """Above 0: times lie on an even grid with this step (stream's time base). 0: times are uneven, and a reader scans
    the packets once. Below 0: times say nothing, and a reader decodes from the start and counts."""
    pixel_aspect: float = 1.0
    """Sample aspect ratio: width / height of one pixel as it should be shown."""
    ends_crc: int | None = None
    """Of the file when it was probed. A reader refuses a file with another one."""


def probe_video(path: Path, *, timeout_s: float = 30.0, thorough: bool = True) -> VideoInfo:
    """Look at a whole file and tell what is in it; ``UnreadableVideoError`` if it is not fit to be read.

    ``thorough`` decodes every frame. Otherwise every packet is read but only the first frame is decoded: many times
    faster, but damage shows only when the frames are read.

    >>> probe_video(Path("clip.mp4")).frames  # doctest: +SKIP
    120
    """
    path = Path(path)
    deadline = Deadline(path, timeout_s)
    times = None
    if not thorough:
        with open_video(path, deadline) as video:
            times = _packet_times(video)
    with open_video(path, deadline) as video:
        frames = _same_picture(path, count_frames(video))
        first = next(frames, None)
        if first is None:
            raise UnreadableVideoError(path, "no frames")
        _, first_frame, orientation = first
        if times is None or times[0] != first_frame.pts:
            shown = [first_frame.pts, *(frame.pts for _, frame, _ in frames)]
        else:
            shown = times.tolist()
        return _describe(video, first_frame, orientation, shown)


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

    One seek to the key frame before the first index, then decoding forward. Only the frames asked for are converted.

    Args:
        info: from :func:`probe_video` or an index; it saves a scan of the file's packets.
        window: (top, left, height, width) of the picture as shown: take only this part of each frame.
        out: a tensor of the result's shape to write into and return. It saves a loader one copy of every clip.

    >>> read_frames(Path("clip.mp4"), range(10, 14)).shape  # doctest: +SKIP
    torch.Size([4, 3, 480, 720])
    """
    path = Path(path)
    wanted = [int(i) for i in indices]
    assert wanted and wanted[0] >= 0, f"frame numbers start at 0: {wanted}"
    assert all(a < b for a, b in pairwise(wanted)), f"frame numbers must rise: {wanted}"
    if info is not None:
        if wanted[-1] >= info.frames:
            raise UnreadableVideoError(path, f"it has {info.frames} frames, frame {wanted[-1]} was asked for")
        check_unchanged(path, info)
    places = {number: place for place, number in enumerate(wanted)}
    converter = RgbConverter()
    for number, frame, orientation in _frames_from(path, wanted[0], info, Deadline(path, timeout_s)):
        shown_width, shown_height = orientation.size(frame.width, frame.height)
        if info is not None and (shown_width, shown_height) != (info.width, info.height):
            shown = f"{shown_width}x{shown_height}, not {info.width}x{info.height}"
            raise UnreadableVideoError(path, f"frame {number} is {shown} as it was indexed")
        place = places.get(number)
        if place is None:
            continue
        top, left, height, width = window or (0, 0, shown_height, shown_width)
        assert top + height <= shown_height and left + width <= shown_width, "window out of picture"
        shape = (len(wanted), 3, height, width)
        out = torch.empty(shape, dtype=torch.uint8) if out is None else out
        assert out.shape == shape and out.dtype == torch.uint8, "out does not fit"
        converter.write(frame, orientation, out[place].numpy(), top, left)
        if number == wanted[-1]:
            return out
    raise UnreadableVideoError(path, f"it ends before frame {wanted[-1]}, which was asked for")


def check_unchanged(path: Path, info: VideoInfo) -> None:
    """Refuse a file that is not the one that was probed, by its ends."""
    if info.ends_crc is not None and info.ends_crc != ends_crc(path):
        raise UnreadableVideoError(path, "it has changed since it was indexed; run `tinyvae data index` again")


def iterate_frames(
    path: Path, *, start: int = 0, stop: int | None = None, timeout_s: float = 30.0
) -> Iterator[torch.Tensor]:
    """Frames ``start`` to ``stop`` (excluded; None: to the end), one by one: uint8 RGB, CHW. Constant memory.

    ``timeout_s`` is for each frame. Damage raises when the reader reaches it, after the sound frames before it. A
    ``stop`` behind the end of the file is an error too.

    >>> sum(1 for frame_CHW in iterate_frames(Path("clip.mp4")))  # doctest: +SKIP
    120
    """
    path = Path(path)
    assert start >= 0, f"frame numbers start at 0: {start}"
    if stop is not None and stop <= start:
        return
    deadline = Deadline(path, timeout_s)
    converter = RgbConverter()
    number = start - 1
    for number, frame, orientation in _frames_from(path, start, None, deadline):
        width, height = orientation.size(frame.width, frame.height)
        frame_CHW = torch.empty((3, height, width), dtype=torch.uint8)
        converter.write(frame, orientation, frame_CHW.numpy())
        yield frame_CHW
        deadline.restart()  # the time that the caller took with the frame does not count
        if stop is not None and number + 1 >= stop:
            return
    if number < start:
        raise UnreadableVideoError(path, "no frames" if start == 0 else f"it ends before frame {start}")
    if stop is not None:
        raise UnreadableVideoError(path, f"it ends after frame {number}, frames up to {stop - 1} were asked for")


def uneven_times_s(path: Path, info: VideoInfo, *, timeout_s: float = 30.0) -> npt.NDArray[np.float64] | None:
    """When each frame is shown, in seconds after the first; None where times are even or unknown."""
    if info.pts_step != 0:
        return None
    deadline = Deadline(path, timeout_s)
    times = _remembered_times(path, deadline)
    with open_video(path, deadline) as video:
        time_base = video.stream.time_base
    if times is None or not time_base or len(times) != info.frames:
        return None
    return (times - times[0]) * float(time_base)


def _frames_from(
    path: Path, first: int, info: VideoInfo | None, deadline: Deadline
) -> Iterator[tuple[int, av.VideoFrame, Orientation]]:
    """(number, frame, orientation) from frame ``first`` on: by a seek where that is sound, else by counting."""
    timeline: Timeline | None = None
    if first > 0 and info is not None and info.pts_step > 0:
        timeline = EvenTimeline(first_pts=info.first_pts, pts_step=info.pts_step)
    elif first > 0 and (info is None or info.pts_step == 0):
        times = _remembered_times(path, deadline)
        timeline = VariableTimeline(pts=times) if times is not None and first < len(times) else None
    if timeline is not None:
        with open_video(path, deadline) as video:
            numbered = seek_frames(video, timeline, first)
            if numbered is not None:
                yield from _same_picture(path, numbered)
                return
    with open_video(path, deadline) as video:
        for number, frame, orientation in _same_picture(path, count_frames(video)):
            if number >= first:
                yield number, frame, orientation


def _same_picture(
    path: Path, numbered: Iterator[tuple[int, av.VideoFrame]]
) -> Iterator[tuple[int, av.VideoFrame, Orientation]]:
    """Add the orientation; refuse interlaced frames, and a size or rotation that changes inside the file."""
    orientation: Orientation | None = None
    width = height = rotation = 0
    for number, frame in numbered:
        if frame.interlaced_frame:
            raise UnreadableVideoError(path, f"interlaced (frame {number}); deinterlace it, e.g. ffmpeg -vf bwdif")
        if orientation is None:
            orientation = frame_orientation(frame, path)
            width, height, rotation = frame.width, frame.height, frame.rotation
        if (frame.width, frame.height) != (width, height):
            change = f"{width}x{height} to {frame.width}x{frame.height} at frame {number}"
            raise UnreadableVideoError(path, f"resolution changes inside the file ({change})")
        if frame.rotation != rotation:
            raise UnreadableVideoError(path, f"rotation changes inside the file (at frame {number})")
        yield number, frame, orientation


def _describe(video: OpenVideo, frame: av.VideoFrame, orientation: Orientation, shown: list[int | None]) -> VideoInfo:
    """``frame``: any of the file; ``shown``: the presentation time of every frame, as decoded."""
    stream = video.stream
    times = rising_times(shown)
    step = _COUNTED_STEP if times is None else even_step(times)
    if step is None:
        # The times of packets can stand for those of frames only where each packet is one frame.
        step = 0.0 if stream.codec_context.name in ONE_FRAME_PER_PACKET else _COUNTED_STEP
    if times is not None and len(times) > 1 and stream.time_base:
        fps = float((len(times) - 1) / ((times[-1] - times[0]) * stream.time_base))
    else:
        fps = float(stream.average_rate or stream.guessed_rate or 0)
    width, height = orientation.size(frame.width, frame.height)
    aspect = float(stream.sample_aspect_ratio or 1)
    return VideoInfo(
        path=video.path,
        frames=len(shown),
        fps=fps,
        width=width,
        height=height,
        codec=stream.codec_context.codec.canonical_name,
        first_pts=times[0] if times is not None else 0,
        pts_step=step,
        pixel_aspect=1 / aspect if orientation.transpose else aspect,
        ends_crc=ends_crc(video.path),
    )


_scans: dict[tuple[str, int, int], npt.NDArray[np.int64] | None] = {}


def _remembered_times(path: Path, deadline: Deadline) -> npt.NDArray[np.int64] | None:
    """The packet times of ``path``, scanned once per process and version of the file."""
    found = check_regular_file(path)
    key = (str(path), found.st_size, found.st_mtime_ns)
    if key not in _scans:
        with open_video(path, deadline) as video:
            times = _packet_times(video)
        while len(_scans) >= _SCANS_KEPT:
            del _scans[next(iter(_scans))]  # the oldest
        _scans[key] = times
    return _scans[key]


def _packet_times(video: OpenVideo) -> npt.NDArray[np.int64] | None:
    """Presentation times (int64, rising) of all frames, from the packets, without decoding.

    None where packets do not tell: a codec that hides pictures, a format without times, times that are missing or
    repeated, or pictures shown before the first key frame. Like decoding, this refuses a file that is cut off.
    """
    if video.stream.codec_context.name not in ONE_FRAME_PER_PACKET or not packets_have_times(video):
        return None
    times: list[int | None] = []
    key_seen, key_pts = False, None
    try:
        for packet in video.packets():
            if packet.is_keyframe and not key_seen:
                key_seen, key_pts = True, packet.pts
            elif not key_seen:
                return None
            if not packet.is_discard:
                times.append(packet.pts)
    except DamageError as broken:
        raise UnreadableVideoError(video.path, f"damaged or cut off after {len(times)} frames ({broken})") from None
    stored = [t for t in times if t is not None]
    rising = rising_times(sorted(stored))
    if not rising or len(rising) < len(times) or key_pts is None or rising[0] < key_pts:
        return None
    proof = end_proof(video)
    if proof is not None:
        last_ones = len(rising) - reorder_depth(stored)
        for number, pts in enumerate(rising):
            if not proof.follows(pts, at_end=number >= last_ones):
                raise UnreadableVideoError(video.path, f"damaged at frame {number} ({CUT_OFF})")
    return np.asarray(rising, dtype=np.int64)
