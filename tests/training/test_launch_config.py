"""Launch files: every value takes effect, must agree with the run, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tinyvae.config import TrainConfig
from tinyvae.errors import MissingFileError, UserError
from tinyvae.training.launch_config import (
    DEEPSPEED_KEYS,
    LaunchConfig,
    find_launch_file,
    launch_of_this_process,
    read_launch_file,
)

CONFIGS = Path(__file__).resolve().parents[2] / "accelerate_configs"
NAMES = ("deepspeed", "deepspeed_1gpu", "deepspeed_8gpu", "deepspeed_16gpu", "ddp_8gpu")
UNDER_DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}


def write(folder: Path, deepspeed: dict[str, object] | None = None, **top: object) -> Path:
    content: dict[str, object] = {"compute_environment": "LOCAL_MACHINE", "num_processes": 2, **top}
    if deepspeed is not None:
        content |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, **deepspeed}}
    file = folder / "launch.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def read(folder: Path, deepspeed: dict[str, object] | None = None, **top: object) -> LaunchConfig:
    return read_launch_file(write(folder, deepspeed, **top))


@pytest.mark.parametrize("name", NAMES)
def test_our_own_launch_files_are_wholly_understood_and_fit_the_presets(name: str) -> None:
    from tinyvae.config_files import load_preset

    launch = read_launch_file(CONFIGS / f"{name}.yaml")
    assert (launch.deepspeed is not None) == name.startswith("deepspeed")
    for preset in ("h100", "1gpu_h100", "test"):
        assert launch.disagreements(load_preset(preset)) == []
    number = name.removeprefix("deepspeed").removeprefix("ddp").removeprefix("_").removesuffix("gpu")
    assert launch.num_processes == int(number or 2)
    if launch.deepspeed is not None:  # a bucket is a buffer: ours hold the largest network once, not many times
        assert launch.deepspeed.numbers["reduce_bucket_size"] <= 25_000_000


def test_every_deepspeed_value_reaches_deepspeeds_own_configuration(tmp_path: Path) -> None:
    given = {
        "offload_optimizer_device": "cpu",
        "communication_data_type": "bf16",
        "reduce_bucket_size": "5e7",
        "allgather_bucket_size": 124,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
    }
    launch = read(tmp_path, given)
    assert launch.deepspeed is not None
    config = launch.deepspeed.for_deepspeed(max_grad_norm=0.7)
    zero = config["zero_optimization"]
    assert config["gradient_clipping"] == 0.7 and config["gradient_accumulation_steps"] == 1
    assert config["communication_data_type"] == "bf16"
    assert zero["stage"] == 2 and zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["reduce_bucket_size"] == 50_000_000 and zero["allgather_bucket_size"] == 124
    assert zero["overlap_comm"] is True and zero["contiguous_gradients"] is False and zero["reduce_scatter"] is False


@pytest.mark.parametrize(
    ("deepspeed", "says"),
    [
        ({"reduce_bucket": 5}, "deepspeed_config.reduce_bucket is not a key that takes effect. Did you mean"),
        ({"zero_stage": 0}, "must be 1, 2 or 3"),
        ({"reduce_bucket_size": float("inf")}, "an even whole number"),
        ({"gradient_clipping": float("nan")}, "auto or a number"),
        ({3: 4}, "deepspeed_config.3 is not a key"),  # type: ignore[dict-item]
        ({"offload_param_device": "cpu"}, "no effect below zero_stage 3"),
        ({"offload_optimizer_device": "nvme"}, "must be none or cpu"),
        ({"stage3_param_persistence_threshold": 10}, "no effect at zero_stage 2, only at 3"),
        ({"zero_stage": 3, "allgather_bucket_size": 10}, "no effect at zero_stage 3, only at 1 or 2"),
        ({"zero_stage": 3, "zero3_init_flag": True}, "zero3_init_flag can only be false"),
        ({"stage3_prefetch_bucket_size": 10}, "nothing to fetch ahead"),
        ({"deepspeed_config_file": "ds.json"}, "write its values into this file"),
        ({"overlap_comm": "yes"}, "must be true or false"),
        ({"reduce_bucket_size": -1}, "must be an even whole number"),
        ({"allgather_bucket_size": 55_555}, "must be an even whole number"),
        ({"deepspeed_multinode_launcher": "pdsh"}, "must be standard"),
    ],
)
def test_what_would_not_take_effect_is_refused(tmp_path: Path, deepspeed: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path, deepspeed)


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read(tmp_path, {"nonsense": 1, "zero3_init_flag": True}, mixed_precision="fp8", fsdp_config={"a": 1})
    for part in ("nonsense", "zero3_init_flag", "mixed_precision: fp8", "fsdp_config"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("top", "says"),
    [
        ({"distributed_type": "FSDP"}, "distributed_type: FSDP is none of"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": 3}, "deepspeed_config: 3 must hold keys and values"),
        ({"num_processes": 0}, "num_processes: 0 must be a whole number of at least 1"),
        ({"main_process_port": 99999}, "main_process_port: 99999 must be"),
        ({"deepspeed_config": {"zero_stage": 2}}, "no effect unless distributed_type is DEEPSPEED"),
        ({"dynamo_backend": "INDUCTOR"}, "compile_model decides"),
        ({"downcast_bf16": "yes"}, "downcast_bf16: yes has no effect"),
        ({"num_procesess": 4}, "there is no key 'num_procesess'"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "must be LOCAL_MACHINE"),
    ],
)
def test_top_level_keys(tmp_path: Path, top: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path, None, **top)


def test_what_accelerates_questionnaire_writes_is_accepted(tmp_path: Path) -> None:
    deepspeed = {"gradient_accumulation_steps": 4, "zero3_init_flag": False, "zero3_save_16bit_model": False}
    deepspeed |= {"offload_optimizer_device": "none", "offload_param_device": "none", "gradient_clipping": 1.0}
    top = {"debug": False, "downcast_bf16": "no", "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}
    launch = read(tmp_path, deepspeed, **top, mixed_precision="bf16", rdzv_backend="static", same_network=True)
    fits = TrainConfig(gradient_accumulation_steps=4, max_grad_norm=1.0, mixed_precision="bf16")
    assert launch.disagreements(fits) == []


def test_the_run_decides_precision_accumulation_and_clipping(tmp_path: Path) -> None:
    launch = read(
        tmp_path, {"gradient_accumulation_steps": 8, "gradient_clipping": 0.5}, mixed_precision="fp16", num_machines=1
    )
    told = "\n".join(launch.disagreements(TrainConfig(gradient_accumulation_steps=2, mixed_precision="bf16")))
    assert "gradient_accumulation_steps: 8, and the run's gradient_accumulation_steps is 2" in told
    assert "gradient_clipping: 0.5, and the run's max_grad_norm is 1.0" in told
    assert "mixed_precision: fp16, and the run's mixed_precision is bf16" in told
    auto = read(tmp_path, {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"})
    assert auto.disagreements(TrainConfig(gradient_accumulation_steps=2)) == []


def test_broken_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no launch configuration"):
        read_launch_file(tmp_path / "none.yaml")
    file = tmp_path / "launch.yaml"
    file.write_text("a: [1")
    with pytest.raises(UserError, match="is not YAML"):
        read_launch_file(file)
    file.write_text("just text")
    with pytest.raises(UserError, match="must hold keys and values"):
        read_launch_file(file)


# the launch of a process


def test_a_plain_start_has_no_launch_file() -> None:
    assert launch_of_this_process(TrainConfig(), {}) is None


def test_deepspeed_without_a_file_to_read_is_refused() -> None:
    with pytest.raises(UserError, match="the launch file cannot be seen"):
        launch_of_this_process(TrainConfig(), UNDER_DEEPSPEED)


def test_values_changed_behind_the_files_back_are_refused(tmp_path: Path) -> None:
    env = {**UNDER_DEEPSPEED, "TINYVAE_LAUNCH_CONFIG": str(write(tmp_path, {}))}
    assert launch_of_this_process(TrainConfig(), env) is not None
    with pytest.raises(UserError, match=r"says zero_stage 3, and .* 2; change the file"):
        launch_of_this_process(TrainConfig(), {**env, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})
    with pytest.raises(UserError, match="offload_optimizer_device cpu"):
        launch_of_this_process(TrainConfig(), {**env, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"})
    with pytest.raises(UserError, match="asked for no DeepSpeed"):
        launch_of_this_process(TrainConfig(), {**env, "ACCELERATE_USE_DEEPSPEED": "false"})
    with pytest.raises(UserError, match="asks for FSDP"):
        launch_of_this_process(TrainConfig(), {"ACCELERATE_USE_FSDP": "true"})


def test_a_process_reads_the_file_on_its_launchers_command_line(tmp_path: Path) -> None:
    """By hand, ``accelerate launch --config_file X`` names the file to the launcher only; its children look there."""
    (tmp_path / "here.yaml").write_text("num_processes: 1\n")
    child = "import os; from tinyvae.training.launch_config import find_launch_file as f; print(f(os.environ))"
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[-1]], check=True)"
    env = {key: value for key, value in os.environ.items() if key != "TINYVAE_LAUNCH_CONFIG"}
    for words in (["--config_file", "here.yaml"], ["--config-file=here.yaml"]):
        done = subprocess.run(
            [sys.executable, "-c", launcher, *words, child],
            env={**env, "ACCELERATE_MIXED_PRECISION": "no"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(tmp_path / "here.yaml")


def test_the_variable_wins_and_a_default_file_counts_only_under_accelerate(tmp_path: Path) -> None:
    default = write(tmp_path)
    assert find_launch_file({}, default=default) is None
    assert find_launch_file({"ACCELERATE_MIXED_PRECISION": "no"}, default=default) == default
    assert find_launch_file({"TINYVAE_LAUNCH_CONFIG": "x.yaml"}, default=default) == Path("x.yaml")


def test_every_known_key_is_in_the_documentation() -> None:
    text = (CONFIGS.parent / "docs" / "engines.md").read_text()
    assert all(f"`{key}`" in text for key in DEEPSPEED_KEYS)
