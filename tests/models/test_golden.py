"""Parity with the golden data: every variant's numbers are those of the networks people already use."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tinyvae import TAEHV, VARIANTS

TOLERANCE = 2e-5
GOLDEN = [name for name in VARIANTS if name != "taeltx2_3_wide"]
"""There is no golden data of the wide decoder; tests/convert compares it with a second writing of the network."""
FILE_OF = {"taew2_1": "taehv", "taeos1_3": "taehv", "taeltx2_3": "taeltx_2"}


def golden_weight(key: str, shape: torch.Size) -> Tensor:
    """A weight made from its own name, as the golden data's README in DESIGN section 2 says."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
    values = values * 0.05 if len(shape) == 1 else values / math.sqrt(values[0].numel())
    return values + 0.5 if key == "decoder.22.bias" else values


def golden_model(variant: str, **options: object) -> TAEHV:
    with torch.device("meta"):
        model = TAEHV(variant, **options)
    state = {key: golden_weight(key, value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model.eval()


def golden_input(shape: list[int], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def golden_cases(shared: Path, variant: str) -> list[dict]:
    return json.loads((shared / "golden" / "cases.json").read_text())[variant]


@pytest.mark.parametrize("variant", GOLDEN)
def test_keys_and_shapes(shared: Path, variant: str) -> None:
    expected = json.loads((shared / "golden" / "state_dict_keys.json").read_text())[variant]
    with torch.device("meta"):
        model = TAEHV(variant)
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == expected


@pytest.mark.parametrize("variant", GOLDEN)
def test_every_case(shared: Path, variant: str) -> None:
    golden = load_file(shared / "golden" / f"{FILE_OF.get(variant, variant)}.safetensors")
    model = golden_model(variant)
    with torch.no_grad():
        for case, parallel in itertools.product(golden_cases(shared, variant), (True, False)):
            name = case["case"]
            if name == "large":
                generator = torch.Generator().manual_seed(case["seed"])
                latents = 3 * torch.randn(case["latents"], generator=generator)
            else:
                latents = model.encode_video(golden_input(case["input"], case["seed"]), parallel=parallel)
                torch.testing.assert_close(latents, golden[f"{name}.latents"], atol=TOLERANCE, rtol=0)
                latents = golden[f"{name}.latents"]
            decoded = model.decode_video(latents, parallel=parallel)
            torch.testing.assert_close(decoded, golden[f"{name}.decoded"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("preview", "name"), [("time", "time_off"), ("space", "space_off"), ("both", "time_space_off")]
)
def test_previews(shared: Path, preview: str, name: str) -> None:
    golden = load_file(shared / "golden" / "extras.safetensors")
    model = golden_model("taehv", preview=preview)
    latents = torch.randn((1, 3, 16, 3, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parallel in (True, False):
            decoded = model.decode_video(latents, parallel=parallel)
            torch.testing.assert_close(decoded, golden[name], atol=TOLERANCE, rtol=0)
