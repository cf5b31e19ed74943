"""How far a decoded video is from its input: per frame and per clip, in pixels, structure, perception and flicker.

Everything takes RGB in [0, 1]. The decoded video is clamped to [0, 1] first, as it would be shown. What cannot be
measured (LPIPS without weights, flicker of a single frame, SSIM of a picture of 5 pixels, LPIPS below 31) is None: it
is left out of the means, never replaced.

**Flicker** is what people see first in tiny video decoders and what PSNR does not tell. Two numbers:

- ``flicker_error``: root mean square of (Δout - Δin), Δx_t = x_t - x_{t-1}. Input motion cancels out.
  A perfect copy plus an alternation of ±a has 2a, independent noise of deviation s per frame has s·√2.
- ``flicker_energy``: mean of h(out)² less mean of h(in)², with h(x)_t = (x_{t+1} - 2·x_t + x_{t-1}) / 4, a high-pass in
  time with gain 1 at the highest frequency. Signed: an alternation of ±a on a still picture has +a², noise of deviation
  s has +3/8·s², an output that smears motion over time is negative.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.errors import MissingFileError

if TYPE_CHECKING:
    from tinyvae.losses.perceptual import LPIPS

PSNR_CAP_DB = 100.0
"""PSNR of frames that agree to within 1e-5: identical frames would be infinite and swallow every mean."""
SSIM_BORDER = 5  # pixels that the 11-pixel window reaches over the edge; the picture is mirrored there
SSIM_DEVIATION = 1.5  # of the window, in pixels
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2  # keep the quotient finite where a picture is black or flat
PERCEPTUAL_BATCH = 8  # frames that SSIM and LPIPS see at once: their scratch memory is tens of frames


class MetricInfo(NamedTuple):
    """How one metric is named, shown and judged."""

    name: str
    label: str
    unit: str  # of the shown number
    better: Literal["higher", "lower", "zero"]
    digits: int
    meaning: str
    shown_scale: float = 1  # tables show ``value * shown_scale``
    first_frame: int = 0  # the first one with a value of its own; flicker needs the frame before

    def shown(self, value: float | None) -> str:
        """The number as tables print it."""
        if value is None:
            return "not measured"
        return f"{value * self.shown_scale:.{self.digits}f}" if math.isfinite(value) else "NaN"

    def shown_difference(self, difference: float) -> str:
        """The same with its sign, for one value less another."""
        return f"{difference * self.shown_scale:+.{self.digits}f}" if math.isfinite(difference) else "NaN"

    def interval(self, low: float | None, high: float | None) -> str:
        """Both ends as tables print them; a single clip has none."""
        return "one clip" if low is None else f"{self.shown(low)} … {self.shown(high)}"

    def badness(self, value: float) -> float:
        """A number that is smaller for better values."""
        return {"higher": -value, "lower": value, "zero": abs(value)}[self.better]

    def difference(self, before: float, after: float) -> float:
        """One value less another; of a metric that is best at 0, the same of their sizes."""
        return abs(after) - abs(before) if self.better == "zero" else after - before


_PSNR = "mean over frames of the peak signal-to-noise ratio; identical frames count as 100 dB"
_SSIM = "structural similarity, Gaussian window of 11 pixels; 1 is identical"
_FLICKER_ERROR = "root mean square error of frame-to-frame differences, in levels of 255"
_FLICKER_ENERGY = "temporal high-frequency energy of the output above the input's; negative means motion is smeared"
METRICS: dict[str, MetricInfo] = {
    info.name: info
    for info in (
        MetricInfo("psnr", "PSNR", "dB", "higher", 2, _PSNR),
        MetricInfo("ssim", "SSIM", "", "higher", 4, _SSIM),
        MetricInfo("lpips", "LPIPS", "", "lower", 4, "perceptual distance of AlexNet features; 0 is identical"),
        MetricInfo("mse", "MSE", "× 10⁻³", "lower", 3, "mean squared error of values in [0, 1]", 1e3),
        MetricInfo("mae", "MAE", "/255", "lower", 2, "mean absolute error, in levels of 255", 255),
        MetricInfo("flicker_error", "Flicker error", "/255", "lower", 2, _FLICKER_ERROR, 255, first_frame=1),
        MetricInfo("flicker_energy", "Flicker energy", "/255²", "zero", 2, _FLICKER_ENERGY, 255**2, first_frame=1),
    )
}


@dataclass(frozen=True, kw_only=True)
class ClipMetrics:
    """One decoded clip against its input. Values of frames and of the clip, in [0, 1] units and dB."""

    psnr_by_frame: tuple[float, ...]
    ssim_by_frame: tuple[float, ...] | None
    lpips_by_frame: tuple[float, ...] | None
    mse_by_frame: tuple[float, ...]
    mae_by_frame: tuple[float, ...]
    flicker_error_by_frame: tuple[float, ...]  # of each frame after the first
    flicker_energy_by_frame: tuple[float, ...]  # of each frame except the first and the last
    psnr: float  # mean of the frames' PSNR
    ssim: float | None
    lpips: float | None
    mse: float
    mae: float
    flicker_error: float | None
    flicker_energy: float | None

    @property
    def num_frames(self) -> int:
        return len(self.psnr_by_frame)

    @property
    def is_finite(self) -> bool:
        """False where the decoder made NaN; infinity is clamped like every value outside [0, 1]."""
        return math.isfinite(self.mse)

    @property
    def worst_frame(self) -> int:
        """The frame of the lowest PSNR; NaN is the worst."""
        return min(range(self.num_frames), key=lambda place: sortable(self.psnr_by_frame[place]))

    def value(self, metric: str) -> float | None:
        """The clip's value of a metric of `METRICS`."""
        return getattr(self, metric)


def open_lpips(wanted: LPIPS | str | os.PathLike[str] | None) -> tuple[LPIPS | None, tuple[str, ...]]:
    """The LPIPS to measure with, and a note for the user where it is missing."""
    if wanted is None:
        return None, ()
    from tinyvae.losses.perceptual import LPIPS

    if isinstance(wanted, LPIPS):
        return wanted, ()
    if wanted != "auto":
        return LPIPS.from_file(Path(wanted)), ()
    try:
        return LPIPS.from_file(None), ()
    except MissingFileError as missing:
        return None, (f"LPIPS was not measured: {missing}",)


class ClipMeter:
    """Measures one clip that arrives in pieces; keeps two frames and a few numbers per frame, nothing more.

    The numbers stay on the device until `result`, so `push` does not wait for a GPU.
    """

    def __init__(self, lpips: LPIPS | None = None) -> None:
        self._lpips = lpips
        self._mse: list[Tensor] = []
        self._mae: list[Tensor] = []
        self._ssim: list[Tensor] | None = []
        self._distance: list[Tensor] = []
        self._difference_ms: list[Tensor] = []  # mean square of (Δout - Δin), one for each pair of frames
        self._extra_energy: list[Tensor] = []  # one for each three frames
        self._tail: tuple[Tensor, Tensor] | None = None  # the last one or two frames (decoded, target)

    def push(self, decoded_TCHW: Tensor, target_TCHW: Tensor) -> None:
        """The next frames, floating point; decoded is clamped to [0, 1], target must be in it."""
        assert decoded_TCHW.shape == target_TCHW.shape, (decoded_TCHW.shape, target_TCHW.shape)
        assert decoded_TCHW.ndim == 4 and decoded_TCHW.shape[1] == 3, decoded_TCHW.shape
        if decoded_TCHW.shape[0] == 0:
            return
        decoded = decoded_TCHW.detach().to(torch.float32).clamp(0, 1)
        target = target_TCHW.detach().to(device=decoded.device, dtype=torch.float32)
        error = decoded - target
        self._mse.append(_per_frame(error.square()))
        self._mae.append(_per_frame(error.abs()))
        self._push_structure(decoded, target)
        self._push_flicker(decoded, target)

    def result(self) -> ClipMetrics:
        """The numbers of all frames pushed so far."""
        assert self._mse, "no frame was pushed"
        mse, mae, difference_ms = _numbers(self._mse), _numbers(self._mae), _numbers(self._difference_ms)
        psnr, energy = [psnr_from_mse(value) for value in mse], _numbers(self._extra_energy)
        ssim = tuple(_numbers(self._ssim)) if self._ssim is not None else None
        lpips = tuple(_numbers(self._distance)) if self._lpips is not None else None
        return ClipMetrics(
            psnr_by_frame=tuple(psnr),
            ssim_by_frame=ssim,
            lpips_by_frame=lpips,
            mse_by_frame=tuple(mse),
            mae_by_frame=tuple(mae),
            flicker_error_by_frame=tuple(math.sqrt(value) for value in difference_ms),
            flicker_energy_by_frame=tuple(energy),
            psnr=_mean(psnr),
            ssim=_mean(ssim) if ssim else None,
            lpips=_mean(lpips) if lpips else None,
            mse=_mean(mse),
            mae=_mean(mae),
            flicker_error=math.sqrt(_mean(difference_ms)) if difference_ms else None,
            flicker_energy=_mean(energy) if energy else None,
        )

    def _push_structure(self, decoded_TCHW: Tensor, target_TCHW: Tensor) -> None:
        from tinyvae.losses.perceptual import MIN_PIXELS

        shorter_side = min(decoded_TCHW.shape[-2:])
        if shorter_side <= SSIM_BORDER:
            self._ssim = None
        if shorter_side < MIN_PIXELS:
            self._lpips = None
        for start in range(0, decoded_TCHW.shape[0], PERCEPTUAL_BATCH):
            decoded = decoded_TCHW[start : start + PERCEPTUAL_BATCH]
            target = target_TCHW[start : start + PERCEPTUAL_BATCH]
            if self._ssim is not None:
                self._ssim.append(ssim_by_frame(decoded, target))
            if self._lpips is not None:
                with torch.no_grad():
                    self._distance.append(self._lpips(decoded, target))

    def _push_flicker(self, decoded_TCHW: Tensor, target_TCHW: Tensor) -> None:
        num_fresh = decoded_TCHW.shape[0]
        if self._tail is not None:
            decoded_TCHW = torch.cat([self._tail[0], decoded_TCHW])
            target_TCHW = torch.cat([self._tail[1], target_TCHW])
        num_pairs = min(num_fresh, decoded_TCHW.shape[0] - 1)
        if num_pairs:
            # Δout - Δin is the difference of the errors.
            differences = (decoded_TCHW - target_TCHW).diff(dim=0)[-num_pairs:]
            self._difference_ms.append(_per_frame(differences.square()))
        if decoded_TCHW.shape[0] >= 3:
            extra = high_pass(decoded_TCHW).square() - high_pass(target_TCHW).square()
            self._extra_energy.append(_per_frame(extra))
        self._tail = decoded_TCHW[-2:].clone(), target_TCHW[-2:].clone()


def clip_metrics(decoded_NTCHW: Tensor, target_NTCHW: Tensor, *, lpips: LPIPS | None = None) -> list[ClipMetrics]:
    """The metrics of each clip of a batch; both NTCHW, the target in [0, 1], the same T.

    Align before: compare ``decoded[:, :n]`` with ``codec.target(frames)``. LPIPS must be on the tensors' device.

    Example: ``clip_metrics(model.reconstruct(frames), model.target(frames))[0].psnr``
    """
    meters = [ClipMeter(lpips) for _ in decoded_NTCHW]
    for meter, decoded_TCHW, target_TCHW in zip(meters, decoded_NTCHW, target_NTCHW, strict=True):
        meter.push(decoded_TCHW, target_TCHW)
    return [meter.result() for meter in meters]


def psnr_from_mse(mse: float) -> float:
    """PSNR in dB for values in [0, 1], at most `PSNR_CAP_DB`; NaN stays NaN."""
    if math.isnan(mse):
        return math.nan
    return PSNR_CAP_DB if mse <= 10 ** (-PSNR_CAP_DB / 10) else -10 * math.log10(mse)


def ssim_by_frame(decoded_TCHW: Tensor, target_TCHW: Tensor) -> Tensor:
    """SSIM of each frame (11-pixel Gaussian window, deviation 1.5), float32 (T,). Both in [0, 1].

    The picture is mirrored at its edges, as torchmetrics does; scikit-image leaves a border of 5 pixels out of the
    mean. torchmetrics is not used itself: it takes seconds to import, and its window of 11 x 11 takes 4 times as long
    as two of 11 (on a CPU).
    """
    decoded, target = decoded_TCHW, target_TCHW
    moments = torch.cat([decoded, target, decoded * decoded, target * target, decoded * target])
    mean_d, mean_t, square_d, square_t, product = _gaussian_blur(moments).chunk(5)
    square_mean_d, square_mean_t, product_mean = mean_d * mean_d, mean_t * mean_t, mean_d * mean_t
    variances = (square_d - square_mean_d).clamp(min=0) + (square_t - square_mean_t).clamp(min=0)
    above = (2 * product_mean + SSIM_C1) * (2 * (product - product_mean) + SSIM_C2)
    below = (square_mean_d + square_mean_t + SSIM_C1) * (variances + SSIM_C2)
    return (above / below).flatten(1).mean(dim=1)


def _gaussian_blur(images_NCHW: Tensor) -> Tensor:
    """Each pixel's Gaussian mean over 11 x 11 pixels, as shifted sums: torch has no fast kernel for such windows."""
    weights = [math.exp(-((place / SSIM_DEVIATION) ** 2) / 2) for place in range(-SSIM_BORDER, SSIM_BORDER + 1)]
    weights = [weight / math.fsum(weights) for weight in weights]
    blurred = F.pad(images_NCHW, (SSIM_BORDER,) * 4, mode="reflect")
    for dim in (2, 3):
        size = images_NCHW.shape[dim]
        source, blurred = blurred, blurred.narrow(dim, 0, size) * weights[0]
        for place, weight in enumerate(weights[1:], start=1):
            blurred.add_(source.narrow(dim, place, size), alpha=weight)
    return blurred


def high_pass(frames_TCHW: Tensor) -> Tensor:
    """(x_{t+1} - 2·x_t + x_{t-1}) / 4 for every inner frame: T-2 frames, gain 1 at the highest temporal frequency."""
    return (frames_TCHW[2:] - 2 * frames_TCHW[1:-1] + frames_TCHW[:-2]) / 4


def sortable(psnr: float) -> float:
    """A PSNR to sort by: NaN is worse than any number."""
    return -math.inf if math.isnan(psnr) else psnr


def _per_frame(values_TCHW: Tensor) -> Tensor:
    return values_TCHW.flatten(1).mean(dim=1, dtype=torch.float64)


def _numbers(pieces: Sequence[Tensor]) -> list[float]:
    return torch.cat(list(pieces)).tolist() if pieces else []


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
