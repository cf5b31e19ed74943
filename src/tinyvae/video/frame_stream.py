"""Decoding in order, with proof: every frame that leaves here is whole, has its number, and none is missing.

Each packet that goes into the decoder leaves its presentation time in a heap. Each frame that comes out must carry the
smallest time of that heap, so a lost, repeated or reordered frame shows at once. The number of a frame follows from
counting, or after a seek from the timeline.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain

import av
import av.error

from tinyvae.errors import UnreadableVideoError
from tinyvae.video.opening import TABLE_FORMATS, DamageError, OpenVideo
from tinyvae.video.timeline import EndProof, Timeline

# Codecs where every packet of a sound file gives exactly one frame. Others may hold pictures that are never shown
# (VP8) or packets without a picture (MPEG-4 in AVI), so their packets prove nothing.
ONE_FRAME_PER_PACKET = frozenset(
    {"h264", "hevc", "vvc", "vp9", "libvpx-vp9", "av1", "libdav1d", "libaom-av1", "mjpeg", "prores", "dnxhd", "ffv1"}
)
REORDERING_CODECS = frozenset({"h264", "hevc", "vvc"})  # they show pictures in another order than they store them
RECORDING_FORMATS = frozenset({"mpegts", "mpeg"})  # cut from a running broadcast, so they may begin anywhere
CUT_OFF = "it is cut off: frames before its last one are missing"
_SEEKS = 6  # the wanted time, then 1, 2, 4, 8, 16 s before it; after that the start of the file
_KEYS_TRIED = 2
_H264_SLICES = frozenset({1, 2, 3, 4, 5})


def packets_have_times(video: OpenVideo) -> bool:
    """Whether the time of a packet is that of its picture. AVI stores no times: FFmpeg counts the packets as they lie
    in the file, and that is another order where the codec reorders pictures."""
    return video.container.format.name != "avi" or video.stream.codec_context.name not in REORDERING_CODECS


class _OrderProof:
    """Compares the frames that come out of a decoder with the packets that went in."""

    def __init__(self, video: OpenVideo) -> None:
        self._strict = video.stream.codec_context.name in ONE_FRAME_PER_PACKET
        self._with_times = packets_have_times(video)
        self._waiting: list[int] = []
        self._balance = 0

    def packet_in(self, packet: av.Packet) -> None:
        self._balance += 1
        if packet.pts is None:
            self._with_times = False
        elif self._with_times:
            heapq.heappush(self._waiting, packet.pts)

    def skip(self, times: set[int]) -> None:
        """Do not wait for frames at these times if they are the next ones."""
        while self._waiting and self._waiting[0] in times:
            heapq.heappop(self._waiting)
            self._balance -= 1

    def is_next(self, frame: av.VideoFrame) -> bool:
        self._balance -= 1
        if not self._strict or not self._with_times:
            return True
        return bool(self._waiting) and heapq.heappop(self._waiting) == frame.pts

    def is_complete(self) -> bool:
        return not self._strict or self._balance == 0


class _Run:
    """One pass of the decoder.

    Pictures shown before the first key frame may lack what they refer to (an open GOP, a broadcast recording). They are
    "uncertain". After a seek they are dropped. At the start of a file they count like all others if they come out
    sound. If the first of them does not, all are dropped and frame 0 is the key frame. Only broadcast recordings may
    start without a key frame.
    """

    def __init__(self, video: OpenVideo, *, after_seek: bool) -> None:
        self._context = video.stream.codec_context
        self._proof = _OrderProof(video)
        # After a seek the timeline knows all times, and not all pictures are decoded.
        self._end_proof = None if after_seek else end_proof(video)
        self._drop_uncertain = after_seek
        self._key_seen = video.container.format.name not in RECORDING_FORMATS
        self._key_pts: int | None = None
        self._uncertain_times: set[int] = set()
        self.count = 0

    def decode(self, packet: av.Packet | None) -> Iterator[av.VideoFrame]:
        """The sound frames that ``packet`` (None: the end of the file) brings out of the decoder."""
        if packet is not None and packet.is_keyframe and self._key_pts is None:
            self._key_seen, self._key_pts = True, packet.pts
        uncertain = packet is not None and self._is_uncertain(packet.pts)
        if packet is not None and not packet.is_discard:
            if uncertain and packet.pts is not None:
                self._uncertain_times.add(packet.pts)
            self._proof.packet_in(packet)
        try:
            decoded = self._context.decode(packet)
        except av.error.FFmpegError as error:
            if not uncertain or self.count:
                raise DamageError(error.strerror or "decoder error") from None
            self._drop_uncertain = True
            return
        for frame in decoded:
            if self._is_kept(frame):
                if self._end_proof and not self._end_proof.follows(frame.pts, at_end=packet is None):
                    raise DamageError(CUT_OFF)
                self.count += 1
                yield frame

    def end(self) -> None:
        if self.count == 0:
            self._proof.skip(self._uncertain_times)
        if not self._proof.is_complete():
            raise DamageError("not all frames can be decoded")

    def _is_kept(self, frame: av.VideoFrame) -> bool:
        if self._is_uncertain(frame.pts):
            if frame.is_corrupt and self.count == 0:
                self._drop_uncertain = True
            if self._drop_uncertain:
                return False
        if frame.is_corrupt:
            raise DamageError("the decoder found errors in it")
        if self.count == 0:
            self._proof.skip(self._uncertain_times - {frame.pts})
        if not self._proof.is_next(frame):
            raise DamageError("a frame is missing or its time is out of order")
        return True

    def _is_uncertain(self, pts: int | None) -> bool:
        if not self._key_seen:
            return True
        return pts is not None and self._key_pts is not None and pts < self._key_pts


def end_proof(video: OpenVideo) -> EndProof | None:
    """The proof that the end of the film is whole; None where the container itself tells."""
    if video.container.format.name in TABLE_FORMATS:
        return None
    return EndProof(rate=float(video.stream.average_rate or 0), time_base=float(video.stream.time_base or 0))


def count_frames(video: OpenVideo) -> Iterator[tuple[int, av.VideoFrame]]:
    """(number, frame) for all frames of a file just opened, from its start."""
    return _without_gaps(video, 0, enumerate(_decode_in_order(video, video.packets(), after_seek=False)))


def seek_frames(video: OpenVideo, timeline: Timeline, first: int) -> Iterator[tuple[int, av.VideoFrame]] | None:
    """(number, frame) from frame ``first`` on, after a seek; None: open the file again and count from its start."""
    for key in _keys_before(video, timeline, first):
        packets = chain((key,), _needed(video, timeline.earliest_pts(first)))
        frames = _decode_in_order(video, packets, after_seek=True)
        numbered = ((None if frame.pts is None else timeline.index_of(frame.pts), frame) for frame in frames)
        try:
            opening = next((nf for nf in numbered if nf[0] is None or nf[0] >= first), None)
        except DamageError:
            continue
        if opening is not None and opening[0] == first:
            return _without_gaps(video, first, chain((opening,), numbered))
    return None


def _decode_in_order(video: OpenVideo, packets: Iterator[av.Packet], *, after_seek: bool) -> Iterator[av.VideoFrame]:
    """The frames of ``packets``; ``DamageError`` at the first damage."""
    run = _Run(video, after_seek=after_seek)
    for packet in chain(packets, (None,)):
        yield from run.decode(packet)
        video.deadline.check()
    run.end()


def _needed(video: OpenVideo, wanted_pts: int) -> Iterator[av.Packet]:
    """The packets that follow, without pictures before ``wanted_pts`` that no other picture refers to.

    Only H.264 in MP4 or Matroska says that quickly: its avcC record (version 1) tells how long the length in front of
    each NAL unit is.
    """
    context = video.stream.codec_context
    extradata = context.extradata if context.name == "h264" else None
    length_size = (extradata[4] & 3) + 1 if extradata and len(extradata) > 6 and extradata[0] == 1 else 0
    for packet in video.packets():
        on_the_way = length_size > 0 and packet.pts is not None and packet.pts < wanted_pts
        if not (on_the_way and is_disposable(packet, length_size)):
            yield packet


def is_disposable(packet: av.Packet, length_size: int) -> bool:
    """Whether all H.264 pictures in ``packet`` say that nothing refers to them (nal_ref_idc 0)."""
    data = memoryview(packet)
    position, slices = 0, 0
    while position + length_size < len(data):
        length = int.from_bytes(data[position : position + length_size], "big")
        header = data[position + length_size]
        if header & 31 in _H264_SLICES:
            if header >> 5 & 3:
                return False
            slices += 1
        position += length_size + length
    return slices > 0 and position == len(data)


def _without_gaps(
    video: OpenVideo, first: int, numbered: Iterable[tuple[int | None, av.VideoFrame]]
) -> Iterator[tuple[int, av.VideoFrame]]:
    """``numbered``, proven to count up from ``first``. Damage is an error here."""
    expected = first
    try:
        for found, frame in numbered:
            if found != expected:
                raise UnreadableVideoError(video.path, f"frame {expected} is not at its time")
            yield expected, frame
            expected += 1
    except DamageError as damage:
        raise UnreadableVideoError(video.path, f"damaged at frame {expected} ({damage})") from None


def _keys_before(video: OpenVideo, timeline: Timeline, first: int) -> Iterator[av.Packet]:
    """Key packets at or before frame ``first``, nearest first; the container stands right behind each.

    Containers without an index land anywhere, so each guess is checked, and the next one goes further back.
    """
    stream = video.stream
    wanted = target = timeline.seek_pts(first)
    ticks_per_s = max(1, round(1 / stream.time_base)) if stream.time_base else 1
    tried = 0
    for attempt in range(_SEEKS):
        try:
            video.container.seek(wanted, stream=stream)
            key = next((p for p in video.packets() if p.is_keyframe), None)
        except (av.error.FFmpegError, DamageError):
            return  # no way to seek in this container: the caller starts at the beginning
        if key is None or key.pts is None or key.pts > target:
            wanted = target - ticks_per_s * 2**attempt
            continue
        yield key
        tried += 1
        if tried == _KEYS_TRIED:
            return
        wanted = min(key.pts, key.pts if key.dts is None else key.dts) - 1
