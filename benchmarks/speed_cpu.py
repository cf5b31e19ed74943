"""A CPU's engines in turn: CPU time against the plain float32 network, and the error in dB.

    taskset -c 0 python benchmarks/speed_cpu.py [--models taehv taew2_2 run/final_model.safetensors] [--sizes 480x720x4]

Times are CPU seconds of the process with ``--threads`` threads, medians, the codecs in turn: other work on the machine
does not count as long as it leaves the caches alone. A variant's name stands for random weights of which every layer
matters. dB is the range of the values against the error's root mean square, both against the plain float32 network.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time

import torch
from speed_codec import spread_model
from torch import Tensor
from torch.nn import functional as F

from tinyvae import TAEHV, VARIANTS, load_model
from tinyvae.convert.bench import count_work
from tinyvae.engines.fused import FusedTAEHV
from tinyvae.errors import UserError
from tinyvae.models.codec import VideoCodec


def open_codecs(name: str) -> tuple[TAEHV, dict[str, VideoCodec]]:
    """(the float32 network, every codec that runs on this CPU)."""
    model = spread_model(name) if name in VARIANTS else load_model(name, dtype=torch.float32)
    short = copy.deepcopy(model).bfloat16()
    codecs: dict[str, VideoCodec] = {"plain float32": model, "plain bfloat16": short}
    for network in (model, short):
        for engine in ("eager", "onednn"):
            title = f"{engine} {str(network.dtype).removeprefix('torch.')}"
            try:
                codecs[title] = FusedTAEHV(network, engine=engine)
            except UserError as error:
                print(f"{title}: {error}")
    return model, codecs


def smooth_frames(num_frames: int, height: int, width: int) -> Tensor:
    coarse = torch.rand(num_frames, 3, height // 8, width // 8)
    return F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[None]


def decibels(made: Tensor, expected: Tensor) -> float:
    error = (made.double() - expected.double()).square().mean().sqrt()
    return 20 * math.log10(((expected.max() - expected.min()) / error).item())


def measure(
    codecs: dict[str, VideoCodec], operation: str, video: Tensor, repeats: int
) -> dict[str, tuple[float, float]]:
    """{codec: (median of CPU seconds, dB)}."""
    times: dict[str, list[float]] = {name: [] for name in codecs}
    results: dict[str, Tensor] = {}
    for turn in range(repeats + 1):
        for name, codec in codecs.items():
            given = video.to(codec.dtype)
            began = time.process_time()
            results[name] = codec.decode(given) if operation == "decode" else codec.encode(given)
            if turn:  # the first is a warm-up
                times[name].append(time.process_time() - began)
    expected = results["plain float32"]
    found = {name: math.inf if name == "plain float32" else decibels(made, expected) for name, made in results.items()}
    return {name: (statistics.median(times[name]), found[name]) for name in codecs}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["taehv"], help="variants or weight files")
    parser.add_argument("--sizes", nargs="+", default=["128x192x12", "480x720x4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print("| | codec | CPU seconds | against plain float32 | GFLOP/s of folded work | dB |\n|---|---|---|---|---|---|")
    for name in arguments.models:
        model, codecs = open_codecs(name)
        for size in arguments.sizes:
            height, width, num_frames = map(int, size.split("x"))
            frames = smooth_frames(num_frames, height, width)
            latents = model.encode_video(frames)
            for operation, video in (("decode", latents), ("encode", frames)):
                rows = measure(codecs, operation, video, arguments.repeats)
                flops = count_work(model, operation, num_frames, height, width)[0]
                for codec, (seconds, quality) in rows.items():
                    ratio = rows["plain float32"][0] / seconds
                    label = f"{model.spec.name} {size} {operation}"
                    speed = flops / seconds / 1e9
                    print(
                        f"| {label} | {codec} | {seconds:.2f} | {ratio:.2f}x | {speed:.0f} | {quality:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
