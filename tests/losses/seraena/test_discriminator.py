"""The discriminator's scores and corrections: the golden data, and what happens to the correction at large sizes."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tinyvae.losses.seraena.discriminator import SeraenaDiscriminator, make_correction

GROUP_FRAMES = 3
LATENT_CHANNELS = 16


def golden_weight(key: str, value: Tensor) -> Tensor:
    """A weight made from its own name (DESIGN section 2); the running statistics stay at their defaults."""
    if "running" in key or "num_batches" in key:
        return value
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
    if value.ndim > 1:
        return drawn / math.sqrt(drawn[0].numel())
    return 0.05 * drawn + (1 if key.endswith(".weight") else 0)


def golden_discriminator() -> SeraenaDiscriminator:
    discriminator = SeraenaDiscriminator.from_seed(3 * GROUP_FRAMES, LATENT_CHANNELS, seed=0)
    state = discriminator.state_dict()
    discriminator.load_state_dict({key: golden_weight(key, value) for key, value in state.items()})
    return discriminator.eval()


def golden_inputs(height: int = 32, width: int = 48, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    real = torch.rand((rows, 3 * GROUP_FRAMES, height, width), generator=generator)
    fake = torch.rand((rows, 3 * GROUP_FRAMES, height, width), generator=generator)
    contexts = torch.randn((rows, LATENT_CHANNELS, height // 8, width // 8), generator=generator)
    return real, fake, contexts


def test_keys_and_shapes(shared: Path) -> None:
    expected = json.loads((shared / "golden" / "seraena_keys.json").read_text())
    state = SeraenaDiscriminator(3 * GROUP_FRAMES, LATENT_CHANNELS).state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == expected


def test_golden_scores_and_correction(shared: Path) -> None:
    golden = load_file(shared / "golden" / "extras.safetensors")
    discriminator = golden_discriminator()
    real, fake, contexts = golden_inputs()
    with torch.no_grad():
        scores = discriminator(real, contexts)
    torch.testing.assert_close(scores, golden["seraena.scores"], atol=2e-5, rtol=0)
    correction, scalars = make_correction(discriminator, real, fake, contexts, "golden")
    torch.testing.assert_close(correction, golden["seraena.correction"], atol=2e-5, rtol=0)
    torch.testing.assert_close(
        scalars["correction_std"], golden["seraena.correction"].std(correction=0), atol=1e-6, rtol=0
    )


def test_the_golden_correction_fades_with_size_and_ours_does_not() -> None:
    discriminator = golden_discriminator()
    std = {
        (mode, size): float(make_correction(discriminator, *golden_inputs(*size, rows=1), mode)[1]["correction_std"])
        for mode in ("golden", "size_independent")
        for size in ((32, 48), (128, 128))
    }
    assert std["golden", (32, 48)] > 3 * std["golden", (128, 128)]
    assert std["size_independent", (32, 48)] == pytest.approx(std["size_independent", (128, 128)], rel=0.03)
    assert std["size_independent", (128, 128)] > 0.9


@pytest.mark.parametrize("mode", ["golden", "size_independent"])
def test_a_fake_that_is_the_real_image_gets_no_correction(mode: str) -> None:
    real, _, contexts = golden_inputs()
    correction, _ = make_correction(golden_discriminator(), real, real, contexts, mode)
    assert torch.equal(correction, torch.zeros_like(real))


def test_the_correction_brings_the_scores_together() -> None:
    discriminator = golden_discriminator()
    real, fake, contexts = golden_inputs()
    correction, _ = make_correction(discriminator, real, fake, contexts, "size_independent")
    with torch.no_grad():
        wanted = discriminator(real, contexts)
        before = (discriminator(fake, contexts) - wanted).square().mean()
        after = (discriminator(fake + 0.01 * correction, contexts) - wanted).square().mean()
    assert after < 0.6 * before
    assert not correction.requires_grad


def test_scores_do_not_depend_on_autocast() -> None:
    discriminator = golden_discriminator()
    real, _, contexts = golden_inputs(rows=1)
    with torch.no_grad():
        plain = discriminator(real, contexts)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(discriminator(real, contexts), plain)
            assert torch.equal(discriminator(real.double(), contexts.double()), plain)


def test_fresh_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, again, other = (SeraenaDiscriminator.from_seed(3, 16, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.blocks[0][0].weight, other.blocks[0][0].weight)
    assert all(value.isfinite().all() for value in one.state_dict().values())
