"""Opening a video file so that it can do no harm. FFmpeg's errors become `UnreadableVideoError` or `DamageError`."""

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
import av.video.stream
from av.stream import Discard, Disposition
from packaging.version import Version

from tinyvae.errors import UnreadableVideoError

# A frame above this (more than 16384 x 8192) is a broken header, not a film; FFmpeg would ask for gigabytes.
MAX_PIXELS = 16384 * 8192

# With "explode" a decoder reports a broken slice instead of painting something likely over it.
ERROR_DETECTION = "explode+crccheck+bitstream+buffer"

# Containers with a table of all frames: their order is known before decoding, and a missing frame is a missing packet.
TABLE_FORMATS = frozenset({"mov,mp4,m4a,3gp,3g2,mj2"})

# A file with tags that are not UTF-8 must still open. PyAV 19 reads them as they are and has no such setting.
_ANY_TAGS: dict[str, Any] = {"metadata_errors": "replace"} if Version(av.__version__) < Version("19") else {}

_NOT_THE_FILM = Disposition.attached_pic | Disposition.timed_thumbnails | Disposition.still_image


class DamageError(Exception):
    """The file cannot give its next packet or frame whole; the text is the reason."""


class Deadline:
    """The time after which reading a file counts as failed. A system call that never returns cannot be interrupted."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.restart()

    def restart(self) -> None:
        """Start again: a stream of any length has ``timeout_s`` per frame."""
        self._end = time.monotonic() + self.timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise UnreadableVideoError(self.path, f"reading took longer than {self.timeout_s:g} s")


@dataclass(frozen=True, kw_only=True)
class OpenVideo:
    """An open file, and the one stream of it that is the film."""

    path: Path
    container: av.container.InputContainer
    stream: av.video.stream.VideoStream
    deadline: Deadline

    def packets(self) -> Iterator[av.Packet]:
        """Whole coded packets from the current position; ``DamageError`` where one is not whole.

        Empty packets are left out: they would tell the decoder that the file is over. FFmpeg also marks a packet as
        incomplete where two MPEG-TS recordings are joined, and there a key frame follows at once (the parser holds one
        packet back). So before a key frame the mark does not count; the decoder decides.
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
            raise DamageError(ffmpeg_words(error)) from None
        if held:
            raise DamageError("its data is incomplete")


@contextmanager
def open_video(path: Path, deadline: Deadline) -> Iterator[OpenVideo]:
    """Open ``path`` by its content (never by its suffix), ready to decode its film.

    One decoder thread. With more, damaged files hang: a thread that reports damage waits for Python's lock, while the
    code that closes the file waits for that thread.
    """
    check_regular_file(path)
    with _open_container(path, deadline) as container:
        stream = _choose_stream(path, container)
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        context = stream.codec_context
        context.thread_count = 1
        context.options = {"err_detect": ERROR_DETECTION, "max_pixels": str(MAX_PIXELS)}
        yield OpenVideo(path=path, container=container, stream=stream, deadline=deadline)


def _open_container(path: Path, deadline: Deadline) -> av.container.InputContainer:
    """Open without FFmpeg's trial decoding of some twenty frames where the tables of the file (MP4) say as much."""
    try:
        no_trial = {"probesize": "4096", "fpsprobesize": "0", "skip_frame": "all"}
        container = open_container(path, timeout_s=deadline.remaining_s(), **no_trial)
        if container.format.name in TABLE_FORMATS:
            return container
        container.close()
    except av.error.FFmpegError:
        pass  # it read too little to tell what this is: try again with all that FFmpeg does
    try:
        return open_container(path, timeout_s=deadline.remaining_s())
    except av.error.FFmpegError as error:
        deadline.check()
        raise UnreadableVideoError(path, f"not a readable video file ({ffmpeg_words(error)})") from None


def open_container(path: Path, *, timeout_s: float | None = None, **options: str) -> av.container.InputContainer:
    """PyAV's ``open`` for a file of unknown origin. ``options`` are those of FFmpeg."""
    return av.open(
        os.path.abspath(path),  # absolute: a name such as "http:x.mp4" is a file, not an address
        mode="r",
        options=options,
        container_options={"protocol_whitelist": "file"},  # a playlist named .mp4 must not reach for the network
        timeout=None if timeout_s is None else (max(0.001, timeout_s),) * 2,
        **_ANY_TAGS,
    )


def check_regular_file(path: Path) -> os.stat_result:
    """Refuse what is no plain file: to open a pipe that nobody writes to would wait for ever."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UnreadableVideoError(path, (error.strerror or str(error)).lower()) from None
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableVideoError(path, "not a regular file")
    if found.st_size == 0:
        raise UnreadableVideoError(path, "the file is empty")
    return found


def ends_crc(path: Path) -> int:
    """CRC-32 of the first and the last 64 KiB: tells whether the tables of a file are those that were indexed.

    The size alone does not: without its edit list, or in another cut of the film, every frame has another number.
    """
    size = check_regular_file(path).st_size
    with open(path, "rb", buffering=0) as stream:
        crc = zlib.crc32(stream.read(1 << 16))
        stream.seek(max(stream.tell(), size - (1 << 16)))
        return zlib.crc32(stream.read(1 << 16), crc)


def _choose_stream(path: Path, container: av.container.InputContainer) -> av.video.stream.VideoStream:
    """The film: not a cover picture; the default stream before others, then the larger one, then the first."""
    films = [s for s in container.streams.video if not s.disposition & _NOT_THE_FILM]
    if not films:
        raise UnreadableVideoError(path, "no video stream")
    decodable = [s for s in films if s.codec_context is not None]
    if not decodable:
        raise UnreadableVideoError(path, "no decoder for its video codec in this build of FFmpeg")

    def rank(stream: av.video.stream.VideoStream) -> tuple[bool, int, int]:
        is_default = bool(stream.disposition & Disposition.default)
        return is_default, stream.codec_context.width * stream.codec_context.height, -stream.index

    return max(decodable, key=rank)


def ffmpeg_words(error: av.error.FFmpegError) -> str:
    """FFmpeg's reason in a few words, without the file name that PyAV puts into it."""
    words = (error.strerror or str(error)).strip().rstrip(".")
    log: Any = error.log  # (level, part of FFmpeg, text); PyAV's stub says otherwise
    return f"{words}: {log[2].strip()}" if log else words
