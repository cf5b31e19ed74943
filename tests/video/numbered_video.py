"""Clips that carry their frame numbers in the picture, made by PyAV in many shapes, to tell which frame came.

The code is the one of the shared hostile files at half the size: 10 bits along the top, most significant first, each a
block of 16 x 16 pixels (white = 1), with the inverse of each block below it. The rest is procedural footage.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from tinyvae.data.sample_clips import render_clip

BITS = 10
BLOCK = 16
WIDTH = BITS * BLOCK
HEIGHT = 96


def numbered_frames(count: int, *, scene: int = 0) -> torch.Tensor:
    """``count`` frames (uint8 TCHW) whose pictures tell their numbers."""
    frames = render_clip(scene, height=HEIGHT, width=WIDTH, frames=count, seed=7)
    for number in range(count):
        for bit in range(BITS):
            white = number >> (BITS - 1 - bit) & 1
            frames[number, :, :BLOCK, bit * BLOCK : (bit + 1) * BLOCK] = 255 * white
            frames[number, :, BLOCK : 2 * BLOCK, bit * BLOCK : (bit + 1) * BLOCK] = 255 * (1 - white)
    return frames


def frame_number(frame_CHW: torch.Tensor) -> int | None:
    """The number in the picture; None if the code is damaged, or the damage has changed the picture's size."""
    _, height, width = frame_CHW.shape
    block = width // BITS
    if width % BITS or height < 2 * block:
        return None
    middle = slice(block * 3 // 8, block - block * 3 // 8)
    blocks = frame_CHW[:, : 2 * block].reshape(3, 2, block, BITS, block)[:, :, middle, :, middle]
    code, inverse = blocks.float().mean((0, 2, 4))
    if ((code - inverse).abs() < 100).any():
        return None
    return int("".join("01"[is_white] for is_white in code > inverse), 2)


def write_video(
    path: Path,
    frames_TCHW: torch.Tensor,
    *,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    pts: list[int] | None = None,
    time_base: Fraction = Fraction(1, 25),
    container_options: dict[str, str] | None = None,
    rotation: float | None = None,
    context_settings: dict[str, Any] | None = None,
) -> Path:
    """Encode ``frames_TCHW``; ``pts`` (in ``time_base``) are 0, 1, 2... unless given."""
    if codec == "libx264":
        options = {"x264-params": "mbtree=0", **(options or {})}  # with it, the same frames give other bytes at times
    with av.open(str(path), "w", container_options=container_options or {}) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(25), options=options or {})
        stream.height, stream.width = frames_TCHW.shape[2:]
        stream.pix_fmt = pix_fmt
        stream.codec_context.time_base = time_base
        stream.codec_context.thread_count = 1
        for name, value in (context_settings or {}).items():
            setattr(stream.codec_context, name, value)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number, frame_CHW in enumerate(frames_TCHW):
            picture = np.ascontiguousarray(frame_CHW.permute(1, 2, 0).numpy())
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=pix_fmt)
            frame.pts = pts[number] if pts is not None else number
            frame.time_base = time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
