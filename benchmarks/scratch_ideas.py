"""What `scratch_search.py` can try beside the keys of the configuration: crops and optimizers that are not shipped,
because no long run on a GPU has shown yet that they pay. docs/results.md has what is known, and ideas that lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinyvae.config.schema import TrainConfig
from tinyvae.models.taehv import TAEHV
from tinyvae.training import optim as optimizers
from tinyvae.training.optim import (
    Muon,
    OptimizerSet,
    make_optimizers,
    orthogonalize,
    orthogonalize_all,
)

IDEAS = {
    "per_tap": "Muon makes each tap of a 3x3 conv orthogonal by itself",
    "fixed_rows": "rows of Muon's weights keep the length that they begin with",
    "detail": "of this many drawn crops, any file and place, the one with the most detail trains; crop_candidates adds "
    "to them more crops of the first one's file",
    "shapes": "clips x frames x side by share of the run: 0.8:16x12x128+0.2:4x12x256 ends with large crops",
}


def orthogonalize_taps(updates: list[Tensor]) -> list[Tensor]:
    """Stands in for `optimizers.orthogonalize_all`: each tap of a conv by itself, together as long as the shipped."""
    directions = []
    for update, shipped in zip(updates, orthogonalize_all(updates), strict=True):
        taps = update.permute(2, 3, 0, 1).flatten(0, 1).bfloat16()
        tall = taps.shape[1] > taps.shape[2]
        made = orthogonalize(taps.mT).mT if tall else orthogonalize(taps)
        made = made.to(update.dtype).permute(1, 2, 0).reshape(update.shape)
        directions.append(made * (shipped.norm() / made.norm()))
    return directions


class FixedRows(Muon):
    """Muon on weights whose rows keep the length that they begin with, as magnitude-preserving convs do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        weights = [p for group in self.param_groups for p in group["params"]]
        for weight in weights:
            self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            self.state[weight].setdefault("length", row_length(weight))
        super().step()
        for weight in weights:
            weight.mul_(self.state[weight]["length"] / row_length(weight))


def row_length(weight_OIHW: Tensor) -> Tensor:
    return weight_OIHW.square().sum(dim=(1, 2, 3), keepdim=True).sqrt()


def optimizers_of(model: TAEHV, config: TrainConfig, options: dict[str, Any]) -> OptimizerSet:
    """The shipped optimizers, or with what a candidate changes in them."""
    optimizers.orthogonalize_all = orthogonalize_taps if options.get("per_tap") else orthogonalize_all
    chosen = make_optimizers(model, config)
    if not options.get("fixed_rows"):
        return chosen
    muon, adamw = chosen.optimizers
    inner = muon.param_groups[0]["params"]
    return OptimizerSet([FixedRows(inner, lr=config.muon_learning_rate, momentum=config.muon_momentum), adamw])
