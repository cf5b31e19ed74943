"""The encoder converts between diffusion space and VAE space exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.test_golden import golden_model
from tinyvae import TAEHV, get_spec, load_model, save_model
from tinyvae.convert.latent_space import convert_encoder
from tinyvae.errors import UserError
from tinyvae.teachers.latent_space import LatentSpace
from tinyvae.teachers.statistics import KNOWN_STATISTICS

CHANNELS = 16
STATISTICS = LatentSpace(
    mean=tuple(0.1 * number - 0.7 for number in range(CHANNELS)),
    std=tuple(0.5 + 0.2 * number for number in range(CHANNELS)),
    factor=0.9,
)


def test_the_latents_are_those_of_the_other_space() -> None:
    model = golden_model("taew2_1", width=0.25)
    converted = convert_encoder(model, "vae", STATISTICS)
    frames = torch.rand(1, 9, 3, 16, 24)
    made = converted.encode_video(frames)
    mean, std = (torch.tensor(values).view(1, 1, -1, 1, 1) for values in (STATISTICS.mean, STATISTICS.std))
    # As a teacher's latents become diffusion space: (z - mean) * factor / std.
    torch.testing.assert_close((made - mean) * STATISTICS.factor / std, model.encode_video(frames), atol=1e-5, rtol=0)


def test_a_model_of_the_other_space_is_a_start_for_training(tmp_path: Path) -> None:
    model, frames = golden_model("taew2_1", width=0.25), torch.rand(1, 5, 3, 16, 24)
    converted = convert_encoder(model, "vae")
    assert converted.spec == get_spec("taew2_1", width=0.25, latent_space="vae")
    known = KNOWN_STATISTICS["taew2_1"]
    mean, std = (torch.tensor(values).view(1, 1, -1, 1, 1) for values in (known.mean, known.std))
    expected = model.encode_video(frames) * std + mean
    torch.testing.assert_close(converted.encode_video(frames), expected, atol=1e-5, rtol=0)
    save_model(converted, tmp_path / "start.safetensors")
    back = convert_encoder(load_model(tmp_path / "start.safetensors"), "diffusion")
    torch.testing.assert_close(back.encode_video(frames), model.encode_video(frames), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="LTX-2 are among the weights of its VAE; pass statistics"):
        convert_encoder(TAEHV("taeltx_2", width=0.125), "vae")
    with pytest.raises(UserError, match="taew2_1 was given 3 latents_mean for 16 latent channels"):
        convert_encoder(model, "vae", LatentSpace.scaled(3))


def test_there_and_back() -> None:
    model = golden_model("taew2_1", width=0.25).double()
    converted = convert_encoder(model, "vae", STATISTICS)
    there, back = converted.state_dict(), convert_encoder(converted, "diffusion", STATISTICS).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back[key], value, atol=1e-12, rtol=0)
        assert key.startswith("encoder.17.") or torch.equal(there[key], value), "nothing else is touched"


def test_the_dtype_stays() -> None:
    assert convert_encoder(golden_model("taew2_1", width=0.25).half(), "vae").dtype == torch.float16
