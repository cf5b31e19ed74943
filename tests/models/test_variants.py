"""The frame rule as a table and as properties, for T = 1..200 and every variant."""

from __future__ import annotations

import math

import pytest

from tinyvae import VARIANTS, get_spec
from tinyvae.errors import UserError

LENGTHS = range(1, 201)


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        ("taehv", {1: (1, 1), 4: (1, 1), 5: (2, 5), 12: (3, 9), 13: (4, 13), 16: (4, 13), 17: (5, 17)}),
        ("taecvx", {5: (2, 8), 8: (2, 8), 9: (3, 9), 12: (3, 9), 13: (4, 16), 16: (4, 16), 17: (5, 17)}),
        ("taeltx_2", {1: (1, 1), 9: (2, 9), 16: (2, 9), 17: (3, 17), 24: (3, 17)}),
        ("taeh3", {1: (2, 5), 17: (2, 5), 18: (7, 22), 34: (7, 22), 51: (12, 39)}),
    ],
)
def test_known_rows(variant: str, rows: dict[int, tuple[int, int]]) -> None:
    spec = get_spec(variant)
    assert {t: (spec.latents(t), spec.frames_out(t)) for t in rows} == rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_counts_agree_with_a_walk_over_frames(variant: str) -> None:
    """frames_out is what counting the kept raw frames one by one gives, and never less than it should be."""
    spec = get_spec(variant)
    for t in LENGTHS:
        latents = spec.latents(t)
        kept = sum(spec.frame_is_kept(i, latents) for i in range(spec.time_factor * latents))
        assert spec.frames_out(t) == kept == spec.frames_from_latents(latents)
        assert spec.aligned_frames(t) == min(t, kept)
        assert spec.padded_frames(t) >= t
        if spec.frame_rule != "chunked":
            assert latents == math.ceil(t / spec.time_factor)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_lengths(variant: str) -> None:
    """A valid length decodes to no more frames than it has; an invalid one names the nearest valid ones."""
    spec = get_spec(variant)
    valid = [t for t in LENGTHS if spec.is_training_length(t)]
    expected = {
        "causal": [t for t in LENGTHS if t % spec.time_factor in (0, 1)],
        "even_keeps_all": [t for t in LENGTHS if t % 8 in (0, 1)],
        "chunked": [t for t in LENGTHS if t % 17 == 0],
    }
    assert valid == expected[spec.frame_rule]
    assert all(spec.frames_out(t) <= t for t in valid)
    for t in LENGTHS:
        if t in valid:
            spec.check_training_length(t)
            continue
        with pytest.raises(UserError) as refused:
            spec.check_training_length(t)
        named = {max((v for v in valid if v < t), default=None), min((v for v in valid if v > t), default=204)}
        assert all(str(v) in str(refused.value) for v in named if v is not None)


def test_lengths_in_circulation_that_cogvideox_cannot_use() -> None:
    for t in (12, 13, 19, 20):
        with pytest.raises(UserError, match="8k or 8k\\+1"):
            get_spec("taecvx").check_training_length(t)


@pytest.mark.parametrize(("frames", "group"), [(16, 13), (20, 17), (24, 7), (28, 5), (20, 8)])
def test_seraena_groups_that_fail(frames: int, group: int) -> None:
    with pytest.raises(UserError, match="use one of 1, 2"):
        get_spec("taehv").check_seraena_frames(frames, group)


@pytest.mark.parametrize(("frames", "group"), [(16, 4), (20, 4), (20, 5), (28, 7)])
def test_seraena_groups_that_work(frames: int, group: int) -> None:
    get_spec("taehv").check_seraena_frames(frames, group)
    divisors = get_spec("taehv").seraena_divisors(frames)
    assert group in divisors and divisors == [k for k in range(1, frames + 1) if frames % k == 0]


def test_previews_make_one_frame_per_latent_and_cannot_be_compared() -> None:
    spec = get_spec("taecvx", preview="time")
    assert [spec.frames_from_latents(n) for n in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(UserError, match="line up"):
        spec.aligned_frames(8)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: get_spec("taew2.1"), "Did you mean 'taew2_1'"),
        (lambda: get_spec("taehv", width=0.3), "here 0.25"),
        (lambda: get_spec("taehv", width=0.0), "here 0.125"),
        (lambda: get_spec("taehv", width=float("nan")), "multiple of 0.125"),
        (lambda: get_spec("taehv", preview="all"), "'time', 'space', 'both'"),
        (lambda: get_spec("taew2_2_super", preview="both"), "no spatial preview"),
        (lambda: get_spec("taehv").check_size(100, 64), "96x64 or 104x64"),
        (lambda: get_spec("taeltx_2").check_size(16, 33), "32x32 or 32x64"),
        (lambda: get_spec("taehv").latents(0), "at least 1 frame"),
        (lambda: get_spec("taehv").frames_from_latents(0), "at least 1 latent"),
        (lambda: get_spec("taecvx").check_training_length(-100), "8k or 8k\\+1, here 1"),
        (lambda: get_spec("taehv").check_training_length(10**20 + 3), f"here {10**20 + 1} or {10**20 + 4}"),
        (lambda: get_spec("taehv").check_seraena_frames(10**12, 7), "use one of 1, 2, 4, 5, 8, 10"),
    ],
)
def test_mistakes_name_the_way_out(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
