"""RGB is exactly what the file's matrix, range and depth say, for flat colours of every kind."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from tinyvae.video.pixels import Orientation, RgbConverter, frame_orientation

MATRICES = {"bt709": (1, 0.2126, 0.0722), "bt601": (6, 0.299, 0.114), "bt470bg": (5, 0.299, 0.114)}


def flat_frame(pix_fmt: str, levels: tuple[float, ...], *, height: int = 16, width: int = 16) -> av.VideoFrame:
    """A frame with one 8-bit ``level`` in each plane, scaled to the depth of the format."""
    frame = av.VideoFrame(width, height, pix_fmt)
    deep = frame.format.components[0].bits > 8
    for plane, level in zip(frame.planes, levels, strict=False):
        value = round(level * 2 ** (frame.format.components[0].bits - 8))
        samples = np.full(plane.buffer_size // (2 if deep else 1), value, np.uint16 if deep else np.uint8)
        plane.update(samples.tobytes())
    return frame


def expected_rgb(levels: tuple[float, ...], *, full: bool, kr: float, kb: float) -> np.ndarray:
    y, u, v = (levels[0], 128, 128) if len(levels) == 1 else levels
    luma = y if full else (y - 16) * 255 / 219
    cb, cr = ((c - 128) * (1 if full else 255 / 224) for c in (u, v))
    red, blue = luma + 2 * (1 - kr) * cr, luma + 2 * (1 - kb) * cb
    green = (luma - kr * red - kb * blue) / (1 - kr - kb)
    return np.clip([red, green, blue], 0, 255)


def convert(frame: av.VideoFrame) -> np.ndarray:
    out = np.empty((3, frame.height, frame.width), np.uint8)
    RgbConverter().write(frame, Orientation(), out)
    return out


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "yuv422p10le", "yuv444p12le"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
def test_colours_follow_the_tags(pix_fmt: str, full: bool, matrix: str) -> None:
    tag, kr, kb = MATRICES[matrix]
    for levels in ((16, 128, 128), (235, 128, 128), (81, 90, 200), (170, 166, 60), (120, 54, 34), (40, 200, 110)):
        frame = flat_frame(pix_fmt, levels)
        frame.colorspace, frame.color_range = tag, 2 if full else 1
        found = convert(frame)
        wanted = expected_rgb(levels, full=full, kr=kr, kb=kb)
        assert np.abs(found - wanted[:, None, None]).max() <= 0.75, (levels, found[:, 0, 0], wanted)


def test_untagged_is_bt601_for_small_and_bt709_for_large() -> None:
    for height, matrix in ((576, "bt601"), (720, "bt709")):
        frame = flat_frame("yuv420p", (120, 54, 200), height=height)
        _, kr, kb = MATRICES[matrix]
        wanted = expected_rgb((120, 54, 200), full=False, kr=kr, kb=kb)
        assert np.abs(convert(frame)[:, 5, 5] - wanted).max() <= 0.75, height


@pytest.mark.parametrize("pix_fmt", ["gray", "gray10le"])
def test_grey(pix_fmt: str) -> None:
    for level in (16, 100, 235):
        frame = flat_frame(pix_fmt, (level,))
        for range_tag, full in ((1, False), (2, True)):
            frame.color_range = range_tag
            wanted = expected_rgb((level,), full=full, kr=0.2126, kb=0.0722)
            assert np.abs(convert(frame) - wanted[:, None, None]).max() <= 0.75


def test_rgb_formats_keep_their_bytes() -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (24, 33, 3), dtype=np.uint8)
    for pix_fmt in ("rgb24", "bgr24", "gbrp"):
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pix_fmt)
        assert np.array_equal(convert(frame), picture.transpose(2, 0, 1)), pix_fmt


def test_odd_sizes_keep_chroma_in_place() -> None:
    """The left half red, the right half blue: in a 4:2:0 frame of odd size the border stays where it is."""
    picture = np.zeros((31, 45, 3), np.uint8)
    picture[:, :22, 0], picture[:, 22:, 2] = 200, 200
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
    found = convert(frame).astype(int)
    assert found.shape == (3, 31, 45)
    assert (found[0, :, :20] > 150).all() and (found[0, :, 25:] < 60).all()
    assert (found[2, :, :20] < 60).all() and (found[2, :, 25:] > 150).all()


def test_no_matrix_no_turn() -> None:
    assert frame_orientation(flat_frame("gray", (1,)), Path("x")) == Orientation()
