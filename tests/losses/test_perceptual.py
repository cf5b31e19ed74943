"""LPIPS: the known distances, the mapping from [0, 1], and gradients that are never NaN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tinyvae.errors import MissingFileError, UserError
from tinyvae.losses import LPIPS, perceptual_loss
from tinyvae.losses.perceptual import max_pool


@pytest.fixture(scope="module")
def lpips(shared: Path) -> LPIPS:
    return LPIPS.from_file(shared / "lpips" / "alex.safetensors")


def random_lpips() -> LPIPS:
    model = LPIPS()
    with torch.no_grad():
        for head in model.lin:
            head.weight.abs_()  # as in the real weights, a difference never makes the distance smaller
    return model


def picture(shared: Path, name: str) -> Tensor:
    pixels = np.array(Image.open(shared / "lpips" / f"{name}.png").convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255


def test_known_distances(shared: Path, lpips: LPIPS) -> None:
    reference, far, near = (picture(shared, name) for name in ("ex_ref", "ex_p0", "ex_p1"))
    found = lpips(reference.repeat(2, 1, 1, 1), torch.cat([far, near]))
    torch.testing.assert_close(found, torch.tensor([0.7219, 0.1376]), atol=1e-4, rtol=0)
    assert lpips(reference, reference).item() == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lpips(reference, far), lpips(reference, far).float())
        assert lpips(reference, far).item() == pytest.approx(0.7219, abs=1e-4)


def test_a_clip_is_the_mean_over_its_frames(shared: Path, lpips: LPIPS) -> None:
    reference, far, near = (picture(shared, name) for name in ("ex_ref", "ex_p0", "ex_p1"))
    decoded = torch.stack([far, near], dim=1)
    target = reference[:, None].expand_as(decoded)
    assert perceptual_loss(lpips, decoded, target).item() == pytest.approx((0.7219 + 0.1376) / 2, abs=1e-4)
    by_turns = [perceptual_loss(lpips, decoded, target, max_frames=1, offset=step).item() for step in (6, 7)]
    assert by_turns == pytest.approx([0.7219, 0.1376], abs=1e-4)


@pytest.mark.parametrize("kind", ["black", "grey", "equal", "huge"])
def test_gradients_are_finite_where_features_vanish(kind: str) -> None:
    model = random_lpips()
    b = torch.rand(1, 3, 40, 40)
    a = {"black": torch.zeros_like(b), "grey": torch.full_like(b, 0.5), "equal": b.clone(), "huge": 1e4 * b}[kind]
    a.requires_grad_(True)
    with torch.no_grad():
        model.features[2].weight.zero_()  # every feature from here on is the bias's ReLU
        model.features[2].bias.fill_(-1)  # and that is 0: a norm of 0 in both images
    model(a, b).sum().backward()
    assert a.grad is not None and a.grad.isfinite().all()


def test_it_is_frozen_and_stays_in_eval_mode() -> None:
    model = random_lpips()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.train().training
    a = torch.rand(2, 3, 32, 48, requires_grad=True)
    model(a, torch.rand(2, 3, 32, 48)).sum().backward()
    assert a.grad is not None and a.grad.abs().sum() > 0


def test_frames_take_turns() -> None:
    seen = set()

    class Recorder(LPIPS):
        def forward(self, a_NCHW: Tensor, b_NCHW: Tensor) -> Tensor:
            seen.update(a_NCHW[:, 0, 0, 0].int().tolist())
            assert len(a_NCHW) == 2 * 3
            return super().forward(a_NCHW, b_NCHW)

    clip = torch.arange(7.0).view(1, 7, 1, 1, 1).expand(2, 7, 3, 32, 32)
    for step in range(7):
        perceptual_loss(Recorder(), clip, clip, max_frames=3, offset=step)
    assert seen == set(range(7))


def test_wrong_files_and_sizes(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="tinyvae lpips-weights"):
        LPIPS.from_file(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not weights")
    with pytest.raises(UserError, match="no readable safetensors"):
        LPIPS.from_file(tmp_path / "text.safetensors")
    save_file({"decoder.0.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="does not hold LPIPS weights"):
        LPIPS.from_file(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="31x31"):
        random_lpips()(torch.rand(1, 3, 30, 64), torch.rand(1, 3, 30, 64))
    assert random_lpips()(torch.rand(1, 3, 31, 31), torch.rand(1, 3, 31, 31)).isfinite().all()


def test_a_file_is_read_without_touching_the_random_stream(tmp_path: Path) -> None:
    save_file(random_lpips().state_dict(), tmp_path / "weights.safetensors")
    before = torch.random.get_rng_state()
    LPIPS.from_file(tmp_path / "weights.safetensors")
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("size", [(31, 31), (32, 45)])
def test_the_repeatable_max_pool_is_torchs_own(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size).relu().requires_grad_(True)
    expected = F.max_pool2d(x, kernel_size=3, stride=2)
    torch.use_deterministic_algorithms(True)
    try:
        made = max_pool(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(made, expected)
    weights = torch.randn_like(made)
    found, wanted = (torch.autograd.grad(y, x, weights)[0] for y in (made, expected))
    # Where several pixels share the maximum (zeros of a ReLU) the gradient's place differs; the ReLU stops it there.
    torch.testing.assert_close(found * (x > 0), wanted * (x > 0))
