"""Chunks of few frames: how the work of one convolution is cut, and whether a kernel starts early.

    python benchmarks/speed_small.py [--output DIR]

Two launches behind each other, from a CUDA graph, at the shapes of pushes and of whole videos of taew2_2, taeltx_2 and
taehv (medians; cuDNN beside them):

- `conv_tiles` with tiles of 8 and 16 rows and of the best height for many frames (`hopper_kernels.FLAT_HEIGHTS`,
  `choose_tile_height`; "chosen" names what it takes);
- `conv_rows` with two warpgroups of a block or one (`conv_rows.ALONE_TURNS`, `cut_work`; "chosen" names what it takes);
- each as usual, and with the second launch early (`nvrtc.EARLY_LAUNCH`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from speed_kernels import DEVICE, graphed, random_frames, timed

from tinyvae.engines import conv_rows, cudnn, hopper_kernels, nvrtc

Row = dict[str, object]
Calls = dict[str, Callable[[], object]]
TILES = ((256, 1, 30, 46), (256, 3, 30, 46), (256, 13, 30, 46), (256, 1, 15, 23), (256, 7, 15, 23), (256, 1, 60, 90))
ROWS = ((2, 120, 184), (6, 120, 184), (8, 60, 92), (14, 30, 46), (7, 15, 23))  # frames, height, width


def with_choice(launch: Callable[[], object], name: str, value: object, early: bool) -> None:
    """``launch`` twice with another choice of how the work is cut, the second time perhaps early."""
    module = conv_rows if name == "ALONE_TURNS" else hopper_kernels
    before = getattr(module, name)
    for cached in (hopper_kernels._tiles_launch, conv_rows._launch):
        cached.cache_clear()
    setattr(module, name, value)
    try:
        with nvrtc.early_launches() if early else contextlib.nullcontext():
            launch()
            launch()
    finally:
        setattr(module, name, before)


def time_tiles(dtype: torch.dtype) -> list[Row]:
    rows = []
    for channels, frames, height, width in TILES:
        x, residual = (random_frames(frames, height, width, channels, dtype) for _ in "ab")
        weight = (torch.randn(channels, channels, 3, 3, device=DEVICE) / (9 * channels) ** 0.5).to(dtype)
        bias = torch.randn(channels, device=DEVICE).to(dtype)
        packed = hopper_kernels.pack_tile_weights(weight, bias)
        launch = partial(hopper_kernels.conv_tiles, x, packed, residual_BHWC=residual, relu=True)
        calls: Calls = {}
        for tile_h in sorted({8, 16, hopper_kernels.best_tile_height(height)}):
            for early in (False, True):
                name = f"{tile_h}_early" if early else f"{tile_h}"
                calls[name] = partial(with_choice, launch, "choose_tile_height", lambda *_, h=tile_h, **__: h, early)
        by_cudnn = partial(
            cudnn.conv_relu,
            x.permute(0, 3, 1, 2),
            weight.contiguous(memory_format=torch.channels_last),
            bias,
            residual=residual.permute(0, 3, 1, 2),
        )
        calls["cudnn"] = lambda call=by_cudnn: (call(), call())
        count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        chosen = hopper_kernels.choose_tile_height(frames, height, width, channels // 64, 9, False, processors=count)
        name, flops = f"tiles {channels}ch {frames}x{height}x{width}, chosen {chosen}", 4.0 * x[..., 0].numel()
        rows.append(timed(name, flops * weight.numel(), calls, repeat=graphed))
    return rows


def time_rows(dtype: torch.dtype) -> list[Row]:
    rows = []
    for frames, height, width in ROWS:
        x = random_frames(frames, height, width, 64, dtype)
        for sources in (1, 2):
            weight = (torch.randn(64, sources * 64, 3, 3, device=DEVICE) / (sources * 576) ** 0.5).to(dtype)
            packed = conv_rows.pack_row_weights(weight, torch.randn(64, device=DEVICE).to(dtype))
            launch = partial(conv_rows.conv_rows, x, packed, frames_per_video=frames, relu=True)
            calls: Calls = {
                name + "_early" * early: partial(with_choice, launch, "ALONE_TURNS", turns, early)
                for name, turns in (("pairs", math.inf), ("alone", 0.0))
                for early in (False, True)
            }
            count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
            chosen = "pairs" if conv_rows.cut_work(frames, height, width, processors=count)[2] == 2 else "alone"
            name, flops = f"rows over {sources}, {frames}x{height}x{width}, chosen {chosen}", 4.0 * x[..., 0].numel()
            rows.append(timed(name, flops * weight.numel(), calls, repeat=graphed))
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for small.json")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = time_tiles(torch.float16) + time_rows(torch.float16)
    if arguments.output:
        (arguments.output / "small.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
