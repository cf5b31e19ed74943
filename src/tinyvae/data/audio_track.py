"""Carrying the sound of one video over into another: copied where the container can hold it, else as AAC."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import av
import av.error

from tinyvae.data.video_file import check_regular_file, ffmpeg_words, open_container, unreadable

# What MP4, MOV and Matroska can all hold and players expect there. Everything else becomes AAC.
COPIED_CODECS = frozenset({"aac", "mp3", "ac3", "eac3", "alac"})
_AAC_FRAME_SAMPLES = 1024


class AudioTrack:
    """The first sound track of ``source``, as a stream of ``output`` that is muxed alongside the frames.

    Times count from the first frame of the source's film. A source without sound makes all calls do nothing.
    """

    def __init__(self, source: Path, output: Any) -> None:
        self.path = Path(source)
        check_regular_file(self.path)
        self._output = output
        try:
            self._input: Any = open_container(self.path)
        except av.error.FFmpegError as error:
            raise unreadable(self.path, f"its sound cannot be read ({ffmpeg_words(error)})") from None
        self._packets: Iterator[tuple[Fraction, Any]] = iter(())
        self._waiting: tuple[Fraction, Any] | None = None
        sound = [s for s in self._input.streams.audio if s.codec_context is not None]
        if sound:
            self._packets = self._copied(sound[0]) if sound[0].name in COPIED_CODECS else self._encoded(sound[0])
            self._waiting = next(self._packets, None)

    def mux_until(self, end_s: Fraction) -> None:
        """Write all packets that begin before ``end_s``."""
        while self._waiting is not None and self._waiting[0] < end_s:
            self._output.mux(self._waiting[1])
            self._waiting = next(self._packets, None)

    def finish(self, end_s: Fraction) -> None:
        """Write what is left before ``end_s``; the rest of the sound is longer than the frames and is left out."""
        self.mux_until(end_s)
        self._waiting = None

    def close(self) -> None:
        self._input.close()

    def _film_start_s(self) -> Fraction:
        """When the film's first frame is shown, on the source's clock."""
        starts = [s.start_time * s.time_base for s in self._input.streams.video if s.start_time is not None]
        return starts[0] if starts else Fraction(0)

    def _copied(self, sound: Any) -> Iterator[tuple[Fraction, Any]]:
        """(start in seconds, packet) of the track as it is stored."""
        stream = self._output.add_stream_from_template(sound)
        return self._shifted_packets(sound, stream, round(self._film_start_s() / sound.time_base))

    def _shifted_packets(self, sound: Any, stream: Any, shift: int) -> Iterator[tuple[Fraction, Any]]:
        try:
            for packet in self._input.demux(sound):
                if not packet.size or packet.pts is None or packet.is_discard:
                    continue
                packet.pts -= shift
                packet.dts = packet.pts  # sound has no reordering
                if packet.pts < 0:
                    continue  # before the film begins
                packet.stream = stream
                yield packet.pts * sound.time_base, packet
        except av.error.FFmpegError as error:
            raise unreadable(self.path, f"its sound is damaged ({ffmpeg_words(error)})") from None

    def _encoded(self, sound: Any) -> Iterator[tuple[Fraction, Any]]:
        """(start in seconds, packet) of the track as AAC."""
        rate = sound.codec_context.sample_rate
        layout = "mono" if sound.codec_context.layout.nb_channels == 1 else "stereo"
        stream = self._output.add_stream("aac", rate=rate, layout=layout)
        return self._encoded_packets(sound, stream, layout, rate, self._film_start_s())

    def _encoded_packets(
        self, sound: Any, stream: Any, layout: str, rate: int, film_start_s: Fraction
    ) -> Iterator[tuple[Fraction, Any]]:
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate, frame_size=_AAC_FRAME_SAMPLES)
        samples: int | None = None
        try:
            for decoded in chain(self._input.decode(sound), (None,)):
                if decoded is not None and decoded.time is not None and decoded.time < film_start_s:
                    continue
                if samples is None:  # sound that sets in after the film's first frame stays that late
                    late_s = Fraction(decoded.time) - film_start_s if decoded is not None and decoded.time else 0
                    samples = max(0, round(late_s * rate))
                for frame in resampler.resample(decoded):
                    frame.pts, frame.time_base = samples, Fraction(1, rate)
                    samples += frame.samples
                    for packet in stream.encode(frame):
                        yield packet.pts * packet.time_base, packet
            for packet in stream.encode(None):
                yield packet.pts * packet.time_base, packet
        except av.error.FFmpegError as error:
            raise unreadable(self.path, f"its sound is damaged ({ffmpeg_words(error)})") from None
