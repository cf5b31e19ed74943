"""Convolution, bias, residual and ReLU as one cuDNN call, and images laid out for it.

On a GPU torch's own convolution in channels_last memory adds its bias in a second pass over the result, and a ReLU in a
third: at 64 channels that doubles its time (0.27 ms against 0.14 ms, eight frames of 240x360, fp16, H200). cuDNN can do
all of it while it writes. Frames are BCHW in channels_last memory, fp16, bf16 or fp32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.models.fold import ConvStep
from tinyvae.models.folded_run import CUDA_CHANNEL_MULTIPLE, stacked_first


@functools.cache
def why_not_fused(dtype: torch.dtype, device: torch.device) -> str | None:
    """None where cuDNN's fused convolutions run, else the reason in words; tried once per device and dtype."""
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if torch.version.hip is not None or not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return _why_they_fail(dtype, device)


def _why_they_fail(dtype: torch.dtype, device: torch.device) -> str | None:
    """What cuDNN says to one small convolution of each kind; None if it runs them."""
    x = torch.ones(2, 64, 4, 4, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    bias = torch.ones(64, dtype=dtype, device=device)
    over_time = torch.stack([weight, weight], dim=2).contiguous(memory_format=torch.channels_last_3d)
    try:
        conv_relu(x, weight, bias, residual=x)
        conv_relu(x, weight, bias)
        two_frame_conv_relu(x, over_time, bias, past_N1CHW=None, num_videos=1)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # cuDNN says so when it has no kernel for this card and dtype
        return f"cuDNN's fused convolutions do not run in {dtype} on this card ({str(error).splitlines()[0]})"
    return None


def conv_relu(x_BCHW: Tensor, weight: Tensor, bias: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """relu(convolution + bias + residual) on the same grid; a 2x2 ``weight`` makes one row and one column more."""
    ones, padding = (1, 1), (weight.shape[2] // 2, weight.shape[3] // 2)
    if residual is None:
        return torch.cudnn_convolution_relu(x_BCHW, weight, bias, ones, padding, ones, 1)
    return torch.cudnn_convolution_add_relu(x_BCHW, weight, residual, 1.0, bias, ones, padding, ones, 1)


def two_frame_conv_relu(
    x_BCHW: Tensor, weight: Tensor, bias: Tensor, *, past_N1CHW: Tensor | None, num_videos: int
) -> Tensor:
    """relu of a 3x3 over each frame and the one before it; ``weight`` is (out, in, 2, 3, 3), the frame before first.

    ``past_N1CHW`` stands before the first frame of each video (None: zeros).
    """
    video = x_BCHW.unflatten(0, (num_videos, -1))
    num_frames = video.shape[1]
    # Of one fresh video cuDNN's own zeros are the frame before; the frame that they also bring at the end is let go.
    by_padding = past_N1CHW is None and num_videos == 1
    if not by_padding:
        before = torch.zeros_like(video[:, :1]) if past_N1CHW is None else past_N1CHW
        video = torch.cat([before.permute(0, 1, 3, 4, 2), video.permute(0, 1, 3, 4, 2)], dim=1).permute(0, 1, 4, 2, 3)
    ones = (1, 1, 1)
    made = torch.cudnn_convolution_relu(
        video.transpose(1, 2), weight, bias, ones, (1 if by_padding else 0, 1, 1), ones, 1
    )
    return made.transpose(1, 2)[:, :num_frames].flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class PatchConv:
    """The first convolution of an encoder with its ReLU, from image frames; inputs filled up to a multiple of 8.

    ``stacked`` frames side by side go through block-diagonal weights and come out side by side, as the pooling step
    behind wants them: that costs little here, and a copy of the largest tensor there is would cost a lot.
    """

    weight: Tensor  # (stacked · out, filled inputs, 3, 3), channels_last
    bias: Tensor
    patch_size: int
    stacked: int

    @classmethod
    def of(cls, step: ConvStep, *, patch_size: int, stacked: int) -> PatchConv:
        assert step.relu and step.frames == 1 and not step.shuffle
        side_by_side = stacked_first(step, stacked)
        assert side_by_side.bias is not None
        weight = side_by_side.weight
        filled = F.pad(weight, (0, 0, 0, 0, 0, -weight.shape[1] % CUDA_CHANNEL_MULTIPLE))
        return cls(
            weight=filled.contiguous(memory_format=torch.channels_last),
            bias=side_by_side.bias,
            patch_size=patch_size,
            stacked=stacked,
        )

    def __call__(self, image_BCHW: Tensor) -> Tensor:
        """Images (B·stacked)3HW, contiguous, to B(stacked·out)(H/patch)(W/patch)."""
        patch, stacked = self.patch_size, self.stacked
        frames, colours, height, width = image_BCHW.shape
        used, filled = stacked * colours * patch**2, self.weight.shape[1]
        laid_out = image_BCHW.new_empty(frames // stacked, height // patch, width // patch, filled)
        laid_out[..., used:] = 0
        # Channels are (frame, colour, row in the patch, column in the patch), as pixel_unshuffle orders them.
        split = image_BCHW.reshape(-1, stacked, colours, height // patch, patch, width // patch, patch)
        laid_out[..., :used].unflatten(3, (stacked, colours, patch, patch)).copy_(split.permute(0, 3, 5, 1, 2, 4, 6))
        return conv_relu(laid_out.permute(0, 3, 1, 2), self.weight, self.bias)


def write_image(made_BCHW: Tensor, bias: Tensor, patch_size: int, frames: int, image_BCHW: Tensor) -> None:
    """Put a last convolution's result, bias still to be added, into its image (B·frames)3HW, pixel-shuffled.

    ``made_BCHW`` has (frame, colour, row in the patch, column in the patch) channels, perhaps followed by filling.
    """
    batch, _, height, width = made_BCHW.shape
    shape = (frames, 3, patch_size, patch_size)
    grown = image_BCHW.view(batch, frames, 3, height, patch_size, width, patch_size).permute(0, 1, 2, 4, 6, 3, 5)
    # BHWC, because a slice of channels is then still a plain view.
    values = made_BCHW.permute(0, 2, 3, 1)[..., : bias.shape[0]].unflatten(3, shape).permute(0, 3, 4, 5, 6, 1, 2)
    torch.add(values, bias.view(*shape, 1, 1), out=grown)
