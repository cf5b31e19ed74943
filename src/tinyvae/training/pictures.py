"""The pictures of a validation: input | output | error of a clip, as a PNG and as an animated GIF.

A process of its own draws them: this file, run as a script, without torch. Pillow holds Python's lock while it draws,
and every small operation of the training loop would wait for it: in a thread, four clips of 20 x 256x256 cost 2 to 3 s.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

VIDEO_FPS = 8


class DrawingError(Exception):
    """The process that draws has failed; the text is the last line that it printed."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The middle frame of a clip, and all frames as an animation; both ``width`` x ``height`` pixels."""

    name: str
    width: int
    height: int
    png: bytes
    gif: bytes


def draw_pictures(strips: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> list[Pictures]:
    """Draw clips in a process of its own, and wait for it; ``strips``: names, and frames THWC as RGB bytes.

    Example: ``draw_pictures([("clip", np.zeros((20, 64, 192, 3), np.uint8))])[0].gif``
    """
    sent = io.BytesIO()
    np.savez(sent, *(frames for _, frames in strips))
    # Signals to the run's own group (Ctrl-C) do not reach it: it ends by itself, at the latest when nobody reads.
    command = [sys.executable, "-P", __file__]
    done = subprocess.run(command, input=sent.getvalue(), capture_output=True, check=False, start_new_session=True)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").split("\n")
        raise DrawingError(next((line for line in reversed(said) if line.strip()), f"exit code {done.returncode}"))
    drawn = [values.tobytes() for values in np.load(io.BytesIO(done.stdout)).values()]
    return [
        Pictures(name=name, width=frames.shape[2], height=frames.shape[1], png=png, gif=gif)
        for (name, frames), png, gif in zip(strips, drawn[::2], drawn[1::2], strict=True)
    ]


def encode(frames_THWC: npt.NDArray[np.uint8]) -> tuple[bytes, bytes]:
    """(PNG of the middle frame, GIF of all)."""
    images = [Image.fromarray(frame) for frame in frames_THWC]
    # 256 colors chosen by an octree: 35 times faster than Pillow's own choice, and 1 of 255 levels further off.
    first, *rest = [image.quantize(method=Image.Quantize.FASTOCTREE) for image in images]
    png, gif = io.BytesIO(), io.BytesIO()
    images[len(images) // 2].save(png, format="PNG")
    first.save(gif, format="GIF", save_all=True, append_images=rest, duration=1000 // VIDEO_FPS, loop=0)
    return png.getvalue(), gif.getvalue()


if __name__ == "__main__":
    received = np.load(io.BytesIO(sys.stdin.buffer.read())).values()
    files = [np.frombuffer(file, np.uint8) for frames in received for file in encode(frames)]
    answer = io.BytesIO()
    np.savez(answer, *files)
    sys.stdout.buffer.write(answer.getvalue())
