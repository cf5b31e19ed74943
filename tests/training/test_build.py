"""Where nothing can compile, the run goes on without; what was compiled once is found again."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import arguments_for, train_here, write_clips
from tinyvae import load_model
from tinyvae.config import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.build import settle_compilation


@pytest.mark.slow
def test_a_run_for_another_latent_space_and_activation(tmp_path: Path) -> None:
    clips = write_clips(tmp_path / "clips")
    form = {"latent_space": "vae", "activation": "leaky_relu"}
    train_here(arguments_for(clips, tmp_path / "run", **form, max_train_steps=3, checkpointing_steps=2))
    spec = load_model(tmp_path / "run").spec
    assert (spec.latent_space, spec.activation) == ("vae", "leaky_relu")
    again = arguments_for(clips, tmp_path / "run", **form, max_train_steps=4, resume_from_checkpoint="latest")
    train_here(again)
    start = {"pretrained_model_path": tmp_path / "run" / "final_model.safetensors"}
    with pytest.raises(UserError, match="is stated to have latent_space vae, and latent_space is diffusion"):
        train_here(arguments_for(clips, tmp_path / "other", **start))


def test_a_missing_compiler_is_a_warning_and_the_plain_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    config = TrainConfig(compile_model=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: compile_nothing)
        assert not settle_compilation(config, torch.device("meta")).compile_model
    assert "torch.compile fails here (Failed to find C compiler" in caplog.text
    assert not settle_compilation(config, torch.device("cpu")).compile_model
    assert not settle_compilation(replace(config, deterministic=True), torch.device("meta")).compile_model


@pytest.mark.slow
def test_each_of_many_sizes_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than torch's limit of eight, each with static shapes."""
    compiled: list[tuple[object, ...]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(tuple(inputs[0].shape))
        return graph

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **given: plain(function, backend=backend, **given))
    monkeypatch.setattr(torch._dynamo.config, "cache_size_limit", 8)
    sizes = [f"{n_frames}x{side}x{side}" for n_frames in (4, 8) for side in (16, 24, 32, 40, 48)]
    config = TrainConfig(compile_model=True, resolutions=tuple(sizes))
    assert settle_compilation(config, torch.device("meta")).compile_model
    step = torch.compile(lambda frames: frames * 2, dynamic=False)
    for n_frames, height, width in config.sizes.sizes * 2:
        step(torch.zeros(1, n_frames, 3, height, width))
    assert compiled == [(8,), *((1, n, 3, height, width) for n, height, width in config.sizes.sizes)]


COMPILED_STEP = """
import hashlib, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from tinyvae.engines.eager import run_folded
from tinyvae.models.blocks import TPool
from tinyvae.training.build import keep_traces

keep_traces(sys.argv[1])
torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), TPool(8, 2), nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False))
network.append(nn.Conv2d(8, 4, 3, padding=1))
step = torch.compile(lambda frames: run_folded(network, frames, None, checkpointing=False)[0])
with torch.autocast("cpu", {"bf16": torch.bfloat16, "fp16": torch.float16}[sys.argv[1]]):
    made = step(torch.rand(1, 2, 3, 16, 16))
made.float().square().sum().backward()
digest = hashlib.sha256()
for value in (made, *(parameter.grad for parameter in network.parameters())):
    digest.update(value.detach().float().contiguous().numpy().tobytes())
seen = counters["aot_autograd"]
print(seen["autograd_cache_hit"], seen["autograd_cache_miss"], seen["autograd_cache_bypass"], digest.hexdigest())
"""


@pytest.mark.slow
def test_a_compiled_step_is_traced_once(tmp_path: Path) -> None:
    """A second process finds the whole step in the cache, gets the same bits, and none of another precision's."""
    inductor = importlib.import_module("torch._inductor.config")  # here, because it takes a second
    if not hasattr(inductor, "unsafe_marked_cacheable_functions") or shutil.which("g++") is None:
        pytest.skip("an old torch, which traces every time, or nothing to compile with")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}

    def compile_step(precision: str) -> list[str]:
        command = [sys.executable, "-c", COMPILED_STEP, precision]
        return subprocess.check_output(command, env=os.environ | caches, text=True).split()

    first, second = compile_step("bf16"), compile_step("bf16")
    assert first[:3] == ["0", "1", "0"] and second[:3] == ["1", "0", "0"]
    assert first[3] == second[3]
    assert compile_step("fp16")[:3] == ["0", "1", "0"]
