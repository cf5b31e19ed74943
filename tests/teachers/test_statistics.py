"""The table of latent statistics against the numbers that diffusers' own classes carry."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tinyvae import VARIANTS, get_spec
from tinyvae.errors import UserError
from tinyvae.teachers.statistics import KNOWN_STATISTICS, chosen_statistics, statistics_of_vae

diffusers = pytest.importorskip("diffusers")


def defaults(class_name: str) -> dict[str, Any]:
    if not hasattr(diffusers, class_name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {class_name}")
    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


@pytest.mark.parametrize("class_name", ["AutoencoderKLWan", "AutoencoderKLQwenImage"])
def test_wan_2_1(class_name: str) -> None:
    known, theirs = KNOWN_STATISTICS["taew2_1"], defaults(class_name)
    assert (list(known.mean), list(known.std), known.factor) == (theirs["latents_mean"], theirs["latents_std"], 1.0)


@pytest.mark.parametrize(
    ("variant", "class_name"),
    [("taehv", "AutoencoderKLHunyuanVideo"), ("taehv1_5", "AutoencoderKLHunyuanVideo15")],
)
def test_hunyuan(variant: str, class_name: str) -> None:
    assert KNOWN_STATISTICS[variant].factor == defaults(class_name)["scaling_factor"]


def test_the_vae_of_an_image_model_is_refused_in_one_sentence() -> None:
    vae = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2)
    with pytest.raises(UserError, match="is a AutoencoderKL, which does not say how many frames"):
        statistics_of_vae(vae, get_spec("taew2_1"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_value_per_channel(variant: str) -> None:
    spec = get_spec(variant)
    known = chosen_statistics(spec, None, None, None)
    assert len(known.mean) == len(known.std) == spec.latent_channels
    if variant not in KNOWN_STATISTICS:
        assert (set(known.mean), set(known.std), known.factor) == ({0.0}, {1.0}, 1.0)
