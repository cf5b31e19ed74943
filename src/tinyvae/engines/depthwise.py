"""The kernel of a super block's two depthwise 7x7 convolutions as a function on tensors; `depthwise.cu` explains it.

cuDNN's fast kernel for them is for eight frames and more, and its results still have to be copied side by side. This
one takes any number of frames, and puts the results where the 1x1 convolution behind needs them. It is for fp16 and
bf16 on every CUDA card of compute capability 8.0 or more; NVRTC compiles it once per process, card and dtype.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from tinyvae.engines import nvrtc

STRIPS = 16  # which a block of threads computes at a time, each 8 columns wide
CHANNELS = 16  # which a block of threads computes
TAPS = 7
THREADS = 512
LEAST_CAPABILITY = (8, 0)
MOST_VALUES = 2**34 - 1  # of one call: its offsets have 32 bits and count 16 bytes
STEPS_PER_BLOCK = 8  # what it costs a block of threads to start, in rows


class _Shape(ctypes.Structure):
    """The kernel's ``Shape``, field by field."""

    _fields_ = nvrtc.int_fields("frames_per_video height width words tiles_x strips_y strip_height strips walkers")


def why_not_depthwise(dtype: torch.dtype, device: torch.device) -> str | None:
    """None where the kernel runs, else the reason in words."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the model is on {device.type}" if device.type != "cuda" else "this torch is not for CUDA"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel is for fp16 and bf16, the model is {dtype}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    return nvrtc.why_unavailable(capability)


def pack_bands(depth: Tensor, past_depth: Tensor) -> Tensor:
    """The band matrices of (C, 1, 7, 7) weights as fragments of m16n8k16: (2, C, 7 rows of taps, 32 threads, 4).

    Thread t holds column n = t // 4 of its matrix in rows k = 2j, 2j+1, 2j+8, 2j+9 with j = t % 4: tap k - n or 0.
    """
    threads = torch.arange(32, device=depth.device)
    rows = 2 * (threads % 4)[:, None] + torch.tensor([0, 1, 8, 9], device=depth.device)
    taps = rows - (threads // 4)[:, None]
    taps = torch.where((taps >= 0) & (taps < TAPS), taps, TAPS)  # where the band is zero: the column that is added
    filled = torch.nn.functional.pad(torch.stack([depth, past_depth])[:, :, 0], (0, 1))
    return filled[..., taps].contiguous()


def super_depthwise(
    x_BHWC: Tensor, bands: Tensor, *, num_videos: int, past_NHWC: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(``depth`` of each frame and ``past_depth`` of the frame before it side by side, BHW(2C); ``past_depth`` of each
    video's last frame, NHWC). ``past_NHWC`` stands before the first frame of each video (None: zeros)."""
    frames, height, width, channels = x_BHWC.shape
    assert x_BHWC.is_contiguous() and x_BHWC.dtype == bands.dtype and bands.shape[1] == channels
    assert past_NHWC is None or (past_NHWC.is_contiguous() and past_NHWC.shape == (num_videos, height, width, channels))
    both = x_BHWC.new_empty(frames, height, width, 2 * channels)
    last = x_BHWC.new_empty(num_videos, height, width, channels)
    is_bfloat = x_BHWC.dtype == torch.bfloat16
    launch = _launch(is_bfloat, x_BHWC.device.index, frames, num_videos, height, width, channels)
    launch(x_BHWC, past_NHWC, bands, both, last)
    return both, last


@functools.lru_cache(maxsize=256)
def _launch(
    is_bfloat: bool, device_index: int, frames: int, num_videos: int, height: int, width: int, channels: int
) -> nvrtc.Launch:
    shape, blocks = cut_work(frames, num_videos, height, width, channels, processors=nvrtc.processors(device_index))
    files, name = ("instructions.cu", "depthwise.cu"), "super_depthwise"
    kernel = nvrtc.load_kernel(files, name, device_index, threads=THREADS, BFLOAT=int(is_bfloat))
    return nvrtc.Launch(kernel, 5, [shape], blocks=blocks)


def cut_work(
    frames: int, num_videos: int, height: int, width: int, channels: int, *, processors: int
) -> tuple[_Shape, int]:
    """(how the work is cut into strips, blocks of threads). Flat strips load more halo, tall ones leave processors
    idle; the height with the fewest rows for the busiest processor is taken."""
    assert channels % CHANNELS == 0 and frames * height * width * channels <= MOST_VALUES
    tiles_x, channel_blocks = -(-width // 8), channels // CHANNELS

    def cut(strips_y: int) -> tuple[int, int, int, int]:
        strip_height = -(-height // strips_y)
        groups = -(-frames * tiles_x * -(-height // strip_height) // STRIPS)
        walkers = min(groups, max(1, processors // channel_blocks))
        rounds = -(-groups // walkers) * -(-channel_blocks * walkers // processors)
        return rounds * (strip_height + TAPS - 1) + STEPS_PER_BLOCK, strips_y, strip_height, walkers

    _, _, strip_height, walkers = min(cut(strips_y) for strips_y in range(1, -(-height // 4) + 1))
    strips_y = -(-height // strip_height)
    shape = _Shape(
        frames // num_videos, height, width, channels // 8, tiles_x, strips_y, strip_height,
        frames * tiles_x * strips_y, walkers,
    )  # fmt: skip
    return shape, channel_blocks * walkers
