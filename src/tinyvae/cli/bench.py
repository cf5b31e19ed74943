"""Measure how fast a model encodes and decodes here: plain, fused, and fused as a stream, in one run.

Medians after a warm-up, memory, frames per second, the error against a more exact run, and how busy the device is,
compared with a large matrix product and a large copy. MODEL may be a weights file, a run folder, or the name of a
variant (then with random weights; speed does not depend on them).

example:
  tinyvae bench best_model/model.safetensors --size 480x720 --frames 49 --dtype float16 --device cuda
  tinyvae bench taew2_2 --size 704x1280 --output bench.json
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.options import MODEL, add_options
from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.convert.bench import Ceilings, Timing
    from tinyvae.models.taehv import TAEHV

LEGEND = """\
memory     the most that a GPU holds beside weights and input; not measured on a CPU
error      how far the output is from the same network in {wider} (relative)
compute    share of the matrix product's speed that the arithmetic of the fused network reaches in that time
bandwidth  share of the copy's speed that the bytes it must move reach in that time
speed-up   how many times as fast as plain
The nearer compute or bandwidth is to 100 %, the less is left to gain on this device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{MODEL}, or the name of a variant")
    add_options(parser, "--variant", "--device")
    add_options(parser, "--size", default=(480, 720), help="size of the frames (default: 480x720)")
    add_options(parser, "--frames", default=49, help="frames of the video (default: 49)")
    add_options(parser, "--dtype", help="float32, float16 or bfloat16; default: float16 on a GPU, float32 on a CPU")
    add_options(parser, "--output", metavar="FILE", help="also write everything to this JSON file")
    parser.add_argument("--repeats", type=int, help="timed calls of each kind (default: 20 on a GPU, 5 on a CPU)")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from tinyvae.convert.bench import BenchmarkCase, as_json, run_benchmark
    from tinyvae.evaluation.cost import choose_devices, describe_device, fitting_in_memory
    from tinyvae.files import atomic_write, check_output_file, writing_to

    (height, width), num_frames = arguments.size, arguments.frames
    if arguments.output:
        check_output_file(arguments.output, option="--output", suffix=".json")
    device = choose_devices(arguments.device)[0]
    if device.type not in ("cpu", "cuda") or "," in (arguments.device or ""):
        raise UserError(f"--device {arguments.device}: one device is timed; give cpu, cuda or cuda:1.")
    on_gpu = device.type == "cuda"
    dtype = arguments.dtype or (torch.float16 if on_gpu else torch.float32)
    dtype_name = str(dtype).removeprefix("torch.")
    model = read_model(arguments.model, arguments.variant)
    model.spec.check_size(height, width)
    case = BenchmarkCase(
        height=height,
        width=width,
        num_frames=num_frames,
        repeats=arguments.repeats if arguments.repeats is not None else 20 if on_gpu else 5,
        warmups=3 if on_gpu else 1,
        show_progress_bar=True,
    )
    with fitting_in_memory(f"a video of {num_frames} frames of {height}x{width}"):
        ceilings, timings, fused = run_benchmark(model.to(device, dtype).eval(), case)
    machine = {"device": describe_device(device), "torch": torch.__version__, "python": platform.python_version()}
    print(f"{model.spec.name}, {height}x{width}, {num_frames} frames, {dtype_name}, on {machine['device']}")
    print(f"torch {machine['torch']}; encoder {fused.engines['encoder']}; decoder {fused.engines['decoder']}")
    print(table(ceilings, timings))
    print("\n" + LEGEND.format(wider="float64" if dtype == torch.float32 else "float32"))
    if arguments.output:
        described = {"variant": model.spec.name, "height": height, "width": width, "frames": num_frames}
        report = {**described, "dtype": dtype_name, "machine": machine, "engines": fused.engines}
        with writing_to(arguments.output.parent), atomic_write(arguments.output, "w") as stream:
            stream.write(json.dumps({**report, **as_json(ceilings, timings)}, indent=1) + "\n")
        print(f"written to {arguments.output}")
    return 0


def read_model(name: str, variant: str | None) -> TAEHV:
    import torch

    from tinyvae.models.taehv import TAEHV
    from tinyvae.models.variants import VARIANTS
    from tinyvae.models.weights import load_model

    if name in VARIANTS and not Path(name).exists():
        if variant not in (None, name):
            raise UserError(f"MODEL is the variant {name} and --variant says {variant}; leave one out.")
        torch.manual_seed(0)
        return TAEHV(name)
    return load_model(name, variant=variant)


def table(ceilings: Ceilings, timings: list[Timing]) -> str:
    """The timings as text, plain and fused of each operation together."""
    product, copy = f"{ceilings.flops_per_s / 1e12:.3g} TFLOP/s", f"{ceilings.bytes_per_s / 1e12:.3g} TB/s"
    heads = f"{'network':>16} {'ms':>14} {'frames/s':>9} {'memory':>9} {'error':>8} {'compute':>8} {'bandwidth':>9}"
    lines = [f"this device, measured: matrix product {product}, copy {copy}", f"{heads} {'speed-up':>8}"]
    plain_ms = {timing.operation: timing.milliseconds for timing in timings if timing.codec == "plain"}
    for timing in timings:
        memory = "" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**30:.2f} GiB"
        error = "" if timing.relative_error is None else f"{timing.relative_error:.1e}"
        speed_up = plain_ms[timing.operation] / timing.milliseconds
        lines.append(
            f"{timing.operation:8} {timing.codec:12} {timing.milliseconds:9.2f} {timing.frames_per_s:9.1f} {memory:>9} "
            f"{error:>8} {timing.share_of_flops:8.0%} {timing.share_of_bytes:9.0%} {speed_up:7.2f}x"
        )
    return "\n".join(lines)
