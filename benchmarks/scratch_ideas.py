"""What `scratch_search.py` can try beside the keys of the configuration: first weights, crops and optimizers that are
not shipped, because no GPU has measured them yet. docs/results.md has the figures of CPU pilots, and of ideas that lost
on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tinyvae.config.schema import TrainConfig
from tinyvae.models.blocks import TGrow, TPool
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
    "colors": "three channels carry the colors from the start: the encoder shrinks the average or the first of the "
    "frames of a latent (average, first), the decoder enlarges it",
    "per_tap": "Muon makes each tap of a 3x3 conv orthogonal by itself",
    "fixed_rows": "rows of Muon's weights keep the length that they begin with",
    "detail": "of this many drawn crops, any file and place, the one with the most detail trains",
    "detail_place": "the same, all from one file and frame",
    "turns": "crops are also turned upside down, on their side and back in time",
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


def start_colors(model: TAEHV, frame: str) -> None:
    """Let the first three channels carry red, green and blue through the whole network; the others begin as drawn.

    Colors are not negative and residual branches begin quietly, so ReLUs and blocks let them pass. The encoder averages
    them over space, the decoder enlarges them bilinearly: the first step already sees a blurred picture. ``frame``: a
    latent takes the "average" of its frames, or the "first" of them, which is the last one that is decoded from it.
    """
    tent = torch.tensor([0.25, 0.5, 0.25])
    middle, smooth, average = torch.zeros(3, 3), tent[:, None] * tent, torch.zeros(3, 3)
    middle[1, 1], average[1:, 1:] = 1.0, 0.25  # a stride of 2 sees its four pixels in the last lines and columns
    assert frame in ("average", "first"), f"colors={frame}: it is average or first"
    to_latents, from_latents, output = model.encoder[-1], model.decoder[1], model.decoder[-1]
    others = output.weight.data[:, 3:] * 0.03  # quiet, but not silent: the channels behind them could not learn
    for stack, resize in ((model.encoder, average), (model.decoder, smooth)):
        for layer in stack:
            if isinstance(layer, TPool):
                first, period = frame == "first", len(layer.conv.weight)
                share = torch.tensor(1.0 if first else 1 / layer.stride)
                carry_colors(layer.conv.weight, share, columns=period * (layer.stride if first else 1))
            elif isinstance(layer, TGrow):
                carry_colors(layer.conv.weight, torch.tensor(1.0), rows=layer.conv.weight.shape[1])
            elif isinstance(layer, nn.Conv2d):
                edge = layer.bias is not None  # the convs that change the size have none
                carry_colors(layer.weight, middle if edge else resize)
    to_latents.weight.data[:3] *= 2  # colors from 0 to 1 become latents from -1 to 1, and colors again
    to_latents.bias.data[:3] = -1
    from_latents.weight.data[:3] /= 2
    from_latents.bias.data[:3] = 0.5
    output.weight.data[:, 3:] = others
    output.bias.data.zero_()


def carry_colors(weight: Tensor, kernel: Tensor, *, rows: int | None = None, columns: int | None = None) -> None:
    """Make output channels 0, 1, 2 (and again every ``rows`` rows) read input channels 0, 1, 2 (and again every
    ``columns`` columns) through a kernel, and nothing else."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    for color in range(3):
        weight.data[color::rows] = 0
        weight.data[color::rows, color::columns] = kernel


def optimizers_of(model: TAEHV, config: TrainConfig, options: dict[str, Any]) -> OptimizerSet:
    """The shipped optimizers, or with what a candidate changes in them."""
    optimizers.orthogonalize_all = orthogonalize_taps if options.get("per_tap") else orthogonalize_all
    chosen = make_optimizers(model, config)
    if not options.get("fixed_rows"):
        return chosen
    muon, adamw = chosen.optimizers
    inner = muon.param_groups[0]["params"]
    return OptimizerSet([FixedRows(inner, lr=config.muon_learning_rate, momentum=config.muon_momentum), adamw])
