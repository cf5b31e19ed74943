"""The clip of a position is a pure function of (seed, epoch, position), and always a clip that the file can give.

Draws have no state: keys matter, values are uniform, shuffles are shuffles.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tinyvae.data.clip import (
    AS_IT_IS,
    ClipSettings,
    CropWindow,
    Turn,
    below,
    center_window,
    choose_clip,
    choose_validation_clip,
    file_of,
    fractions_of_hashes,
    hash_key,
    mix,
    random_window,
    shuffled,
    uniform,
)
from tinyvae.data.index import IndexRow
from tinyvae.errors import UserError

PLAIN = ClipSettings(height=64, width=96, n_frames=1)
NATIVE = ClipSettings(height=64, width=96, n_frames=1, random_resize=False)
SETTINGS = ClipSettings(
    height=64, width=96, n_frames=5, min_frame_delta=1, max_frame_delta=3, color_jitter=True, gaussian_blur=True
)


def row(frames: int = 60, width: int = 320, height: int = 240) -> IndexRow:
    return IndexRow(path="a.mp4", frames=frames, width=width, height=height)


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
@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


def test_more_windows_change_nothing_else_and_one_is_as_it_always_was() -> None:
    for position in range(50):
        one, four = (choose_clip(row(), replace(SETTINGS, crop_candidates=n), position, 100) for n in (1, 4))
        assert one == choose_clip(row(), SETTINGS, position, 100) == replace(four, more_windows=())
        drawn = (four.window, *four.more_windows)
        assert len(set(drawn)) == 4 and one.area == one.window
        three = choose_clip(row(), replace(SETTINGS, crop_candidates=3), position, 100)
        assert three.more_windows == four.more_windows[:2]
        area = four.area
        assert all(area.top <= w.top and w.top + w.height <= area.top + area.height <= 240 for w in drawn)
        assert all(area.left <= w.left and w.left + w.width <= area.left + area.width <= 320 for w in drawn)
    # From before there were candidates: runs and latent stores of that time go on with these.
    golden = [(57, 121, 116, 175), (127, 49, 97, 145), (2, 35, 164, 246)]
    assert [choose_clip(row(), SETTINGS, position, 100).window for position in range(3)] == golden
    assert choose_clip(row(), SETTINGS, 123, 100).frame_indices == (12, 15, 18, 21, 24)
    many = replace(SETTINGS, crop_candidates=4)
    fixed = choose_clip(row(), replace(many, random_crop=False), 0, 100)
    assert choose_validation_clip(row(), many).more_windows == fixed.more_windows == ()


def test_all_starts_steps_flips_and_corners_occur() -> None:
    choices = [choose_clip(row(frames=20, width=100, height=66), SETTINGS, position, 5000) for position in range(5000)]
    assert {choice.frame_indices[0] for choice in choices} == set(range(16))
    assert {choice.frame_indices[1] - choice.frame_indices[0] for choice in choices} == {1, 2, 3}
    assert abs(sum(choice.turn.mirrored for choice in choices) / 5000 - 0.5) < 0.04
    assert not any(choice.turn._replace(mirrored=False) != AS_IT_IS for choice in choices)
    assert {(c.window.top, c.window.left) for c in choices} >= {(0, 0), (2, 4), (0, 4), (2, 0)}
    blurred = [choice.color_and_blur.blur_sigma for choice in choices if choice.color_and_blur.blur_sigma > 0]
    assert abs(len(blurred) / 5000 - 0.5) < 0.04 and min(blurred) < 0.15 and 1.95 < max(blurred) <= 2.0


def test_every_way_to_turn_occurs_as_often_and_changes_nothing_else() -> None:
    square = replace(SETTINGS, height=64, width=64, random_turn=True, random_reverse=True)
    choices = [choose_clip(row(), square, position, 8000) for position in range(8000)]
    counts = Counter(choice.turn for choice in choices)
    assert len(counts) == 16 and all(abs(count - 500) < 100 for count in counts.values())
    for position in range(50):
        as_before = choose_clip(row(), replace(square, random_turn=False, random_reverse=False), position, 8000)
        turn = Turn(mirrored=as_before.turn.mirrored)
        assert as_before == replace(choices[position], turn=turn)
    wide = [choose_clip(row(), replace(square, width=96), position, 8000).turn for position in range(50)]
    assert not any(turn.on_side for turn in wide) and any(turn.upside_down for turn in wide)
    assert choose_validation_clip(row(), square).turn == AS_IT_IS


def test_substitutes_are_drawn_from_all_files() -> None:
    assert {file_of(position, 10, 42, attempt=1) for position in range(300)} == set(range(10))


def test_augmentation_that_is_off_changes_nothing() -> None:
    off = replace(SETTINGS, random_crop=False, random_flip=False, color_jitter=False, gaussian_blur=False)
    plain = choose_validation_clip(row(), off)
    for position in range(50):
        choice = choose_clip(row(), off, position, 50)
        assert replace(choice, frame_indices=()) == replace(plain, frame_indices=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 100}, "height is 100.*multiple of 8"),
        ({"height": 0}, "height is 0"),
        ({"variant": "taew2_2", "height": 72}, "multiples of 16"),
        ({"n_frames": 0}, "n_frames is 0"),
        ({"min_frame_delta": 0}, "min_frame_delta is 0"),
        ({"min_frame_delta": 4}, "max_frame_delta is 3; it must be at least min_frame_delta"),
        ({"color_jitter_params": (0.1, 0.1, 1.0, 0.1)}, "color_jitter_params"),
        ({"color_jitter_params": (0.1, 0.1)}, "4 numbers"),
        ({"gaussian_blur_sigma": (2.0, 1.0)}, "gaussian_blur_sigma"),
        ({"gaussian_blur_probability": 1.5}, "gaussian_blur_probability"),
        ({"crop_candidates": 0}, "crop_candidates is 0; it must be at least 1"),
        ({"decode_timeout_s": 0.0}, "decode_timeout_s"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SETTINGS, **change)  # type: ignore[arg-type]


def test_random_resized_windows_span_all_scales_and_keep_the_shape() -> None:
    windows = [random_window(256, 256, PLAIN, (key,)) for key in range(400)]
    widths = [window.width for window in windows]
    assert min(widths) < 100 and max(widths) > 250
    assert all(abs(window.height / window.width - 64 / 96) < 0.01 for window in windows)


def test_center_windows() -> None:
    assert center_window(240, 320, PLAIN) == CropWindow(top=13, left=0, height=213, width=320)
    assert center_window(240, 320, NATIVE) == CropWindow(top=88, left=112, height=64, width=96)
    assert center_window(64, 96, PLAIN) == CropWindow(top=0, left=0, height=64, width=96)


def test_upscaling_needs_to_be_asked_for() -> None:
    with pytest.raises(AssertionError, match="smaller than the clip"):
        center_window(63, 96, PLAIN)
    window = random_window(32, 60, replace(PLAIN, allow_upscale=True), (0,))
    assert (window.height, window.width) == (32, 48)


def test_mix_is_splitmix64() -> None:
    # The first outputs of splitmix64 with seed 0, which are public reference values.
    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF
    assert mix(2 * golden & (1 << 64) - 1) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000])
def test_shuffled_is_a_bijection(size: int) -> None:
    assert sorted(shuffled(place, size, 1, 2) for place in range(size)) == list(range(size))


def test_shuffles_of_other_epochs_and_seeds_are_other_shuffles() -> None:
    orders = {tuple(shuffled(place, 50, seed, epoch) for place in range(50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_shuffle_of_five_million_needs_no_table() -> None:
    seen = {shuffled(place, 5_000_000, 42, 0) for place in range(2000)}
    assert len(seen) == 2000 and max(seen) > 4_900_000 and min(seen) < 100_000


def test_every_place_of_a_small_shuffle_is_equally_likely() -> None:
    counts = Counter(shuffled(0, 5, seed) for seed in range(5000))
    assert all(abs(counts[value] - 1000) < 150 for value in range(5))  # five standard deviations


def test_draws_are_uniform_and_depend_on_every_part_of_the_key() -> None:
    draws = np.array([uniform(3, position, 1) for position in range(20_000)])
    assert abs(draws.mean() - 0.5) < 0.01 and np.histogram(draws, 10, (0, 1))[0].min() > 1800
    other = np.array([uniform(3, position, 2) for position in range(20_000)])
    assert abs(np.corrcoef(draws, other)[0, 1]) < 0.03
    assert hash_key(1, 2) != hash_key(2, 1) and hash_key(1) != hash_key(1, 0) and hash_key(-1) != hash_key(1)
    assert {below(3, key) for key in range(100)} == {0, 1, 2}


def test_whole_columns_are_mixed_like_single_values() -> None:
    hashes = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    expected = [(mix((int(value) + hash_key(7)) % 2**64) >> 11) * 2.0**-53 for value in hashes]
    assert fractions_of_hashes(hashes, 7).tolist() == expected
