"""A codec that gives back exactly what it was given, under the causal frame rule: evaluation must call it perfect.

Latent i holds the frames that decoding it must give: S·i-S+1 .. S·i. The encoder sees frames S·i .. S·i+S-1 when it
makes latent i, so it carries the last S-1 frames along.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae.models.codec import CodecState, VideoCodec
from tinyvae.models.variants import get_spec


class CopyCodec(VideoCodec, nn.Module):
    """``offset`` is added to every decoded value, ``flicker`` with alternating sign from frame to frame."""

    def __init__(self, variant: str = "taehv", *, offset: float = 0.0, flicker: float = 0.0) -> None:
        super().__init__()
        spec = get_spec(variant)
        self.spec = replace(spec, latent_channels=3 * spec.time_factor * spec.space_factor**2)
        self.offset, self.flicker = offset, flicker
        self.unused = nn.Parameter(torch.zeros(1))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.unused.device

    def encode_chunk(self, frames_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        s = self.spec.time_factor
        if state is None:
            state = torch.zeros_like(frames_NTCHW[:, :1]).expand(-1, s - 1, -1, -1, -1)
        assert isinstance(state, Tensor)
        frames = torch.cat([state, frames_NTCHW], dim=1)  # S-1 frames carried, then those not yet in a latent
        num_latents = (frames.shape[1] - (s - 1)) // s
        packed = [
            F.pixel_unshuffle(frames[:, i * s : (i + 1) * s], self.spec.space_factor).flatten(1, 2)
            for i in range(num_latents)
        ]
        n, _, _, h, w = frames_NTCHW.shape
        factor = self.spec.space_factor
        empty = frames.new_zeros(n, 0, self.spec.latent_channels, h // factor, w // factor)
        return torch.stack(packed, dim=1) if packed else empty, frames[:, num_latents * s :]

    def decode_chunk(self, latents_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        first = state if isinstance(state, int) else 0
        packed = latents_NTCHW.unflatten(2, (self.spec.time_factor, -1)).flatten(1, 2)
        frames = F.pixel_shuffle(packed, self.spec.space_factor) + self.offset
        signs = 1 - 2 * ((first + torch.arange(frames.shape[1])) % 2).view(1, -1, 1, 1, 1)
        return frames + self.flicker * signs, first + frames.shape[1]
