"""Means over clips and how sure they are.

The clip is the unit: frames of one clip are nearly copies of each other, so an interval over frames would be too
narrow. Intervals are Student's t at 95 %. Two models are compared clip by clip, because clips differ more than models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinyvae.evaluation.metrics import METRICS, ClipMetrics

# Quantiles of Student's t at 0.975 for 1..30 degrees of freedom.
_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over clips with its spread. ``low`` and ``high`` bound the mean at 95 %; None for a single clip."""

    mean: float
    std: float | None  # over clips (n-1); None for a single clip
    low: float | None
    high: float | None
    count: int  # clips that have a value


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All clips of an evaluation. A metric that no clip has is None."""

    psnr: Estimate | None
    ssim: Estimate | None
    lpips: Estimate | None
    mse: Estimate | None
    mae: Estimate | None
    flicker_error: Estimate | None
    flicker_energy: Estimate | None
    num_clips: int
    num_frames: int

    def value(self, metric: str) -> Estimate | None:
        return getattr(self, metric)

    def means(self) -> dict[str, float]:
        """``{metric: mean}`` of what was measured, for logs and choices of the best model."""
        return {name: estimate.mean for name in METRICS if (estimate := self.value(name)) is not None}


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """One metric, two models, the same clips: candidate minus baseline (of absolute values for a metric best at 0)."""

    metric: str
    difference: Estimate
    wins: int  # clips on which the candidate is better
    losses: int
    verdict: str  # better, worse, or unclear: the interval holds zero, or a single clip gives none


def summarize(clips: Sequence[ClipMetrics]) -> Summary:
    """Mean, deviation and 95 % interval over clips of every metric."""
    estimates: dict[str, Estimate | None] = {}
    for name in METRICS:
        values = [value for clip in clips if (value := clip.value(name)) is not None]
        estimates[name] = estimate(values) if values else None
    return Summary(**estimates, num_clips=len(clips), num_frames=sum(clip.num_frames for clip in clips))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, sample deviation and Student's t interval of at least one value; NaN among them makes NaN."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean=mean, std=None, low=None, high=None, count=1)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student_t_975(count - 1) * std / math.sqrt(count)
    return Estimate(mean=mean, std=std, low=mean - half, high=mean + half, count=count)


def paired_difference(
    metric: str, baseline: Mapping[str, ClipMetrics], candidate: Mapping[str, ClipMetrics]
) -> PairedDifference | None:
    """Candidate against baseline over the clips (by name) that both have; None where no clip has both values."""
    info = METRICS[metric]
    differences: list[float] = []
    for name in baseline.keys() & candidate.keys():
        before, after = baseline[name].value(metric), candidate[name].value(metric)
        if before is not None and after is not None:
            differences.append(info.difference(before, after))
    if not differences:
        return None
    sign = 1 if info.better == "higher" else -1
    difference = estimate(differences)
    verdict = "unclear"
    low, high = difference.low, difference.high
    if low is not None and high is not None and (low > 0 or high < 0):  # neither holds for NaN
        verdict = "better" if sign * difference.mean > 0 else "worse"
    return PairedDifference(
        metric=metric,
        difference=difference,
        wins=sum(sign * value > 0 for value in differences),
        losses=sum(sign * value < 0 for value in differences),
        verdict=verdict,
    )


def student_t_975(degrees: int) -> float:
    """The 0.975 quantile of Student's t: a table up to 30, beyond it the expansion around the normal quantile."""
    assert degrees >= 1
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / 4 / degrees + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / degrees**2
