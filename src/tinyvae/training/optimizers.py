"""AdamW, and Muon for the inner convolutions.

Muon (momentum, then the update made orthogonal by five Newton-Schulz steps) trains the 4-D weights flattened to
out x rest; biases, the first conv of the encoder and the last of the decoder stay with AdamW.
`OptimizerSet` makes one or two torch optimisers look like one to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tinyvae.config import TrainConfig
from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic whose iteration drives singular values towards 1


@dataclass(frozen=True, kw_only=True)
class _Proposal:
    """What a step would do to the weights of one shape."""

    parameters: list[nn.Parameter]
    moments: list[Tensor]
    directions: list[Tensor]
    lr: float


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update matrix is orthogonalised; weights of one shape are done in one batch.

    `propose` does the work of a step without taking it: it can be handed to a GPU before the host knows whether the
    gradients are fit to be applied. `step` takes the step (and proposes it first, where nobody has); `zero_grad`
    forgets it.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._proposals: list[_Proposal] | None = None

    @torch.no_grad()
    def propose(self) -> None:
        self._proposals = []
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.shape[0]
                    by_shape.setdefault((rows, parameter.numel() // rows), []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                self._proposals.append(
                    self._propose_one_shape(parameters, rows, columns, lr=group["lr"], momentum=group["momentum"])
                )

    def _propose_one_shape(
        self, parameters: list[nn.Parameter], rows: int, columns: int, *, lr: float, momentum: float
    ) -> _Proposal:
        gradients = [p.grad for p in parameters if p.grad is not None]
        old = [self.state[p]["momentum"] if p in self.state else torch.zeros_like(p) for p in parameters]
        moments = list(torch._foreach_lerp(old, gradients, 1.0 - momentum))
        updates = torch._foreach_lerp(gradients, moments, momentum)
        stacked = torch.stack([update.reshape(rows, columns) for update in updates])
        directions = orthogonalise(stacked).to(parameters[0].dtype) * math.sqrt(max(1.0, rows / columns))
        shaped = [direction.view(p.shape) for direction, p in zip(directions.unbind(), parameters, strict=True)]
        return _Proposal(parameters=parameters, moments=moments, directions=shaped, lr=lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the trainer computes the loss once"
        if self._proposals is None:
            self.propose()
        for proposal in self._proposals or []:
            for parameter, moment in zip(proposal.parameters, proposal.moments, strict=True):
                self.state[parameter]["momentum"] = moment
            torch._foreach_add_(list(proposal.parameters), proposal.directions, alpha=-proposal.lr)
        self._proposals = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._proposals = None
        super().zero_grad(set_to_none)


def orthogonalise(matrices_BRC: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly (singular values 0.7..1.2), of a batch of them.

    On a GPU in bf16, which is enough for a direction; on a CPU in fp32, where bf16 would be slower.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices_BRC.to(torch.bfloat16) if matrices_BRC.is_cuda else matrices_BRC.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(square, square, square, beta=b, alpha=c) @ x
    return x.mT if tall else x


class OptimizerSet:
    """The optimisers of one model, driven as one. Peak rates live in ``base_lr`` of each group."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        for group in self.groups():
            group.setdefault("base_lr", group["lr"])

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_rates(self, factor: float) -> None:
        """Set every group's rate to ``factor`` times its peak."""
        for group in self.groups():
            group["lr"] = group["base_lr"] * factor

    def propose(self) -> None:
        """Hand the device what can be computed of the step before anybody knows whether it is taken."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.propose()

    def zero_grad(self) -> None:
        """Forget the gradients, and a step that was proposed and not taken."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over moments and step counts; the peak rates stay those of this run's configuration."""
        saved = state["optimizers"]
        sizes = [[len(group["params"]) for group in one["param_groups"]] for one in saved]
        own = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers]
        if sizes != own:
            raise UserError(
                f"the checkpoint's optimiser state holds groups of {sizes} weights, this run's {own}: it was made by "
                "another version or with another optimizer setting; use it as --pretrained_model_path instead."
            )
        for optimizer, one in zip(self.optimizers, saved, strict=True):
            peaks = [group["base_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(one)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["base_lr"] = peak


def make_optimizers(model: TAEHV, config: TrainConfig) -> OptimizerSet:
    """The optimisers that a configuration asks for, over all parameters of a model."""
    inner = inner_conv_weights(model) if config.optimizer == "muon" else {}
    plain = [p for name, p in model.named_parameters() if name not in inner]
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
    muon = Muon(inner.values(), lr=config.muon_learning_rate, momentum=config.muon_momentum)
    return OptimizerSet([muon, adamw])


def inner_conv_weights(model: TAEHV) -> dict[str, nn.Parameter]:
    """The 4-D weights but those of the first conv of the encoder, the last of the decoder, and depthwise ones.

    The two convs at the latents belong to Muon: moving them there from AdamW was worth about half a dB after 1,000
    steps (docs/results.md).
    """
    edges = {"encoder.0.weight", f"decoder.{len(model.decoder) - 1}.weight"}
    return {
        name: p
        for name, p in model.named_parameters()
        # A depthwise kernel is a row of 49 numbers per channel, not a matrix that mixes channels.
        if p.ndim == 4 and p.shape[1] > 1 and name not in edges
    }
