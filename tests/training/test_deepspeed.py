"""Launches: every value takes effect, agrees with the run, or is refused. ZeRO-1/2/3 with two CPU ranks: the plain
engine's numbers, its guards, its checkpoints."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.training.engine_runs import largest_difference, results, run_plan, same_weights
from tests.training.faults import NanLoss, OutOfMemoryInZero
from tests.training.tiny_runs import (
    DECODER_ALONE,
    SERAENA,
    arguments_for,
    differences,
    launch,
    read_lines,
    state_of,
    train_here,
)
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.deepspeed import LaunchConfig, Zero, read_environment, read_launch_file

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "accelerate_configs"
NAMES = ("deepspeed", "deepspeed_1gpu", "deepspeed_8gpu", "deepspeed_16gpu", "ddp_8gpu")

GUIDE = {
    "zero_stage": 2,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "cpu",
    "communication_data_type": "fp16",
    "gradient_accumulation_steps": 1,
    "reduce_bucket_size": "5e7",
    "overlap_comm": True,
}
"""What guides print."""

QUESTIONNAIRE = {
    "deepspeed_multinode_launcher": "standard",
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": False,
    "zero3_save_16bit_model": False,
    "zero_stage": 3,
}
"""What ``accelerate config`` writes."""


def with_deepspeed(test: Any) -> Any:
    """A slow test that needs DeepSpeed."""
    why = "DeepSpeed is not installed (pip install 'tinyvae[deepspeed]')"
    return pytest.mark.slow(pytest.mark.skipif(find_spec("deepspeed") is None, reason=why)(test))


def write(folder: Path, block: dict[str, Any] | None = None, **top: Any) -> Path:
    content = {"distributed_type": "DEEPSPEED" if block else "MULTI_GPU", "num_processes": 2, **top}
    if block:
        content["deepspeed_config"] = block
    file = folder / "launch.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def told(folder: Path, content: Any, **variables: str) -> LaunchConfig:
    """The launch of a process whose YAML names a JSON of this content."""
    file = folder / "deepspeed.json"
    file.write_text(json.dumps(content))
    named = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    return read_environment({**named, **variables})


def passed_by_accelerate(*words: str) -> dict[str, str]:
    """The variables that accelerate itself makes of a command line."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments, file, _ = _validate_launch_command(
        launch_command_parser().parse_args([*words, "--main_process_port", "0", "train.py"])
    )
    if not arguments.use_deepspeed:
        return prepare_multi_gpu_env(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(file.deepspeed_config) if file else ""
    return prepare_deepspeed_cmd_env(arguments)[1]


@pytest.mark.parametrize("name", NAMES)
def test_our_own_launch_files_fit_the_presets_from_every_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinyvae.config import load_preset

    monkeypatch.chdir(tmp_path)
    launch = read_launch_file(CONFIGS / f"{name}.yaml")
    for preset in ("h100", "1gpu_h100", "test"):
        assert launch.disagreements(load_preset(preset)) == []
    assert (launch.deepspeed is not None) == name.startswith("deepspeed")
    if launch.deepspeed is not None:  # a bucket is a buffer: ours hold the largest network once, not many times
        assert (launch.deepspeed.zero_optimization.reduce_bucket_size or 0) <= 25_000_000
        assert launch.deepspeed.zero_optimization.stage == (3 if "16" in name else 2)


@pytest.mark.parametrize("name", [*NAMES, "questionnaire", "guide", "precision", "dynamo"])
def test_a_file_is_read_as_the_processes_that_it_starts_see_it(name: str, tmp_path: Path) -> None:
    """`tinyvae check --launch FILE` says what `accelerate launch --config_file FILE` will end in."""
    own: dict[str, Any] = {
        "questionnaire": {"block": QUESTIONNAIRE},
        "guide": {"block": GUIDE},
        "precision": {"mixed_precision": "fp16"},
        "dynamo": {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
    }
    file = write(tmp_path, **own[name]) if name in own else CONFIGS / f"{name}.yaml"

    def outcome(read: Any) -> str:
        try:
            launch = read()
        except UserError as refused:
            return str(refused)
        return f"{launch} {launch.disagreements(TrainConfig())}"

    by_file = outcome(lambda: read_launch_file(file))
    assert by_file == outcome(
        lambda: read_environment(passed_by_accelerate("--config_file", str(file)), place=str(file))
    )


def test_every_value_of_a_json_reaches_deepspeed(tmp_path: Path) -> None:
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 5e7,
        "allgather_bucket_size": 124,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
    }
    launch = told(tmp_path, {"zero_optimization": zero, "communication_data_type": "bf16"})
    assert launch.deepspeed is not None and launch.deepspeed.communication_data_type == "bf16"
    assert launch.deepspeed.zero_optimization.model_dump(exclude_defaults=True) == zero


def test_auto_and_none_ask_for_nothing(tmp_path: Path) -> None:
    zero = {"stage": 2, "reduce_bucket_size": "auto", "offload_param": {"device": "none"}, "sub_group_size": None}
    launch = told(tmp_path, {"zero_optimization": zero, "train_batch_size": "auto", "gradient_clipping": "auto"})
    assert launch.deepspeed is not None and launch.disagreements(TrainConfig()) == []
    assert launch.deepspeed.zero_optimization == Zero(stage=2)


@pytest.mark.parametrize(
    ("zero", "says"),
    [
        ({"reduce_bucket": 5}, r"zero_optimization\.reduce_bucket: it has no effect here; take it out"),
        ({"stage": 0}, r"zero_optimization\.stage: Input should be greater than or equal to 1"),
        ({"reduce_bucket_size": float("inf")}, "reduce_bucket_size: Input should be a finite number"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size: Input should be greater"),
        ({"allgather_bucket_size": 55_555}, "allgather_bucket_size: Input should be a multiple of 2"),
        ({"overlap_comm": "perhaps"}, "overlap_comm: Input should be a valid boolean"),
        ({"offload_param": {"device": "cpu"}}, "offload_param has no effect at ZeRO stage 2; take it out"),
        ({"offload_optimizer": {"device": "nvme"}}, r"offload_optimizer\.device: Input should be 'cpu'"),
        ({"stage3_prefetch_bucket_size": 10}, "stage3_prefetch_bucket_size: it has no effect here"),
        ({"stage3_param_persistence_threshold": 10}, "has no effect at ZeRO stage 2"),
        (
            {"stage": 3, "allgather_bucket_size": 10, "reduce_scatter": True},
            "allgather_bucket_size, reduce_scatter has",
        ),
    ],
)
def test_what_would_not_take_effect_is_refused(tmp_path: Path, zero: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        told(tmp_path, {"zero_optimization": {"stage": 2, **zero}})


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 2, "nonsense": 1}, "optimizer": {"type": "Adam"}}
    others = {"ACCELERATE_DEEPSPEED_ZERO3_INIT": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    others |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_MEGATRON_LM": "true"}
    with pytest.raises(UserError) as refused:
        told(tmp_path, content, **others, ACCELERATE_DYNAMO_BACKEND="INDUCTOR")
    parts = ("nonsense", "optimizer: it has no effect", "zero3_init_flag", "so write zero_stage", "asks for FSDP")
    for part in (*parts, "Megatron-LM; tinyvae runs under DDP or DeepSpeed", "compile_model decides"):
        assert part in str(refused.value)


def test_keys_that_accelerate_drops_are_refused_by_name(tmp_path: Path) -> None:
    """Their values never arrive; their names do."""
    with pytest.raises(UserError) as refused:
        read_environment(passed_by_accelerate("--config_file", str(write(tmp_path, GUIDE))))
    lost = "does not pass on communication_data_type, reduce_bucket_size, overlap_comm of deepspeed_config"
    assert lost in str(refused.value) and "write such values into a DeepSpeed JSON" in str(refused.value)
    assert "offload_param has no effect at ZeRO stage 2" in str(refused.value)


def test_the_command_line_of_accelerate_counts_too(tmp_path: Path) -> None:
    words = ("--config_file", str(write(tmp_path, QUESTIONNAIRE)), "--zero_stage", "1")
    launch = read_environment(passed_by_accelerate(*words))
    assert launch.deepspeed is not None and launch.deepspeed.zero_optimization == Zero(stage=1)
    assert launch.disagreements(TrainConfig(gradient_accumulation_steps=4)) == []
    bare = read_environment({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""})
    assert bare.deepspeed is not None and bare.deepspeed.zero_optimization.stage == 2  # accelerate's own default


def test_a_plain_start_asks_for_nothing() -> None:
    for environment in ({}, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}):
        launch = read_environment(environment)
        launch.check(TrainConfig(mixed_precision="bf16"))
        assert launch.deepspeed is None


def test_the_run_decides_precision_accumulation_and_clipping(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8, "gradient_clipping": 0.5}
    launch = told(tmp_path, content, ACCELERATE_MIXED_PRECISION="fp16")
    with pytest.raises(UserError) as refused:
        launch.check(TrainConfig(gradient_accumulation_steps=2, mixed_precision="bf16"))
    assert "gradient_accumulation_steps: 8, and the run's gradient_accumulation_steps is 2" in str(refused.value)
    assert "gradient_clipping: 0.5, and the run's max_grad_norm is 1.0" in str(refused.value)
    assert "mixed_precision: fp16, and the run's mixed_precision is bf16" in str(refused.value)
    fitting = TrainConfig(gradient_accumulation_steps=8, max_grad_norm=0.5, mixed_precision="fp16")
    launch.check(fitting)
    with pytest.raises(UserError, match="optimizer=muon works on whole weight matrices"):
        launch.check(replace(fitting, optimizer="muon"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("distributed_type: [1", "accelerate cannot read"),
        ("just text", "accelerate cannot read"),
        ("num_processes: 2", "`distributed_type` must be specified"),
        ("distributed_type: MULTI_GPU\nnum_procesess: 4", "unknown keys"),
        ("distributed_type: MULTI_GPU\ndeepspeed_config: {zero_stage: 2}", "under distributed_type: DEEPSPEED"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: 3", "must hold keys and values"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json}", "JSON no.json cannot be"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: launch.yaml}", "Expecting value"),
    ],
)
def test_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("launch.yaml")
    with pytest.raises(UserError, match="does not exist"):
        read_launch_file(file)
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        read_launch_file(file)


def test_a_json_that_holds_no_keys_is_said_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"deepspeed\.json\): Input should be a valid dictionary"):
        told(tmp_path, [1, 2])


def test_every_key_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "engines.md").read_text()
    assert all(f"`{key}`" in text for key in Zero.model_fields)


@with_deepspeed
@pytest.mark.parametrize("name", ["ours", "default"])
def test_accelerate_launch_by_hand_with_our_file_and_with_its_default_file(
    name: str, clips: Path, tmp_path: Path
) -> None:
    """A real launch from another folder; without ``--config_file`` accelerate takes the one of its questionnaire."""
    words = ["--config_file", str(CONFIGS / "deepspeed.yaml")] if name == "ours" else []
    (tmp_path / "accelerate").mkdir()
    write(tmp_path, QUESTIONNAIRE).rename(tmp_path / "accelerate" / "default_config.yaml")
    settings = {"max_train_steps": 2, "checkpointing_steps": 2, "validation_steps": 0, "gradient_accumulation_steps": 4}
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, "--num_processes", "2"]
    command += ["--main_process_port", "0", "-m", "tinyvae", "train"]
    command += arguments_for(clips, tmp_path / "run", **settings)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "checkpoint-2" / "manifest.json").read_text())["engine"] == "deepspeed"


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
    plan.append({"name": "plain_decay", "zero": None, "steps": 10, "load": "plain.saved.pt", "weight_decay": 0.5})
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
        zero = {"zero_optimization": ZERO[f"zero{stage}"]}
        changed = {"steps": 10, "load": "plain.saved.pt", "weight_decay": 0.5}
        plan.append({"name": f"zero{stage}_decay", "zero": zero, **changed})
        odd = {"zero_optimization": {"stage": stage, **odd_values(stage)}, "communication_data_type": "bf16"}
        plan.append({"name": f"odd_{stage}", "zero": odd, "steps": 2})
    plan += [{"name": f"plain_{p}", "zero": None, "steps": 2, "precision": p} for p in ("fp16", "bf16")]
    run_plan(plan, folder, processes=2)
    run_plan([{"name": "moved", "zero": None, "steps": 10, "load": "zero3.saved.pt"}], folder, processes=1)
    return folder


@with_deepspeed
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


@with_deepspeed
@pytest.mark.parametrize("name", ZERO)
def test_resume_is_exact_and_checkpoints_move_between_engines(folder: Path, name: str) -> None:
    run, plain = results(folder, name, processes=2)[0], results(folder, "plain", processes=2)[0]
    assert same_weights(run, results(folder, f"{name}_again", processes=2)[0])
    assert largest_difference(plain, results(folder, f"{name}_from_plain", processes=2)[0]) < 1e-6
    assert largest_difference(plain, results(folder, f"{name}_to_plain", processes=2)[0]) < 1e-6
    if name == "zero3":
        assert largest_difference(plain, results(folder, "moved", processes=1)[0]) < 1e-6


@with_deepspeed
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_a_weight_decay_that_changes_at_a_resume_takes_effect(folder: Path, name: str) -> None:
    changed = results(folder, "plain_decay", processes=2)[0]
    assert largest_difference(changed, results(folder, "plain", processes=2)[0]) > 1e-5
    assert largest_difference(changed, results(folder, f"{name}_decay", processes=2)[0]) < 1e-6


@with_deepspeed
@pytest.mark.parametrize("name", ZERO)
def test_a_nan_on_one_rank_makes_both_skip_with_weights_bit_equal(folder: Path, name: str) -> None:
    ranks = results(folder, f"{name}_nan", processes=2)
    assert [rank["stepped"] for rank in ranks] == [[True, True, False, True]] * 2
    assert [rank["unchanged"] for rank in ranks] == [[False, False, True, False]] * 2
    assert same_weights(*ranks) and not math.isfinite(ranks[0]["norms"][2])


@with_deepspeed
@pytest.mark.parametrize("name", ZERO)
def test_finite_gradients_that_overflow_on_the_way_are_skipped_too(folder: Path, name: str) -> None:
    ranks = results(folder, f"{name}_overflow", processes=2)
    assert [rank["stepped"] for rank in ranks] == [[True, False, True]] * 2
    assert [rank["unchanged"] for rank in ranks] == [[False, True, False]] * 2
    assert same_weights(*ranks) and all(torch.isfinite(v).all() for v in ranks[0]["model"].values())


@with_deepspeed
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


@with_deepspeed
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
    spare = by_default["in_effect"]["reduce_bucket_size"] - weights
    assert spare in (0, 1), "a bucket is a buffer, and it must be even"


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


@with_deepspeed
def test_whole_runs_are_the_same_under_every_engine(clips: Path, tmp_path: Path) -> None:
    settings = {"max_train_steps": 10, "log_every": 1, "validation_steps": 5, "checkpointing_steps": 5}
    launch(arguments_for(clips, tmp_path / "one", **settings, train_batch_size=4), tmp_path / "logs").ends_with(0)
    wanted = losses_of(tmp_path / "one")
    assert len(wanted) == 10
    launch(arguments_for(clips, tmp_path / "ddp", **settings), tmp_path / "logs", ranks=2).ends_with(0, 0)
    assert losses_of(tmp_path / "ddp") == pytest.approx(wanted, abs=1e-5)
    for stage in (1, 2, 3):
        name = f"zero{stage}"
        arguments = arguments_for(clips, tmp_path / name, **settings)
        run = launch(arguments, tmp_path / "logs", ranks=2, prepare=UnderDeepSpeed(json_file(tmp_path, stage)))
        run.ends_with(0, 0)
        assert losses_of(tmp_path / name) == pytest.approx(wanted, abs=1e-5)
        assert json.loads((tmp_path / name / "checkpoint-10" / "manifest.json").read_text())["engine"] == "deepspeed"
        final = [torch.load(tmp_path / run / "final_model.pth", weights_only=True) for run in ("ddp", name)]
        gap = max(float((value - final[1][key]).abs().max()) for key, value in final[0].items())
        assert gap < 1e-6  # the averaged weights too


@with_deepspeed
def test_a_run_with_seraena_resumes_exactly_under_deepspeed_and_moves_to_ddp(clips: Path, tmp_path: Path) -> None:
    """Seraena trains beside DeepSpeed, equal on all ranks and to what it is without; all of its state is saved."""
    under = UnderDeepSpeed(json_file(tmp_path, 2))
    settings = {**SERAENA, "log_every": 1, "checkpointing_steps": 3, "gradient_accumulation_steps": 2}

    def train(name: str, prepare: Any, **more: object) -> Path:
        arguments = arguments_for(clips, tmp_path / name, **settings, **more)
        run = launch(arguments, tmp_path / "logs", ranks=2, **({} if prepare is None else {"prepare": prepare}))
        run.ends_with(0, 0)
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


@with_deepspeed
def test_a_nan_in_a_whole_run_is_skipped_by_both_ranks_and_named(clips: Path, tmp_path: Path) -> None:
    under = UnderDeepSpeed(json_file(tmp_path, 3), NanLoss(rank=1, calls=(2,)))
    run = launch(arguments_for(clips, tmp_path / "run"), tmp_path / "logs", ranks=2, prepare=under).ends_with(0, 0)
    assert "skipped" in run.log(0) and "process 1:" in run.log(0) and "process 0:" not in run.log(0)
    progress = state_of(tmp_path / "run" / "checkpoint-6")["training_state.pt"]["progress"]
    assert progress["skipped_steps"] == 1


@with_deepspeed
def test_mistakes_in_a_deepspeed_json_end_in_one_sentence(clips: Path, tmp_path: Path) -> None:
    under = UnderDeepSpeed(json_file(tmp_path, 2, reduce_bucket=1))
    run = launch(arguments_for(clips, tmp_path / "run"), tmp_path / "logs", ranks=1, prepare=under).ends_with(2)
    assert "zero_optimization.reduce_bucket: it has no effect here" in run.log() and "Traceback" not in run.log()


@with_deepspeed
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
    run.ends_with(0, 0)
    assert '"train/encoder_loss"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    state = state_of(tmp_path / "run" / "checkpoint-2")["training_state.pt"]
    (moments,) = state["engine"]["optimizers"]["optimizers"]
    assert len(moments["state"]) == len(state["model"])
    assert not any("teacher" in key for key in state["model"])


@with_deepspeed
def test_a_decoder_alone_under_deepspeed(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """DeepSpeed holds the trained part only; the run is the plain engine's, and goes on there from its checkpoint."""
    settings = {**DECODER_ALONE, "teacher": teacher, "log_every": 1}
    train_here(arguments_for(clips, tmp_path / "plain", **settings, train_batch_size=2))
    under, arguments = UnderDeepSpeed(json_file(tmp_path, 3)), arguments_for(clips, tmp_path / "zero", **settings)
    launch([*arguments, "--train_batch_size", "1"], tmp_path / "logs", ranks=2, prepare=under).ends_with(0, 0)
    assert losses_of(tmp_path / "zero") == pytest.approx(losses_of(tmp_path / "plain"), abs=1e-5)
    state = state_of(tmp_path / "zero" / "checkpoint-3")["training_state.pt"]
    (moments,) = state["engine"]["optimizers"]["optimizers"]
    assert len(moments["state"]) == sum(name.startswith("decoder") for name in state["model"])
    settings |= {"resume_from_checkpoint": tmp_path / "zero" / "checkpoint-3", "train_batch_size": 2}
    train_here(arguments_for(clips, tmp_path / "moved", **settings))
    assert losses_of(tmp_path / "moved")[-3:] == pytest.approx(losses_of(tmp_path / "plain")[-3:], abs=1e-5)


@with_deepspeed
def test_out_of_memory_in_deepspeeds_step_is_told_as_that(clips: Path, tmp_path: Path) -> None:
    """As a lost process it would be started again ten times; it is a mistake in the settings (exit code 2)."""
    under = UnderDeepSpeed(json_file(tmp_path, 2), OutOfMemoryInZero(call=2))
    run = launch(arguments_for(clips, tmp_path / "run"), tmp_path / "logs", ranks=2, prepare=under).ends_with(2, 2)
    assert "out of memory while the gradients were applied" in run.log() and "Traceback" not in run.log()
