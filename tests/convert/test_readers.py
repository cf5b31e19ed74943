"""The independent reading of other programs' rules: shapes as in the golden data, frames as in the golden data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.test_golden import FILE_OF, GOLDEN, TOLERANCE, golden_cases, golden_input, golden_model, golden_weight
from tinyvae import VARIANTS
from tinyvae.convert import readers
from tinyvae.convert.readers import Reading, UnreadableByProgramError


def reading_of(variant: str) -> Reading:
    return readers.upstream_reading({}, Path(f"{variant}.pth"), variant)


def golden_state(variant: str) -> dict[str, Tensor]:
    shapes = readers.expected_shapes(reading_of(variant))
    return {key: golden_weight(key, torch.Size(shape)) for key, shape in shapes.items()}


@pytest.mark.parametrize("variant", GOLDEN)
def test_shapes_are_those_of_the_released_files(shared: Path, variant: str) -> None:
    expected = json.loads((shared / "golden" / "state_dict_keys.json").read_text())[variant]
    assert {key: list(shape) for key, shape in readers.expected_shapes(reading_of(variant)).items()} == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(set(GOLDEN) - FILE_OF.keys()))
def test_the_reading_gives_the_golden_frames(shared: Path, variant: str) -> None:
    """Without our network: file keys in, golden frames and latents out."""
    golden = load_file(shared / "golden" / f"{variant}.safetensors")
    state, reading = golden_state(variant), reading_of(variant)
    compared = 0
    for case in golden_cases(shared, variant):
        name = case["case"]
        if name == "large":
            continue
        latents = golden[f"{name}.latents"]
        decoded = readers.read_decode(state, reading, latents).clamp(0, 1)
        torch.testing.assert_close(decoded, golden[f"{name}.decoded"], atol=TOLERANCE, rtol=0)
        whole = 17 if reading.frames == "h3" else VARIANTS[variant].time_factor
        if case["input"][1] % whole == 0:
            frames = golden_input(case["input"], case["seed"])
            torch.testing.assert_close(readers.read_encode(state, reading, frames), latents, atol=TOLERANCE, rtol=0)
        compared += 1
    assert compared


def small_state(channels: int, outputs: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "decoder.1.weight": torch.zeros(256, channels, 3, 3, dtype=dtype),
        "decoder.22.bias": torch.zeros(outputs, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("state", "reading"),
    [
        (small_state(16, 3, torch.float16), Reading(channels=16, patch=1, scale=0.476986)),
        (small_state(16, 3, torch.bfloat16), Reading(channels=16, patch=1)),
        (small_state(48, 12), Reading(channels=48, patch=2)),
        (small_state(32, 12), Reading(channels=32, patch=2, slope=0.2, scale=1.03682, pixel_range=(-1, 1))),
        (small_state(128, 48), readers.LTX),
        (small_state(24, 12), readers.H3),
    ],
)
def test_comfyui_tells_by_shapes_and_dtype(state: dict[str, Tensor], reading: Reading) -> None:
    assert readers.comfyui_reading(state, Path("any"), "any") == reading


def test_comfyui_stops_at_a_super_decoder() -> None:
    with pytest.raises(UnreadableByProgramError, match=r"decoder\.1\.weight is missing"):
        readers.comfyui_reading(golden_state("taew2_2_super"), Path("any"), "taew2_2_super")


def test_the_wide_decoder_is_that_of_a_second_writing() -> None:
    model = golden_model("taeltx2_3_wide")
    state = model.state_dict()
    reading = readers.sdcpp_reading(state, Path("any"), "taeltx2_3_wide")
    readers.check_shapes(state, reading)
    latents = torch.randn(1, 2, 128, 2, 3)
    with torch.no_grad():
        made, expected = readers.read_decode(state, reading, latents), model.decode(latents)
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=0)


def test_a_strict_load_names_what_is_wrong() -> None:
    state = golden_state("taehv")
    state["decoder.1.weight"] = state["decoder.1.weight"][:, :8]
    del state["encoder.0.bias"]
    with pytest.raises(UnreadableByProgramError, match=r"encoder\.0\.bias is missing; decoder\.1\.weight is \[256, 8"):
        readers.check_shapes(state, reading_of("taehv"))


def test_the_range_and_the_activation_are_applied() -> None:
    plain = Reading(channels=16, patch=1)
    state, latents = golden_state("taehv"), torch.randn(1, 2, 16, 2, 3)
    frames = readers.read_decode(state, plain, latents)
    wide = readers.read_decode(state, Reading(channels=16, patch=1, pixel_range=(-1, 1)), latents)
    torch.testing.assert_close(wide, (frames + 1) / 2)
    leaky = readers.read_decode(state, Reading(channels=16, patch=1, slope=0.2), latents)
    assert (leaky - frames).abs().max() > 0.05
