"""What the wide decoder and LeakyReLU need of a GPU, one by one: right, and which of several ways is fastest.

    python benchmarks/speed_blocks.py [--output DIR]

First the checks: `conv_tiles` with LeakyReLU and over groups of channels at odd sizes, relative error against float32,
output poisoned with NaN before. Then medians at the shapes of 480x736x49 (taeltx2_3_wide) and 480x720x49 (taehv):

- a wide block's 3x3 over groups of 64 channels: our kernel (as built), cuDNN, cuDNN with bias, residual and ReLU
  inside;
- its 1x1 over two frames with bias and ReLU: cuDNN over pictures whose rows are frames, cuDNN in 3-D (as built), two
  matrix products;
- what follows a convolution: the pointwise kernel, torch's operators;
- a block's 3x3 with LeakyReLU: our kernel (as built), cuDNN and the pointwise kernel.

`python benchmarks/speed_engines.py --activation leaky_relu` and `--variant taeltx2_3_wide --sizes 480x736x49` then
compare whole engines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from speed_kernels import DEVICE, random_frames, timed
from torch import Tensor
from torch.nn import functional as F

from tinyvae.convert.bench import relative_error
from tinyvae.engines import cudnn, hopper_kernels
from tinyvae.engines.pointwise import finish
from tinyvae.models.variants import LEAKY_SLOPE

Row = dict[str, object]
STAGES = ((1024, 7, 15, 23), (512, 14, 30, 46), (256, 28, 60, 92))  # channels, frames, height, width


def random_weight(*shape: int, dtype: torch.dtype) -> Tensor:
    weight = torch.randn(shape, device=DEVICE) / torch.Size(shape[1:]).numel() ** 0.5
    return weight.to(dtype).contiguous(memory_format=torch.channels_last)


def check_tiles(dtype: torch.dtype) -> list[Row]:
    rows: list[Row] = []
    for channels, height, width, groups, slope, with_residual in (
        (64, 37, 29, 1, LEAKY_SLOPE, True),
        (128, 31, 50, 1, LEAKY_SLOPE, False),
        (128, 17, 9, 2, 0.0, True),
        (192, 31, 10, 3, LEAKY_SLOPE, True),
        (256, 60, 92, 4, 0.0, False),
        (1024, 15, 23, 16, 0.0, True),
    ):
        weight = random_weight(channels, channels // groups, 3, 3, dtype=dtype)
        bias = torch.randn(channels, device=DEVICE, dtype=dtype)
        x, other = (random_frames(5, height, width, channels, dtype) for _ in range(2))
        residual = other if with_residual else None
        packed = hopper_kernels.pack_tile_weights(weight, bias, groups=groups)
        out = torch.full_like(x, torch.nan)
        hopper_kernels.conv_tiles(x, packed, residual_BHWC=residual, relu=True, slope=slope, out=out)
        exact = F.conv2d(x.float().permute(0, 3, 1, 2), weight.float(), bias.float(), padding=1, groups=groups)
        exact = exact.permute(0, 2, 3, 1)
        exact = F.leaky_relu(exact if residual is None else exact + residual.float(), slope)
        row = {"check": f"{channels}ch {height}x{width} groups {groups} slope {slope} {dtype}"}
        rows.append({**row, "error": relative_error(out, exact)})
        print(rows[-1], flush=True)
    return rows


def time_groups(dtype: torch.dtype) -> list[Row]:
    rows = []
    for channels, frames, height, width in STAGES:
        x, residual = (random_frames(frames, height, width, channels, dtype) for _ in range(2))
        flat, kept = x.permute(0, 3, 1, 2), residual.permute(0, 3, 1, 2)
        groups = channels // 64
        weight, bias = random_weight(channels, 64, 3, 3, dtype=dtype), torch.randn(channels, device=DEVICE).to(dtype)
        packed = hopper_kernels.pack_tile_weights(weight, bias, groups=groups)
        calls: dict[str, Callable[[], object]] = {
            "kernel": lambda x=x, p=packed, r=residual: hopper_kernels.conv_tiles(x, p, residual_BHWC=r, relu=True),
            "cudnn": lambda x=flat, w=weight, g=groups: F.conv2d(x, w, padding=1, groups=g),
        }
        if cudnn.fuses_groups(dtype, DEVICE):
            calls["cudnn_add_relu"] = lambda x=flat, w=weight, b=bias, r=kept: cudnn.conv_relu(x, w, b, residual=r)
        rows.append(timed(f"3x3 {channels}ch in {groups} groups, {frames} frames", 2.0 * x.numel() * 64 * 9, calls))
    return rows


def two_products(x: Tensor, now: Tensor, then: Tensor, bias: Tensor) -> Tensor:
    """relu(now(x_t) + then(x_{t-1}) + bias) of one video THWC as matrix products; the first frame has none before."""
    pixels = x.flatten(1, 2)
    made = torch.addmm(bias, pixels.flatten(0, 1), now.T).view(pixels.shape)
    made[1:].flatten(0, 1).addmm_(pixels[:-1].flatten(0, 1), then.T)
    return made.relu_().view(x.shape)


def time_two_frames(dtype: torch.dtype) -> list[Row]:
    rows = []
    for channels, frames, height, width in STAGES:
        x = random_frames(frames, height, width, channels, dtype)
        weight, bias = (
            random_weight(channels, channels, 2, 1, dtype=dtype),
            torch.randn(channels, device=DEVICE).to(dtype),
        )
        then, now = (tap.squeeze(-1).contiguous() for tap in weight.unbind(2))
        in_3d = weight.unsqueeze(-1).contiguous(memory_format=torch.channels_last_3d)
        flat, video = x.permute(0, 3, 1, 2), x[None].permute(0, 4, 1, 2, 3)

        def as_rows(x: Tensor = flat, w: Tensor = weight, b: Tensor = bias) -> Tensor:
            return cudnn.two_frame_conv_relu(x, w, b, past_N1CHW=None, num_videos=1)

        def by_products(x: Tensor = x, n: Tensor = now, t: Tensor = then, b: Tensor = bias) -> Tensor:
            return two_products(x, n, t, b)

        difference = relative_error(as_rows().permute(0, 2, 3, 1), by_products())
        print({"check": f"1x1 over two frames, {channels}ch", "error": difference}, flush=True)
        calls: dict[str, Callable[[], object]] = {
            "cudnn_rows": as_rows,
            "cudnn_3d": lambda x=video, w=in_3d, b=bias: cudnn.convolve(x, w, b, (1, 0, 0), None),
            "products": by_products,
        }
        flops = 2.0 * x.numel() * 2 * channels
        rows.append({**timed(f"1x1 {channels}ch x2 frames, {frames} frames", flops, calls), "error": difference})
    return rows


def time_leaky(dtype: torch.dtype) -> list[Row]:
    rows = []
    for channels, frames, height, width in ((256, 13, 60, 90), (128, 13, 120, 180), (64, 26, 240, 360)):
        x, residual = (random_frames(frames, height, width, channels, dtype) for _ in range(2))
        flat, kept = x.permute(0, 3, 1, 2), residual.permute(0, 3, 1, 2)
        weight, bias = (
            random_weight(channels, channels, 3, 3, dtype=dtype),
            torch.randn(channels, device=DEVICE).to(dtype),
        )
        packed = hopper_kernels.pack_tile_weights(weight, bias)

        def kernel(slope: float, x: Tensor = x, p: hopper_kernels.TileWeights = packed, r: Tensor = residual) -> Tensor:
            return hopper_kernels.conv_tiles(x, p, residual_BHWC=r, relu=True, slope=slope)

        made = residual.clone().permute(0, 3, 1, 2)

        def torchs(x: Tensor = made, b: Tensor = bias, r: Tensor = kept) -> Tensor:
            return F.leaky_relu_(x.add_(b[:, None, None]).add_(r), LEAKY_SLOPE)

        calls: dict[str, Callable[[], object]] = {
            "kernel_relu": lambda call=kernel: call(0.0),
            "kernel_leaky": lambda call=kernel: call(LEAKY_SLOPE),
            "cudnn_and_pointwise": lambda x=flat, w=weight, b=bias, r=kept: cudnn.conv_relu(
                x, w, b, residual=r, slope=LEAKY_SLOPE
            ),
            "pointwise_alone": lambda x=made, b=bias, r=kept: finish(x, b, r, LEAKY_SLOPE),
            "torchs_operators_alone": torchs,
        }
        rows.append(timed(f"3x3 {channels}ch with LeakyReLU", 2.0 * x.numel() * channels * 9, calls))
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for blocks.json")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # the float32 references must be float32
    rows = check_tiles(torch.float16) + check_tiles(torch.bfloat16)
    rows += time_groups(torch.float16) + time_two_frames(torch.float16) + time_leaky(torch.float16)
    if arguments.output:
        (arguments.output / "blocks.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
