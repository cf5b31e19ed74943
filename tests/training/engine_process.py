"""One process of an engine test: ``torchrun ... engine_process.py PLAN.json FOLDER`` trains as each case says.

A case: ``name``; ``zero`` (a DeepSpeed JSON, or null for the plain engine); ``steps``; and where wanted
``precision``, ``micro_batches``, ``nan_at`` and ``huge_at`` ([rank, step]: what the loss becomes), ``save_at`` (a
step), ``load`` (the file of an earlier case), ``max_grad_norm``, ``weight_decay``. Each rank writes
``FOLDER/NAME.RANK.pt``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tinyvae.config.schema import TrainConfig
from tinyvae.models.taehv import TAEHV
from tinyvae.training.deepspeed import DeepSpeedSettings
from tinyvae.training.engine import Engine
from tinyvae.training.optim import make_optimizers

CLIPS_A_STEP = 4


def clips_of_step(step: int) -> torch.Tensor:
    return torch.rand(CLIPS_A_STEP, 4, 3, 16, 16, generator=torch.Generator().manual_seed(100 + step))


def start(config: TrainConfig, zero: dict[str, Any] | None) -> Engine:
    if zero is None:
        return Engine(config)
    from tinyvae.training.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, DeepSpeedSettings.model_validate(zero))


def run_case(case: dict[str, Any], folder: Path) -> Engine:
    max_grad_norm = case.get("max_grad_norm", 0.5)
    config = TrainConfig(
        model_width=0.125,
        mixed_precision=case.get("precision", "no"),
        learning_rate=1e-3,
        max_grad_norm=max_grad_norm,
        weight_decay=case.get("weight_decay", 0.01),
        nccl_timeout=240,
    )
    engine = start(config, case["zero"])
    torch.manual_seed(7 + engine.rank)  # ranks begin apart; the engine brings them together
    model = TAEHV(config.variant, width=config.model_width)
    if engine.is_main:
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
    model = model.to(memory_format=torch.channels_last)  # as a run has it
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    first = 0
    if case.get("load"):
        saved = torch.load(folder / case["load"], weights_only=True)
        model.load_state_dict(saved["model"])
        engine.weights_were_loaded()
        engine.load_state_dict(saved["engine"])
        first = saved["step"]
    done: dict[str, list[Any]] = {"losses": [], "norms": [], "stepped": [], "unchanged": []}
    for step in range(first, case["steps"]):
        optimizers.set_rates(1.0)
        before = [p.detach().clone() for p in model.parameters()]
        own = clips_of_step(step).chunk(engine.world_size)[engine.rank]
        loss = train_step(case, engine, model, own, step)
        result = engine.finish_step(max_grad_norm=max_grad_norm)
        engine.average_([loss])
        done["losses"].append(float(loss))
        done["norms"].append(result.gradient_norm)
        done["stepped"].append(result.stepped)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        done["unchanged"].append(unchanged)
        if case.get("save_at") == step + 1:
            engine.save_collective()
            if engine.is_main:
                state = {"model": model.state_dict(), "engine": engine.state_dict(), "step": step + 1}
                torch.save(state, folder / f"{case['name']}.saved.pt")
            engine.barrier()
    found = {"model": model.state_dict(), "dtype": str(next(model.parameters()).dtype), "in_effect": in_effect(engine)}
    torch.save(done | found, folder / f"{case['name']}.{engine.rank}.pt")
    engine.barrier()
    return engine


def in_effect(engine: Engine) -> dict[str, Any]:
    """The values that DeepSpeed says it works with, and where its moments lie."""
    zero = getattr(engine, "_zero", None)
    if zero is None:
        return {}
    names = ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients", "reduce_scatter")
    values = {name: getattr(zero, f"zero_{name}")() for name in (*names, "sub_group_size")}
    values["stage3_param_persistence_threshold"] = zero.zero_param_persistence_threshold()
    values["stage3_model_persistence_threshold"] = zero.zero_model_persistence_threshold()
    partitions = [p for p in zero.module.parameters() if hasattr(p, "ds_tensor")]
    return values | {
        "zero_stage": zero.zero_optimization_stage(),
        "clipping": zero.gradient_clipping(),
        "communication_data_type": str(zero.communication_data_type),
        "offload_optimizer": zero.zero_use_cpu_optimizer(),
        "whole_parameters": sum(p.ds_persist for p in partitions),
        "sub_groups": len(getattr(zero.optimizer, "fp16_groups", [])),
    }


def train_step(case: dict[str, Any], engine: Engine, model: TAEHV, own: torch.Tensor, step: int) -> torch.Tensor:
    total = torch.zeros(1)
    parts = own.chunk(case.get("micro_batches", 1))
    for part in parts:
        with engine.autocast():
            decoded, _ = model(part)
        loss = 10 * (decoded.float() - model.target(part)).square().mean() * len(part) / len(own)
        if case.get("nan_at") == [engine.rank, step] and part is parts[-1]:
            loss = loss * float("nan")
        if case.get("huge_at") == [engine.rank, step]:
            loss = loss * 1e8  # finite in fp32, beyond what fp16 can carry
        total += loss.detach()
        engine.backward(loss)
    return total


def main() -> None:
    torch.set_num_threads(1)
    plan, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    engine = None
    for case in plan:
        engine = run_case(case, folder)
    assert engine is not None
    engine.close()


if __name__ == "__main__":
    main()
