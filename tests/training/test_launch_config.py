"""Launches: every value takes effect, must agree with the run, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.tiny_runs import arguments_for
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
    launch.check(TrainConfig(gradient_accumulation_steps=8, max_grad_norm=0.5, mixed_precision="fp16"))


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


def test_every_key_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "engines.md").read_text()
    assert all(f"`{key}`" in text for key in Zero.model_fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "default"])
def test_accelerate_launch_by_hand_with_our_file_and_with_its_default_file(
    name: str, clips: Path, tmp_path: Path
) -> None:
    """A real launch from another folder; without ``--config_file`` accelerate takes the one of its questionnaire."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install 'tinyvae[deepspeed]')")
    words = ["--config_file", str(CONFIGS / "deepspeed.yaml")] if name == "ours" else []
    (tmp_path / "accelerate").mkdir()
    write(tmp_path, QUESTIONNAIRE).rename(tmp_path / "accelerate" / "default_config.yaml")
    settings = {"max_train_steps": 2, "checkpointing_steps": 2, "validation_steps": 0, "gradient_accumulation_steps": 4}
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, "--num_processes", "2"]
    command += ["--main_process_port", "0", "-m", "tinyvae", "train"]
    command += arguments_for(clips, tmp_path / "run", **settings)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "checkpoint-2" / "manifest.json").read_text())["engine"] == "deepspeed"
