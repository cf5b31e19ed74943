"""Writing videos that every player shows correctly: H.264, 4:2:0, bt709, limited range, all tagged, with sound.

A file appears under its name only when it is complete. A killed write leaves at most a hidden ``.part`` file beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import av
import av.error
import numpy as np
import numpy.typing as npt
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UnreadableVideoError, UserError
from tinyvae.files import atomic_write
from tinyvae.video.opening import check_regular_file, ffmpeg_words, open_container
from tinyvae.video.pixels import EXACT

FORMATS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}
COPIED_CODECS = frozenset({"aac", "mp3", "ac3", "eac3", "alac"})
"""Sound that all three formats can hold and players expect there. Other sound becomes AAC."""
LOWEST_MP3_RATE = 16_000  # Hz; an MP4 file holds no slower one
_AAC_FRAME_SAMPLES = 1024

# As in reading, and with the chroma of all pixels averaged; by default swscale takes every second one.
_EXACT = EXACT | int(Interpolation.FULL_CHR_H_INP)
_FINE_TIME_BASE = Fraction(1, 90_000)  # of videos with uneven frame times
_BT709 = 1  # the value of the matrix, of the primaries and of the transfer curve


def frame_rate(fps: Fraction | float) -> Fraction:
    """``fps`` as the fraction a container stores; 23.976, 29.97 and 59.94 become the NTSC rates that they stand for.

    >>> frame_rate(25.0), frame_rate(29.97)
    (Fraction(25, 1), Fraction(30000, 1001))
    """
    if not 0 < fps < 100_000:
        raise UserError(f"a video cannot have {float(fps):g} frames per second")
    if isinstance(fps, Fraction):
        return fps.limit_denominator(100_000)
    ntsc = Fraction(round(fps * 1001 / 1000) * 1000, 1001)
    if ntsc and not float(fps).is_integer() and abs(float(ntsc) - fps) < 0.001 * fps / 10:
        return ntsc
    return Fraction(fps).limit_denominator(1001)


class AudioTrack:
    """The first sound track of ``source`` (if any) as a stream of ``output``; times count from the first frame."""

    def __init__(self, source: Path, output: Any) -> None:
        self._path = Path(source)
        check_regular_file(self._path)
        self._output = output
        try:
            self._input: Any = open_container(self._path)
        except av.error.FFmpegError as error:
            raise UnreadableVideoError(self._path, f"its sound cannot be read ({ffmpeg_words(error)})") from None
        films: Any = (film for film in self._input.streams.video if film.start_time is not None)
        self._film_start_s: Fraction = next((film.start_time * film.time_base for film in films), Fraction(0))
        self._packets: Iterator[tuple[Fraction, Any]] = iter(())
        sound: Any = next((s for s in self._input.streams.audio if s.codec_context is not None), None)
        # The stream is made now: a container takes no new ones once packets are written.
        if sound is not None and _can_be_copied(sound.codec_context, output):
            self._packets = self._copied(sound, output.add_stream_from_template(sound))
        elif sound is not None:
            layout = "mono" if sound.codec_context.layout.nb_channels == 1 else "stereo"
            known_rates = av.Codec("aac", "w").audio_rates or []
            rate = max((known for known in known_rates if known <= sound.codec_context.sample_rate), default=48_000)
            stream = output.add_stream("aac", rate=rate, layout=layout)
            self._packets = self._encoded(sound, stream, layout, rate)
        self._waiting = self._next()

    def mux_until(self, end_s: Fraction) -> None:
        """Write all packets that begin before ``end_s``."""
        while self._waiting is not None and self._waiting[0] < end_s:
            self._output.mux(self._waiting[1])
            self._waiting = self._next()

    def close(self) -> None:
        self._input.close()

    def _next(self) -> tuple[Fraction, Any] | None:
        """(start in seconds, packet), or None at the end of the sound."""
        try:
            return next(self._packets, None)
        except av.error.FFmpegError as error:
            raise UnreadableVideoError(self._path, f"its sound is damaged ({ffmpeg_words(error)})") from None

    def _copied(self, sound: Any, stream: Any) -> Iterator[tuple[Fraction, Any]]:
        shift = round(self._film_start_s / sound.time_base)
        for packet in self._input.demux(sound):
            if not packet.size or packet.pts is None or packet.is_discard:
                continue
            packet.pts -= shift
            packet.dts = packet.pts  # sound has no reordering
            if packet.pts >= 0:  # else it is from before the film begins
                packet.stream = stream
                yield packet.pts * sound.time_base, packet

    def _encoded(self, sound: Any, stream: Any, layout: str, rate: int) -> Iterator[tuple[Fraction, Any]]:
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate, frame_size=_AAC_FRAME_SAMPLES)
        samples: int | None = None
        for decoded in chain(self._input.decode(sound), (None,)):
            if decoded is not None and decoded.time is not None and decoded.time < self._film_start_s:
                continue
            if samples is None:  # sound that begins after the first frame of the film stays that late
                late_s = Fraction(decoded.time) - self._film_start_s if decoded is not None and decoded.time else 0
                samples = max(0, round(late_s * rate))
            for frame in resampler.resample(decoded):
                frame.pts, frame.time_base = samples, Fraction(1, rate)
                samples += frame.samples
                yield from ((packet.pts * packet.time_base, packet) for packet in stream.encode(frame))
        yield from ((packet.pts * packet.time_base, packet) for packet in stream.encode(None))


def _can_be_copied(sound: Any, output: Any) -> bool:
    codec = sound.codec.canonical_name
    return codec in COPIED_CODECS and not (
        codec == "mp3" and output.format.name == "mp4" and sound.sample_rate < LOWEST_MP3_RATE
    )


class VideoWriter:
    """Write RGB frames as H.264; use it as a context manager.

    >>> with VideoWriter(Path("out.mp4"), fps=25, width=320, height=240) as writer:  # doctest: +SKIP
    ...     writer.write(frames_TCHW)

    4:2:0 video has even sizes only. With an odd ``width`` or ``height`` the last column or row is written twice;
    ``pixel_format="yuv444p"`` keeps the exact size, which fewer players show.

    Args:
        audio_from: a video whose first sound track (if any) is carried over, cut to the length of the frames.
        pixel_aspect: the source's ``VideoInfo.pixel_aspect``.
        times_s: one for each frame, rising from 0, for a video of variable frame rate; ``fps`` is then its average.
    """

    def __init__(
        self,
        path: Path,
        *,
        fps: Fraction | float,
        width: int,
        height: int,
        crf: float = 18,
        preset: str = "medium",
        key_interval: int = 48,
        pixel_aspect: float = 1.0,
        pixel_format: Literal["yuv420p", "yuv444p"] = "yuv420p",
        audio_from: Path | None = None,
        times_s: Sequence[float] | npt.NDArray[np.float64] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self.width, self.height = width, height
        self.rate = frame_rate(fps)
        self.frames_written = 0
        self._pixel_format = pixel_format
        self._extra_width, self._extra_height = (width % 2, height % 2) if pixel_format == "yuv420p" else (0, 0)
        self._times_s = times_s
        self._time_base = 1 / self.rate if times_s is None else _FINE_TIME_BASE
        self._overwrite = overwrite
        self._reformatter = VideoReformatter()
        self._audio: AudioTrack | None = None
        self._check_path()
        if width < 1 or height < 1:
            raise UserError(f"a video cannot be {width}x{height}")
        with ExitStack() as opened:
            part = opened.enter_context(atomic_write(self.path))
            suffix = self.path.suffix.lower()
            # The index in front lets a browser start before the file is loaded. (It needs a path, not a stream.)
            options = {} if suffix == ".mkv" else {"movflags": "+faststart"}
            container = av.open(part.name, "w", format=FORMATS[suffix], container_options=options)
            self._container: Any = opened.enter_context(container)
            self._stream = self._add_video(crf=crf, preset=preset, key_interval=key_interval, pixel_aspect=pixel_aspect)
            if audio_from is not None:
                self._audio = AudioTrack(audio_from, self._container)
                opened.callback(self._audio.close)
            self._opened = opened.pop_all()

    def _check_path(self) -> None:
        if self.path.suffix.lower() not in FORMATS:
            known = ", ".join(FORMATS)
            raise UserError(f"cannot write a video as {self.path.name!r}: use one of the endings {known}")
        if not self.path.parent.is_dir():
            raise MissingFileError(f"the folder {self.path.parent} does not exist; make it first")
        if not self._overwrite and self.path.exists():
            raise FileExistsAlreadyError(f"{self.path} exists already; remove it or ask for it to be overwritten")

    def _add_video(self, *, crf: float, preset: str, key_interval: int, pixel_aspect: float) -> Any:
        # The same frames give the same file: x264's output depends on the number of threads, and its macroblock
        # tree differs from run to run (seen in 8 of 100 encodes of one clip).
        options = {"crf": str(crf), "preset": preset, "threads": "1", "x264-params": "mbtree=0"}
        stream: Any = self._container.add_stream("libx264", rate=self.rate, options=options)
        stream.width, stream.height = self.width + self._extra_width, self.height + self._extra_height
        stream.pix_fmt = self._pixel_format
        context = stream.codec_context
        context.time_base = self._time_base
        context.gop_size = key_interval
        context.thread_count = 1
        context.color_range = ColorRange.MPEG
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.sample_aspect_ratio = Fraction(pixel_aspect).limit_denominator(255)
        return stream

    def write(self, frames: torch.Tensor) -> None:
        """Append ``frames``: uint8 RGB, TCHW or CHW, 0..255."""
        frames_TCHW = frames if frames.ndim == 4 else frames[None]
        expected = (3, self.height, self.width)
        assert frames_TCHW.dtype == torch.uint8, f"frames must be uint8, not {frames_TCHW.dtype}"
        assert tuple(frames_TCHW.shape[1:]) == expected, f"frames are {tuple(frames_TCHW.shape[1:])}, not {expected}"
        for frame_CHW in frames_TCHW.cpu().numpy():
            for packet in self._stream.encode(self._to_yuv(frame_CHW)):
                self._container.mux(packet)
            self.frames_written += 1
            if self._audio is not None:
                self._audio.mux_until(self._start_s(self.frames_written))

    def _start_s(self, number: int) -> Fraction:
        """When frame ``number`` is shown; the last one of variable times stays as long as an average one."""
        if self._times_s is None:
            return number / self.rate
        assert number <= len(self._times_s), f"frame {number} has no time"
        if number < len(self._times_s):
            return Fraction(float(self._times_s[number]))
        return Fraction(float(self._times_s[-1])) + 1 / self.rate

    def _to_yuv(self, frame_CHW: np.ndarray) -> av.VideoFrame:
        padded = np.pad(frame_CHW, ((0, 0), (0, self._extra_height), (0, self._extra_width)), mode="edge")
        rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(padded.transpose(1, 2, 0)), format="rgb24")
        frame = self._reformatter.reformat(
            rgb,
            format=self._pixel_format,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=_EXACT,
            threads=1,
        )
        start, end = (round(self._start_s(self.frames_written + n) / self._time_base) for n in (0, 1))
        frame.pts, frame.duration = start, end - start
        frame.time_base = self._time_base
        frame.colorspace = frame.color_primaries = frame.color_trc = _BT709
        frame.color_range = ColorRange.MPEG
        return frame

    def close(self) -> None:
        """Finish the file and give it its name. Called at the end of a ``with`` block."""
        with self._opened:  # it removes the file on an error
            if self.frames_written == 0:
                raise UserError(f"{self.path} was not written: no frame was given")
            for packet in self._stream.encode(None):
                self._container.mux(packet)
            if self._audio is not None:
                self._audio.mux_until(self._start_s(self.frames_written))
            self._container.close()
            if not self._overwrite and self.path.exists():
                raise FileExistsAlreadyError(f"{self.path} appeared while it was being written; kept as it is")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.close()
        else:
            self._opened.__exit__(*error)
