"""What a rank does when a step goes wrong: skip, retry in smaller parts, or stop with a sentence and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.faults import NanLoss, OutOfMemory
from tests.training.tiny_runs import SERAENA, arguments_for, differences, launch, read_lines, state_of, train_here
from tinyvae.config.load import load_config
from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.training.build import build_task
from tinyvae.training.engine import Engine
from tinyvae.training.guards import AnotherRankInTrouble, Status, is_out_of_memory, skipped_steps_error
from tinyvae.training.optim import make_optimizers
from tinyvae.training.task import StepLosses, TrainingTask


def with_losses(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Have ``change(compute, clips)`` stand for `TrainingTask.losses` in this process."""
    original = TrainingTask.losses
    monkeypatch.setattr(
        TrainingTask,
        "losses",
        lambda self, frames, **options: change(lambda: original(self, frames, **options), len(frames)),
    )


def test_a_nan_skips_the_step_and_names_its_clips(clips: Path, tmp_path: Path) -> None:
    """Three steps, the second with a NaN: the weights are those of two steps, the clips of three are used up."""
    arguments = arguments_for(clips, tmp_path / "run", max_train_steps=3, validation_steps=0, log_every=1)
    launch(arguments, tmp_path, prepare=NanLoss(rank=0, calls=(2,))).ends_with(0)
    text = (tmp_path / "run/train.log").read_text()
    (line,) = [line for line in text.splitlines() if "step 2 skipped" in line]
    assert line.count(".mp4") == 2 and "process 0" in line
    state = state_of(tmp_path / "run/checkpoint-3")["training_state.pt"]
    assert state["progress"]["skipped_steps"] == 1 and state["progress"]["samples_seen"] == 6
    assert state["average"]["updates"] == 2
    assert all(value["step"] == 2 for value in state["engine"]["optimizers"]["optimizers"][0]["state"].values())
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [("train/loss" in line) for line in lines] == [True, False, True]


def test_a_loss_that_is_not_finite_counts_even_with_finite_gradients(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_losses(
        monkeypatch,
        lambda compute, n: StepLosses(total=compute().total + torch.inf, logged={"loss": torch.tensor(torch.inf)}),
    )
    arguments = arguments_for(
        clips, tmp_path / "run", max_train_steps=9, max_skipped_steps=3, validation_steps=0, checkpointing_steps=0
    )
    with pytest.raises(UserError, match=r"3 steps in a row .* not finite.*docs/troubleshooting.md#steps"):
        train_here(arguments)
    assert (tmp_path / "run/train.log").read_text().count("skipped:") == 3


@pytest.mark.parametrize(("seraena", "num_clips"), [(False, 3), (True, 4)], ids=["plain, 2 and 1", "seraena, 2 and 2"])
def test_out_of_memory_retries_in_parts_at_the_same_math(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seraena: bool, num_clips: int
) -> None:
    """Two clips fit, more do not: after the step everything is as in the run where all fitted, up to rounding."""
    changes: dict[str, object] = {
        "train_batch_size": num_clips,
        "max_train_steps": 2,
        "validation_steps": 0,
        "log_every": 1,
    }
    changes |= {"checkpointing_steps": 2, "epsilon": 1e-3, **(SERAENA if seraena else {})}
    train_here(arguments_for(clips, tmp_path / "whole", **changes))
    seen: list[int] = []

    def two_fit(compute: Any, num_clips: int) -> StepLosses:
        seen.append(num_clips)
        if num_clips > 2:
            raise torch.OutOfMemoryError("injected")
        return compute()

    with_losses(monkeypatch, two_fit)
    train_here(arguments_for(clips, tmp_path / "halves", **changes))
    assert seen == [num_clips, *[2, num_clips - 2] * 2], "one failure, then parts for good"
    assert "the same math in less memory" in (tmp_path / "halves/train.log").read_text()
    whole, halves = (state_of(tmp_path / name / "checkpoint-2")["training_state.pt"] for name in ("whole", "halves"))
    for name, value in whole["model"].items():
        assert torch.allclose(value, halves["model"][name], atol=2e-6), name
    if seraena:
        assert halves["seraena"]["steps"] == whole["seraena"]["steps"] == 2
        for name, value in whole["seraena"]["discriminator"].items():
            assert torch.allclose(value, halves["seraena"]["discriminator"][name], atol=1e-4), name
        own = [state_of(tmp_path / name / "checkpoint-2")["rank_00000.pt"]["seraena"] for name in ("whole", "halves")]
        assert torch.equal(own[0]["generator"], own[1]["generator"])
        assert torch.allclose(own[0]["buffers"][0][0].float(), own[1]["buffers"][0][0].float(), atol=2e-3)


@pytest.mark.slow
def test_out_of_memory_at_one_size_leaves_the_others_whole(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = TrainingTask.losses, []

    def one_large_fits(self: TrainingTask, frames: torch.Tensor, **options: Any) -> StepLosses:
        seen.append((frames.shape[3], len(frames)))
        if seen[-1] == (32, 2):
            raise torch.OutOfMemoryError("injected")
        return original(self, frames, **options)

    monkeypatch.setattr(TrainingTask, "losses", one_large_fits)
    sizes = {"resolutions": "4x16x16,4x32x32@1,4x16x16@3,4x32x32@4", "validation_steps": 0}
    train_here(arguments_for(clips, tmp_path / "run", max_train_steps=5, **sizes))
    large, small = [(32, 1)] * 2, [(16, 2)]
    assert seen == [*small, (32, 2), *large, *large, *small, *large]
    text = (tmp_path / "run/train.log").read_text()
    assert "going on with micro-batches in 2 parts for clips of 4x32x32" in text
    assert "from step 3 on the clips are 4x16x16" in text


def test_gradients_in_parts_equal_those_of_the_whole(clips: Path) -> None:
    """With Seraena, at 4 clips whole, in 2 and in 4 parts: one discriminator step each, equal gradients."""
    config = load_config("quickstart", arguments_for(clips, Path("unused"), train_batch_size=4, **SERAENA)[1:]).config
    frames = torch.rand(4, 4, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    engine = Engine(config)
    gradients = []
    for num_parts in (1, 2, 4):
        torch.manual_seed(0)
        model = TAEHV(config.variant, width=config.model_width)
        engine.prepare(model, make_optimizers(model, config))
        task = build_task(config, engine, model)
        parts = frames.chunk(num_parts)
        without: dict[str, Any] = {"stored": [None] * num_parts, "positions": [()] * num_parts}
        corrections: list[Any] = task.correct_in_parts(parts, **without) if num_parts > 1 else [None]
        for part, corrected in zip(parts, corrections, strict=True):
            losses = task.losses(part, use_seraena=True, corrected=corrected)
            (losses.total * len(part) / len(frames)).backward()
        assert task.seraena is not None and task.seraena.steps == 1
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for other in gradients[1:]:
        assert (gradients[0] - other).norm() < 1e-4 * gradients[0].norm()


def test_a_single_clip_that_does_not_fit_stops_with_a_checkpoint(clips: Path, tmp_path: Path) -> None:
    """The checkpoint is of before the step, except that Seraena has learned from its first micro-batch: it says so, and
    the resumed run does not teach it that one again."""
    changes: dict[str, object] = {**SERAENA, "max_train_steps": 3, "gradient_accumulation_steps": 2}
    changes |= {"validation_steps": 0, "checkpointing_steps": 1}
    arguments = arguments_for(clips, tmp_path / "run", **changes)
    fault = OutOfMemory(rank=0, calls=range(4, 100))  # the second micro-batch of the second step, and ever after
    running = launch(arguments, tmp_path, prepare=fault).ends_with(2)
    assert "out of memory with a single clip of 4 frames of 32x32; the run is saved" in running.log()
    assert "Traceback" not in running.log()
    run = tmp_path / "run"
    before, saved = state_of(run / "checkpoint-1"), state_of(run / "emergency_checkpoint-1")
    found = [place for place in differences(before, saved) if "/seraena/" not in place]
    assert [place for place in found if "/lr:" not in place] == [], "the rate is set again before every step"
    seraena = saved["training_state.pt"]["seraena"]
    assert (seraena["steps"], seraena["training_step"], len(seraena["learned"])) == (3, 1, 1)
    train_here([*arguments, "--resume_from_checkpoint", "latest", "--checkpointing_steps", "3"])
    assert state_of(run / "checkpoint-3")["training_state.pt"]["seraena"]["steps"] == 6


def test_half_precision_skips_with_both_optimisers_or_none(clips: Path) -> None:
    """An infinity in the weights of one optimiser: the other must not step either."""
    arguments = arguments_for(clips, Path("unused"), optimizer="muon", mixed_precision="fp16")
    config = load_config("quickstart", arguments[1:]).config
    model = TAEHV(config.variant, width=config.model_width)
    engine = Engine(config)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    engine.backward(sum(p.square().sum() for p in model.parameters()))
    assert engine.finish_step(max_grad_norm=1.0).stepped, "from here on the moments alone would move the weights"
    for spoilt in (next(iter(model.parameters())), optimizers.optimizers[0].param_groups[0]["params"][0]):
        before = [p.detach().clone() for p in model.parameters()]
        engine.backward(sum(p.square().sum() for p in model.parameters()))
        assert spoilt.grad is not None
        spoilt.grad[0] = torch.inf
        result = engine.finish_step(max_grad_norm=1.0)
        assert not result.stepped
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    engine.backward(sum(p.square().sum() for p in model.parameters()))
    assert engine.finish_step(max_grad_norm=1.0).stepped


def test_codes_and_kinds() -> None:
    assert Status.WELL < Status.OUT_OF_MEMORY < Status.HAS_TO_STOP
    assert AnotherRankInTrouble(Status.OUT_OF_MEMORY).status == Status.OUT_OF_MEMORY
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert "use bf16" in str(skipped_steps_error(10, mixed_precision="fp16"))
    assert "the learning rate is too high" in str(skipped_steps_error(10, mixed_precision="bf16"))
