"""Reconstruction, latent and temporal losses: known values, fp32 in every dtype, gradients outside [0, 1]."""

from __future__ import annotations

import pytest
import torch

from tinyvae.losses.distances import latent_loss, reconstruction_loss, temporal_loss


@pytest.mark.parametrize(("kind", "expected"), [("mse", 0.09), ("l1", 0.3), ("charbonnier", 0.299)])
def test_known_values(kind: str, expected: float) -> None:
    target = torch.rand(2, 3, 3, 4, 4)
    assert reconstruction_loss(target + 0.3, target, kind).item() == pytest.approx(expected, abs=1e-5)
    assert reconstruction_loss(target, target, kind).item() == 0


@pytest.mark.parametrize("kind", ["mse", "l1", "charbonnier"])
def test_gradients_bring_pixels_back_from_outside_the_range(kind: str) -> None:
    decoded = torch.tensor([-3.0, 0.5, 4.0]).view(1, 1, 3, 1, 1).requires_grad_(True)
    reconstruction_loss(decoded, torch.full_like(decoded, 0.5), kind).backward()
    assert decoded.grad is not None
    assert decoded.grad.flatten().sign().tolist() == [-1, 0, 1]
    assert decoded.grad.isfinite().all()


@pytest.mark.parametrize("loss", [reconstruction_loss, temporal_loss, latent_loss])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_loss_is_fp32_in_and_out_of_autocast(loss, dtype: torch.dtype) -> None:
    a, b = torch.rand(2, 3, 3, 64, 64).to(dtype), torch.rand(2, 3, 3, 64, 64)
    exact = loss(a.double().float(), b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(a, b)
    assert found.dtype == torch.float32 and found.ndim == 0
    assert torch.equal(found, exact)


def test_a_shifted_target_is_never_broadcast() -> None:
    with pytest.raises(AssertionError, match="shapes"):
        reconstruction_loss(torch.rand(1, 5, 3, 2, 2), torch.rand(1, 1, 3, 2, 2))


def test_temporal_sees_flicker_and_not_a_still_error() -> None:
    target = torch.rand(1, 5, 3, 4, 4)
    assert temporal_loss(target + 0.25, target).item() == pytest.approx(0, abs=1e-12)
    flicker = 0.1 * torch.tensor([1.0, -1, 1, -1, 1]).view(1, 5, 1, 1, 1)
    assert temporal_loss(target + flicker, target).item() == pytest.approx(0.04, rel=1e-4)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = (torch.rand(1, 2, 16, 4, 4, requires_grad=True) for _ in range(2))
    latent_loss(student, teacher).backward()
    assert student.grad is not None and teacher.grad is None
