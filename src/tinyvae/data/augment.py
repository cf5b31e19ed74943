"""Color jitter and blur, applied on the device as the bytes of a batch become floats.

``clip`` draws five numbers for each sample. They are applied here and not in a data worker, which would spend longer on
them than on decoding the clip, and would round to bytes a second time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.data.clip import UNCHANGED

GREY_WEIGHTS = (0.299, 0.587, 0.114)
BLUR_REACH = 3.0
"""The kernel ends this many standard deviations from its middle, where 0.3 % of its weight remains."""


def to_model_input(frames_NTCHW: Tensor, color_and_blur: Tensor) -> Tensor:
    """The model's input: float32 NTCHW in [0, 1], with the color jitter and blur of each sample.

    Args:
        frames_NTCHW: uint8, on the device that does the work.
        color_and_blur: float32 (N, 5): brightness, contrast, saturation, hue, blur sigma; on the CPU, so that the
            decision what to do does not wait for the device.
    """
    assert frames_NTCHW.dtype == torch.uint8, "frames are bytes until here, so that nothing divides by 255 twice"
    frames = frames_NTCHW.to(torch.float32).div_(255.0)
    if bool((color_and_blur[:, :4] != torch.tensor(UNCHANGED[:4])).any()):
        frames = jitter_color(frames, color_and_blur[:, :4])
    if bool((color_and_blur[:, 4] > 0).any()):
        frames = blur(frames, color_and_blur[:, 4])
    return frames.contiguous()  # one layout, whatever was drawn: a compiled step would be compiled again for another


def jitter_color(frames_NTCHW: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast (around the clip's mean grey), saturation and hue, in this order, then clamped to [0, 1].

    Together they are one 3x3 matrix and one offset for each sample. Hue turns the chroma plane of YIQ and keeps the
    luma. ``frames_NTCHW``: float in [0, 1]; ``factors``: (N, 4), on the CPU.
    """
    matrices, contrasts = color_matrices(factors)
    grey_weights = torch.tensor(GREY_WEIGHTS, device=frames_NTCHW.device, dtype=frames_NTCHW.dtype)
    mean_grey = (frames_NTCHW.mean(dim=(1, 3, 4)) * grey_weights).sum(1)
    brightness = factors[:, 0].to(frames_NTCHW)
    offsets = (1.0 - contrasts.to(frames_NTCHW)) * brightness * mean_grey
    mixed = torch.einsum("nij,ntjhw->ntihw", matrices.to(frames_NTCHW), frames_NTCHW)
    return mixed.add_(offsets.view(-1, 1, 1, 1, 1)).clamp_(0.0, 1.0)


def color_matrices(factors: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 3, 3) matrices that hold all four changes, and the (N,) contrasts; float32, made in float64 on the CPU."""
    brightness, contrast, saturation, hue = factors.double().unbind(1)
    luma = torch.tensor(GREY_WEIGHTS, dtype=torch.float64).expand(3, 3)
    identity = torch.eye(3, dtype=torch.float64)
    saturate = saturation.view(-1, 1, 1) * identity + (1.0 - saturation).view(-1, 1, 1) * luma
    to_yiq = torch.tensor([GREY_WEIGHTS, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)], dtype=torch.float64)
    angle = 2.0 * math.pi * hue
    turn = torch.zeros(len(factors), 3, 3, dtype=torch.float64)
    turn[:, 0, 0] = 1.0
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2], turn[:, 2, 1] = -angle.sin(), angle.sin()
    hue_matrix = torch.linalg.inv(to_yiq) @ turn @ to_yiq
    return (hue_matrix @ saturate * (brightness * contrast).view(-1, 1, 1)).float(), contrast.float()


def blur(frames_NTCHW: Tensor, sigmas: Tensor) -> Tensor:
    """Gaussian blur of float frames, edges mirrored. ``sigmas``: (N,) in pixels (0: unchanged), on the CPU."""
    n, t, c, h, w = frames_NTCHW.shape
    reach = min(math.ceil(BLUR_REACH * float(sigmas.max())), h - 1, w - 1)
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    # A sigma of zero would divide by zero; anything this small gives the weight 1 to the middle and 0 elsewhere.
    spread = sigmas.double().clamp_min(1e-3).view(-1, 1)
    kernels = torch.exp(-0.5 * (offsets / spread) ** 2)
    kernels = (kernels / kernels.sum(1, keepdim=True)).to(frames_NTCHW)
    # Samples as channel groups: each has its own kernel, all in one convolution.
    planes = frames_NTCHW.permute(1, 2, 0, 3, 4).reshape(t * c, n, h, w)
    planes = F.conv2d(F.pad(planes, (0, 0, reach, reach), mode="reflect"), kernels.view(n, 1, -1, 1), groups=n)
    planes = F.conv2d(F.pad(planes, (reach, reach, 0, 0), mode="reflect"), kernels.view(n, 1, 1, -1), groups=n)
    return planes.view(t, c, n, h, w).permute(2, 0, 1, 3, 4)
