"""Pruning on a GPU, and the whole network as a teacher there, in the engine that users get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_codecs import error, spread
from tinyvae import save_model
from tinyvae.convert.prune import prune_model
from tinyvae.models.variants import get_spec
from tinyvae.teachers import load_teacher


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
def test_clips_help_on_a_gpu_too(variant: str) -> None:
    model = spread(variant)
    side = 8 * model.spec.space_factor
    clips = [torch.rand(1, 17, 3, side, side) for _ in range(4)]
    other = torch.rand(1, 9, 3, side, side, device="cuda")
    latents = model.encode_video(other)
    blind, fitted = prune_model(model, 0.5), prune_model(model, 0.5, clips=clips)
    assert fitted.device == model.device and fitted.spec.width == 0.5
    assert error(fitted.encode_video(other), latents.double()) < error(blind.encode_video(other), latents.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_network_teaches_in_every_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = spread("taehv")
    save_model(model, tmp_path / "whole.safetensors")
    spec = get_spec("taehv", width=0.5)
    teacher = load_teacher(None, tmp_path / "whole.safetensors", dtype=dtype, device="cuda", spec=spec)
    frames = torch.rand(2, 8, 3, 64, 96, device="cuda")
    found = teacher.encode(teacher.clip_of(frames))
    assert error(found, model.encode_video(frames).double()) < {torch.float32: 1e-2}.get(dtype, 5e-2)
