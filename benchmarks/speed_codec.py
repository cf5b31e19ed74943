"""Plain network against `model.fused()`: decode, encode, streaming and latency, in one run.

    python benchmarks/speed_codec.py [--variant taehv] [--dtype fp16] [--sizes 480x720x49 720x1280x61] [--output DIR]

`speed_engines.py` compares engines and their choices, `speed_variants.py` all variants.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tinyvae import TAEHV, StreamingDecoder
from tinyvae.convert.bench import (
    SIDES,
    BenchmarkCase,
    Timing,
    peak_bytes,
    run_benchmark,
    stream_through,
    time_alternating_ms,
)
from tinyvae.evaluation.cost import without_cudnn_trials
from tinyvae.files import make_output_folder

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def spread_model(variant: str, **options: Any) -> TAEHV:
    """A network with random weights of which every layer matters to the output; fresh ones fade out over the depth."""
    model, generator = TAEHV(variant, **options), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            scale = 0.05 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(values * scale)
    return model.eval()


def streaming_calls(model: TAEHV, latents: torch.Tensor, frames: torch.Tensor) -> list[dict[str, Callable[[], object]]]:
    """Calls to be timed in turn: whole videos beside streams in the default chunk and short pushes that wait for it;
    streams of one, three, eight.

    Few at a time, because a call after an easy one finds a cooler card with a higher clock.
    """
    fused = model.fused()
    groups: list[dict[str, Callable[[], object]]] = []
    for operation, video in (("decode", latents), ("encode", frames)):
        chunk = fused.stream_chunk_latents(SIDES[operation], *latents.shape[-2:])
        stream = partial(stream_through, fused, operation, video, chunk_latents=chunk)
        whole = partial(fused.decode_video if operation == "decode" else fused.encode_video, video)
        groups += [
            {
                f"{operation} whole": whole,
                f"{operation} stream, {chunk} latents": stream,
                f"{operation} by 1 latent, which waits": partial(stream, pushed_latents=1),
                f"{operation} by 3 latents, which wait": partial(stream, pushed_latents=3),
            },
            {
                f"{operation} by 3 latents": partial(stream, chunk_latents=3),
                f"{operation} by 8 latents": partial(stream, chunk_latents=8),
            },
        ]
    one = {
        "decode by single latents": partial(stream_through, fused, "decode", latents, chunk_latents=1),
        "plain by single latents": partial(stream_through, model, "decode", latents, chunk_latents=1),
    }
    return [*groups, one]


def latency_ms(model: TAEHV, latents: torch.Tensor) -> dict[str, float]:
    """Time from one latent to its frames, median: the plain network, the fused one, and its CUDA graph."""
    fused = model.fused()
    streams = {
        "plain": StreamingDecoder(model, num_latents=None),
        "fused": StreamingDecoder(fused, num_latents=None),
        "fused, graph": StreamingDecoder(fused, num_latents=None, low_latency=True),
    }
    one = latents[:, :1]
    calls: dict[str, Callable[[], object]] = {name: (lambda s=stream: s.push(one)) for name, stream in streams.items()}
    times = time_alternating_ms(calls, latents.device, repeats=20, warmups=3)
    expected = StreamingDecoder(fused, num_latents=None)
    graphed = StreamingDecoder(fused, num_latents=None, low_latency=True)
    for place in range(latents.shape[1]):
        part = latents[:, place : place + 1]
        assert torch.equal(expected.push(part), graphed.push(part)), f"the graph differs at latent {place}"
    return {name: statistics.median(values) for name, values in times.items()}


def comparison_row(plain: Timing, fast: Timing) -> dict[str, float]:
    return {
        "plain_ms": plain.milliseconds,
        "fused_ms": fast.milliseconds,
        "ratio": plain.milliseconds / fast.milliseconds,
        "plain_GiB": (plain.peak_bytes or 0) / 2**30,
        "fused_GiB": (fast.peak_bytes or 0) / 2**30,
        "plain_error": plain.relative_error,
        "fused_error": fast.relative_error,
        "share_of_flops": fast.share_of_flops,
        "share_of_bytes": fast.share_of_bytes,
        "spread": fast.spread,
    }


def first_calls_ms(model: TAEHV, latents: torch.Tensor) -> dict[str, float]:
    """What the first calls of a new length cost a codec that has run before, by the wall clock: the second one may
    record a CUDA graph. cuDNN tries out no kernels."""
    with without_cudnn_trials():
        fused = model.fused()
        fused.decode_video(latents)
        waits = {}
        for call in ("first", "second", "third"):
            torch.cuda.synchronize()
            began = time.perf_counter()
            fused.decode_video(latents[:, 1:])
            torch.cuda.synchronize()
            waits[call] = (time.perf_counter() - began) * 1e3
    return waits


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="taehv")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--sizes", nargs="+", default=["480x720x49", "720x1280x61"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only_whole", action="store_true", help="whole videos and default streams alone")
    parser.add_argument("--output", type=Path, help="folder for codec.json; it grows size by size")
    return parser.parse_args()


def measure(model: TAEHV, case: BenchmarkCase, *, only_whole: bool) -> dict[str, dict[str, float]]:
    """Rows by name: whole videos and, unless ``only_whole``, streams, latency, and what the codec holds."""
    device, rows = model.device, {}
    ceilings, timings, fused = run_benchmark(model, case)
    print(f"{case.height}x{case.width}x{case.num_frames} {fused!r}")
    print(f"  copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, product {ceilings.flops_per_s / 1e12:.0f} TFLOP/s")
    found = {(timing.operation, timing.codec): timing for timing in timings}
    for operation in ("decode", "encode"):
        plain, fast = found[operation, "plain"], found[operation, "fused"]
        rows[operation] = comparison_row(plain, fast)
        rows[operation]["stream"] = fast.milliseconds / found[operation, "fused stream"].milliseconds
        words = ", ".join(f"{name} {value:.4g}" for name, value in rows[operation].items())
        print(f"  {operation}: {words}", flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        rows["held"] = {"GiB": torch.cuda.memory_reserved() / 2**30}  # with weights and graphs, without any call
        print(f"  held between calls: {rows['held']['GiB']:.3f} GiB", flush=True)
    if only_whole:
        return rows
    video = torch.rand(1, case.num_frames, 3, case.height, case.width, device=device).to(model.dtype)
    latents = model.encode_video(video)
    for calls in streaming_calls(model, latents, video):
        times = time_alternating_ms(calls, device, repeats=max(9, case.repeats), warmups=3)
        for name, call in calls.items():
            peak = (peak_bytes(call, device) or 0) / 2**30
            rows[name] = {"ms": statistics.median(times[name]), "GiB": peak}
            print(f"  {name}: {statistics.median(times[name]):.2f} ms, {peak:.2f} GiB", flush=True)
    if device.type == "cuda":
        rows["latency"], rows["first calls"] = latency_ms(model, latents), first_calls_ms(model, latents)
        print(f"  latency: {rows['latency']}\n  first calls of a new length: {rows['first calls']}", flush=True)
    return rows


@torch.no_grad()
def main() -> None:
    arguments = parse()
    if arguments.output:
        make_output_folder(arguments.output)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0 if torch.cuda.is_available() else None)
    model = spread_model(arguments.variant).to(device, DTYPES[arguments.dtype])
    results: dict[str, object] = {"torch": torch.__version__, "command": sys.argv}
    for size in arguments.sizes:
        height, width, frames = map(int, size.split("x"))
        case = BenchmarkCase(height=height, width=width, num_frames=frames, repeats=arguments.repeats)
        results[size] = measure(model, case, only_whole=arguments.only_whole)
        if arguments.output:
            (arguments.output / "codec.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
