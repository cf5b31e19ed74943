"""From a decoded frame to RGB bytes: color matrix, color range, bit depth, grey, rotation.

The rules, the same for every file:

- The file's tags choose the matrix. Untagged files count as bt601 up to 576 lines and bt709 above, as in players.
- Limited and full range both end as black 0, white 255. Untagged YUV counts as limited.
- More than 8 bits are rounded to 8, not cut. There is no tone mapping: HDR transfer curves stay as they are.
- A display matrix of quarter turns and mirrorings is applied; other angles are refused.
- The sample aspect ratio is ignored: pixels are those stored (``VideoInfo.pixel_aspect`` has the ratio).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.filter
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from tinyvae.errors import UnreadableVideoError

# Exactly rounded (at most 0.5 of 255 from the formula). swscale's default is 1 to 2 levels too dark on average.
EXACT = int(Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT)
_MATRIX_UNTAGGED = 2  # AVCOL_SPC_UNSPECIFIED
_SD_LINES = 576

# A cut holds whole chroma samples of every format, and all samples that the edge of the window is interpolated from.
_CROP_STEP, _CROP_MARGIN = 16, 8
_CROP_WORTH = 0.95  # above this share of the picture a cut saves nothing

# swscale leaves limited-range grey as it is; this table stretches 16..235 to 0..255.
_GREY_STRETCH = np.clip(np.round((np.arange(256) - 16) * 255 / 219), 0, 255).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Orientation:
    """How stored pixels become shown pixels: first transposed, then mirrored left-right, then top-bottom."""

    transpose: bool = False
    mirror_x: bool = False
    mirror_y: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Shown (width, height) of a frame stored as (width, height)."""
        return (height, width) if self.transpose else (width, height)

    def apply(self, plane: np.ndarray) -> np.ndarray:
        """A view of one stored plane (HW) as it is shown."""
        if self.transpose:
            plane = plane.T
        return plane[:: -1 if self.mirror_y else 1, :: -1 if self.mirror_x else 1]


def frame_orientation(frame: av.VideoFrame, path: Path) -> Orientation:
    """The orientation that the frame's display matrix asks for."""
    side_data: Any = frame.side_data  # PyAV 18's stub says otherwise: a mapping, by type
    matrix = side_data.get(SideDataType.DISPLAYMATRIX)
    if matrix is None:
        return Orientation()
    a, b, _, c, d = (int(x) for x in np.frombuffer(matrix, dtype=np.int32)[:5])
    # Shown (x', y') = (a x + c y, b x + d y); 16.16 fixed point, so anything below 1 % counts as zero.
    straight = max(abs(b), abs(c)) * 100 <= min(abs(a), abs(d))
    turned = max(abs(a), abs(d)) * 100 <= min(abs(b), abs(c))
    if straight and a and d:
        return Orientation(mirror_x=a < 0, mirror_y=d < 0)
    if turned and b and c:
        return Orientation(transpose=True, mirror_x=c < 0, mirror_y=b < 0)
    raise UnreadableVideoError(path, f"its display matrix turns by {frame.rotation} degrees, which is no quarter turn")


class RgbConverter:
    """Writes decoded frames of one video into RGB arrays. Keep one per video: it holds swscale's tables."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._cropper: tuple[tuple[object, ...], av.filter.Graph] | None = None

    def write(
        self, frame: av.VideoFrame, orientation: Orientation, out_CHW: np.ndarray, top: int = 0, left: int = 0
    ) -> None:
        """Convert the part of ``frame`` that starts at (``top``, ``left``) as shown and fills ``out_CHW`` (uint8)."""
        untagged_hd = frame.colorspace == _MATRIX_UNTAGGED and frame.height > _SD_LINES
        if orientation == Orientation():
            frame, top, left = self._near_window(frame, top, left, *out_CHW.shape[1:])
        planar = self._reformatter.reformat(
            frame,
            format="gbrp",
            src_colorspace=Colorspace.ITU709 if untagged_hd and not frame.format.is_rgb else None,
            dst_color_range=ColorRange.JPEG,
            interpolation=EXACT,
            threads=1,
        )
        limited_grey = frame.format.name.startswith("gray") and frame.color_range == ColorRange.MPEG
        for channel, plane_number in enumerate((2, 0, 1)):  # gbrp holds green, blue, red
            plane = planar.planes[plane_number]
            pixels = np.frombuffer(memoryview(plane), dtype=np.uint8).reshape(-1, plane.line_size)
            shown = orientation.apply(pixels[: frame.height, : frame.width])
            shown = shown[top : top + out_CHW.shape[1], left : left + out_CHW.shape[2]]
            out_CHW[channel] = _GREY_STRETCH[shown] if limited_grey else shown

    def _near_window(
        self, frame: av.VideoFrame, top: int, left: int, height: int, width: int
    ) -> tuple[av.VideoFrame, int, int]:
        """The frame cut (without copying) to little more than the window, and where the window starts in it.

        Margin and alignment keep the colors of the whole picture. A picture of odd size is never cut: it has half a
        chroma sample at its edge, which swscale spreads over the whole picture.
        """
        y0 = max(0, top - _CROP_MARGIN) // _CROP_STEP * _CROP_STEP
        x0 = max(0, left - _CROP_MARGIN) // _CROP_STEP * _CROP_STEP
        y1 = min(frame.height, -(-(top + height + _CROP_MARGIN) // _CROP_STEP) * _CROP_STEP)
        x1 = min(frame.width, -(-(left + width + _CROP_MARGIN) // _CROP_STEP) * _CROP_STEP)
        odd = frame.height % 2 or frame.width % 2
        if odd or (y1 - y0) * (x1 - x0) > _CROP_WORTH * frame.height * frame.width:
            return frame, top, left
        key = (frame.format.name, frame.width, frame.height, y0, x0, y1, x1)
        if self._cropper is None or self._cropper[0] != key:
            graph = av.filter.Graph()
            graph.threads = 1  # a cut has no work for more, and threads do not survive a fork (see data/workers.py)
            size: Any = {"width": frame.width, "height": frame.height, "format": frame.format}
            source = graph.add_buffer(**size, time_base=Fraction(1, 1000))
            crop = graph.add("crop", f"{x1 - x0}:{y1 - y0}:{x0}:{y0}:exact=1")
            graph.link_nodes(source, crop, graph.add("buffersink")).configure()
            self._cropper = (key, graph)
        graph = self._cropper[1]
        graph.push(frame)
        cut = graph.pull()
        assert isinstance(cut, av.VideoFrame)
        return cut, top - y0, left - x0
