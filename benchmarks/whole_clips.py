"""Video VAEs of diffusers on whole clips: the same weights and the same function in fewer and cheaper operations.

diffusers runs a video in parts and carries the last frames of every layer from part to part. That saves memory and
costs a training step dearly: a graph for each part, and copies between them. Inside `whole_clips` the networks take a
clip at once. For Wan the result is the same at every length of 1 + 4k frames. CogVideoX's group norms see one part
alone, of 8 frames (the first: 9) and 2 latents (the first: 3). So for it the clip has 8 or 9 frames, or 17: then the
norms take it in two parts, and the result is the same again.

Besides, CogVideoX's decoder sends its latents, enlarged to full size, through two 1x1 convs at every norm. A 1x1 conv
and a nearest-neighbor enlargement change places without changing the result: the convs run on the small latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSpatialNorm3D
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from diffusers.models.downsampling import CogVideoXDownsample3D
from diffusers.models.upsampling import CogVideoXUpsample3D
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def whole_clips(*, in_two_parts: bool = False) -> Iterator[None]:
    """Inside the block, `encode_whole` and `decode_whole` work; diffusers' own encode and decode do not.

    ``in_two_parts``: for clips of 17 frames through CogVideoX.
    """
    replaced: dict[Any, Any] = {
        CogVideoXSpatialNorm3D: _spatial_norm,
        CogVideoXUpsample3D: _cogvideox_upsample,
        CogVideoXDownsample3D: _cogvideox_downsample,
        WanResample: _wan_resample,
    }
    replaced |= {nn.GroupNorm: _group_norm_of_parts} if in_two_parts else {}
    patches = [mock.patch.object(kind, "forward", forward) for kind, forward in replaced.items()]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def encode_whole(vae: Any, frames_NCTHW: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, log of the variance) of the latents NCTHW of frames in [-1, 1]."""
    if vae.quant_conv is None:
        moments = vae.encoder(frames_NCTHW)[0]
    else:
        moments = vae.quant_conv(vae.encoder(frames_NCTHW))
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode_whole(vae: Any, latents_NCTHW: Tensor) -> Tensor:
    """Frames NCTHW. Not clamped, as Wan's own are: a clamp stops the gradient of every pixel beyond the range."""
    if vae.post_quant_conv is None:
        return vae.decoder(latents_NCTHW)[0]
    return vae.decoder(vae.post_quant_conv(latents_NCTHW))


def enlarge(x_NCTHW: Tensor, num_frames: int, height: int) -> Tensor:
    """Nearest neighbor by whole factors; where the number of frames is odd and grows, the first stands alone.

    A view that is expanded, and not `F.interpolate`: its gradient is a plain sum, which a compiler fuses.
    """
    n, c, t, h, w = x_NCTHW.shape
    if t != num_frames and num_frames % 2 and num_frames > 1:
        first, rest = x_NCTHW[:, :, :1], x_NCTHW[:, :, 1:]
        return torch.cat([enlarge(first, 1, height), enlarge(rest, num_frames - 1, height)], dim=2)
    in_time, in_space = num_frames // t, height // h
    assert (t * in_time, h * in_space) == (num_frames, height), "only whole factors"
    grown = x_NCTHW[:, :, :, None, :, None, :, None].expand(n, c, t, in_time, h, in_space, w, in_space)
    return grown.reshape(n, c, num_frames, height, w * in_space)


def _each_frame(layer: Any, x_NCTHW: Tensor) -> Tensor:
    frames = layer(x_NCTHW.transpose(1, 2).flatten(0, 1))
    return frames.unflatten(0, (len(x_NCTHW), -1)).transpose(1, 2)


def _spatial_norm(self: Any, f: Tensor, zq: Tensor, conv_cache: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    size = f.shape[2], f.shape[3]
    scale, shift = (enlarge(conv.conv(zq), *size) for conv in (self.conv_y, self.conv_b))
    return self.norm_layer(f) * scale + shift, {}


def _group_norm_of_parts(self: Any, x_NCTHW: Tensor) -> Tensor:
    """diffusers' two parts of 17 frames are 9 + 8 of them; where time is halved, 5 + 4; of 5 latents, 3 + 2."""
    first = (x_NCTHW.shape[2] + 1) // 2
    parts = x_NCTHW[:, :, :first], x_NCTHW[:, :, first:]
    return torch.cat([F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps) for x in parts], dim=2)


def _cogvideox_upsample(self: Any, inputs: Tensor) -> Tensor:
    _, _, t, h, _ = inputs.shape
    num_frames = 2 * t - t % 2 if self.compress_time and t > 1 else t
    return _each_frame(self.conv, enlarge(inputs, num_frames, 2 * h))


def _cogvideox_downsample(self: Any, x: Tensor) -> Tensor:
    if self.compress_time:
        odd = x.shape[2] % 2
        pairs = (x[:, :, odd::2] + x[:, :, odd + 1 :: 2]) / 2
        x = torch.cat([x[:, :, :1], pairs], dim=2) if odd else pairs
    return _each_frame(self.conv, F.pad(x, (0, 1, 0, 1)))


def _wan_resample(self: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
    """diffusers passes the first frame by the layers that change the number of frames; so does this."""
    if self.mode == "upsample3d":
        rest = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], rest], dim=2)
    if self.mode in ("upsample2d", "upsample3d"):
        return _each_frame(self.resample[1], enlarge(x, x.shape[2], 2 * x.shape[3]))
    x = _each_frame(self.resample, x)
    return torch.cat([x[:, :, :1], self.time_conv(x)], dim=2) if self.mode == "downsample3d" else x
