"""The layers of the family, and one way to run a stack of them over time.

Frames travel through the layers as (N·T)CHW, time inside batch. What a layer carries from one chunk of a video to the
next is its *state*: the last frame it saw, or the frames that wait for their partners. `run_layers` carries it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

State = list[Tensor | None]
"""One entry per layer: what it still needs of the frames before. None before the first chunk, and where it needs
nothing."""

RECOMPUTED_SLICES = 4


def conv3x3(channels_in: int, channels_out: int, *, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1, stride=stride, bias=bias)


class Clamp(nn.Module):
    """Soft limit to (-3, 3): latents of diffusion models can lie far outside the range seen in training."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


def make_activation(slope: float) -> nn.ReLU | nn.LeakyReLU:
    """ReLU, or LeakyReLU where ``slope``, the slope below zero, is not 0."""
    return nn.LeakyReLU(slope, inplace=True) if slope else nn.ReLU(inplace=True)


class TwoFrameBlock(nn.Module):
    """A residual block that sees its frame and the one before: x, past (N·T)CHW -> (N·T)CHW."""

    conv: nn.Sequential
    activation: nn.ReLU | nn.LeakyReLU

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return self.activation(self.conv(torch.cat([x, past], dim=1)) + x)


class MemBlock(TwoFrameBlock):
    """The block of the encoders and of most decoders."""

    def __init__(self, channels: int, slope: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            conv3x3(2 * channels, channels),
            make_activation(slope),
            conv3x3(channels, channels),
            make_activation(slope),
            conv3x3(channels, channels),
        )
        self.activation = make_activation(slope)


class WideMemBlock(TwoFrameBlock):
    """The block of the wide decoder: many channels, and 3x3 convolutions over groups of 64 of them."""

    def __init__(self, channels: int, slope: float = 0.0) -> None:
        super().__init__()
        groups = max(1, math.gcd(channels // 64, channels))
        self.conv = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 1),
            make_activation(slope),
            nn.Conv2d(channels, channels, 3, padding=1, groups=groups),
            make_activation(slope),
            nn.Conv2d(channels, channels, 1),
            make_activation(slope),
            nn.Conv2d(channels, channels, 3, padding=1, groups=groups),
        )
        self.activation = make_activation(slope)


class SuperMemBlock(TwoFrameBlock):
    """Inverted-bottleneck block of the super decoders, without an activation behind the sum."""

    def __init__(self, channels: int, slope: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * channels, 2 * channels, 7, padding=3, groups=2 * channels, bias=False),
            nn.Conv2d(2 * channels, 4 * channels, 1),
            make_activation(slope),
            nn.Conv2d(4 * channels, channels, 1, bias=False),
        )

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return x + self.conv(torch.cat([x, past], dim=1))


class TPool(nn.Module):
    """Merge ``stride`` consecutive frames into one: (N·T)CHW -> (N·T/s)CHW."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(channels * stride, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        _, c, h, w = x.shape
        return self.conv(x.reshape(-1, self.stride * c, h, w))


class TGrow(nn.Module):
    """Make ``stride`` frames of each: (N·T)CHW -> (N·T·s)CHW; only the last with ``last_only`` (temporal previews)."""

    def __init__(self, channels: int, stride: int, *, last_only: bool = False) -> None:
        super().__init__()
        self.stride = stride
        self.last_only = last_only
        self.conv = nn.Conv2d(channels, channels * stride, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        _, c, h, w = x.shape
        if self.last_only:
            return nn.functional.conv2d(x, self.conv.weight[-c:])
        return self.conv(x).reshape(-1, c, h, w)


class Upsample(nn.Module):
    """Nearest-neighbor upsampling by 2 in space, or nothing (spatial previews)."""

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, scale_factor=2, mode="nearest") if self.enabled else x


def run_layers(
    layers: nn.Sequential, frames_NTCHW: Tensor, state: State | None = None, *, checkpointing: bool = False
) -> tuple[Tensor, State]:
    """Run one chunk of a video through a stack; returns (output NTCHW, state for the next chunk).

    ``state=None`` starts a video (the frame before the first is zero). The output may hold no frame (T = 0) while a
    `TPool` waits for partners. With ``checkpointing`` the backward pass computes the activations again.
    """
    num_videos = frames_NTCHW.shape[0]
    old: State = [None] * len(layers) if state is None else state
    new: State = list(old)
    recompute = checkpointing and torch.is_grad_enabled()
    x = frames_NTCHW.flatten(0, 1)
    for start, stop in _segments(layers):
        segment: nn.Module = layers[start]
        inputs: tuple[Tensor, ...] = (x,)
        if isinstance(segment, TwoFrameBlock):
            past, new[start] = _frame_before(x.unflatten(0, (num_videos, -1)), old[start])
            inputs = (x, past)
        elif isinstance(segment, TPool):
            video, new[start] = whole_groups(x.unflatten(0, (num_videos, -1)), old[start], segment.stride)
            if video.shape[1] == 0:
                return video, new
            inputs = (video.flatten(0, 1),)
        else:
            segment = layers[start:stop]
        x = _recomputed(segment, inputs) if recompute else segment(*inputs)
    return x.unflatten(0, (num_videos, -1)), new


def _segments(layers: nn.Sequential) -> list[tuple[int, int]]:
    """Cut a stack into [start, stop) runs: each layer with a state alone, the others between them together."""
    carries = [isinstance(layer, TwoFrameBlock | TPool) for layer in layers]
    cuts = [i for i in range(1, len(layers)) if carries[i] or carries[i - 1]]
    return list(zip([0, *cuts], [*cuts, len(layers)], strict=True))


def _recomputed(segment: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Run a segment a slice of the frames at a time, and keep only its inputs for the backward pass, to save memory."""
    slices = 1 if isinstance(segment, TPool) else RECOMPUTED_SLICES
    parts = zip(*(x.chunk(slices) for x in inputs), strict=True)
    return torch.cat([checkpoint(segment, *part, use_reentrant=False) for part in parts])


def _frame_before(video_NTCHW: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the frame before each frame, (N·T)CHW; the last frame N1CHW to carry)."""
    first = torch.zeros_like(video_NTCHW[:, :1]) if last is None else last
    past = torch.cat([first, video_NTCHW[:, :-1]], dim=1).flatten(0, 1)
    # A slice would keep the whole chunk's storage alive for as long as the stream lives.
    return past, video_NTCHW[:, -1:].clone()


def whole_groups(video_NTCHW: Tensor, waiting: Tensor | None, stride: int) -> tuple[Tensor, Tensor | None]:
    """(the frames that form whole groups of ``stride``, the remaining ones, which wait for the next chunk)."""
    if waiting is not None:
        video_NTCHW = torch.cat([waiting, video_NTCHW], dim=1)
    whole = video_NTCHW.shape[1] // stride * stride
    rest = video_NTCHW[:, whole:].clone() if whole < video_NTCHW.shape[1] else None
    return video_NTCHW[:, :whole], rest
