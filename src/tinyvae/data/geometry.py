"""From a decoded frame to exactly height x width: which window of the picture, and its scaling.

The window always has the clip's shape, so nothing is stretched. Scaling is bilinear with antialiasing and only ever
down, unless ``allow_upscale`` lets smaller files in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.data.clip_settings import ClipSettings
from tinyvae.data.randomness import below, uniform

SCALE, TOP, LEFT = range(3)


@dataclass(frozen=True, kw_only=True)
class CropWindow:
    """A window of the decoded picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


def random_window(frame_height: int, frame_width: int, settings: ClipSettings, key: tuple[int, ...]) -> CropWindow:
    """A window at a random place, and with ``random_resize`` of a random scale (log-uniform)."""
    largest = largest_scale(frame_height, frame_width, settings)
    scale = 1.0 if largest >= 1.0 else largest
    if settings.random_resize and largest > 1.0:
        scale = math.exp(uniform(*key, SCALE) * math.log(largest))
    height, width = window_size(frame_height, frame_width, settings, scale)
    return CropWindow(
        top=below(frame_height - height + 1, *key, TOP),
        left=below(frame_width - width + 1, *key, LEFT),
        height=height,
        width=width,
    )


def centre_window(frame_height: int, frame_width: int, settings: ClipSettings) -> CropWindow:
    """The middle of the picture: as much as fits where clips are resized, else exactly clip size."""
    largest = largest_scale(frame_height, frame_width, settings)
    scale = largest if settings.random_resize else min(1.0, largest)
    height, width = window_size(frame_height, frame_width, settings, scale)
    return CropWindow(top=(frame_height - height) // 2, left=(frame_width - width) // 2, height=height, width=width)


def largest_scale(frame_height: int, frame_width: int, settings: ClipSettings) -> float:
    """Side of the largest window of the clip's shape, as a multiple of the clip's own size."""
    scale = min(frame_height / settings.height, frame_width / settings.width)
    assert scale >= 1.0 or settings.allow_upscale, "split() leaves out files smaller than the clip"
    return scale


def window_size(frame_height: int, frame_width: int, settings: ClipSettings, scale: float) -> tuple[int, int]:
    """Height and width of the window at ``scale``, in whole pixels of the picture."""
    height = min(frame_height, max(1, round(settings.height * scale)))
    width = min(frame_width, max(1, round(settings.width * scale)))
    return height, width


def cut_clip(frames_TCHW: Tensor, window: CropWindow, height: int, width: int, flip: bool) -> Tensor:
    """The window of every frame at exactly ``height`` x ``width``. uint8 TCHW in, uint8 TCHW out."""
    bottom, right = window.top + window.height, window.left + window.width
    assert bottom <= frames_TCHW.shape[-2] and right <= frames_TCHW.shape[-1], "the window leaves the picture"
    clip = frames_TCHW[..., window.top : bottom, window.left : right]
    return finish_clip(clip, torch.empty((*clip.shape[:2], height, width), dtype=torch.uint8), flip)


def finish_clip(window_TCHW: Tensor, out_TCHW: Tensor, flip: bool) -> Tensor:
    """Scale the pixels of a window to the size of ``out_TCHW`` and mirror them; both uint8, may be the same tensor."""
    assert window_TCHW.dtype == out_TCHW.dtype == torch.uint8, "frames stay bytes until they are on the device"
    size = out_TCHW.shape[-2:]
    # Frame by frame: what is made in between then fits into the processor's cache.
    for frame, out in zip(window_TCHW, out_TCHW, strict=True):
        if frame.shape[-2:] != size:
            frame = F.interpolate(frame[None].contiguous(), size=size, mode="bilinear", antialias=True)[0]
        if flip:
            frame = frame.flip(-1)
        if frame.data_ptr() != out.data_ptr():
            out.copy_(frame)
    return out_TCHW
