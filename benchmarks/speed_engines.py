"""Engines of the fused codec, and choices of theirs, in turn on the same videos: first call, speed against plain,
memory, error. All are in one process, so that the GPU's clock is the same for all.

    python benchmarks/speed_engines.py [--variant taehv] [--dtype fp16] [--sizes 480x720x49 240x360x17] [--output DIR]
    python benchmarks/speed_engines.py --variant taew2_2 --sizes 480x736x49 --engines hopper hopper:launched \\
        hopper:cudnn=128,256 hopper:cudnn=

``launched``: every kernel is launched, no chunk replays a CUDA graph. ``cudnn=``: memory blocks of these numbers of
channels take cuDNN's fused convolutions where they can.

The sizes run one after another through the same codecs, so an engine meets each as a change of shape. ``first`` is the
seconds of a codec's first call at that size, choosing kernels in it; ``stream`` is the default chunk's, ``pushes`` a
decode by three latents at a time. After each size a stream of single latents must give the whole call's output, to
rounding.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast, get_args
from unittest import mock

import torch
from speed_codec import DTYPES, spread_model
from torch import Tensor

from tinyvae import TAEHV, StreamingDecoder
from tinyvae.convert.bench import peak_bytes, relative_error, stream_through, time_alternating_ms
from tinyvae.engines import hopper
from tinyvae.engines.fused import Engine, FusedTAEHV
from tinyvae.errors import UserError
from tinyvae.files import make_output_folder
from tinyvae.models.codec import VideoCodec
from tinyvae.models.variants import Activation

PUSHED = 3  # latents


def build_codec(model: TAEHV, words: str) -> FusedTAEHV:
    """``hopper:launched:cudnn=128,256``: an engine, and what it shall choose."""
    engine, *choices = words.split(":")
    cudnn_channels = hopper.CUDNN_CHANNELS
    for choice in choices:
        key, _, value = choice.partition("=")
        if key not in ("launched", "cudnn"):
            raise SystemExit(f"{words}: {choice} is no choice; an engine is followed by :launched or :cudnn=CHANNELS.")
        if key == "cudnn":
            cudnn_channels = frozenset(int(number) for number in value.split(",") if number)
    with mock.patch.object(hopper, "CUDNN_CHANNELS", cudnn_channels):  # read when weights are packed
        codec = FusedTAEHV(model, engine=cast(Engine, engine))
    if "launched" in choices:
        codec._replays.clear()
    return codec


def engines_of(model: TAEHV, wanted: list[str]) -> dict[str, VideoCodec]:
    """plain, and every engine that runs here; others are named with their reason."""
    codecs: dict[str, VideoCodec] = {"plain": model}
    for words in wanted:
        try:
            codecs[words] = build_codec(model, words)
        except UserError as error:
            print(f"{words}: {error}")
    return codecs


def seconds_of_first(call: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(
    codecs: dict[str, VideoCodec], exact: VideoCodec, operation: str, video: Tensor, *, repeats: int, tf32: bool
) -> dict[str, dict[str, float]]:
    """A row for each codec; ``video`` is latents to decode or frames to encode."""

    def run(codec: VideoCodec, of: Tensor) -> Tensor:
        return codec.decode_video(of) if operation == "decode" else codec.encode_video(of)

    calls: dict[str, Callable[[], object]] = {name: partial(run, codec, video) for name, codec in codecs.items()}
    torch.backends.cudnn.allow_tf32 = tf32
    firsts = {name: seconds_of_first(call, video.device) for name, call in calls.items()}
    times = time_alternating_ms(calls, video.device, repeats=repeats, warmups=2)
    medians = {name: statistics.median(values) for name, values in times.items()}
    part = video[:, : 2 if operation == "decode" else 2 * exact.spec.time_factor]
    torch.backends.cudnn.allow_tf32 = False  # in the reference
    reference = run(exact, part.to(exact.dtype))
    torch.backends.cudnn.allow_tf32 = tf32
    streams: dict[str, Callable[[], object]] = {
        name: partial(stream_through, codec, operation, video) for name, codec in codecs.items() if name != "plain"
    }
    stream_times = time_alternating_ms(streams, video.device, repeats=repeats, warmups=2)
    pushes: dict[str, Callable[[], object]] = {
        name: partial(stream_through, codecs[name], operation, video, chunk_latents=PUSHED)
        for name in (streams if operation == "decode" else ())
    }
    push_times = time_alternating_ms(pushes, video.device, repeats=repeats, warmups=3)  # the third from a graph
    rows = {}
    for name, codec in codecs.items():
        rows[name] = {
            "first": firsts[name],
            "ms": medians[name],
            "ratio": medians["plain"] / medians[name],
            "GiB": (peak_bytes(calls[name], video.device) or 0) / 2**30,
            "error": relative_error(run(codec, part), reference),
        }
        if name in streams:
            rows[name]["stream_ms"] = statistics.median(stream_times[name])
            rows[name]["stream_GiB"] = (peak_bytes(streams[name], video.device) or 0) / 2**30
        if name in pushes:
            rows[name]["pushes_ms"] = statistics.median(push_times[name])
        words = ", ".join(f"{key} {value:.4g}" for key, value in rows[name].items())
        print(f"  {operation} {name}: {words}", flush=True)
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="taehv")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the channels; hopper fills them up to 64")
    parser.add_argument("--activation", choices=get_args(Activation), default="relu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--sizes", nargs="+", default=["480x720x49", "480x720x25", "240x360x17"])
    what = f"{', '.join(get_args(Engine))}; each may be followed by :launched and :cudnn=CHANNELS"
    parser.add_argument("--engines", nargs="+", default=list(get_args(Engine)), help=what)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no_trials", action="store_true", help="leave cuDNN's benchmark mode off")
    parser.add_argument("--tf32", action="store_true", help="float32 with TF32 convolutions, as torch does by default")
    parser.add_argument("--output", type=Path, help="folder for engines.json; it grows size by size")
    arguments = parser.parse_args()
    if arguments.output:
        make_output_folder(arguments.output)
    torch.backends.cudnn.benchmark = not arguments.no_trials
    torch.backends.cudnn.allow_tf32 = False  # for what the errors are measured against
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = spread_model(arguments.variant, width=arguments.width, activation=arguments.activation)
    exact = copy.deepcopy(model).to(device, torch.float64 if arguments.dtype == "fp32" else torch.float32)
    model = model.to(device, DTYPES[arguments.dtype])
    codecs = engines_of(model, arguments.engines)
    results: dict[str, object] = {}
    for size in arguments.sizes:
        height, width, num_frames = map(int, size.split("x"))
        print(size, flush=True)
        frames = torch.rand(1, num_frames, 3, height, width, device=device).to(model.dtype)
        latents = model.encode_video(frames)
        rows = {
            "decode": measure(codecs, exact, "decode", latents, repeats=arguments.repeats, tf32=arguments.tf32),
            "encode": measure(codecs, exact, "encode", frames, repeats=arguments.repeats, tf32=arguments.tf32),
        }
        for name, codec in codecs.items():
            stream = StreamingDecoder(codec, num_latents=latents.shape[1])
            streamed = torch.cat([stream.push(part) for part in latents.split(1, dim=1)], 1)
            rows["decode"][name]["stream difference"] = apart = relative_error(streamed, codec.decode_video(latents))
            print(f"  decode {name}: by single latents differs from the whole by {apart:.2e}", flush=True)
            assert apart < 1e-2, f"{name}: a stream differs from the whole call"
        results[size] = rows
        if arguments.output:
            (arguments.output / "engines.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
