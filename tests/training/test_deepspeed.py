"""DeepSpeed ZeRO-1/2/3 with two CPU ranks: the plain engine's numbers, its guards, its checkpoints."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.engine_runs import largest_difference, results, run_plan, same_weights
from tests.training.faults import NanLoss, OutOfMemoryInZero
from tests.training.tiny_runs import SERAENA, arguments_for, differences, launch, read_lines, state_of

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install 'tinyvae[deepspeed]')")

CPU = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "reduce_bucket_size": 1_000_000},
    "zero3": {"stage": 3, "reduce_bucket_size": 1_000_000, "stage3_param_persistence_threshold": 100},
    "zero2_offload": {"stage": 2, "offload_optimizer": CPU},
    "zero3_offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


# the engine alone


def odd_values(stage: int) -> dict[str, Any]:
    """Values of which none is DeepSpeed's default."""
    values: dict[str, Any] = {"reduce_bucket_size": 77_778, "contiguous_gradients": False, "overlap_comm": stage == 2}
    if stage == 2:
        return values | {"allgather_bucket_size": 55_556, "reduce_scatter": False}
    values |= {"sub_group_size": 33_333, "stage3_param_persistence_threshold": 500}
    return values | {"stage3_model_persistence_threshold": 2_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one group of two processes: starting it costs more than running it."""
    folder = tmp_path_factory.mktemp("engines")
    plan: list[dict[str, Any]] = [{"name": "plain", "zero": None, "steps": 10, "save_at": 5}]
    for name, section in ZERO.items():
        zero = {"zero_optimization": section}
        plan += [
            {"name": name, "zero": zero, "steps": 10, "save_at": 5},
            {"name": f"{name}_again", "zero": zero, "steps": 10, "load": f"{name}.saved.pt"},
            {"name": f"{name}_from_plain", "zero": zero, "steps": 10, "load": "plain.saved.pt"},
            {"name": f"{name}_to_plain", "zero": None, "steps": 10, "load": f"{name}.saved.pt"},
            {"name": f"{name}_parts", "zero": zero, "steps": 3, "micro_batches": 2},
            {"name": f"{name}_nan", "zero": zero, "steps": 4, "nan_at": [1, 2]},
            {"name": f"{name}_fp16", "zero": zero, "steps": 4, "precision": "fp16", "nan_at": [0, 3]},
            {"name": f"{name}_bf16", "zero": zero, "steps": 2, "precision": "bf16"},
        ]
        short = {**zero, "communication_data_type": "fp16"}
        plan.append({"name": f"{name}_overflow", "zero": short, "steps": 3, "huge_at": [0, 1]})
    for stage in (2, 3):
        odd = {"zero_optimization": {"stage": stage, **odd_values(stage)}, "communication_data_type": "bf16"}
        plan.append({"name": f"odd_{stage}", "zero": odd, "steps": 2})
    plan += [{"name": f"plain_{p}", "zero": None, "steps": 2, "precision": p} for p in ("fp16", "bf16")]
    run_plan(plan, folder, processes=2)
    run_plan([{"name": "moved", "zero": None, "steps": 10, "load": "zero3.saved.pt"}], folder, processes=1)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_the_same_losses_and_weights_as_the_plain_engine(folder: Path, name: str) -> None:
    plain, ranks = results(folder, "plain", processes=2), results(folder, name, processes=2)
    assert same_weights(*ranks)
    assert ranks[0]["losses"] == pytest.approx(plain[0]["losses"], abs=1e-5) and len(set(plain[0]["losses"])) == 10
    assert ranks[0]["norms"] == pytest.approx(plain[0]["norms"], rel=1e-4)
    assert max(plain[0]["norms"]) > 0.5  # so clipping took part, once: a second time would show in the weights
    assert largest_difference(ranks[0], plain[0]) < 1e-6
    parts = results(folder, f"{name}_parts", processes=2)[0]
    assert parts["losses"] == pytest.approx(plain[0]["losses"][:3], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_resume_is_exact_and_checkpoints_move_between_engines(folder: Path, name: str) -> None:
    run, plain = results(folder, name, processes=2)[0], results(folder, "plain", processes=2)[0]
    assert same_weights(run, results(folder, f"{name}_again", processes=2)[0])
    assert largest_difference(plain, results(folder, f"{name}_from_plain", processes=2)[0]) < 1e-6
    assert largest_difference(plain, results(folder, f"{name}_to_plain", processes=2)[0]) < 1e-6
    if name == "zero3":
        assert largest_difference(plain, results(folder, "moved", processes=1)[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_a_nan_on_one_rank_makes_both_skip_with_weights_bit_equal(folder: Path, name: str) -> None:
    ranks = results(folder, f"{name}_nan", processes=2)
    assert [rank["stepped"] for rank in ranks] == [[True, True, False, True]] * 2
    assert [rank["unchanged"] for rank in ranks] == [[False, False, True, False]] * 2
    assert same_weights(*ranks) and not math.isfinite(ranks[0]["norms"][2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_finite_gradients_that_overflow_on_the_way_are_skipped_too(folder: Path, name: str) -> None:
    ranks = results(folder, f"{name}_overflow", processes=2)
    assert [rank["stepped"] for rank in ranks] == [[True, False, True]] * 2
    assert [rank["unchanged"] for rank in ranks] == [[False, True, False]] * 2
    assert same_weights(*ranks) and all(torch.isfinite(v).all() for v in ranks[0]["model"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_every_precision(folder: Path, name: str) -> None:
    """Weights are fp32 in every mode, so there is no bf16 bias for a float input to meet."""
    half = results(folder, f"{name}_fp16", processes=2)
    assert any(half[0]["stepped"]) and not half[0]["stepped"][3] and half[0]["stepped"] == half[1]["stepped"]
    assert same_weights(*half)
    brain = results(folder, f"{name}_bf16", processes=2)
    assert brain[0]["stepped"] == [True, True] and brain[0]["dtype"] == "torch.float32" and same_weights(*brain)
    plain = results(folder, "plain_bf16", processes=2)[0]
    assert brain[0]["losses"] == pytest.approx(plain["losses"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_every_value_is_in_effect(folder: Path, stage: int) -> None:
    given = odd_values(stage)
    effect = results(folder, f"odd_{stage}", processes=2)[0]["in_effect"]
    assert {key: effect[key] for key in given} == given
    assert effect["zero_stage"] == stage and effect["clipping"] == 0.5
    assert effect["communication_data_type"] == "torch.bfloat16"
    if stage == 3:
        fewer = results(folder, "zero3", processes=2)[0]["in_effect"]
        assert effect["sub_groups"] > 1 == fewer["sub_groups"]
        assert effect["whole_parameters"] > fewer["whole_parameters"] > 0
    assert not effect["offload_optimizer"]
    by_default = results(folder, f"zero{stage}_offload", processes=2)[0]
    assert by_default["in_effect"]["offload_optimizer"]
    weights = sum(value.numel() for value in by_default["model"].values())
    assert by_default["in_effect"]["reduce_bucket_size"] - weights in (
        0,
        1,
    )  # a bucket is a buffer, and it must be even


# whole runs, chosen by launch configuration alone


class UnderDeepSpeed:
    """Gives a rank what ``accelerate launch`` gives it where its YAML names a DeepSpeed JSON."""

    def __init__(self, file: Path, fault: Any = None) -> None:
        self.file, self.fault = file, fault

    def __call__(self, rank: int) -> None:
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(self.file)}
        if self.fault is not None:
            self.fault(rank)


def json_file(folder: Path, stage: int, **more: object) -> Path:
    file = folder / f"zero{stage}.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000, **more}}))
    return file


def losses_of(run: Path) -> list[float]:
    return [line["train/loss"] for line in read_lines(run / "metrics.jsonl") if "train/loss" in line]


@pytest.mark.slow
def test_whole_runs_are_the_same_under_every_engine(clips: Path, tmp_path: Path) -> None:
    settings = {"max_train_steps": 10, "log_every": 1, "validation_steps": 5, "checkpointing_steps": 5}
    alone = launch(arguments_for(clips, tmp_path / "one", **settings, train_batch_size=4), tmp_path / "logs")
    assert alone.wait() == [0], alone.both_logs()
    wanted = losses_of(tmp_path / "one")
    assert len(wanted) == 10
    ddp = launch(arguments_for(clips, tmp_path / "ddp", **settings), tmp_path / "logs", ranks=2)
    assert ddp.wait(120) == [0, 0], ddp.both_logs()
    assert losses_of(tmp_path / "ddp") == pytest.approx(wanted, abs=1e-5)
    for stage in (1, 2, 3):
        name = f"zero{stage}"
        arguments = arguments_for(clips, tmp_path / name, **settings)
        run = launch(arguments, tmp_path / "logs", ranks=2, prepare=UnderDeepSpeed(json_file(tmp_path, stage)))
        assert run.wait(180) == [0, 0], run.both_logs()
        assert losses_of(tmp_path / name) == pytest.approx(wanted, abs=1e-5)
        assert json.loads((tmp_path / name / "checkpoint-10" / "manifest.json").read_text())["engine"] == "deepspeed"
        final = [torch.load(tmp_path / run / "final_model.pth", weights_only=True) for run in ("ddp", name)]
        gap = max(float((value - final[1][key]).abs().max()) for key, value in final[0].items())
        assert gap < 1e-6  # the averaged weights too


@pytest.mark.slow
def test_a_run_with_seraena_resumes_exactly_under_deepspeed_and_moves_to_ddp(clips: Path, tmp_path: Path) -> None:
    """Seraena trains beside DeepSpeed, equal on all ranks and to what it is without; all of its state is saved."""
    under = UnderDeepSpeed(json_file(tmp_path, 2))
    settings = {**SERAENA, "log_every": 1, "checkpointing_steps": 3, "gradient_accumulation_steps": 2}

    def train(name: str, prepare: Any, **more: object) -> Path:
        arguments = arguments_for(clips, tmp_path / name, **settings, **more)
        run = launch(arguments, tmp_path / "logs", ranks=2, **({} if prepare is None else {"prepare": prepare}))
        assert run.wait(180) == [0, 0], run.both_logs()
        return tmp_path / name

    whole, ddp = train("whole", under), train("ddp", None)
    checkpoint = whole / "checkpoint-3"
    resumed = train("resumed", under, resume_from_checkpoint=checkpoint)
    assert differences(state_of(whole / "checkpoint-6"), state_of(resumed / "checkpoint-6")) == []
    shared = state_of(whole / "checkpoint-6")["training_state.pt"]
    assert not any("teacher" in key or "discriminator" in key for key in shared["model"])
    other = state_of(ddp / "checkpoint-6")["training_state.pt"]
    for key, value in shared["seraena"]["discriminator"].items():
        assert torch.allclose(value.float(), other["seraena"]["discriminator"][key].float(), atol=1e-5), key
    moved = train("moved", None, resume_from_checkpoint=checkpoint)
    assert losses_of(moved)[-3:] == pytest.approx(losses_of(whole)[-3:], abs=1e-5)


@pytest.mark.slow
def test_a_nan_in_a_whole_run_is_skipped_by_both_ranks_and_named(clips: Path, tmp_path: Path) -> None:
    under = UnderDeepSpeed(json_file(tmp_path, 3), NanLoss(rank=1, calls=(2,)))
    run = launch(arguments_for(clips, tmp_path / "run"), tmp_path / "logs", ranks=2, prepare=under)
    assert run.wait(180) == [0, 0], run.both_logs()
    assert "skipped" in run.log(0) and "process 1:" in run.log(0) and "process 0:" not in run.log(0)
    progress = state_of(tmp_path / "run" / "checkpoint-6")["training_state.pt"]["progress"]
    assert progress["skipped_steps"] == 1


@pytest.mark.slow
def test_mistakes_in_a_deepspeed_json_end_in_one_sentence(clips: Path, tmp_path: Path) -> None:
    under = UnderDeepSpeed(json_file(tmp_path, 2, reduce_bucket=1))
    run = launch(arguments_for(clips, tmp_path / "run"), tmp_path / "logs", ranks=1, prepare=under)
    assert run.wait(60) == [2]
    assert "zero_optimization.reduce_bucket: it has no effect here" in run.log() and "Traceback" not in run.log()


@pytest.mark.slow
def test_a_frozen_teacher_beside_deepspeed(clips: Path, tmp_path: Path) -> None:
    """The old "zero stage 2 requires an optimizer": here only the student reaches DeepSpeed, in bf16 too."""
    diffusers = pytest.importorskip("diffusers")
    vae = diffusers.AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
    vae.save_pretrained(tmp_path / "teacher")
    changes: dict[str, object] = {"use_ref_vae": True, "ref_vae_path": tmp_path / "teacher", "n_frames": 5}
    changes |= {"encoder_loss_weight": 0.1, "decoder_loss_weight": 0.1, "mixed_precision": "bf16", "log_every": 1}
    changes |= {"max_train_steps": 2, "checkpointing_steps": 2, "validation_steps": 0}
    under = UnderDeepSpeed(json_file(tmp_path, 2))
    run = launch(arguments_for(clips, tmp_path / "run", **changes), tmp_path / "logs", ranks=2, prepare=under)
    assert run.wait(180) == [0, 0], run.both_logs()
    assert '"train/encoder_loss"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    state = state_of(tmp_path / "run" / "checkpoint-2")["training_state.pt"]
    (moments,) = state["engine"]["optimizers"]["optimizers"]
    assert len(moments["state"]) == len(state["model"])
    assert not any("teacher" in key for key in state["model"])


@pytest.mark.slow
def test_out_of_memory_in_deepspeeds_step_is_told_as_that(clips: Path, tmp_path: Path) -> None:
    """As a lost process it would be started again ten times; it is a mistake in the settings (exit code 2)."""
    under = UnderDeepSpeed(json_file(tmp_path, 2), OutOfMemoryInZero(call=2))
    run = launch(arguments_for(clips, tmp_path / "run"), tmp_path / "logs", ranks=2, prepare=under)
    assert run.wait(120) == [2, 2], run.both_logs()
    assert "out of memory while the gradients were applied" in run.log() and "Traceback" not in run.log()
