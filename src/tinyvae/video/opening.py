"""Opening a video file so that it can do no harm: which stream, which limits, and every failure with a name.

All of FFmpeg's own errors end here as :class:`tinyvae.errors.UnreadableVideoError`, whose text is ``file: reason``.
"""

from __future__ import annotations

import os
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import av.container
import av.error
import av.stream
import av.video.stream
from packaging.version import Version

from tinyvae.errors import UnreadableVideoError

# A frame above this (more than 16384 x 8192) is a broken header, not a film; FFmpeg would ask for gigabytes.
MAX_PIXELS = 16384 * 8192

# With "explode" a decoder reports a broken slice instead of painting something plausible over it.
ERROR_DETECTION = "explode+crccheck+bitstream+buffer"

# Where containers keep what tells frames apart (sizes, times, edit lists): at the front, at the back, or both.
_END_BYTES = 1 << 16

# Containers with a table of all frames, or of all in a fragment: their order is known before anything is decoded, and
# what is missing shows as a packet that is not there.
TABLE_FORMATS = frozenset({"mov,mp4,m4a,3gp,3g2,mj2"})

# For the decoder that FFmpeg tries a file with while opening it; ours is another one.
_NO_TRIAL = {"probesize": "4096", "fpsprobesize": "0", "skip_frame": "all"}

# Tags that are not UTF-8 must not keep a film from opening. PyAV 19 reads them as they are and has no such setting.
_ANY_TAGS: dict[str, Any] = {"metadata_errors": "replace"} if Version(av.__version__) < Version("19") else {}

_NOT_THE_FILM = (
    av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails | av.stream.Disposition.still_image
)


class PacketError(Exception):
    """The file cannot give its next packet whole; the text is the reason."""


class Deadline:
    """A moment after which reading a file counts as failed.

    FFmpeg's reads are told about it through their interrupt callback, our own loops ask after each packet. A
    system call that never returns (a dead network mount) cannot be interrupted from inside the process.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """Begin anew: a stream of any length has ``timeout_s`` per frame."""
        self._end = time.monotonic() + self.timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise unreadable(self.path, f"reading took longer than {self.timeout_s:g} s")


@dataclass(frozen=True, kw_only=True)
class OpenVideo:
    """A file that is open, and the one stream of it that is the film."""

    path: Path
    container: av.container.InputContainer
    stream: av.video.stream.VideoStream
    deadline: Deadline

    def packets(self) -> Iterator[av.Packet]:
        """Whole coded packets from the current position; ``PacketError`` where one is not whole.

        Empty packets (a "repeat the last picture" mark in AVI) are left out: they would tell the decoder that the
        file is over. FFmpeg also marks a packet as incomplete at the joint of two MPEG-TS recordings, where nothing
        is lost. A joint goes on with a key frame, so the mark is believed unless a key frame follows at once (the
        parser holds one packet back); there the decoder has the last word.
        """
        held: list[av.Packet] = []
        try:
            for packet in self.container.demux(self.stream):
                self.deadline.check()
                if not packet.size:
                    continue
                if held and packet.is_keyframe:
                    yield from held
                    held = []
                if held or packet.is_corrupt:
                    held.append(packet)
                    if len(held) > 2:
                        break
                else:
                    yield packet
        except av.error.FFmpegError as error:
            self.deadline.check()
            raise PacketError(ffmpeg_words(error)) from None
        if held:
            raise PacketError("its data is incomplete")


def unreadable(path: Path, reason: str) -> UnreadableVideoError:
    """The error for ``path``: one sentence, the file and the reason."""
    return UnreadableVideoError(f"{path}: {reason}")


@contextmanager
def open_video(path: Path, deadline: Deadline) -> Iterator[OpenVideo]:
    """Open ``path`` by its content (never by its suffix), ready to decode its film.

    One decoder thread. Loader workers are many processes already; and with more, a decoder thread that reports
    damage waits for Python's lock while closing the file waits for that thread: damaged files hang.
    """
    check_regular_file(path)
    with _open_container(path, deadline) as container:
        stream = _choose_stream(path, container)
        for other in container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all
        context = stream.codec_context
        context.thread_count = 1
        context.options = {"err_detect": ERROR_DETECTION, "max_pixels": str(MAX_PIXELS)}
        yield OpenVideo(path=path, container=container, stream=stream, deadline=deadline)


def _open_container(path: Path, deadline: Deadline) -> av.container.InputContainer:
    """Open by content, without FFmpeg's trial decoding where nothing is learnt from it.

    FFmpeg decodes some twenty frames of H.264 on opening, to find out how far they are reordered: a seventh of the
    work of a 16-frame clip. The tables of MP4 files tell, so for these it is left out.
    """
    try:
        container = _av_open(path, deadline, trial_decoding=False)
        if container.format.name in TABLE_FORMATS:
            return container
        container.close()
    except av.error.FFmpegError:
        pass  # too little was read to tell what it is: once more, with all that FFmpeg does
    try:
        return _av_open(path, deadline, trial_decoding=True)
    except av.error.FFmpegError as error:
        deadline.check()
        raise unreadable(path, f"not a readable video file ({ffmpeg_words(error)})") from None


def _av_open(path: Path, deadline: Deadline, *, trial_decoding: bool) -> av.container.InputContainer:
    limit_s = max(0.001, deadline.remaining_s())
    return open_container(path, options={} if trial_decoding else _NO_TRIAL, timeout=(limit_s, limit_s))


def open_container(path: Path, **settings: Any) -> av.container.InputContainer:
    """PyAV's ``open`` for a file of unknown origin, whichever PyAV is installed."""
    return av.open(
        os.path.abspath(path),  # absolute: a name such as "http:x.mp4" is a file, not an address
        mode="r",
        # A playlist named .mp4 must not make us reach for the network.
        container_options={"protocol_whitelist": "file"},
        **_ANY_TAGS,
        **settings,
    )


def check_regular_file(path: Path) -> None:
    """Refuse what is no plain file: opening a pipe nobody writes to would wait for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise unreadable(path, (error.strerror or str(error)).lower()) from None
    if not stat.S_ISREG(mode):
        raise unreadable(path, "not a regular file")
    if os.path.getsize(path) == 0:
        raise unreadable(path, "the file is empty")


def ends_crc(path: Path) -> int:
    """CRC-32 of the first and the last 64 KiB: tells whether a file's tables are those that were indexed.

    A size alone does not. Where the edit list of an indexed file is lost, or another cut of the same film takes its
    place, every frame has another number, and only the tables know.
    """
    check_regular_file(path)
    try:
        with open(path, "rb", buffering=0) as stream:
            crc = zlib.crc32(stream.read(_END_BYTES))
            stream.seek(max(stream.tell(), os.fstat(stream.fileno()).st_size - _END_BYTES))
            return zlib.crc32(stream.read(_END_BYTES), crc)
    except OSError as error:
        raise unreadable(path, (error.strerror or str(error)).lower()) from None


def _choose_stream(path: Path, container: av.container.InputContainer) -> av.video.stream.VideoStream:
    """The film: not a cover picture; the default stream before others, then the larger one, then the first."""
    films = [s for s in container.streams.video if not s.disposition & _NOT_THE_FILM]
    if not films:
        raise unreadable(path, "no video stream")
    decodable = [s for s in films if s.codec_context is not None]
    if not decodable:
        raise unreadable(path, "no decoder for its video codec in this build of FFmpeg")

    def rank(stream: av.video.stream.VideoStream) -> tuple[bool, int, int]:
        is_default = bool(stream.disposition & av.stream.Disposition.default)
        return is_default, stream.codec_context.width * stream.codec_context.height, -stream.index

    return max(decodable, key=rank)


def ffmpeg_words(error: av.error.FFmpegError) -> str:
    """FFmpeg's reason in a few words, without the file name that PyAV puts into it."""
    words = (error.strerror or str(error)).strip().rstrip(".")
    log: Any = error.log  # (level, part of FFmpeg, text); PyAV's stub says otherwise
    return f"{words}: {log[2].strip()}" if log else words
