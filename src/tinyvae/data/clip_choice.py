"""Which clip a global position gets: a pure function of (seed, epoch, position).

Positions count samples over the whole run, 0, 1, 2, ...; epoch = position // files. Inside an epoch a shuffle gives
each file exactly one position. When a file turns out bad while decoding, try 1, 2, ... draws another file from the
same key, so that the substitute too depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinyvae.data.augment import ColorAndBlur, choose_color_and_blur
from tinyvae.data.clip import ClipSettings, CropWindow, below, centre_window, random_window, shuffled, uniform
from tinyvae.data.index import IndexRow
from tinyvae.data.splits import frames_needed

# What a draw is for; part of its key, so that two draws of one position are independent.
SHUFFLE, SUBSTITUTE, STEP, START, CROP, FLIP, COLOR = range(7)


@dataclass(frozen=True, kw_only=True)
class ClipChoice:
    """Everything that is random about one sample."""

    frame_indices: tuple[int, ...]
    window: CropWindow
    flip: bool
    color_and_blur: ColorAndBlur


def epoch_of(position: int, num_files: int) -> int:
    return position // num_files


def file_of(position: int, num_files: int, seed: int, attempt: int = 0) -> int:
    """Which of ``num_files`` files the position gets; ``attempt`` counts the bad files drawn before it."""
    epoch, place = divmod(position, num_files)
    if attempt == 0:
        return shuffled(place, num_files, seed, epoch, SHUFFLE)
    return below(num_files, seed, epoch, place, SUBSTITUTE, attempt)


def choose_clip(row: IndexRow, settings: ClipSettings, position: int, num_files: int, attempt: int = 0) -> ClipChoice:
    """Frames, crop, flip and colour of a training sample."""
    epoch, place = divmod(position, num_files)
    key = (settings.seed, epoch, place, attempt)
    delta_that_fits = longest_delta(row.frames, settings)
    delta = settings.min_frame_delta + below(delta_that_fits - settings.min_frame_delta + 1, *key, STEP)
    start = below(row.frames - frames_needed(settings.n_frames, delta) + 1, *key, START)
    if settings.random_crop:
        window = random_window(row.height, row.width, settings, (*key, CROP))
    else:
        window = centre_window(row.height, row.width, settings)
    return ClipChoice(
        frame_indices=tuple(start + delta * frame for frame in range(settings.n_frames)),
        window=window,
        flip=settings.random_flip and uniform(*key, FLIP) < 0.5,
        color_and_blur=choose_color_and_blur(settings, (*key, COLOR)),
    )


def choose_validation_clip(row: IndexRow, settings: ClipSettings) -> ClipChoice:
    """The middle of the file at the smallest step, the middle of the picture, nothing random."""
    delta = settings.min_frame_delta
    start = (row.frames - frames_needed(settings.n_frames, delta)) // 2
    return ClipChoice(
        frame_indices=tuple(start + delta * frame for frame in range(settings.n_frames)),
        window=centre_window(row.height, row.width, settings),
        flip=False,
        color_and_blur=ColorAndBlur(),
    )


def longest_delta(frames: int, settings: ClipSettings) -> int:
    """The largest step, up to ``max_frame_delta``, at which the clip still fits into a file of ``frames`` frames."""
    assert frames >= frames_needed(settings.n_frames, settings.min_frame_delta), "split() leaves out shorter files"
    if settings.n_frames == 1:
        return settings.max_frame_delta
    return min(settings.max_frame_delta, (frames - 1) // (settings.n_frames - 1))
