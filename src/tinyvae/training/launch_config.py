"""What a launch configuration (the yaml that ``accelerate launch --config_file`` reads) says, and whether we do it.

accelerate drops DeepSpeed keys that it does not know, and lets a yaml's accumulation win over a run's. So the file is
read here again, by us: every value in it either takes effect, is required to agree with the run's configuration, or is
refused with a sentence. A process finds its launch file by the variable ``TINYVAE_LAUNCH_CONFIG`` (the launchers set
it) or on the command line of the ``accelerate launch`` that started it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyvae.config import TrainConfig
from tinyvae.errors import MissingFileError, UserError, nearest_name

LAUNCH_FILE_VARIABLE = "TINYVAE_LAUNCH_CONFIG"
NONE_WORDS = (None, "none", "None", "no", False)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """How DeepSpeed is to work. ``numbers``: keys of its ``zero_optimization`` section as the file gave them."""

    zero_stage: int
    offload_optimizer: bool = False
    offload_param: bool = False
    communication_data_type: str | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def for_deepspeed(self, *, max_grad_norm: float) -> dict[str, Any]:
        """The configuration that DeepSpeed takes. Clipping happens there, accumulation in our loop."""
        zero: dict[str, Any] = {"stage": self.zero_stage, **self.numbers}
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload_param:
            zero["offload_param"] = {"device": "cpu"}
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # it sees gradients, never clips
            "gradient_accumulation_steps": 1,
            "gradient_clipping": max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # the optimiser is the plain engine's: the same steps, bit for bit
            "steps_per_print": None,
        }
        if self.communication_data_type is not None:
            settings["communication_data_type"] = self.communication_data_type
        return settings


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """A launch file that has been read and whose every value has a meaning."""

    file: Path
    num_processes: int | None
    num_machines: int
    main_process_port: int | None
    mixed_precision: str | None
    gradient_accumulation_steps: int | None
    gradient_clipping: float | None
    deepspeed: DeepSpeedSettings | None

    def disagreements(self, config: TrainConfig) -> list[str]:
        """Where the file says something else than the run's configuration; empty where nothing clashes."""
        pairs = (
            ("mixed_precision", self.mixed_precision, config.mixed_precision, "mixed_precision"),
            (
                "deepspeed_config.gradient_accumulation_steps",
                self.gradient_accumulation_steps,
                config.gradient_accumulation_steps,
                "gradient_accumulation_steps",
            ),
            ("deepspeed_config.gradient_clipping", self.gradient_clipping, config.max_grad_norm, "max_grad_norm"),
        )
        return [
            f"{self.file} says {name}: {value}, and the run's {key} is {wanted}; take the line out of the file (the "
            "run decides), or make them agree"
            for name, value, wanted, key in pairs
            if value is not None and value != wanted
        ]


# values


def _whole_number(value: Any) -> int:
    """An int; also from 2e8, which YAML takes for text."""
    if isinstance(value, bool):
        raise ValueError
    number = _number(value)
    if number != int(number) or number < 0:
        raise ValueError
    return int(number)


def _count(value: Any) -> int:
    """A whole number of at least 1."""
    number = _whole_number(value)
    if number < 1:
        raise ValueError
    return number


def _port(value: Any) -> int:
    number = _whole_number(value)
    if number > 65535:
        raise ValueError
    return number


def _bucket(value: Any) -> int:
    """Numbers in a bucket; DeepSpeed aligns pieces to pairs."""
    number = _whole_number(value)
    if number < 2 or number % 2:
        raise ValueError
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _precision(value: Any) -> str | None:
    if value is False:  # YAML reads a bare `no` as false
        return "no"
    if value not in ("no", "fp16", "bf16"):
        raise ValueError
    return str(value)


def _communication(value: Any) -> str:
    if value not in ("fp32", "fp16", "bf16"):
        raise ValueError
    return str(value)


def _device(value: Any) -> bool:
    """Whether something is moved to the CPU."""
    if value in NONE_WORDS:
        return False
    if value != "cpu":
        raise ValueError
    return True


def _auto_or(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value in (None, "auto") else convert(value)


@dataclass(frozen=True, kw_only=True)
class _Key:
    """``stages``: the ZeRO stages in which the key has an effect. ``wants``: how a wrong value is answered."""

    convert: Callable[[Any], Any]
    wants: str
    stages: tuple[int, ...] = (1, 2, 3)


def _size(*stages: int) -> _Key:
    return _Key(convert=_whole_number, wants="a whole number", stages=stages)


def _flag(*stages: int) -> _Key:
    return _Key(convert=_switch, wants="true or false", stages=stages)


def _bucket_size(*stages: int) -> _Key:
    return _Key(convert=_bucket, wants="an even whole number of at least 2", stages=stages)


ZERO_KEYS: Mapping[str, _Key] = {
    "reduce_bucket_size": _bucket_size(1, 2, 3),
    "allgather_bucket_size": _bucket_size(1, 2),
    "overlap_comm": _flag(1, 2, 3),
    "contiguous_gradients": _flag(1, 2, 3),
    "reduce_scatter": _flag(1, 2),
    "sub_group_size": _size(3),
    "stage3_param_persistence_threshold": _size(3),
    "stage3_model_persistence_threshold": _size(3),
}
"""Keys that go into DeepSpeed's own ``zero_optimization`` section."""

DEEPSPEED_KEYS: Mapping[str, _Key] = {
    "zero_stage": _Key(convert=_whole_number, wants="1, 2 or 3"),
    "gradient_accumulation_steps": _Key(convert=_auto_or(_whole_number), wants="auto or a whole number"),
    "gradient_clipping": _Key(convert=_auto_or(_number), wants="auto or a number"),
    "offload_optimizer_device": _Key(convert=_device, wants="none or cpu"),
    "offload_param_device": _Key(convert=_device, wants="none or cpu"),
    "communication_data_type": _Key(convert=_communication, wants="fp32, fp16 or bf16"),
    **ZERO_KEYS,
}

WITHOUT_MEANING: Mapping[str, str] = {
    "zero3_init_flag": "the network is small and is built before it is shared out",
    "zero3_save_16bit_model": "checkpoints always hold whole fp32 weights",
}
"""Keys that accelerate's questionnaire writes and that may only be false; key -> why."""

REFUSED: Mapping[str, str] = {
    "deepspeed_config_file": "write its values into this file's deepspeed_config, where they are checked",
    "deepspeed_hostfile": "start the launcher on every machine (docs/engines.md)",
    "deepspeed_inclusion_filter": "start the launcher on every machine (docs/engines.md)",
    "deepspeed_exclusion_filter": "start the launcher on every machine (docs/engines.md)",
    "deepspeed_moe_layer_cls_names": "the network has no experts",
    "stage3_prefetch_bucket_size": "the weights are gathered in one exchange, so there is nothing to fetch ahead",
    "stage3_max_live_parameters": "the weights are gathered in one exchange",
    "stage3_max_reuse_distance": "the weights are gathered in one exchange",
    "offload_optimizer_nvme_path": "offload goes to the CPU; a network of this size gains nothing from a disk",
    "offload_param_nvme_path": "offload goes to the CPU; a network of this size gains nothing from a disk",
}
"""Keys that could have no effect here; key -> what to do or why."""

MACHINE_KEYS = (
    "compute_environment",
    "debug",
    "distributed_type",
    "enable_cpu_affinity",
    "gpu_ids",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "main_training_function",
    "mixed_precision",
    "num_machines",
    "num_processes",
    "rdzv_backend",
    "same_network",
    "use_cpu",
    "deepspeed_config",
)
"""Keys of the file that ``accelerate launch`` itself carries out (and the precision, which must agree)."""

HARMLESS_FALSE = ("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16")
"""Keys that the questionnaire always writes; only "no", false or empty is accepted."""

DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")


# reading


def read_launch_file(file: Path) -> LaunchConfig:
    """Read and check a launch file; `UserError` with every key that would not take effect."""
    import yaml

    if not file.is_file():
        raise MissingFileError(f"there is no launch configuration {file} (looked from {Path.cwd()}).")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as fault:
        raise UserError(f"{file} cannot be read ({fault.strerror}); check its permissions.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        raise UserError(f"{file} is not YAML: {' '.join(str(fault).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a launch configuration: it must hold keys and values.")
    problems: list[str] = []
    _check_machine_keys(content, problems)
    block = content.get("deepspeed_config") or {}
    if not isinstance(block, dict):
        problems.append(f"deepspeed_config: {block} must hold keys and values")
        block = {"zero_stage": 1}  # that one complaint is enough
    uses_deepspeed = content.get("distributed_type") == "DEEPSPEED"
    if block and not uses_deepspeed:
        problems.append("deepspeed_config has no effect unless distributed_type is DEEPSPEED")
    values = _deepspeed_values(block, problems) if uses_deepspeed else {}
    precision = _read(content, "mixed_precision", _precision, "no, fp16 or bf16", problems)
    processes = _read(content, "num_processes", _count, "a whole number of at least 1", problems)
    machines = _read(content, "num_machines", _count, "a whole number of at least 1", problems)
    port = _read(content, "main_process_port", _port, "a whole number up to 65535", problems)
    if problems:
        text = "; ".join(problems)
        raise UserError(f"{file}: {text}" if text.endswith("?") else f"{file}: {text}.")
    return LaunchConfig(
        file=file,
        num_processes=processes,
        num_machines=machines or 1,
        main_process_port=port,
        mixed_precision=precision,
        gradient_accumulation_steps=values.get("gradient_accumulation_steps"),
        gradient_clipping=values.get("gradient_clipping"),
        deepspeed=_settings(values) if uses_deepspeed else None,
    )


def _read(content: Mapping[str, Any], key: str, convert: Callable[[Any], Any], wants: str, problems: list[str]) -> Any:
    value = content.get(key)
    if value is None:
        return None
    try:
        return convert(value)
    except (TypeError, ValueError):
        problems.append(f"{key}: {value} must be {wants}")
        return None


def _meant(key: object, known: Iterable[str]) -> str:
    """``". Did you mean 'x'?"`` for a key that is close to a known one."""
    hint = nearest_name(str(key), known)
    return f".{hint}" if hint else ""


def _check_machine_keys(content: Mapping[str, Any], problems: list[str]) -> None:
    for key, value in content.items():
        if key in MACHINE_KEYS:
            continue
        if key in HARMLESS_FALSE:
            if value not in (False, "no", [], None):
                problems.append(f"{key}: {value} has no effect here; take it out")
        elif key in ("dynamo_config", "dynamo_backend"):
            problems.append(f"{key} has no effect here: the run's compile_model decides; take it out")
        else:
            problems.append(f"there is no key {key!r} that takes effect here{_meant(key, MACHINE_KEYS)}")
    kind = content.get("distributed_type", "NO")
    kind = "NO" if kind is False else kind
    if kind not in DISTRIBUTED_TYPES:
        problems.append(f"distributed_type: {kind} is none of {', '.join(DISTRIBUTED_TYPES)}")
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        problems.append("compute_environment must be LOCAL_MACHINE")


def _deepspeed_values(block: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The block's values converted, with a problem for everything that would not take effect."""
    values: dict[str, Any] = {}
    stage = block.get("zero_stage")
    if stage not in (1, 2, 3):
        problems.append(f"deepspeed_config.zero_stage: {stage} must be 1, 2 or 3 (for none, use ddp_8gpu.yaml)")
        stage = 0
    for key, value in block.items():
        if key in WITHOUT_MEANING:
            if value not in NONE_WORDS:
                problems.append(f"deepspeed_config.{key} can only be false: {WITHOUT_MEANING[key]}")
        elif key == "deepspeed_multinode_launcher":
            if value != "standard":
                problems.append("deepspeed_config.deepspeed_multinode_launcher must be standard")
        elif key in REFUSED:
            if value not in NONE_WORDS:
                problems.append(f"deepspeed_config.{key} has no effect here: {REFUSED[key]}")
        elif key not in DEEPSPEED_KEYS:
            problems.append(f"deepspeed_config.{key} is not a key that takes effect{_meant(key, DEEPSPEED_KEYS)}")
        else:
            known = DEEPSPEED_KEYS[key]
            if stage and stage not in known.stages:
                at = " or ".join(map(str, known.stages))
                problems.append(f"deepspeed_config.{key} has no effect at zero_stage {stage}, only at {at}")
            values[key] = _read(block, key, known.convert, known.wants, problems)
    if values.get("offload_param_device") and stage != 3:
        problems.append("deepspeed_config.offload_param_device: cpu has no effect below zero_stage 3; use none")
    return values


def _settings(values: Mapping[str, Any]) -> DeepSpeedSettings:
    return DeepSpeedSettings(
        zero_stage=values["zero_stage"],
        offload_optimizer=bool(values.get("offload_optimizer_device")),
        offload_param=bool(values.get("offload_param_device")),
        communication_data_type=values.get("communication_data_type"),
        numbers={key: values[key] for key in ZERO_KEYS if values.get(key) is not None},
    )


# the launch of this process


def find_launch_file(environment: Mapping[str, str], *, default: Path | None = None) -> Path | None:
    """The launch file that started this process; None where no ``accelerate launch`` did, or where it used none."""
    named = environment.get(LAUNCH_FILE_VARIABLE)
    if named:
        return Path(named)
    if "ACCELERATE_MIXED_PRECISION" not in environment:  # what every `accelerate launch` sets
        return None
    import psutil

    for parent in psutil.Process().parents():
        try:
            words, folder = parent.cmdline(), Path(parent.cwd())
        except psutil.Error:  # a parent of another user tells nothing
            continue
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if name.replace("-", "_") == "__config_file":
                return folder / (value if equals else following)
    return default if default is not None and default.is_file() else None


def launch_of_this_process(
    config: TrainConfig, environment: Mapping[str, str] | None = None, *, default_file: Path | None = None
) -> LaunchConfig | None:
    """The checked launch configuration of this process, or None for a plain start; refuses what would be ignored."""
    env = os.environ if environment is None else environment
    for variable, what in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")):
        if env.get(variable, "false").lower() == "true":
            raise UserError(f"the launch configuration asks for {what}; tinyvae runs under DDP or DeepSpeed.")
    wants_deepspeed = env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    file = find_launch_file(env, default=default_file)
    if file is None:
        if wants_deepspeed:
            raise UserError(
                "this process was launched with DeepSpeed, but the launch file cannot be seen, so its values could be "
                f"lost; use accelerate launch --config_file FILE, or set {LAUNCH_FILE_VARIABLE}=FILE."
            )
        return None
    launch = read_launch_file(file)
    problems = launch.disagreements(config)
    if wants_deepspeed != (launch.deepspeed is not None):
        asked, says = ("DeepSpeed", "something else") if wants_deepspeed else ("no DeepSpeed", "DEEPSPEED")
        problems.append(f"accelerate launch was asked for {asked}, and {file} says {says}; let the file alone decide")
    problems += _overridden(launch, env)
    if problems:
        raise UserError(f"{'; '.join(problems)}.")
    return launch


def _overridden(launch: LaunchConfig, env: Mapping[str, str]) -> list[str]:
    """Values that the command line of accelerate changed behind the file's back."""
    deepspeed = launch.deepspeed
    if deepspeed is None:
        return []
    expected = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("zero_stage", (str(deepspeed.zero_stage),)),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "offload_optimizer_device",
            ("cpu",) if deepspeed.offload_optimizer else ("none", "no", "false"),
        ),
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (
            "offload_param_device",
            ("cpu",) if deepspeed.offload_param else ("none", "no", "false"),
        ),
    }
    return [
        f"the command line of accelerate says {key} {env[variable]}, and {launch.file} {right[0]}; change the file"
        for variable, (key, right) in expected.items()
        if variable in env and env[variable].lower() not in right
    ]
