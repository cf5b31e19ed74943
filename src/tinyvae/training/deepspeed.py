"""DeepSpeed: what a launch asks of it, and the engine that trains under it.

Every value of a launch takes effect, must agree with the run's settings, or is refused.

As under the plain engine, every process computes the gradients of its own clips on a whole copy of the weights (45 MB
for the released networks). When all are well, DeepSpeed averages and clips the gradients, steps its part of the
optimizer and gathers the new weights. Checkpoints hold the optimizer's state whole, in the plain engine's form: a run
moves freely between engines, ZeRO stages and numbers of processes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor, nn

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError, require_package
from tinyvae.training.engine import Engine, StepResult, as_number
from tinyvae.training.optim import SET_BY_CONFIG, OptimizerSet

MOMENTS = ("exp_avg", "exp_avg_sq")

NAMES_OF_KEYS = "ACCELERATE_CONFIG_DS_FIELDS"
PASSED = {  # key of deepspeed_config -> the variable that passes its value
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
}
NOT_PASSED = ("mixed_precision", "deepspeed_multinode_launcher")  # keys that only the launcher reads

MUST_BE_OFF = {
    "ACCELERATE_USE_FSDP": "FSDP; tinyvae runs under DDP or DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM; tinyvae runs under DDP or DeepSpeed",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo; the run's compile_model decides that",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag; the network is small and is built whole",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model; checkpoints always hold whole fp32 weights",
}

ONLY_AT = {  # the ZeRO stages in which a key has an effect, if not in all of them
    "offload_param": (3,),
    "allgather_bucket_size": (1, 2),
    "reduce_scatter": (1, 2),
    "sub_group_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
}


Size = Annotated[int, Field(ge=0)]
Bucket = Annotated[int, Field(ge=2, multiple_of=2)]  # DeepSpeed aligns pieces to pairs of numbers


class Offload(BaseModel, extra="forbid", frozen=True):
    device: Literal["cpu"] | None = None
    pin_memory: bool = False


class Zero(BaseModel, extra="forbid", frozen=True):
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


class DeepSpeedSettings(BaseModel, extra="forbid", frozen=True):
    """What may stand in DeepSpeed's JSON."""

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
        """Where the launch does not fit the run's settings; empty where it fits."""
        told = self.deepspeed
        pairs = [
            ("mixed_precision", self.mixed_precision, "mixed_precision"),
            ("gradient_accumulation_steps", told and told.gradient_accumulation_steps, "gradient_accumulation_steps"),
            ("gradient_clipping", told and told.gradient_clipping, "max_grad_norm"),
        ]
        clashes = [
            f"{self.place} says {name}: {value}, and the run's {key} is {getattr(config, key)}; take the line out (the "
            "run decides), or make them agree"
            for name, value, key in pairs
            if value not in (None, "no", getattr(config, key))  # "no" is also what accelerate passes by default
        ]
        if told is not None and config.optimizer == "muon":
            clashes.append(
                "optimizer=muon works on whole weight matrices, and DeepSpeed cuts them into flat pieces; use "
                "--optimizer adamw, or launch with accelerate_configs/ddp_8gpu.yaml instead"
            )
        return clashes

    def check(self, config: TrainConfig) -> None:
        if problems := self.disagreements(config):
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
                key = ".".join(map(str, error["loc"]))  # none where the JSON as a whole is wrong
                problems.append(": ".join(filter(None, [place, key, why.removeprefix("Value error, ")])))
    if problems:
        raise UserError(f"{'; '.join(problems)}. See docs/engines.md#launch-files")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    return LaunchConfig(place=place, mixed_precision=precision, deepspeed=deepspeed)


def _deepspeed_content(environment: Mapping[str, str], place: str, problems: list[str]) -> tuple[str, Any]:
    """Where DeepSpeed's settings stand, and the settings in the form of its JSON."""
    passed = {key: environment[variable] for key, variable in PASSED.items() if variable in environment}
    lost = [key for key in environment.get(NAMES_OF_KEYS, "").split(",") if key and key not in (*passed, *NOT_PASSED)]
    if lost:
        problems.append(
            f"{place}: accelerate does not pass on {', '.join(lost)} of deepspeed_config; write such values into a "
            "DeepSpeed JSON and name it there (deepspeed_config_file), as accelerate_configs/deepspeed.yaml does"
        )
    inline = _decided(passed)
    named = inline.pop("deepspeed_config_file", None)
    if named is None:
        zero = {"stage": inline.get("zero_stage", 2)}  # accelerate's default
        for what in ("optimizer", "param"):
            zero[f"offload_{what}"] = _decided({"device": inline.get(f"offload_{what}_device")})
        return place, {"zero_optimization": zero} | {key: inline[key] for key in inline if "gradient" in key}
    doubled = [key for key, value in inline.items() if value.lower() not in ("auto", "none", "false")]
    if doubled:
        problems.append(f"{place} names the DeepSpeed JSON {named}, so write {', '.join(doubled)} there")
    # accelerate passes the path as it was written; the files of this checkout are found from every working folder.
    checkout = Path(__file__).resolve().parents[3]
    file = next((path for path in (Path(named), checkout / named) if path.is_file()), Path(named))
    try:
        return f"{place} ({named})", json.loads(file.read_text(encoding="utf-8"), object_hook=_decided)
    except (OSError, ValueError) as fault:
        raise UserError(f"the DeepSpeed JSON {file} cannot be read ({fault}; looked from {Path.cwd()}).") from None


def _decided(content: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that leave the choice to the run or to DeepSpeed."""
    return {key: value for key, value in content.items() if value not in ("auto", "none", None)}


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


class _Held(nn.Module):
    """The trained parameters as DeepSpeed holds them: on one module, so that ZeRO-3 gathers them in one exchange."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            # DeepSpeed sees flat memory, so it gets a channels-last weight in the plain order.
            plain = parameter.detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(plain))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """A number whose gradient with respect to each parameter is the given one, bit for bit."""
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()


class DeepSpeedEngine(Engine):
    """One process of a run whose optimizer is DeepSpeed's ZeRO."""

    kind = "deepspeed"

    def __init__(self, config: TrainConfig, settings: DeepSpeedSettings) -> None:
        assert config.optimizer != "muon", "LaunchConfig.check refuses it"
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self._deepspeed = require_package("deepspeed", extra="deepspeed", needed_for="this launch configuration")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # DeepSpeed calls these at every step by names that torch wants to rename; a user cannot fix that.
        for renamed in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            warnings.filterwarnings("ignore", message=rf".*{renamed}. is deprecated", category=FutureWarning)
        super().__init__(config)
        self._settings = settings
        self._stage = settings.zero_optimization.stage
        self._max_grad_norm = config.max_grad_norm
        self._gathered: dict[str, Any] | None = None
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)

    def prepare(self, model: nn.Module, optimizers: OptimizerSet) -> None:
        super().prepare(model, optimizers)
        (self._adamw,) = optimizers.optimizers
        (group,) = self._adamw.param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in self._parameters]
        self._held = _Held(model)
        group["params"] = list(self._held.parameters())  # the loop's optimizer now steps what DeepSpeed holds
        num_weights = sum(p.numel() for p in self._parameters)
        bucket = num_weights + num_weights % 2  # a bucket is a buffer: one that holds the network once is enough
        zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        zero |= self._settings.zero_optimization.model_dump(exclude_defaults=True)
        configuration = {
            "train_micro_batch_size_per_gpu": 1,  # it sees gradients, never clips; our loop accumulates
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._max_grad_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # the optimizer is the plain engine's: the same steps, bit for bit
            "steps_per_print": None,
            "communication_data_type": self._settings.communication_data_type,
        }
        self._zero, *_ = self._deepspeed.initialize(
            model=self._held, optimizer=self._adamw, config=configuration, dist_init_required=False
        )
        assert self._zero.zero_optimization_stage() == self._stage
        # The scaler takes the loss scale off the gradients of an optimizer; this one is there for that alone.
        self._scaled = torch.optim.SGD(self._parameters, lr=0.0)

    def discard_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def finish_step(self, *, max_grad_norm: float) -> StepResult:
        """Give the gradients of all processes to DeepSpeed; where they are not finite, nothing changes anywhere."""
        assert max_grad_norm == self._max_grad_norm, "DeepSpeed clips at the norm that it was started with"
        assert any(p.grad is not None for p in self._parameters), "finish_step without a backward pass"
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
        (someone_is_bad,) = self.worst(0 if bool(finite) else 1)
        if self._scaler.is_enabled():
            # All loss scales must move alike, so a process that was well acts as if it had overflowed too.
            if someone_is_bad:
                gradients[0].fill_(math.inf)
            self._scaler.unscale_(self._scaled)
            self._scaler.update()
        stepped = False
        if not someone_is_bad:
            with self._exchange("gradients"):
                self._step_zero([gradient.contiguous() for gradient in gradients])
            # Finite gradients can still overflow on the way, where they travel in fp16; DeepSpeed then changes nothing.
            stepped = not self._zero.optimizer.overflow
        if stepped:
            held = list(self._held.parameters())
            whole = nullcontext() if self._stage < 3 else self._deepspeed.zero.GatheredParameters(held)
            with torch.no_grad(), whole:
                torch._foreach_copy_(list[Tensor](self._parameters), [p.detach().to(self.device) for p in held])
        self.discard_gradients()
        norm = as_number(self._zero.get_global_grad_norm()) if stepped else math.inf
        return StepResult(gradient_norm=norm, stepped=stepped)

    def _step_zero(self, gradients: list[Tensor]) -> None:
        self._zero.backward(self._zero(gradients))
        self._zero.step()

    def weights_were_loaded(self) -> None:
        """Put the model's weights into what DeepSpeed holds: the copy that computes and the optimizer's own."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        for parameter, value in zip(self._held.parameters(), self._parameters, strict=True):
            whole = value.detach().float()
            if self._stage < 3:
                parameter.data.copy_(whole)
                safe_set_full_fp32_param(parameter, whole)
            else:
                piece = self._own_piece(parameter, whole)
                parameter.ds_tensor.data.copy_(piece)  # type: ignore[attr-defined]
                safe_set_local_fp32_param(parameter, piece)

    def save_collective(self) -> None:
        """Gather the optimizer's state, all processes together; `state_dict` then returns it on the main one."""
        from deepspeed.utils import safe_get_full_optimizer_state

        state: dict[int, dict[str, Tensor]] = {}
        steps = next((int(own["step"]) for own in self._adamw.state.values() if "step" in own), 0)
        if steps:
            with self._exchange("the optimizer's state"):
                for i, parameter in enumerate(self._held.parameters()):
                    whole = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
                    if self.is_main:
                        state[i] = {name: value.detach().cpu().clone() for name, value in whole.items()}
                        state[i]["step"] = torch.tensor(float(steps))
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._adamw.param_groups]
        groups[0]["params"] = list(range(len(self._parameters)))
        self._gathered = {"optimizers": [{"state": state, "param_groups": groups}]}

    def state_dict(self) -> dict[str, Any]:
        """What `save_collective` has just gathered, in the plain engine's form."""
        assert self._gathered is not None, "state_dict without save_collective"
        gathered, self._gathered = self._gathered, None
        return {"optimizers": gathered, "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an optimizer's state, of this engine or the plain one, from any number of processes."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        (saved,) = state["optimizers"]["optimizers"]
        (group,), (other,) = self._adamw.param_groups, saved["param_groups"]
        group.update({key: value for key, value in other.items() if key not in ("params", *SET_BY_CONFIG)})
        if saved["state"]:
            # The optimizer makes its moments in a step; one of rate 0 with gradients of 0 changes no weight.
            rate, group["lr"] = group["lr"], 0.0
            self._step_zero([p.new_zeros(p.shape) for p in self._parameters])
            group["lr"] = rate
            for i, parameter in enumerate(self._held.parameters()):
                for name in MOMENTS:
                    value = saved["state"][i][name].to(self.device, torch.float32)
                    if self._stage < 3:
                        safe_set_full_optimizer_state(parameter, value, name)
                    else:
                        safe_set_local_optimizer_state(parameter, self._own_piece(parameter, value), name)
            for own in self._adamw.state.values():
                own["step"].fill_(float(saved["state"][0]["step"]))
        if self._scaler.is_enabled() and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def _own_piece(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This process's piece of a whole value, as ZeRO-3 cuts them: equal pieces, the last one padded with zeros."""
        length = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        padded = value.new_zeros(length * self.world_size)
        padded[: value.numel()] = value.reshape(-1)
        return padded[length * self.rank : length * (self.rank + 1)]


def start_engine(config: TrainConfig) -> Engine:
    """The engine that the launch of this process asks for."""
    launch = read_environment(os.environ)
    launch.check(config)
    return Engine(config) if launch.deepspeed is None else DeepSpeedEngine(config, launch.deepspeed)
