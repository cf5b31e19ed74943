"""The learning-rate schedule as a pure function of the optimiser step.

There is no scheduler object to step, save or step too often: on eight processes the rate at step k is what it is on
one, and a resumed run asks for step k and has it.
"""

from __future__ import annotations

import math

from tinyvae.config import TrainConfig


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Factor on every peak learning rate for optimiser step ``step`` (the first is 0); above 0 until the end."""
    warmup = config.lr_warmup_steps if config.lr_scheduler != "constant" else 0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.lr_scheduler in ("constant", "constant_with_warmup"):
        return 1.0
    # The last step (max_train_steps - 1) still learns: the rate would reach zero one step after it.
    done = min(1.0, (step - warmup) / max(1, config.max_train_steps - warmup))
    if config.lr_scheduler == "linear":
        return 1.0 - done
    if config.lr_scheduler == "polynomial":
        return (1.0 - done) ** config.lr_power
    if config.lr_scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    assert config.lr_scheduler == "cosine_with_restarts", config.lr_scheduler
    return 0.5 * (1.0 + math.cos(math.pi * (done * config.lr_num_cycles % 1.0)))
