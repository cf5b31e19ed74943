"""A position's clip is a pure function of (seed, epoch, position), and always a clip that the file can give."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tinyvae.data.clip import ClipSettings
from tinyvae.data.clip_choice import choose_clip, choose_validation_clip, file_of
from tinyvae.data.index import STATUS_OK, IndexRow
from tinyvae.errors import UserError

SETTINGS = ClipSettings(
    height=64, width=96, n_frames=5, min_frame_delta=1, max_frame_delta=3, color_jitter=True, gaussian_blur=True
)


def row(frames: int = 60, width: int = 320, height: int = 240) -> IndexRow:
    return IndexRow(
        number=0, path="a.mp4", status=STATUS_OK, reason="", split="", frames=frames, fps=25.0, width=width,
        height=height, codec="h264", interlaced=False, file_bytes=1, ends_crc=1, mtime_ns=1, first_pts=0, pts_step=1.0,
        pixel_aspect=1.0, thorough=False,
    )  # fmt: skip


@given(
    position=st.integers(0, 10**12),
    n_frames=st.integers(1, 20),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
    spare=st.integers(0, 50),
    height=st.integers(64, 500),
    width=st.integers(96, 500),
    resize=st.booleans(),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_a_clip_always_lies_inside_its_file(
    position: int, n_frames: int, low: int, more: int, spare: int, height: int, width: int, resize: bool
) -> None:
    settings = ClipSettings(
        height=64, width=96, n_frames=n_frames, min_frame_delta=low, max_frame_delta=low + more, random_resize=resize
    )
    file = row(frames=(n_frames - 1) * low + 1 + spare, width=width, height=height)
    for choice in (choose_clip(file, settings, position, 1000), choose_validation_clip(file, settings)):
        indices = choice.frame_indices
        assert len(indices) == n_frames and indices[0] >= 0 and indices[-1] < file.frames
        steps = {b - a for a, b in itertools.pairwise(indices)}
        assert len(steps) <= 1 and all(low <= step <= low + more for step in steps)
        window = choice.window
        assert window.top >= 0 and window.top + window.height <= height
        assert window.left >= 0 and window.left + window.width <= width
        assert window.height >= 64 and window.width >= 96, "no upscaling"


def test_the_same_key_gives_the_same_clip_and_every_part_of_the_key_counts() -> None:
    base = choose_clip(row(), SETTINGS, 123, 100)
    assert base == choose_clip(row(), SETTINGS, 123, 100)
    others = [
        choose_clip(row(), SETTINGS, 124, 100),
        choose_clip(row(), SETTINGS, 223, 100),  # the same place in the next epoch
        choose_clip(row(), SETTINGS, 123, 100, attempt=1),
        choose_clip(row(), replace(SETTINGS, seed=43), 123, 100),
    ]
    assert all(base != other for other in others)


def test_all_starts_steps_flips_and_corners_occur() -> None:
    choices = [choose_clip(row(frames=20, width=100, height=66), SETTINGS, position, 5000) for position in range(5000)]
    assert {choice.frame_indices[0] for choice in choices} == set(range(16))
    assert {choice.frame_indices[1] - choice.frame_indices[0] for choice in choices} == {1, 2, 3}
    assert abs(sum(choice.flip for choice in choices) / 5000 - 0.5) < 0.04
    assert {(c.window.top, c.window.left) for c in choices} >= {(0, 0), (2, 4), (0, 4), (2, 0)}
    blurred = [choice.color_and_blur.blur_sigma for choice in choices if choice.color_and_blur.blur_sigma > 0]
    assert abs(len(blurred) / 5000 - 0.5) < 0.04 and min(blurred) < 0.15 and 1.95 < max(blurred) <= 2.0


def test_each_file_comes_once_per_epoch_and_epochs_differ() -> None:
    epochs = [[file_of(epoch * 37 + place, 37, 42) for place in range(37)] for epoch in range(4)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_substitutes_are_drawn_from_all_files() -> None:
    assert {file_of(position, 10, 42, attempt=1) for position in range(300)} == set(range(10))
    assert file_of(5, 10, 42, attempt=1) == file_of(5, 10, 42, attempt=1)


def test_augmentation_that_is_off_changes_nothing() -> None:
    off = replace(SETTINGS, random_crop=False, random_flip=False, color_jitter=False, gaussian_blur=False)
    plain = choose_validation_clip(row(), off)
    for position in range(50):
        choice = choose_clip(row(), off, position, 50)
        assert (choice.window, choice.flip, choice.color_and_blur) == (plain.window, False, plain.color_and_blur)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 100}, "height is 100.*96 or 104"),
        ({"height": 0}, "height is 0"),
        ({"variant": "taew2_2", "height": 72}, "multiples of 16"),
        ({"n_frames": 0}, "n_frames is 0"),
        ({"min_frame_delta": 0}, "min_frame_delta is 0"),
        ({"min_frame_delta": 4}, "min_frame_delta is 4 and max_frame_delta is 3"),
        ({"color_jitter_params": (0.1, 0.1, 1.0, 0.1)}, "color_jitter_params"),
        ({"color_jitter_params": (0.1, 0.1)}, "4 numbers"),
        ({"gaussian_blur_sigma": (2.0, 1.0)}, "gaussian_blur_sigma"),
        ({"gaussian_blur_probability": 1.5}, "gaussian_blur_probability"),
        ({"decode_timeout_s": 0.0}, "decode_timeout_s"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SETTINGS, **change)  # type: ignore[arg-type]
