"""How weights move: AdamW, Muon for the inner convolutions, the learning rate, and the average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV

SET_BY_CONFIG = ("base_lr", "betas", "eps", "weight_decay", "momentum", "fused")
"""Options of a group of weights that a checkpoint does not change: this run's configuration decides them."""


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update, flattened to a matrix out x rest, is made orthogonal by Newton-Schulz steps.

    `propose` computes a step without taking it: a GPU can do so before the host knows whether the gradients are finite.
    `step` takes the step (and proposes it first where that was not done); `zero_grad` discards it.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._proposals: list[tuple[list[nn.Parameter], list[Tensor], list[Tensor], float]] | None = None

    @torch.no_grad()
    def propose(self) -> None:
        self._proposals = []  # weights with the same shorter side, their new moments, their directions, their rate
        for group in self.param_groups:
            by_short_side: dict[int, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_short_side.setdefault(min(_matrix_shape(parameter)), []).append(parameter)
            for parameters in by_short_side.values():
                gradients = [p.grad for p in parameters if p.grad is not None]
                old = [self.state[p]["momentum"] if p in self.state else torch.zeros_like(p) for p in parameters]
                moments = list(torch._foreach_lerp(old, gradients, 1.0 - group["momentum"]))
                updates = list(torch._foreach_lerp(gradients, moments, group["momentum"]))
                self._proposals.append((parameters, moments, orthogonalize_all(updates), group["lr"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes the loss once"
        if self._proposals is None:
            self.propose()
        for parameters, moments, directions, lr in self._proposals or []:
            for parameter, moment in zip(parameters, moments, strict=True):
                self.state[parameter]["momentum"] = moment
            torch._foreach_add_(list(parameters), directions, alpha=-lr)
        self._proposals = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._proposals = None
        super().zero_grad(set_to_none)


def orthogonalize_all(updates: list[Tensor]) -> list[Tensor]:
    """Each update as a semi-orthogonal matrix (out x rest), in its own shape; all have the same shorter side.

    They share one batch, filled up with columns of zeros, which change nothing: many small batches would cost a GPU
    more in launches than in arithmetic. In bf16 on a GPU, which is enough for a direction; in fp32 on a CPU.
    """
    shapes = [_matrix_shape(update) for update in updates]
    first = updates[0]
    dtype = torch.bfloat16 if first.is_cuda else torch.float32
    size = (len(updates), min(shapes[0]), max(max(shape) for shape in shapes))
    batch = torch.zeros(size, dtype=dtype, device=first.device)
    for wide, update in zip(batch, updates, strict=True):
        _in_shape_of(update, wide).copy_(update)
    directions = []
    for wide, update, (rows, columns) in zip(orthogonalize(batch).to(first.dtype), updates, shapes, strict=True):
        direction = _in_shape_of(update, wide)
        directions.append(direction * math.sqrt(rows / columns) if rows > columns else direction)
    return directions


def _matrix_shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.numel() // weight.shape[0]


def _in_shape_of(weight: Tensor, wide: Tensor) -> Tensor:
    """The part of a wide matrix that a weight takes, as a view in the weight's shape; a tall one lies on its side."""
    rows, columns = _matrix_shape(weight)
    part = wide[:columns, :rows].T if rows > columns else wide[:rows, :columns]
    return part.unflatten(1, weight.shape[1:])


def orthogonalize(wide_BRC: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly (singular values 0.7..1.2), of a batch of wide ones."""
    a, b, c = 3.4445, -4.7750, 2.0315  # a quintic whose iteration drives singular values towards 1
    x = wide_BRC / (wide_BRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class OptimizerSet:
    """The optimizers of one model, driven as one. Peak rates live in ``base_lr`` of each group."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        for group in self.groups():
            group.setdefault("base_lr", group["lr"])

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_rates(self, factor: float) -> None:
        for group in self.groups():
            group["lr"] = group["base_lr"] * factor

    def propose(self) -> None:
        """Let the device compute what it can of the step before the host knows whether it is taken."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.propose()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over moments and step counts; the options in `SET_BY_CONFIG` stay those of this run."""
        saved = state["optimizers"]
        sizes = [[len(group["params"]) for group in one["param_groups"]] for one in saved]
        own = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        if sizes != own:
            raise UserError(
                f"the checkpoint's optimizer state holds groups of {sizes} weights, this run's {own}: it was made by "
                "another version or with another optimizer setting; use it as --pretrained_model_path instead."
            )
        for optimizer, one in zip(self.optimizers, saved, strict=True):
            groups = [
                theirs | {key: ours[key] for key in SET_BY_CONFIG if key in ours}
                for theirs, ours in zip(one["param_groups"], optimizer.param_groups, strict=True)
            ]
            optimizer.load_state_dict({**one, "param_groups": groups})  # torch places the step counts by these options


def make_optimizers(model: TAEHV, config: TrainConfig) -> OptimizerSet:
    """The optimizers of the weights that require gradients."""
    inner = inner_conv_weights(model) if config.optimizer == "muon" else {}
    plain = [p for name, p in model.named_parameters() if p.requires_grad and name not in inner]
    adamw = torch.optim.AdamW(
        plain,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=config.enable_fused_adam and model.device.type == "cuda",
    )
    if not inner:
        return OptimizerSet([adamw])
    return OptimizerSet([Muon(inner.values(), lr=config.muon_learning_rate, momentum=config.muon_momentum), adamw])


def inner_conv_weights(model: TAEHV) -> dict[str, nn.Parameter]:
    """The trained 4-D weights except those of the first conv of the encoder, the last of the decoder, and depthwise
    ones."""
    edges = {"encoder.0.weight", f"decoder.{len(model.decoder) - 1}.weight"}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights = {name: p for name, p in trained if p.ndim == 4 and name not in edges}
    return {name: p for name, p in weights.items() if p.shape[1] > 1}  # a depthwise kernel mixes no channels


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Factor on every peak learning rate for optimizer step ``step`` (the first is 0); above 0 until the end."""
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


def learning_rates(step: int, config: TrainConfig) -> dict[str, float]:
    """The rates at an optimizer step (counted from 0), by name."""
    factor = learning_rate_factor(step, config)
    rates = {"learning_rate": config.learning_rate * factor}
    if config.optimizer == "muon":
        rates["muon_learning_rate"] = config.muon_learning_rate * factor
    return rates


class WeightAverage:
    """fp32 exponential moving average of a model's parameters: what a run validates and exports.

    The decay after n updates is at most (1 + n) / (10 + n), so that a short run forgets its random start.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.values = {name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        current = [p.detach().to(torch.float32) for p in model.parameters()]
        torch._foreach_lerp_(list(self.values.values()), current, 1.0 - decay)

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights inside the block, its own again after it."""
        weights = [p.detach() for p in model.parameters()]
        own = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, list(self.values.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(weights, own)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert list(state["values"]) == list(self.values), "the average belongs to another network"
        self.updates = state["updates"]
        for name, value in state["values"].items():
            self.values[name].copy_(value)


def averaged_weights(model: nn.Module, average: WeightAverage | None) -> AbstractContextManager[None]:
    """Inside it the model has the averaged weights, if there are any."""
    return nullcontext() if average is None else average.swapped_into(model)
