"""Several clip sizes in one run: the size of a step depends on seed and step alone, and follows shares and stages."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinyvae.data.clip import ClipSettings
from tinyvae.data.sizes import ClipSize, SizeSchedule, SizesOfPositions, in_steps
from tinyvae.errors import UserError

LARGE, SMALL, LONG = ClipSize(16, 480, 720), ClipSize(16, 256, 256), ClipSize(49, 128, 128)
SHARES = SizeSchedule.parse(["16x480x720:0.3", "16x256x256:0.6", "49x128x128:.1"])
STAGES = SizeSchedule.parse(["16x480x720@80", "16x256x256@20", "49x128x128@20", "12x128x128"])


def test_shares_hold_over_many_steps() -> None:
    drawn = Counter(SHARES.size_at(step=step, seed=5) for step in range(20_000))
    for size, share in ((LARGE, 0.3), (SMALL, 0.6), (LONG, 0.1)):
        assert drawn[size] / 20_000 == pytest.approx(share, abs=0.015), size


def test_shares_need_not_add_up_to_one_and_may_be_left_out() -> None:
    (stage,) = SizeSchedule.parse(["16x480x720:3", "16x256x256:6", "49x128x128"]).stages
    assert stage.shares == pytest.approx((0.3, 0.6, 0.1))
    assert SizeSchedule.parse(["8x32x32", "8x64x64"]).stages[0].shares == (0.5, 0.5)


def test_seeds_and_neighboring_steps_differ() -> None:
    drawn = {seed: [SHARES.size_at(step=step, seed=seed) for step in range(60)] for seed in (1, 2)}
    assert drawn[1] != drawn[2] and len(set(drawn[1][:30])) == 3


def test_stages_follow_each_other_in_any_order_of_writing() -> None:
    assert [stage.first_step for stage in STAGES.stages] == [0, 20, 80]
    drawn = [STAGES.size_at(step=step, seed=9) for step in range(100)]
    assert set(drawn[:20]) == {ClipSize(12, 128, 128)}
    assert set(drawn[20:80]) == {SMALL, LONG} and set(drawn[80:]) == {LARGE}


@pytest.mark.parametrize(("num_steps", "step"), [(1000, 700), (9_800, 6_860), (5, 3), (3, 2), (2, 1), (1, 1)])
def test_a_stage_may_begin_at_a_part_of_the_run(num_steps: int, step: int) -> None:
    assert in_steps("20x128x128:2@70%", num_steps) == f"20x128x128:2@{step}", "never with the first step"


def test_other_entries_stay_as_they_are() -> None:
    for entry in ("12x128x128", "16x256x256:0.8@2000", "20x128x128@0%", "20x128x128@100%", "20x128x128@7.5%"):
        assert in_steps(entry, 1000) == entry


def test_the_largest_has_the_most_pixels_and_the_bounds_hold_every_size() -> None:
    assert SHARES.largest == LARGE and SHARES.bounds == ClipSize(49, 480, 720)
    turned = SizeSchedule.parse(["8x480x720", "8x720x480", "9x64x64"])
    assert turned.bounds == ClipSize(9, 720, 720) and turned.largest == ClipSize(8, 480, 720)


def test_a_stage_shares_its_pictures_of_one_size() -> None:
    assert STAGES.pictures_at_once == 2
    assert SizeSchedule.parse(["8x64x64", "16x64x64"]).pictures_at_once == 1


def test_in_words() -> None:
    assert SHARES.in_words() == "16x480x720 (0.3), 16x256x256 (0.6), 49x128x128 (0.1)"
    words = "12x128x128, from step 20 on 16x256x256 (0.5), 49x128x128 (0.5), from step 80 on 16x480x720"
    assert STAGES.in_words() == words


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (["16x256"], "'16x256' is no size; write FRAMESxHEIGHTxWIDTH, perhaps with :SHARE and @STEP"),
        (["16x256x256", "16x256x256:half"], "'16x256x256:half' is no size"),
        (["16x256x256@-5"], "'16x256x256@-5' is no size"),
        (["12x128x128", "20x128x128@100%"], "'20x128x128@100%' is no size; write FRAMESxHEIGHTxWIDTH, perhaps with"),
        (["0x256x256"], "'0x256x256' is no size"),
        (["16x256x256:0"], "the share of '16x256x256:0' is 0"),
        (["16x256x256@100", "16x64x64@50"], "the first stage, '16x64x64@50', must begin at step 0"),
        (["16x256x256:2@0100"], "the first stage, '16x256x256@100', must begin at step 0"),
        (["8x64x64:1", "8x64x64:2"], "'8x64x64:2' names a size that this stage already has"),
    ],
)
def test_a_wrong_entry_is_named(entries: list[str], named: str) -> None:
    with pytest.raises(UserError) as refused:
        SizeSchedule.parse(entries)
    assert named in str(refused.value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.integers(1, 4), accumulation=st.integers(1, 3), ranks=st.integers(1, 4), done=st.integers(0, 5))
def test_all_ranks_and_micro_batches_of_a_step_have_its_size(
    batch: int, accumulation: int, ranks: int, done: int
) -> None:
    """Positions are dealt as the loader deals them, and the run goes on after ``done`` steps of another batch size."""
    settings, start = ClipSettings(height=8, width=8, n_frames=1), 7 * done
    sizes = SizesOfPositions(
        schedule=SHARES, clips_per_step=batch * accumulation * ranks, start_sample=start, start_step=done
    )
    sizes = pickle.loads(pickle.dumps(sizes))  # as on its way to a worker
    for micro_batch in range(6 * accumulation):
        for rank in range(ranks):
            first = start + (micro_batch * ranks + rank) * batch
            for position in range(first, first + batch):
                found = sizes.settings_at(position, settings)
                wanted = SHARES.size_at(step=done + micro_batch // accumulation, seed=settings.seed)
                assert (found.n_frames, found.height, found.width) == wanted
