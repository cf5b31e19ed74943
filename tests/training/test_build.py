"""He initialization keeps signals alive through every variant, and is drawn from its seed alone; where nothing can
compile, the run goes on without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import arguments_for, train_here, write_clips
from tinyvae import TAEHV, VARIANTS, load_model
from tinyvae.config import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.build import QUIET_BRANCH, initialize_he, settle_compilation


@pytest.mark.parametrize("variant", VARIANTS)
def test_signals_neither_die_nor_explode(variant: str) -> None:
    model = TAEHV(variant, width=0.5)
    initialize_he(model, seed=0)
    size = model.spec.space_factor * 2
    with torch.no_grad():
        latents = model.encode(torch.rand(1, 17, 3, size, size))
        decoded = model.decode(torch.randn(1, 2, model.spec.latent_channels, 2, 2))
    assert 0.05 < latents.std() < 5
    assert 0.05 < decoded.std() < 5
    assert 0.0 < decoded.mean() < 1.0


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


def test_drawn_from_the_seed_and_nothing_else() -> None:
    drawn = []
    for global_seed, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(global_seed)
        model = TAEHV("taehv", width=0.125)
        initialize_he(model, seed=seed)
        drawn.append(model.state_dict())
    same = [all(torch.equal(drawn[0][k], other[k]) for k in drawn[0]) for other in drawn[1:]]
    assert same == [True, False]


def test_output_starts_at_mid_grey_and_branches_are_quiet() -> None:
    model = TAEHV("taehv", width=0.25)
    initialize_he(model, seed=0)
    state = model.state_dict()
    assert (state["decoder.22.bias"] == 0.5).all() and (state["encoder.0.bias"] == 0).all()
    inner, last = (state[f"decoder.3.conv.{i}.weight"].std().item() for i in (2, 4))
    assert last == pytest.approx(QUIET_BRANCH / 2**0.5 * inner, rel=0.1)
    assert last < 0.1 * inner


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
