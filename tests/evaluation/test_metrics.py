"""The metrics against scikit-image and torchmetrics, and flicker against made-up flicker of known size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tinyvae.evaluation.metrics import METRICS, PSNR_CAP_DB, ClipMeter, clip_metrics


def made_up_clip(num_frames: int = 6, height: int = 40, width: int = 56, seed: int = 0) -> Tensor:
    """A smooth moving pattern with some texture, TCHW in [0.2, 0.8]: room for errors without clamping."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 3, height), torch.linspace(0, 4, width), indexing="ij")
    frames = [torch.stack([torch.sin(x + y + 0.2 * t + c) for c in range(3)]) for t in range(num_frames)]
    texture = torch.rand(3, height, width, generator=generator) - 0.5
    return 0.5 + 0.25 * torch.stack(frames) + 0.1 * texture


def test_psnr_mse_mae_equal_scikit_image_and_torchmetrics() -> None:
    from skimage.metrics import mean_squared_error, peak_signal_noise_ratio
    from torchmetrics.functional.image import peak_signal_noise_ratio as torchmetrics_psnr

    target = made_up_clip()
    decoded = (target + 0.05 * torch.randn(target.shape)).clamp(0, 1)
    (clip,) = clip_metrics(decoded[None], target[None])
    for t in range(len(target)):
        a, b = target[t].double().numpy(), decoded[t].double().numpy()
        assert clip.psnr_by_frame[t] == pytest.approx(peak_signal_noise_ratio(a, b, data_range=1.0), abs=1e-4)
        assert clip.psnr_by_frame[t] == pytest.approx(
            torchmetrics_psnr(decoded[t], target[t], data_range=1.0).item(), abs=1e-4
        )
        assert clip.mse_by_frame[t] == pytest.approx(mean_squared_error(a, b), rel=1e-5)
        assert clip.mae_by_frame[t] == pytest.approx(np.abs(a - b).mean(), rel=1e-5)
    assert clip.psnr == pytest.approx(np.mean(clip.psnr_by_frame))
    assert clip.mse == pytest.approx(np.mean(clip.mse_by_frame))
    assert clip.mae == pytest.approx(np.mean(clip.mae_by_frame))


def test_ssim_equals_scikit_image_and_torchmetrics() -> None:
    from skimage.metrics import structural_similarity
    from torchmetrics.functional.image import structural_similarity_index_measure

    target = made_up_clip(num_frames=10)  # more than one batch of frames inside
    decoded = (target + 0.08 * torch.randn(target.shape)).clamp(0, 1)
    (clip,) = clip_metrics(decoded[None], target[None])
    assert clip.ssim_by_frame is not None
    for t in range(len(target)):
        # scikit-image leaves out the border that torchmetrics mirrors; mirrored by hand, both see the same picture
        known = structural_similarity(
            *(np.pad(x[t].double().numpy(), ((0, 0), (5, 5), (5, 5)), mode="reflect") for x in (target, decoded)),
            channel_axis=0,
            data_range=1.0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        assert clip.ssim_by_frame[t] == pytest.approx(known, abs=1e-4)
    assert clip.ssim == pytest.approx(
        structural_similarity_index_measure(decoded, target, data_range=1.0).item(), abs=1e-4
    )
    assert 0.2 < clip.ssim < 0.95


def test_a_perfect_copy() -> None:
    target = made_up_clip()
    (clip,) = clip_metrics(target[None].clone(), target[None])
    assert clip.psnr == PSNR_CAP_DB
    assert clip.ssim == pytest.approx(1.0, abs=1e-6)  # other tools have reported 2.47 here
    assert (clip.mse, clip.mae, clip.flicker_error, clip.flicker_energy) == (0, 0, 0, 0)
    assert clip.lpips is None and clip.lpips_by_frame is None


@pytest.mark.parametrize("amplitude", [0.01, 0.05])
def test_alternating_flicker_of_known_size(amplitude: float) -> None:
    """Every second frame brighter by a, the others darker: error 2a on any input, energy a² on a still one."""
    signs = torch.tensor([1.0, -1.0]).repeat(5)[:, None, None, None]
    moving, still = made_up_clip(num_frames=10), made_up_clip(num_frames=1).expand(10, -1, -1, -1)
    (on_moving,) = clip_metrics((moving + amplitude * signs)[None], moving[None])
    (on_still,) = clip_metrics((still + amplitude * signs)[None], still[None])
    assert on_moving.flicker_error == pytest.approx(2 * amplitude, rel=1e-4)
    assert on_still.flicker_error == pytest.approx(2 * amplitude, rel=1e-4)
    assert on_still.flicker_energy == pytest.approx(amplitude**2, rel=1e-4)
    assert on_moving.flicker_energy is not None and on_moving.flicker_energy > 0
    assert all(value == pytest.approx(2 * amplitude, rel=1e-3) for value in on_moving.flicker_error_by_frame)


def test_noise_of_known_deviation() -> None:
    """Noise that is new in every frame, deviation s: error s·√2, energy 3/8·s²."""
    deviation = 0.02
    still = made_up_clip(num_frames=1, height=96, width=96).expand(24, -1, -1, -1)
    noisy = still + deviation * torch.randn(24, 3, 96, 96)
    (clip,) = clip_metrics(noisy[None], still[None])
    assert clip.flicker_error == pytest.approx(deviation * math.sqrt(2), rel=0.01)
    assert clip.flicker_energy == pytest.approx(0.375 * deviation**2, rel=0.02)


def test_a_still_error_is_no_flicker_and_smeared_motion_is_negative() -> None:
    target = made_up_clip(num_frames=8)
    shifted = target + 0.1
    (clip,) = clip_metrics(shifted[None], target[None])
    assert clip.flicker_error == pytest.approx(0, abs=1e-6) and clip.psnr == pytest.approx(20, abs=1e-3)
    blinking = 0.5 + 0.2 * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None, None].expand(8, 3, 32, 32)
    smeared = torch.full_like(blinking, 0.5)
    (clip,) = clip_metrics(smeared[None], blinking[None])
    assert clip.flicker_energy == pytest.approx(-(0.2**2), rel=1e-4)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1, 1), (3, 4), (2, 5), (1, 6), (6, 1)])
def test_pieces_give_the_same_numbers_as_the_whole(sizes: tuple[int, ...]) -> None:
    target = made_up_clip(num_frames=7)
    decoded = target + 0.05 * torch.randn(target.shape)
    (whole,) = clip_metrics(decoded[None], target[None])
    meter = ClipMeter()
    for part, other in zip(decoded.split(sizes), target.split(sizes), strict=True):
        meter.push(part, other)
    for name in METRICS:
        expected, by_frame = whole.value(name), getattr(whole, f"{name}_by_frame")
        assert meter.result().value(name) == (None if expected is None else pytest.approx(expected, rel=1e-5))
        assert getattr(meter.result(), f"{name}_by_frame") == (
            None if by_frame is None else pytest.approx(by_frame, rel=1e-5)
        )


def test_decoded_values_outside_the_range_are_shown_clamped() -> None:
    target = torch.ones(1, 3, 3, 16, 16)
    (clip,) = clip_metrics(target * 1.7, target)
    assert clip.mse == 0


def test_what_cannot_be_measured_is_none() -> None:
    (single,) = clip_metrics(torch.rand(1, 1, 3, 16, 16), torch.rand(1, 1, 3, 16, 16))
    assert single.flicker_error is None and single.flicker_energy is None and single.ssim is not None
    (pair,) = clip_metrics(torch.rand(1, 2, 3, 5, 9), torch.rand(1, 2, 3, 5, 9))
    assert pair.flicker_error is not None and pair.flicker_energy is None
    assert pair.ssim is None and pair.ssim_by_frame is None  # half its window does not fit


def test_a_decoder_that_makes_nan_is_not_called_good() -> None:
    target = torch.rand(1, 3, 3, 16, 16)
    broken = target.clone()
    broken[0, 1, 0, 3, 3] = math.nan
    (clip,) = clip_metrics(broken, target)
    assert not clip.is_finite and math.isnan(clip.psnr) and math.isnan(clip.psnr_by_frame[1])


def test_a_batch_gives_one_result_per_clip() -> None:
    targets = torch.stack([made_up_clip(seed=0), made_up_clip(seed=1)])
    decoded = targets + torch.tensor([0.0, 0.1])[:, None, None, None, None]
    perfect, shifted = clip_metrics(decoded, targets)
    assert perfect.psnr == PSNR_CAP_DB and shifted.psnr == pytest.approx(20, abs=1e-3)
