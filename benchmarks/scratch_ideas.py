"""What `scratch_search.py` can try beside the keys of the configuration: losses, first weights and optimisers that are
not shipped, because they lost or because nobody has measured them yet. docs/results.md has the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tinyvae.config.schema import TrainConfig
from tinyvae.losses.distances import reconstruction_loss
from tinyvae.models.blocks import TGrow, TPool
from tinyvae.models.taehv import TAEHV
from tinyvae.training import optim as optimizers
from tinyvae.training.optim import (
    Muon,
    OptimizerSet,
    inner_conv_weights,
    make_optimizers,
    orthogonalize,
    orthogonalize_all,
)

IDEAS = {
    "loss": "mse, l1, charbonnier; of each frame log_mse, rmse, or its MSE to a power: power_0.75",
    "quiet": "size of the last conv of each residual branch at the start (shipped: 0.03)",
    "bilinear": "the decoder's upsampling convs begin as bilinear interpolation",
    "colors": "three channels carry the colors from the start: the encoder shrinks the average or the first of the "
    "frames of a latent (average, first), the decoder enlarges it",
    "orthogonal": "every conv begins with orthogonal rows (or columns), as large as drawn",
    "output_gain": "factor on the output conv at the start",
    "muon_at_edges": "Muon for the first and last conv too",
    "decoder_rate": "factor on the decoder's Muon rate",
    "pointwise_rate": "factor on the Muon rate of 1x1 convs",
    "polar": "five Newton-Schulz steps whose coefficients change from step to step (Polar Express)",
    "per_tap": "Muon makes each tap of a 3x3 conv orthogonal by itself",
    "fixed_rows": "rows of Muon's weights keep the length that they begin with",
    "soap": "Adam in the eigenbasis of the left gradient covariance instead of Muon, at this rate",
    "detail": "of this many drawn crops, any file and place, the one with the most detail trains",
    "detail_place": "the same, all from one file and frame",
    "turns": "crops are also turned upside down, on their side and back in time",
    "shapes": "clips x frames x side by share of the run: 0.8:16x12x128+0.2:4x12x256 ends with large crops",
}


def loss_of(decoded: Tensor, target: Tensor, kind: str) -> Tensor:
    """The reconstruction loss of a kind; those of each frame look at PSNR's own quantity."""
    if kind in ("log_mse", "rmse"):
        error = (decoded.float() - target.float()).square().mean(dim=(2, 3, 4)) + 1e-5
        return error.log().mean() / 10 if kind == "log_mse" else error.sqrt().mean() / 10
    if kind.startswith("power_"):
        error = (decoded.float() - target.float()).square().mean(dim=(2, 3, 4)) + 1e-5
        return error.pow(float(kind.removeprefix("power_"))).mean() / 4
    return reconstruction_loss(decoded, target, kind)  # type: ignore[arg-type]


POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def orthogonalize_polar(wide_BRC: Tensor) -> Tensor:
    """Stands in for `optimizers.orthogonalize`: singular values nearer to 1, small ones raised sooner."""
    x = wide_BRC / (wide_BRC.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


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


class Soap(torch.optim.Optimizer):
    """One-sided SOAP: Adam in the eigenbasis of the running mean of G G^T (out x out), renewed every ten steps."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float] = (0.95, 0.95)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, weight.grad.flatten(1), group)

    def _step_one(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, steps, (beta1, beta2) = self.state[weight], group["steps"], group["betas"]
        if not state:
            state["covariance"] = torch.zeros(gradient.shape[0], gradient.shape[0], device=gradient.device)
            state["mean"], state["square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["covariance"].lerp_(gradient @ gradient.T, 1 - beta2)
        if "basis" not in state:
            state["basis"] = torch.linalg.eigh(state["covariance"])[1]
        elif steps % 10 == 0:  # one power iteration follows a slowly turning basis; the mean turns with it
            turned = torch.linalg.qr(state["covariance"] @ state["basis"])[0]
            state["mean"] = turned.T @ (state["basis"] @ state["mean"])
            state["basis"] = turned
        rotated = state["basis"].T @ gradient
        state["mean"].lerp_(rotated, 1 - beta1)
        state["square"].lerp_(rotated.square(), 1 - beta2)
        mean, square = state["mean"] / (1 - beta1**steps), state["square"] / (1 - beta2**steps)
        direction = state["basis"] @ (mean / (square.sqrt() + 1e-8))
        weight.sub_(direction.view(weight.shape), alpha=group["lr"])


def start_bilinear(model: TAEHV) -> None:
    """Let the convs behind each upsampling begin as bilinear interpolation: random in channels, a tent in space."""
    tent = torch.tensor([0.25, 0.5, 0.25])
    for layer in list(model.decoder)[2:-1]:
        if isinstance(layer, nn.Conv2d):
            mixing = torch.randn(layer.weight.shape[:2]) / math.sqrt(layer.weight.shape[1])
            layer.weight.data.copy_(mixing[:, :, None, None] * tent[:, None] * tent)


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
    """Make output channels 0, 1, 2 (and again after so many ``rows``) read input channels 0, 1, 2 (and again after so
    many ``columns``) through a kernel, and nothing else."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    for color in range(3):
        weight.data[color::rows] = 0
        weight.data[color::rows, color::columns] = kernel


def start_orthogonal(model: TAEHV) -> None:
    """Make every conv's rows (or columns) orthogonal and keep its size."""
    for weight in (p for p in model.parameters() if p.ndim == 4):
        size = weight.detach().norm()
        nn.init.orthogonal_(weight)
        weight.data.mul_(size / weight.detach().norm())


def optimizers_of(model: TAEHV, config: TrainConfig, options: dict[str, Any]) -> OptimizerSet:
    """The shipped optimisers, or with what a candidate changes in them."""
    inner = inner_conv_weights(model)
    if options.get("muon_at_edges"):
        inner = {name: p for name, p in model.named_parameters() if p.ndim == 4}
    optimizers.orthogonalize = orthogonalize_polar if options.get("polar") else orthogonalize
    optimizers.orthogonalize_all = orthogonalize_taps if options.get("per_tap") else orthogonalize_all
    chosen = make_optimizers(model, config)
    if not {"muon_at_edges", "decoder_rate", "pointwise_rate", "fixed_rows", "soap"} & options.keys():
        return chosen
    taken = {id(p) for p in inner.values()}
    adamw = chosen.optimizers[1]
    adamw.param_groups[0]["params"] = [p for p in adamw.param_groups[0]["params"] if id(p) not in taken]
    if "soap" in options:
        return OptimizerSet([Soap(inner.values(), lr=options["soap"]), adamw])
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in inner.items():
        rate = options.get("decoder_rate", 1.0) if name.startswith("decoder") else 1.0
        rate *= options.get("pointwise_rate", 1.0) if parameter.shape[-1] == 1 else 1.0
        groups.setdefault(config.muon_learning_rate * rate, []).append(parameter)
    kind = FixedRows if options.get("fixed_rows") else Muon
    by_rate: Any = [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]
    muon = kind(by_rate, lr=config.muon_learning_rate, momentum=config.muon_momentum)
    return OptimizerSet([muon, adamw])
