"""Our kernels one by one: right, and how fast beside cuDNN at the shapes of a 480x720x49 video.

    python benchmarks/speed_kernels.py [--only tiles wide image rows first depthwise] [--output DIR]

tiles: relative error against float32 at odd sizes (output poisoned with NaN before), then median time, TFLOP/s, and the
same convolution through cuDNN in channels_last without bias, residual, ReLU or interleaving (so cuDNN does less).
wide: the 3x3 over groups of 64 channels of the wide decoder at 480x736x49, beside cuDNN's.
image, rows, first: the kernel beside those that it replaces, with their errors. depthwise: whole operations, both
convolutions with their results side by side, then the 1x1 convolution behind them, by cuDNN and by cuBLAS.
tests/gpu/ has the odd sizes of these.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.convert.bench import relative_error, time_alternating_ms
from tinyvae.engines import (
    conv_rows,
    cudnn,
    depthwise,
    first_pool,
    first_rows,
    fold,
    grow_image,
    hopper,
    hopper_kernels,
)
from tinyvae.files import make_output_folder
from tinyvae.models.variants import LEAKY_SLOPE

Row = dict[str, object]
Calls = dict[str, Callable[[], object]]
LAUNCHES = 10
DEVICE = torch.device("cuda", 0)


def random_frames(frames: int, height: int, width: int, channels: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(frames, height, width, channels, device=DEVICE, dtype=dtype)


def random_weight(*shape: int, dtype: torch.dtype) -> Tensor:
    """OIHW in channels_last, as large as keeps the size of what it is applied to."""
    weight = torch.randn(shape, device=DEVICE) / torch.Size(shape[1:]).numel() ** 0.5
    return weight.to(dtype).contiguous(memory_format=torch.channels_last)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    sources: int = 1,
    grown: int = 1,
    videos: int = 1,
    slope: float = 0.0,
) -> Tensor:
    """What `conv_tiles` computes, in float32 through torch, BHWC."""
    frames, height, width, _ = x.shape
    flat = x.float().permute(0, 3, 1, 2)
    if sources == 2:
        video = flat.unflatten(0, (videos, -1))
        past = torch.cat([torch.zeros_like(video[:, :1]), video[:, :-1]], 1).flatten(0, 1)
        flat = torch.cat([flat, past], 1)
    made = F.conv2d(flat, weight.float(), padding=1, groups=flat.shape[1] // weight.shape[1])
    if weight.shape[-1] == 2:
        phases = made.unflatten(1, (2, 2, grown, -1))
        made = flat.new_empty(frames, grown, phases.shape[4], 2 * height, 2 * width)
        for i in (0, 1):
            for j in (0, 1):
                made[..., i::2, j::2] = phases[:, i, j, ..., i : i + height, j : j + width]
        made = made.flatten(0, 1)
    if bias is not None:
        made = made + bias.float()[:, None, None]
    if residual is not None:
        made = made + residual.float().permute(0, 3, 1, 2)
    return F.leaky_relu(made, slope).permute(0, 2, 3, 1)


class Tiles(NamedTuple):
    """A convolution for `conv_tiles`. ``taps``: 9, or 4 for the phases of a doubled grid."""

    channels: int
    height: int
    width: int
    sources: int = 1
    taps: int = 9
    grown: int = 1
    groups: int = 1
    slope: float = 0.0
    with_residual: bool = False


ODD_TILES = (
    Tiles(64, 37, 29, with_residual=True),
    Tiles(64, 60, 90, sources=2),
    Tiles(128, 31, 50, sources=2),
    Tiles(256, 16, 23, with_residual=True),
    Tiles(256, 60, 90, taps=4),
    Tiles(64, 45, 33, taps=4, grown=2),
    Tiles(64, 37, 29, slope=LEAKY_SLOPE, with_residual=True),
    Tiles(128, 31, 50, slope=LEAKY_SLOPE),
    Tiles(128, 17, 9, groups=2, with_residual=True),
    Tiles(192, 31, 10, groups=3, slope=LEAKY_SLOPE, with_residual=True),
    Tiles(256, 60, 92, groups=4),
    Tiles(1024, 15, 23, groups=16, with_residual=True),
)


def check_tiles(dtype: torch.dtype) -> list[Row]:
    """Right at odd sizes: two videos, both splits, both kinds of taps, groups of channels, LeakyReLU."""
    rows: list[Row] = []
    for case in ODD_TILES:
        outputs = case.channels if case.taps == 9 else 4 * case.grown * 64
        side, scale = (3, 1) if case.taps == 9 else (2, 2)
        weight = random_weight(outputs, case.sources * case.channels // case.groups, side, side, dtype=dtype)
        bias = torch.randn(outputs, device=DEVICE, dtype=dtype) if case.taps == 9 else None
        x, other = (random_frames(6, case.height, case.width, case.channels, dtype) for _ in "ab")
        residual = other if case.with_residual else None
        packed = hopper_kernels.pack_tile_weights(
            weight, bias, sources=case.sources, grown=case.grown, groups=case.groups
        )
        shape = (6 * case.grown, case.height * scale, case.width * scale, packed.channels_out)
        out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        how: dict[str, Any] = {"residual_BHWC": residual, "relu": True, "slope": case.slope, "out": out}
        hopper_kernels.conv_tiles(x, packed, frames_per_video=3, **how)
        expected = reference(
            x, weight, bias, residual, sources=case.sources, grown=case.grown, videos=2, slope=case.slope
        )
        rows.append({"check": f"{case} {dtype}", "error": relative_error(out, expected)})
        print(rows[-1], flush=True)
    return rows


def cudnn_two_frames(x: Tensor, weight: Tensor, bias: Tensor, kernel: Callable[[], Tensor]) -> Callable[[], object]:
    """The same two-frame convolution as cuDNN's 3-D one with bias and ReLU; it makes one frame too many, at the end."""
    channels = x.shape[-1]
    # Taps in time: the frame before, then the frame itself.
    taps = torch.stack([weight[:, channels:], weight[:, :channels]], dim=2)
    taps, bias = taps.contiguous(memory_format=torch.channels_last_3d), bias.to(x.dtype)
    video, ones = x[None].permute(0, 4, 1, 2, 3), (1, 1, 1)

    def call() -> Tensor:
        return torch.cudnn_convolution_relu(video, taps, bias, ones, ones, ones, 1)

    made = call()[:, :, : x.shape[0]].permute(0, 2, 3, 4, 1)[0]
    print({"cudnn_two_frames": "difference from the kernel", "error": relative_error(made, kernel())}, flush=True)
    return call


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(LAUNCHES):
            call()

    return calls


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    """`repeated` as a CUDA graph, for kernels that are shorter than their launch."""
    for _ in range(2):
        call()  # compiles, and lets cuDNN choose
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeated(call)()
    return graph.replay


def timed(
    name: str,
    flops: float,
    calls: Calls,
    *,
    repeat: Callable[..., Callable[[], None]] = repeated,
) -> Row:
    # Several launches between two events, so that the host's share of a launch is not counted.
    times = time_alternating_ms({key: repeat(call) for key, call in calls.items()}, DEVICE, repeats=9, warmups=2)
    row: Row = {"step": name}
    for which, values in times.items():
        median = statistics.median(values) / LAUNCHES
        row[f"{which}_ms"] = round(median, 4)
        row[f"{which}_tflops"] = round(flops / median / 1e9, 1)
    print(row, flush=True)
    return row


def time_tiles(dtype: torch.dtype) -> list[Row]:
    rows = []
    for channels, frames, height, width in ((256, 13, 60, 90), (128, 13, 120, 180), (64, 26, 240, 360)):
        x = random_frames(frames, height, width, channels, dtype)
        residual = random_frames(frames, height, width, channels, dtype)
        flat = x.permute(0, 3, 1, 2)
        for sources in (2, 1):
            weight = torch.randn(channels, sources * channels, 3, 3, device=DEVICE).to(dtype) * 0.02
            packed = hopper_kernels.pack_tile_weights(weight, torch.randn(channels, device=DEVICE), sources=sources)
            assert packed.bias is not None
            doubled = torch.cat([weight[:, :channels], weight[:, -channels:]]) if sources == 2 else weight
            doubled = doubled.contiguous(memory_format=torch.channels_last)
            flops = 2.0 * x.numel() * channels * 9 * sources
            kept = residual if sources == 1 else None

            def kernel(p: hopper_kernels.TileWeights = packed, k: Tensor | None = kept, a: Tensor = x) -> Tensor:
                return hopper_kernels.conv_tiles(a, p, frames_per_video=a.shape[0], residual_BHWC=k, relu=True)

            def library(w: Tensor = doubled, a: Tensor = flat) -> object:
                return F.conv2d(a, w, padding=1)

            calls: Calls = {"kernel": kernel, "cudnn": library}
            if kept is not None:
                bias, added = packed.bias.to(dtype), kept.permute(0, 3, 1, 2)
                calls["cudnn_add_relu"] = partial(cudnn.conv_relu, flat, doubled, bias, residual=added)
            else:
                calls["cudnn_two_frames"] = cudnn_two_frames(x, weight, packed.bias, kernel)
            rows.append(timed(f"3x3 {channels}ch x{sources} frames", flops, calls))
    for channels, following, grown, frames, height, width in (
        (256, 128, 1, 13, 60, 90),
        (128, 64, 2, 13, 120, 180),
        (64, 64, 2, 4, 240, 360),
    ):
        x = random_frames(frames, height, width, channels, dtype)
        weight = torch.randn(4 * grown * following, channels, 2, 2, device=DEVICE).to(dtype) * 0.02
        packed = hopper_kernels.pack_tile_weights(weight, None, grown=grown)
        nhwc, flat = weight.contiguous(memory_format=torch.channels_last), x.permute(0, 3, 1, 2)
        flops = 2.0 * x[..., 0].numel() * weight.numel()
        rows.append(
            timed(
                f"phases {channels}->{following} x{grown}, {frames} frames",
                flops,
                {
                    "kernel": lambda a=x, p=packed: hopper_kernels.conv_tiles(a, p, frames_per_video=1, relu=True),
                    "cudnn": lambda a=flat, w=nhwc: F.conv2d(a, w, padding=1),
                },
            )
        )
    return rows


def time_wide(dtype: torch.dtype) -> list[Row]:
    """A wide block's 3x3 over groups of 64 channels with bias, residual and ReLU: our kernel and cuDNN, which does the
    convolution alone where it cannot do all."""
    rows = []
    for channels, frames, height, width in ((1024, 7, 15, 23), (512, 14, 30, 46), (256, 28, 60, 92)):
        x, residual = (random_frames(frames, height, width, channels, dtype) for _ in "ab")
        flat, groups = x.permute(0, 3, 1, 2), channels // 64
        weight, bias = random_weight(channels, 64, 3, 3, dtype=dtype), torch.randn(channels, device=DEVICE).to(dtype)
        packed = hopper_kernels.pack_tile_weights(weight, bias, groups=groups)
        calls: Calls = {
            "kernel": partial(hopper_kernels.conv_tiles, x, packed, residual_BHWC=residual, relu=True),
            "cudnn": partial(F.conv2d, flat, weight, padding=1, groups=groups),
        }
        if cudnn.fuses_groups(dtype, DEVICE):
            calls["cudnn_add_relu"] = partial(
                cudnn.conv_relu, flat, weight, bias, residual=residual.permute(0, 3, 1, 2)
            )
        rows.append(timed(f"3x3 {channels}ch in {groups} groups, {frames} frames", 2.0 * x.numel() * 64 * 9, calls))
    return rows


def time_image_side(dtype: torch.dtype) -> list[Row]:
    rows = []
    frames, height, width = 8, 480, 720
    x = random_frames(frames, height, width, 64, dtype)
    weight, bias = torch.randn(3, 64, 3, 3, device=DEVICE).to(dtype) * 0.04, torch.randn(3, device=DEVICE)
    packed = hopper_kernels.pack_image_weights(weight, bias, 1)
    out = torch.full((frames, 3, height, width), torch.nan, dtype=dtype, device=DEVICE)
    hopper_kernels.image_conv(x, packed, out)
    expected = F.conv2d(x.float().permute(0, 3, 1, 2), weight.float(), bias, padding=1)
    rows.append({"check": "image_conv", "error": relative_error(out, expected)})
    print(rows[-1], flush=True)
    flat, nhwc = x.permute(0, 3, 1, 2), weight.contiguous(memory_format=torch.channels_last)
    calls: Calls = {
        "kernel": lambda: hopper_kernels.image_conv(x, packed, out),
        "cudnn": lambda: F.conv2d(flat, nhwc, padding=1),
    }
    rows.append(timed("64->3, 8 frames", 2.0 * x.numel() * 27, calls))
    stacked = random_frames(4, height, width, 128, dtype).permute(0, 3, 1, 2)
    weight = (torch.randn(64, 128, 3, 3, device=DEVICE) * 0.03).to(dtype).contiguous(memory_format=torch.channels_last)
    calls = {"cudnn": lambda: F.conv2d(stacked, weight, padding=1, stride=2)}
    rows.append(timed("pool 128->64 stride 2, 4 pairs", 2.0 * stacked.numel() * 64 * 9 / 4, calls))
    return rows


def time_grow_image(dtype: torch.dtype) -> list[Row]:
    """The last growing layer and the image convolution, to RGB and to patches: in one kernel, and in two, a slice of
    frames at a time. Whole videos of 480 lines (and of 720), then one latent of a stream."""
    rows: list[Row] = []
    for patch, frames, height, width in (
        *((1, 3, 37, 29), (1, 26, 240, 360), (1, 26, 360, 640)),
        *((2, 3, 37, 29), (2, 26, 120, 184), (2, 26, 180, 320), (2, 2, 120, 184)),
        *((4, 3, 37, 29), (4, 28, 60, 92), (4, 28, 90, 160), (4, 4, 60, 92)),
    ):
        x = random_frames(frames, height, width, 64, dtype)
        grow = fold.GrowLayer(weight=(torch.randn(512, 64, 2, 2, device=DEVICE) / 16).to(dtype), frames=2, relu=True)
        outputs, scale = 3 * patch**2, 2 * patch
        image = fold.ConvLayer(
            weight=(torch.randn(outputs, 64, 3, 3, device=DEVICE) / 24).to(dtype),
            bias=torch.randn(outputs, device=DEVICE),
        )
        assert image.bias is not None
        one = grow_image.pack_weights(grow, image)
        tiles = hopper_kernels.pack_tile_weights(grow.weight, None, grown=2)
        last = hopper_kernels.pack_image_weights(image.weight, image.bias, patch)
        shape = (2 * frames, 3, scale * height, scale * width)
        outs = [torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in "ab"]
        # As many input frames as the engine takes at once, where it runs two kernels.
        group = max(1, hopper.SLICE_BYTES // (2 * 4 * height * width * 64 * x.itemsize))

        def in_one(a: Tensor = x, w: grow_image.GrowImageWeights = one, out: Tensor = outs[0]) -> None:
            grow_image.grow_image(a, w, out)

        def in_two(
            a: Tensor = x,
            t: hopper_kernels.TileWeights = tiles,
            w: hopper_kernels.ImageWeights = last,
            out: Tensor = outs[1],
            n: int = group,
        ) -> None:
            for part, made in zip(a.split(n), out.split(2 * n), strict=True):
                between = hopper_kernels.conv_tiles(part, t, frames_per_video=1, relu=True)
                hopper_kernels.image_conv(between, w, made)

        in_one()
        in_two()
        between = reference(x[:4], grow.weight, None, None, grown=2).permute(0, 3, 1, 2)
        expected = F.pixel_shuffle(F.conv2d(between, image.weight.float(), image.bias, padding=1), patch)
        one_error, two_error = (relative_error(out[: len(expected)], expected) for out in outs)
        name = f"64->64 x2 and 64->{outputs}, {dtype} {frames}x{height}x{width}"
        rows.append({"check": name, "one": one_error, "two": two_error, "difference": relative_error(*outs)})
        print(rows[-1], flush=True)
        flops = 2.0 * x[..., 0].numel() * (grow.weight.numel() + 8 * image.weight.numel())
        rows.append(timed(name, flops, {"one": in_one, "two": in_two}, repeat=graphed))
    return rows


def time_conv_rows(dtype: torch.dtype) -> list[Row]:
    """The three convolutions of a memory block with 64 channels: row by row, in tiles, and through cuDNN as the engine
    calls it. Blocks of a decoder and an encoder at 480x720x49, then what a stream computes of one latent."""
    rows: list[Row] = []
    for frames, height, width in ((6, 37, 29), (26, 240, 360), (13, 120, 180), (13, 60, 90), (4, 240, 360)):
        x, kept = (random_frames(frames, height, width, 64, dtype) for _ in "ab")
        for number, sources, residual in ((1, 2, None), (2, 1, None), (3, 1, kept)):
            weight = (torch.randn(64, sources * 64, 3, 3, device=DEVICE) / (sources * 576) ** 0.5).to(dtype)
            bias = torch.randn(64, device=DEVICE).to(dtype)
            how: dict[str, Any] = {"frames_per_video": frames, "residual_BHWC": residual, "relu": True}
            by_rows = partial(conv_rows.conv_rows, x, conv_rows.pack_row_weights(weight, bias), **how)
            packed = hopper_kernels.pack_tile_weights(weight, bias, sources=sources)
            by_tiles = partial(hopper_kernels.conv_tiles, x, packed, **how)
            few = None if residual is None else residual[:3]
            expected = reference(x[:3], weight, bias, few, sources=sources)
            made, apart = by_rows(out=torch.full_like(x, torch.nan)), by_tiles()
            name = f"convolution {number} of a block, {dtype} {frames}x{height}x{width}"
            errors = {"rows": relative_error(made[:3], expected), "tiles": relative_error(apart[:3], expected)}
            rows.append({"check": name, **errors, "difference": relative_error(made, apart)})
            print(rows[-1], flush=True)
            calls: Calls = {"rows": by_rows, "tiles": by_tiles}
            if number == 1:
                calls["cudnn"] = cudnn_two_frames(x, weight, bias, by_tiles)
            else:
                nhwc, flat = weight.contiguous(memory_format=torch.channels_last), x.permute(0, 3, 1, 2)
                added = None if residual is None else residual.permute(0, 3, 1, 2)
                calls["cudnn"] = partial(cudnn.conv_relu, flat, nhwc, bias, residual=added)
            rows.append(timed(name, 2.0 * x[..., 0].numel() * weight.numel(), calls))
    return rows


FIRST_CASES = (  # patch size, then image frames in whole pairs: odd, taehv, taew2_2, taeltx_2, a stream's push
    *((patch, 4, 8 * 5, 8 * 7) for patch in (1, 2, 4)),
    (1, 8, 480, 720),
    (2, 48, 480, 736),
    (4, 48, 480, 736),
    (2, 4, 480, 736),
    (4, 8, 480, 736),
)


def time_first(dtype: torch.dtype) -> list[Row]:
    """An encoder's first convolution from the image, frames in pairs as the pooling layer wants them: row by row, and
    by cuDNN behind a pixel-unshuffle. Then with the pooling layer: in one kernel, and with cuDNN behind either of
    them."""
    rows: list[Row] = []
    for patch, frames, height, width in FIRST_CASES:
        image, inputs = torch.randn(frames, 3, height, width, device=DEVICE).to(dtype), 3 * patch**2
        weight = (torch.randn(64, inputs, 3, 3, device=DEVICE) / (9 * inputs) ** 0.5).to(dtype)
        first = fold.ConvLayer(weight=weight, bias=torch.randn(64, device=DEVICE).to(dtype), relu=True)
        pool_weight = (torch.randn(64, 128, 3, 3, device=DEVICE) / 34).to(dtype)
        pool = fold.PoolLayer(weight=fold.channels_last(pool_weight), stride=2)
        assert first.bias is not None
        by_rows = partial(first_rows.first_rows, image, first_rows.pack_weights(weight, first.bias, patch), stacked=2)
        conv = cudnn.PatchConv.of(first, patch_size=patch, stacked=2)
        before = lambda conv=conv, image=image: conv(image).permute(0, 2, 3, 1)  # noqa: E731
        made, apart = by_rows(), before()
        name = f"first convolution, patch {patch}, {dtype} {frames}x{height}x{width}"
        hidden = F.relu(
            F.conv2d(F.pixel_unshuffle(image[:4].float(), patch), weight.float(), first.bias.float(), padding=1)
        )
        pairs = hidden.unflatten(0, (2, 2)).flatten(1, 2)
        expected = pairs.permute(0, 2, 3, 1)
        errors = {"rows": relative_error(made[:2], expected), "before": relative_error(apart[:2], expected)}
        rows.append({"check": name, **errors, "difference": relative_error(made, apart)})
        print(rows[-1], flush=True)
        flops = 2.0 * made.numel() * inputs * 9
        rows.append(timed(name, flops, {"rows": by_rows, "before": before}, repeat=graphed))
        print({"rows_TB_per_s": (image.nbytes + made.nbytes) / cast(float, rows[-1]["rows_ms"]) / 1e9}, flush=True)
        calls: Calls = {
            "rows_and_cudnn": lambda c=by_rows, p=pool: pool_by_cudnn(c(), p),
            "before_and_cudnn": lambda c=before, p=pool: pool_by_cudnn(c(), p),
        }
        if first_pool.fits(first, pool, patch):
            one = partial(first_pool.first_pool, image, first_pool.pack_weights(first, pool, patch))
            exact = F.conv2d(pairs, pool.weight.float(), stride=2, padding=1).permute(0, 2, 3, 1)
            errors = {
                "one": relative_error(one()[:2], exact),
                "two": relative_error(pool_by_cudnn(made, pool)[:2], exact),
            }
            rows.append({"check": f"{name} and pooling", **errors})
            print(rows[-1], flush=True)
            calls["one"] = one
        rows.append(timed(f"{name} and pooling", flops + 2.0 * made.numel() * 64 * 9 / 4, calls, repeat=graphed))
    return rows


def pool_by_cudnn(x_BHWC: Tensor, pool: fold.PoolLayer) -> Tensor:
    return F.conv2d(x_BHWC.permute(0, 3, 1, 2), pool.weight, stride=2, padding=1).permute(0, 2, 3, 1)


SUPER_STAGES = ((512, 30, 45, 1), (256, 60, 90, 1), (128, 120, 180, 2))  # channels, size, frames of a latent


def time_depthwise(dtype: torch.dtype) -> list[Row]:
    """A super block's depthwise convolutions by our kernel and by cuDNN: of whole videos and of a stream's pushes."""
    rows: list[Row] = []
    for channels, height, width, grown in SUPER_STAGES:
        depth, past_depth = (torch.randn(2, channels, 1, 7, 7, device=DEVICE) / 7).to(dtype)
        widen = torch.randn(4 * channels, 2 * channels, 1, 1, device=DEVICE).to(dtype) * 0.03
        bias = torch.randn(4 * channels, device=DEVICE).to(dtype)
        layer = fold.SuperMemLayer(depth=depth, past_depth=past_depth, widen=widen, widen_bias=bias, narrow=widen)
        bands = depthwise.pack_bands(depth, past_depth)
        for latents in (1, 3, 7, 8, 13):
            x = random_frames(latents * grown, height, width, channels, dtype)
            past = random_frames(1, height, width, channels, dtype)
            flat = x.permute(0, 3, 1, 2)
            calls: Calls = {
                "kernel": lambda a=x, b=bands, p=past: depthwise.super_depthwise(a, b, num_videos=1, past_NHWC=p),
                "cudnn": lambda a=flat, k=layer, p=past: cudnn.two_depthwise(k, a, p[None], 1),
            }
            name = f"depthwise {dtype} {channels}ch, {x.shape[0]} frames"
            both, by_cudnn = depthwise.super_depthwise(x, bands, num_videos=1, past_NHWC=past)[0], calls["cudnn"]()
            rows.append({"check": name, "difference": relative_error(both, cast(tuple[Tensor, Tensor], by_cudnn)[0])})
            print(rows[-1], flush=True)
            rows.append(timed(name, 2.0 * x.numel() * 98, calls, repeat=graphed))
        both = random_frames(4 * grown, height, width, 2 * channels, dtype)
        flat, pixels, matrix = both.permute(0, 3, 1, 2), both.flatten(0, 2), widen.flatten(1).T
        calls = {
            "cudnn": lambda a=flat, w=widen, b=bias: cudnn.conv_relu(a, w, b),
            "cublas": lambda a=pixels, w=matrix, b=bias: torch._addmm_activation(b, a, w),
        }
        flops = 2.0 * both.numel() * 4 * channels
        rows.append(timed(f"widen {dtype} {channels}ch, {both.shape[0]} frames", flops, calls, repeat=graphed))
    return rows


KERNELS: dict[str, Callable[[], list[Row]]] = {
    "tiles": lambda: [*both_dtypes(check_tiles), *time_tiles(torch.float16), *time_image_side(torch.float16)],
    "wide": lambda: time_wide(torch.float16),
    "image": lambda: time_grow_image(torch.float16),
    "rows": lambda: both_dtypes(time_conv_rows),
    "first": lambda: both_dtypes(time_first),
    "depthwise": lambda: both_dtypes(time_depthwise),
}


def both_dtypes(measure: Callable[[torch.dtype], list[Row]]) -> list[Row]:
    return measure(torch.float16) + measure(torch.bfloat16)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=list(KERNELS), default=list(KERNELS), help="these kernels alone, of all of them"
    )
    parser.add_argument("--output", type=Path, help="folder for kernels.json")
    arguments = parser.parse_args()
    if arguments.output:
        make_output_folder(arguments.output)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # the float32 references must be float32
    rows = [row for name in arguments.only for row in KERNELS[name]()]
    if arguments.output:
        (arguments.output / "kernels.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
