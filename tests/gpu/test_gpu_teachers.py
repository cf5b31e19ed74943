"""Wan as a teacher on a GPU: whole clips through a compiled encoder, beside diffusers' own way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinyvae.models.variants import get_spec
from tinyvae.teachers import load_teacher


@pytest.mark.parametrize("compiled", [False, True])
def test_whole_clips_have_the_latents_of_their_parts(tmp_path: Path, compiled: bool) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(base_dim=32, dim_mult=[1, 2, 4, 7], num_res_blocks=1).save_pretrained(tmp_path)
    settings = {"dtype": torch.bfloat16, "device": "cuda", "spec": get_spec("taew2_1")}
    exact = load_teacher("wan", tmp_path, **{**settings, "dtype": torch.float32})
    teacher = load_teacher("wan", tmp_path, **settings, compiled=compiled)
    frames = torch.rand(8, 17, 3, 128, 128, device="cuda")
    wanted = exact.encode(frames)
    found = teacher.space.normalize(teacher.distribution(frames)[0])
    rounding = (teacher.encode(frames) - wanted).square().mean().sqrt()
    assert (found - wanted).square().mean().sqrt() <= 1.3 * rounding, "no further from float32 than diffusers' own way"
