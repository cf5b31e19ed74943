"""Writes small real videos for the data tests: moving waves with noise, in H.264."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def write_video(path: Path, *, frames: int = 30, width: int = 96, height: int = 64, seed: int = 0) -> Path:
    """An H.264 file whose frames all differ, with a key frame every 12 frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(24), options={"crf": "20", "preset": "ultrafast", "g": "12"}
        )
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            wave = 90 + 60 * np.sin((x + 3 * number + seed) / 9.0) + 40 * np.cos((y - 2 * number) / 7.0)
            picture = np.clip(wave[..., None] + noise * [1.0, 0.5, 0.2], 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path
