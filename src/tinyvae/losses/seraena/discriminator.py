"""Seraena's discriminator (an image and its context in, six score maps out) and the correction made from its gradient.

Keys and shapes are those of the published Seraena. It computes in fp32, under autocast too. On a GPU ``dtype`` may be
bfloat16: then only the convolutions and batch norms are in that precision.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTHS = (64, 128, 256, 512, 512, 512)
HALVES = (False, True, True, True, False, False)  # these blocks halve height and width (4x4 stride 2), others are 3x3
PATCH_PIXELS = 8  # one score stands for a patch of 8 x 8 pixels
STD_FLOOR = 1e-5  # a discriminator that sees no difference asks for no correction

Normalization = Literal["golden", "size_independent"]


class SeraenaDiscriminator(nn.Module):
    """Scores [N, 6, H//8, W//8] of images in [0, 1] with their contexts; trained to +1 for fake, -1 for real."""

    dtype = torch.float32

    def __init__(self, image_channels: int, context_channels: int) -> None:
        super().__init__()
        inputs = (image_channels + context_channels, *WIDTHS[:-1])
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(c_in, c_out, 4 if halves else 3, stride=2 if halves else 1, padding=1, bias=False),
                nn.BatchNorm2d(c_out),
                nn.ReLU(),
            )
            for c_in, c_out, halves in zip(inputs, WIDTHS, HALVES, strict=True)
        )
        self.proj = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in WIDTHS)

    @classmethod
    def from_seed(cls, image_channels: int, context_channels: int, seed: int) -> SeraenaDiscriminator:
        """Fresh weights that depend on the seed alone: equal on every rank; torch's own random stream does not move."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return cls(image_channels, context_channels)

    def forward(self, images_NCHW: Tensor, contexts_NCHW: Tensor) -> Tensor:
        height, width = images_NCHW.shape[-2:]
        patches = (height // PATCH_PIXELS, width // PATCH_PIXELS)
        device, is_fp32 = images_NCHW.device.type, self.dtype == torch.float32
        with torch.autocast(device_type=device, enabled=False):
            contexts = F.interpolate(contexts_NCHW.to(self.dtype), size=(height, width), mode="nearest")
            x = torch.cat([(2 * images_NCHW.float() - 1).to(self.dtype), contexts], dim=1)
            if device == "cuda":  # its convolutions run twice as fast in this layout
                x = x.contiguous(memory_format=torch.channels_last)
        maps = []
        with torch.autocast(device_type=device, dtype=None if is_fp32 else self.dtype, enabled=not is_fp32):
            for block, proj in zip(self.blocks, self.proj, strict=True):
                x = block(x)
                maps.append(_pool(proj(x).float(), patches))
        return torch.cat(maps, dim=1)


def _pool(scores_N1HW: Tensor, patches: tuple[int, int]) -> Tensor:
    """Average a score map to one value per patch: [N, 1, H//8, W//8]. Training sizes are multiples of 8: there plain
    pooling equals adaptive pooling, and its gradient bits on a GPU are always the same."""
    height, width = scores_N1HW.shape[-2:]
    if height % patches[0] or width % patches[1]:
        return F.adaptive_avg_pool2d(scores_N1HW, patches)
    return F.avg_pool2d(scores_N1HW, (height // patches[0], width // patches[1]))


def make_correction(
    discriminator: SeraenaDiscriminator,
    real_NCHW: Tensor,
    fake_NCHW: Tensor,
    contexts_NCHW: Tensor,
    normalization: Normalization,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What to add to each fake so that its scores come nearer to those of its real image, and scalars for the log.

    g = -gradient over the fakes of the sum over samples of mean (D(real) - D(fake))², divided by its own standard
    deviation over the whole batch + 1e-5. ``golden`` takes that mean over all H/8 · W/8 patches, as published: the
    correction fades at large sizes. ``size_independent`` takes the sum over patches instead.
    """
    assert not discriminator.training, "the correction is made in eval mode"
    with torch.enable_grad():
        fake = fake_NCHW.detach().clone().requires_grad_(True)
        with torch.no_grad():
            real_scores = discriminator(real_NCHW, contexts_NCHW)
        fake_scores = discriminator(fake, contexts_NCHW)
        distance = (real_scores - fake_scores).square().mean(dim=(1, 2, 3)).sum()
        (gradient,) = torch.autograd.grad(distance, fake)
    g = -gradient
    if normalization == "size_independent":
        g = g * fake_scores[0, 0].numel()
    values = g / (g.std(correction=0) + STD_FLOOR)
    return values, {
        "correction_std": values.std(correction=0),
        "real_score": real_scores.mean(),
        "fake_score": fake_scores.detach().mean(),
    }
