"""What is in a video file: how many frames at which times, of which size, and whether it is fit to be read."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from tinyvae.video.frame_stream import CUT_OFF, ONE_FRAME_PER_PACKET, count_frames, end_proof
from tinyvae.video.opening import Deadline, OpenVideo, PacketError, ends_crc, open_video, unreadable
from tinyvae.video.pixels import Orientation, frame_orientation
from tinyvae.video.timeline import (
    EvenTimeline,
    Timeline,
    Timing,
    VariableTimeline,
    even_step,
    reorder_depth,
    rising_times,
)

_SCANS_KEPT = 64  # packet scans that a process remembers, for files with uneven times


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """What is known of one video. The numbers are small so that an index can hold them for millions of files."""

    path: Path
    frames: int
    """What a full decode yields, edit list honoured."""
    fps: float
    """Average frames per second; 0.0 where the file does not tell (one frame and no rate)."""
    width: int
    """Shown width in stored pixels, after rotation; the sample aspect ratio is not applied."""
    height: int
    codec: str
    interlaced: bool = False
    first_pts: int = 0
    """Presentation time of frame 0, in the stream's time base."""
    pts_step: float = 0.0
    """Time per frame in the stream's time base; 0: uneven times; negative: frames must be counted."""
    pixel_aspect: float = 1.0
    """Sample aspect ratio: width / height of one pixel as it should be shown."""
    ends_crc: int | None = None
    """Checksum of the file's two ends when it was probed; a reader refuses a file that has another one."""

    @property
    def timing(self) -> Timing:
        if self.pts_step > 0:
            return Timing.EVEN
        return Timing.VARIABLE if self.pts_step == 0 else Timing.COUNTED


_COUNTED_STEP = -1.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """What must stay the same from the first frame to the last: stored size and orientation."""

    width: int
    height: int
    rotation: int
    orientation: Orientation

    @property
    def shown_size(self) -> tuple[int, int]:
        """(width, height) after rotation."""
        return self.orientation.size(self.width, self.height)


def same_look(path: Path, numbered: Iterator[tuple[int, av.VideoFrame]]) -> Iterator[tuple[int, av.VideoFrame, Look]]:
    """Refuse interlaced frames, and a size or rotation that changes on the way."""
    look: Look | None = None
    for number, frame in numbered:
        if frame.interlaced_frame:
            raise unreadable(path, f"interlaced (frame {number}); deinterlace it first, e.g. ffmpeg -vf bwdif")
        if look is None:
            orientation = frame_orientation(frame, path)
            look = Look(width=frame.width, height=frame.height, rotation=frame.rotation, orientation=orientation)
        if (frame.width, frame.height) != (look.width, look.height):
            change = f"{look.width}x{look.height} to {frame.width}x{frame.height} at frame {number}"
            raise unreadable(path, f"resolution changes inside the file ({change})")
        if frame.rotation != look.rotation:
            raise unreadable(path, f"rotation changes inside the file (at frame {number})")
        yield number, frame, look


def probe_video(path: Path, *, timeout_s: float = 30.0, thorough: bool = True) -> VideoInfo:
    """Look at a whole file and tell what is in it; ``UnreadableVideoError`` if it is not fit to be read.

    ``thorough`` decodes every frame (without converting colours), so that damage, a change of resolution or
    interlacing anywhere in the file is found now. Otherwise every packet is read but only the first frame is
    decoded: many times faster, and damage shows only when the frames are read.
    """
    path = Path(path)
    deadline = Deadline(path, timeout_s)
    times = None
    if not thorough:
        with open_video(path, deadline) as video:
            times = packet_times(video)
    with open_video(path, deadline) as video:
        numbered = same_look(path, count_frames(video))
        opening = next(numbered, None)
        if opening is None:
            raise unreadable(path, "no frames")
        _, first_frame, look = opening
        if times is None or times[0] != first_frame.pts:
            shown = [first_frame.pts, *(frame.pts for _, frame, _ in numbered)]
        else:
            shown = times.tolist()
        return _describe(video, look, shown)


def _describe(video: OpenVideo, look: Look, shown: list[int | None]) -> VideoInfo:
    """``shown``: the presentation time of every frame, as decoded."""
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
    width, height = look.shown_size
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
        pixel_aspect=1 / aspect if look.orientation.transpose else aspect,
        ends_crc=ends_crc(video.path),
    )


def find_timeline(path: Path, info: VideoInfo | None, deadline: Deadline) -> Timeline | None:
    """How to find frames by time; None where they must be counted. Scans the packets only where it must."""
    if info is not None and info.timing is Timing.EVEN:
        return EvenTimeline(first_pts=info.first_pts, pts_step=info.pts_step)
    if info is not None and info.timing is Timing.COUNTED:
        return None
    times = _remembered_times(path, deadline)
    return VariableTimeline(pts=times) if times is not None else None


def uneven_times_s(path: Path, info: VideoInfo, *, timeout_s: float = 30.0) -> npt.NDArray[np.float64] | None:
    """When each frame is shown, in seconds after the first; None where times are even or cannot be told."""
    if info.timing is not Timing.VARIABLE:
        return None
    deadline = Deadline(path, timeout_s)
    times = _remembered_times(path, deadline)
    with open_video(path, deadline) as video:
        time_base = video.stream.time_base
    if times is None or not time_base or len(times) != info.frames:
        return None
    return (times - times[0]) * float(time_base)


_scans: OrderedDict[tuple[str, int, int], npt.NDArray[np.int64] | None] = OrderedDict()


def _remembered_times(path: Path, deadline: Deadline) -> npt.NDArray[np.int64] | None:
    """The packet times of ``path``, scanned once per process and state of the file."""
    with open_video(path, deadline) as video:
        found = os.stat(path)
        key = (str(path), found.st_size, found.st_mtime_ns)
        if key not in _scans:
            _scans[key] = packet_times(video)
            while len(_scans) > _SCANS_KEPT:
                _scans.popitem(last=False)
        _scans.move_to_end(key)
        return _scans[key]


def packet_times(video: OpenVideo) -> npt.NDArray[np.int64] | None:
    """Presentation times (int64, rising) of all frames, by reading packets without decoding.

    None where packets do not tell: a codec that hides pictures, times that are missing or repeated, or pictures
    shown before the first key frame, of which only decoding can say whether they count.
    """
    if video.stream.codec_context.name not in ONE_FRAME_PER_PACKET:
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
    except PacketError as broken:
        raise unreadable(video.path, f"damaged or cut off after {len(times)} frames ({broken})") from None
    rising = rising_times(sorted(t for t in times if t is not None))
    if not rising or len(rising) < len(times) or key_pts is None or rising[0] < key_pts:
        return None
    _check_end(video, [t for t in times if t is not None], rising)
    return np.asarray(rising, dtype=np.int64)


def _check_end(video: OpenVideo, stored: list[int], rising: list[int]) -> None:
    """Refuse a file that ends before all of its last pictures are there, as decoding it from the start does."""
    proof = end_proof(video)
    if proof is None:
        return
    last_ones = len(rising) - reorder_depth(stored)
    for number, pts in enumerate(rising):
        if not proof.follows(pts, at_end=number >= last_ones):
            raise unreadable(video.path, f"damaged at frame {number} ({CUT_OFF})")
