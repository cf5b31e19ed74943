"""Intervals against scipy, and paired differences that see what unpaired means cannot."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch

from tinyvae.evaluation.metrics import METRICS, ClipMetrics, clip_metrics
from tinyvae.evaluation.statistics import Summary, estimate, paired_difference, student_t_975, summarize


def clip_with_noise(seed: int, deviation: float, num_frames: int = 3) -> ClipMetrics:
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(1, num_frames, 3, 16, 16, generator=generator)
    noise = torch.randn(target.shape, generator=generator)
    return clip_metrics(target * 0.5 + 0.25 + deviation * noise, target * 0.5 + 0.25)[0]


@pytest.mark.parametrize("degrees", [1, 2, 5, 19, 30, 31, 40, 100, 5000])
def test_student_t_equals_scipy(degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert student_t_975(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=1e-4)


def test_interval_equals_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = [28.1, 30.4, 25.9, 33.0, 27.2]
    result = estimate(values)
    low, high = stats.t.interval(0.95, 4, loc=result.mean, scale=stats.sem(values))
    assert (result.low, result.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert result.std == pytest.approx(stats.tstd(values)) and result.count == 5


def test_a_single_clip_has_no_interval() -> None:
    summary = summarize([clip_with_noise(0, 0.05)])
    assert summary.psnr is not None and summary.psnr.low is None and summary.psnr.std is None
    assert summary.lpips is None and summary.num_clips == 1 and summary.num_frames == 3


def test_intervals_are_over_clips_not_frames() -> None:
    """The same two clips with ten times the frames must not look ten times as sure."""
    short = summarize([clip_with_noise(seed, 0.02 + 0.03 * seed, 3) for seed in range(2)])
    long = summarize([clip_with_noise(seed, 0.02 + 0.03 * seed, 30) for seed in range(2)])
    assert short.psnr is not None and long.psnr is not None
    assert short.psnr.count == long.psnr.count == 2
    assert long.psnr.high - long.psnr.low == pytest.approx(short.psnr.high - short.psnr.low, rel=0.2)


def test_clips_without_a_value_are_left_out_of_its_mean() -> None:
    summary = summarize([clip_with_noise(0, 0.05, 1), clip_with_noise(1, 0.05, 4)])
    assert summary.flicker_error is not None and summary.flicker_error.count == 1
    assert summary.psnr is not None and summary.psnr.count == 2
    assert set(summary.means()) == {"psnr", "ssim", "mse", "mae", "flicker_error", "flicker_energy"}


def test_pairing_finds_a_small_difference_among_very_different_clips() -> None:
    baseline = {f"c{i}": clip_with_noise(i, 0.02 * (i + 1)) for i in range(6)}
    candidate = {f"c{i}": clip_with_noise(i, 0.02 * (i + 1) * 0.97) for i in range(6)}
    before, after = summarize(list(baseline.values())).psnr, summarize(list(candidate.values())).psnr
    assert before is not None and after is not None and after.low < before.mean  # unpaired: nothing to see
    result = paired_difference("psnr", baseline, candidate)
    assert result is not None and result.verdict == "better" and (result.wins, result.losses) == (6, 0)
    assert result.difference.mean == pytest.approx(-20 * math.log10(0.97), abs=0.02)
    reverse = paired_difference("mse", candidate, baseline)
    assert reverse is not None and reverse.losses == 6 and reverse.difference.mean > 0


def test_a_difference_that_may_be_chance_is_unclear() -> None:
    baseline = {f"c{i}": clip_with_noise(i, 0.05) for i in range(4)}
    candidate = {f"c{i}": clip_with_noise(i, 0.05 + (0.004 if i % 2 else -0.004)) for i in range(4)}
    result = paired_difference("psnr", baseline, candidate)
    assert result is not None and result.verdict == "unclear" and (result.wins, result.losses) == (2, 2)
    assert paired_difference("lpips", baseline, candidate) is None


def test_only_shared_clips_are_compared() -> None:
    clips = {f"c{i}": clip_with_noise(i, 0.05) for i in range(3)}
    result = paired_difference("psnr", clips, {"c1": clips["c1"], "x": clips["c2"]})
    assert result is not None and result.difference.count == 1 and result.verdict == "unclear"


def test_a_summary_has_every_metric() -> None:
    assert {field.name for field in fields(Summary)} == {*METRICS, "num_clips", "num_frames"}
