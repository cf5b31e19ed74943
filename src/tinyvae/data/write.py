"""Writing videos that every player shows right: H.264, 4:2:0, bt709, limited range, all of it tagged.

A file appears under its name only when it is complete: a killed write leaves at most a hidden ``.part`` file beside it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import av
import numpy as np
import numpy.typing as npt
import torch
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from tinyvae.data.audio_track import AudioTrack
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError

FORMATS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}

# Exactly rounded, with the chroma of all pixels averaged rather than every second one taken.
_EXACT = int(
    Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INP | Interpolation.FULL_CHR_H_INT
)
_FINE_TIME_BASE = Fraction(1, 90_000)  # of videos whose frames do not follow each other evenly
_BT709 = 1  # the value of the matrix, of the primaries and of the transfer curve


def frame_rate(fps: Fraction | float) -> Fraction:
    """``fps`` as the fraction a container stores; 23.976 and its kin become the NTSC rates they stand for.

    >>> frame_rate(25.0), frame_rate(29.97), frame_rate(12.5)
    (Fraction(25, 1), Fraction(30000, 1001), Fraction(25, 2))
    """
    if not 0 < fps < 100_000:
        raise UserError(f"a video cannot have {float(fps):g} frames per second")
    if isinstance(fps, Fraction):
        return fps.limit_denominator(100_000)
    ntsc = Fraction(round(fps * 1001 / 1000) * 1000, 1001)
    if ntsc and not float(fps).is_integer() and abs(float(ntsc) - fps) < 0.001 * fps / 10:
        return ntsc
    return Fraction(fps).limit_denominator(1001)


class VideoWriter:
    """Write RGB frames as H.264; use it as a context manager.

    >>> with VideoWriter(Path("out.mp4"), fps=25, width=320, height=240) as writer:  # doctest: +SKIP
    ...     writer.write(frames_TCHW)

    4:2:0 video has even sizes only: with an odd ``width`` or ``height`` the last column or row is written twice,
    and the file is one pixel larger; ``pixel_format="yuv444p"`` keeps the exact size, which fewer players show.

    ``audio_from`` names a video whose first sound track is carried over from its
    start, cut to the length of the frames: copied as it is where the container can hold it, else as AAC; a source
    without sound gives a file without sound. ``pixel_aspect`` is the source's ``VideoInfo.pixel_aspect``.

    ``times_s`` (one for each frame, rising from 0) makes a video of variable frame rate; ``fps`` is then its average,
    which the encoder plans with. None: frames follow each other evenly.
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
        self._pixel_format = pixel_format
        even = pixel_format == "yuv420p"
        self._extra_width, self._extra_height = (width % 2, height % 2) if even else (0, 0)
        self.rate = frame_rate(fps)
        self._times_s = times_s
        self._time_base = 1 / self.rate if times_s is None else _FINE_TIME_BASE
        self.frames_written = 0
        self._overwrite = overwrite
        if self.path.suffix.lower() not in FORMATS:
            known = ", ".join(FORMATS)
            raise UserError(f"cannot write a video as {self.path.name!r}: use one of the endings {known}")
        if not self.path.parent.is_dir():
            raise MissingFileError(f"the folder {self.path.parent} does not exist; make it first")
        if not overwrite and self.path.exists():
            raise FileExistsAlreadyError(f"{self.path} exists already; remove it or ask for it to be overwritten")
        if width < 1 or height < 1:
            raise UserError(f"a video cannot be {width}x{height}")
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._reformatter = VideoReformatter()
        self._container: Any = av.open(
            str(self._part), "w", format=FORMATS[self.path.suffix.lower()], container_options=_container_options(path)
        )
        self._audio: AudioTrack | None = None
        try:
            self._stream = self._add_video(crf=crf, preset=preset, key_interval=key_interval, pixel_aspect=pixel_aspect)
            if audio_from is not None:
                self._audio = AudioTrack(audio_from, self._container)
        except UserError:
            self.discard()
            raise

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

    def _pts(self, number: int) -> int:
        return round(self._start_s(number) / self._time_base)

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
        frame.pts = self._pts(self.frames_written)
        frame.duration = self._pts(self.frames_written + 1) - frame.pts
        frame.time_base = self._time_base
        frame.colorspace = frame.color_primaries = frame.color_trc = _BT709
        frame.color_range = ColorRange.MPEG
        return frame

    def close(self) -> None:
        """Finish the file and give it its name. Called at the end of a ``with`` block."""
        if self._container is None:
            return
        if self.frames_written == 0:
            self.discard()
            raise UserError(f"{self.path} was not written: no frame was given")
        for packet in self._stream.encode(None):
            self._container.mux(packet)
        if self._audio is not None:
            self._audio.finish(self._start_s(self.frames_written))
        self._release()
        if self._overwrite:
            os.replace(self._part, self.path)
            return
        try:
            os.link(self._part, self.path)  # unlike a rename, a link never writes over a file made meanwhile
        except FileExistsError:
            raise FileExistsAlreadyError(f"{self.path} appeared while it was being written; kept as it is") from None
        except OSError:  # a file system without links
            os.replace(self._part, self.path)
        finally:
            self._part.unlink(missing_ok=True)

    def discard(self) -> None:
        """Drop what was written so far; no file appears."""
        if self._container is not None:
            self._release()
        self._part.unlink(missing_ok=True)

    def _release(self) -> None:
        container, self._container = self._container, None
        if self._audio is not None:
            self._audio.close()
        container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _container_options(path: Path) -> dict[str, str]:
    # The index in front lets a browser start before the file is loaded.
    return {} if Path(path).suffix.lower() == ".mkv" else {"movflags": "+faststart"}
