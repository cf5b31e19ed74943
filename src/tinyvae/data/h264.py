"""Which H.264 packets no other picture needs, told from their first bytes without decoding.

On the way from a key frame to the wanted frame such packets need not be decoded at all: about half of the B-frames of
ordinary files. A decoder would throw away exactly the same ones if it were told to skip non-reference pictures.
"""

from __future__ import annotations

from typing import Any

import av

_SLICE_TYPES = frozenset({1, 2, 3, 4, 5})


def nal_length_size(stream: Any) -> int:
    """Bytes of the length in front of each NAL unit; 0 where packets are not H.264 in MP4 or Matroska form."""
    if stream.codec_context.name != "h264":
        return 0
    extradata = stream.codec_context.extradata
    # An avcC record starts with version 1; start-code streams (MPEG-TS) start with 0.
    return (extradata[4] & 3) + 1 if extradata and len(extradata) > 6 and extradata[0] == 1 else 0


def is_disposable(packet: av.Packet, length_size: int) -> bool:
    """Whether all pictures in ``packet`` say of themselves that nothing refers to them (nal_ref_idc 0)."""
    data = memoryview(packet)
    position, slices = 0, 0
    while position + length_size < len(data):
        length = int.from_bytes(data[position : position + length_size], "big")
        header = data[position + length_size]
        if header & 31 in _SLICE_TYPES:
            if header >> 5 & 3:
                return False
            slices += 1
        position += length_size + length
    return slices > 0 and position == len(data)
