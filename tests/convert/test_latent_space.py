"""The encoder converts between diffusion space and VAE space exactly."""

from __future__ import annotations

import copy

import torch

from tests.models.test_golden import golden_model
from tinyvae import TAEHV
from tinyvae.convert.latent_space import encoder_to_diffusion_space, encoder_to_vae_space
from tinyvae.teachers.statistics import LatentStatistics

CHANNELS = 16
STATISTICS = LatentStatistics(
    mean=tuple(0.1 * number - 0.7 for number in range(CHANNELS)),
    std=tuple(0.5 + 0.2 * number for number in range(CHANNELS)),
    factor=0.9,
)


def with_state(model: TAEHV, state: dict[str, torch.Tensor]) -> TAEHV:
    changed = copy.deepcopy(model)
    changed.load_state_dict(state)
    return changed


def test_the_latents_are_those_of_the_other_space() -> None:
    model = golden_model("taew2_1", width=0.25)
    converted = with_state(model, encoder_to_vae_space(model.state_dict(), STATISTICS))
    frames = torch.rand(1, 9, 3, 16, 24)
    made = converted.encode_video(frames)
    mean, std = (torch.tensor(values).view(1, 1, -1, 1, 1) for values in (STATISTICS.mean, STATISTICS.std))
    # As a teacher's latents become diffusion space: (z - mean) * factor / std.
    torch.testing.assert_close((made - mean) * STATISTICS.factor / std, model.encode_video(frames), atol=1e-5, rtol=0)


def test_there_and_back() -> None:
    state = golden_model("taew2_1", width=0.25).double().state_dict()
    back = encoder_to_diffusion_space(encoder_to_vae_space(state, STATISTICS), STATISTICS)
    for key, value in state.items():
        torch.testing.assert_close(back[key], value, atol=1e-12, rtol=0)
        if not key.startswith("encoder.17."):
            assert back[key] is value, "nothing else is touched"


def test_the_dtype_stays() -> None:
    state = golden_model("taew2_1", width=0.25).half().state_dict()
    assert encoder_to_vae_space(state, STATISTICS)["encoder.17.weight"].dtype == torch.float16
