"""What ``accelerate launch`` asks of the processes that it starts: which engine, and how DeepSpeed works.

accelerate tells its processes by environment variables. Of the section ``deepspeed_config`` of its YAML file it passes
the names of all keys, a few values, and the path of a DeepSpeed JSON (``deepspeed_config_file``). Only these variables
and that JSON are read here. Every value takes effect, or must agree with the run's settings, or is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tinyvae.config import TrainConfig
from tinyvae.errors import UserError

NAMES_OF_KEYS = "ACCELERATE_CONFIG_DS_FIELDS"
PASSED = {
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}
"""Key of ``deepspeed_config`` -> the variable that passes its value."""

NOT_PASSED = ("mixed_precision", "deepspeed_multinode_launcher")  # keys that are the launcher's own matter

MUST_BE_OFF = {
    "ACCELERATE_USE_FSDP": "FSDP; tinyvae runs under DDP or DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM; tinyvae runs under DDP or DeepSpeed",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo; the run's compile_model decides that",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag; the network is small and is built whole",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model; checkpoints always hold whole fp32 weights",
}

ONLY_AT = {  # the ZeRO stages in which a key has an effect, where that is not all of them
    "offload_param": (3,),
    "allgather_bucket_size": (1, 2),
    "reduce_scatter": (1, 2),
    "sub_group_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, content: Any) -> Any:
        if isinstance(content, dict):
            content = {key: value for key, value in content.items() if value not in ("auto", "none", None)}
        return content


class Offload(_Section):
    device: Literal["cpu"] | None = None
    pin_memory: bool = False


Size = Annotated[int, Field(ge=0)]
Bucket = Annotated[int, Field(ge=2, multiple_of=2)]  # DeepSpeed aligns pieces to pairs of numbers


class Zero(_Section):
    stage: Annotated[int, Field(ge=1, le=3)]
    offload_optimizer: Offload = Offload()
    offload_param: Offload = Offload()
    reduce_bucket_size: Bucket | None = None
    allgather_bucket_size: Bucket | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    sub_group_size: Size | None = None
    stage3_param_persistence_threshold: Size | None = None
    stage3_model_persistence_threshold: Size | None = None

    @model_validator(mode="after")
    def _has_an_effect(self) -> Zero:
        lost = [key for key in self.model_dump(exclude_defaults=True) if self.stage not in ONLY_AT.get(key, (1, 2, 3))]
        if lost:
            raise ValueError(f"{', '.join(lost)} has no effect at ZeRO stage {self.stage}; take it out")
        return self


class DeepSpeedSettings(_Section):
    """What DeepSpeed may be told, in the form of its JSON. What is "auto" or left out, the run or DeepSpeed decides."""

    zero_optimization: Zero
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What a launch asks for; ``place`` is where, for messages. ``deepspeed`` is None for the plain engine."""

    place: str
    mixed_precision: str
    deepspeed: DeepSpeedSettings | None

    def disagreements(self, config: TrainConfig) -> list[str]:
        """Where the launch says something else than the run's settings; empty where nothing clashes."""
        told = self.deepspeed
        pairs = [
            ("mixed_precision", self.mixed_precision, "mixed_precision"),
            ("gradient_accumulation_steps", told and told.gradient_accumulation_steps, "gradient_accumulation_steps"),
            ("gradient_clipping", told and told.gradient_clipping, "max_grad_norm"),
        ]
        return [
            f"{self.place} says {name}: {value}, and the run's {key} is {getattr(config, key)}; take the line out (the "
            "run decides), or make them agree"
            for name, value, key in pairs
            if value not in (None, "no", getattr(config, key))  # "no" is also what accelerate passes by default
        ]

    def check(self, config: TrainConfig) -> None:
        """Refuse a launch that says something else than the run's settings."""
        problems = self.disagreements(config)
        if problems:
            raise UserError(f"{'; '.join(problems)}.")


def read_environment(environment: Mapping[str, str], *, place: str = "the launch configuration") -> LaunchConfig:
    """The launch that accelerate's variables describe."""
    on = [variable for variable in MUST_BE_OFF if environment.get(variable, "no").lower() not in ("no", "false")]
    problems = [f"{place} asks for {MUST_BE_OFF[variable]}" for variable in on]
    deepspeed = None
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        place, content = _deepspeed_content(environment, place, problems)
        try:
            deepspeed = DeepSpeedSettings.model_validate(content)
        except ValidationError as wrong:
            for error in wrong.errors():
                why = "it has no effect here; take it out" if error["type"] == "extra_forbidden" else error["msg"]
                problems.append(f"{place}: {'.'.join(map(str, error['loc']))}: {why.removeprefix('Value error, ')}")
    if problems:
        raise UserError(f"{'; '.join(problems)}. See docs/engines.md#launch-files")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    return LaunchConfig(place=place, mixed_precision=precision, deepspeed=deepspeed)


def _deepspeed_content(environment: Mapping[str, str], place: str, problems: list[str]) -> tuple[str, Any]:
    """(where it stands, what DeepSpeed is told in the form of its JSON)."""
    inline = {key: environment[variable] for key, variable in PASSED.items() if variable in environment}
    lost = [key for key in environment.get(NAMES_OF_KEYS, "").split(",") if key and key not in (*inline, *NOT_PASSED)]
    if lost:
        problems.append(
            f"{place}: accelerate does not pass on {', '.join(lost)} of deepspeed_config; write such values into a "
            "DeepSpeed JSON and name it there (deepspeed_config_file), as accelerate_configs/deepspeed.yaml does"
        )
    file = inline.pop("deepspeed_config_file", "none")
    if file == "none":
        zero: dict[str, Any] = {"stage": inline.get("zero_stage", 2)}  # accelerate's default
        zero |= {f"offload_{what}": {"device": inline.get(f"offload_{what}_device")} for what in ("optimizer", "param")}
        return place, {"zero_optimization": zero} | {key: inline.get(key) for key in inline if "gradient" in key}
    doubled = [key for key, value in inline.items() if value.lower() not in ("auto", "none", "false")]
    if doubled:
        problems.append(f"{place} names the DeepSpeed JSON {file}, so write {', '.join(doubled)} there")
    return f"{place} ({file})", _read_json(file)


def _read_json(named: str) -> Any:
    # accelerate passes the path as it was written; the files of this checkout are found from every working folder.
    places = (Path(named), Path(__file__).resolve().parents[3] / named)
    file = next((place for place in places if place.is_file()), places[0])
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise UserError(f"the DeepSpeed JSON {file} cannot be read ({fault}; looked from {Path.cwd()}).") from None


def read_launch_file(file: Path) -> LaunchConfig:
    """What ``accelerate launch --config_file FILE`` will ask for."""
    from accelerate.commands.config.config_args import load_config_from_file
    from yaml import YAMLError

    try:
        content = vars(load_config_from_file(str(file)))
    except (OSError, ValueError, TypeError, AttributeError, YAMLError) as fault:  # accelerate does not check types
        raise UserError(f"accelerate cannot read {file}: {' '.join(str(fault).split())}") from None
    kind, block = getattr(content["distributed_type"], "value", "NO"), content.get("deepspeed_config") or {}
    if not isinstance(block, dict) or (block and kind != "DEEPSPEED"):
        raise UserError(f"{file}: deepspeed_config must hold keys and values, under distributed_type: DEEPSPEED.")
    environment = {PASSED[key]: str(block[key]) for key in PASSED if block.get(key) is not None}
    environment |= {f"ACCELERATE_USE_{name}": str(kind == name) for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")}
    environment["ACCELERATE_DYNAMO_BACKEND"] = str(content["dynamo_config"].get("dynamo_backend", "NO"))
    environment["ACCELERATE_MIXED_PRECISION"] = str(content["mixed_precision"] or "no")
    environment[NAMES_OF_KEYS] = ",".join(map(str, block))
    return read_environment(environment, place=str(file))
