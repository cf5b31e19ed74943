"""Measure how fast a model encodes and decodes here: plain, fused, and fused as a stream, in one run.

Medians after a warm-up, memory, frames per second, the error against a more exact run, and how busy the device is,
compared with a large matrix product and a large copy. MODEL may be a weights file, a run folder, or the name of a
variant (then with random weights; speed does not depend on them).

With --against, or with several sizes, the fused networks of all models are timed in turn, and one table compares them
with the first: speed, memory, and how near each is to the least time that its layers could take on this device.

example:
  tinyvae bench best_model/model.safetensors --size 480x720 --frames 49 --dtype float16 --device cuda
  tinyvae bench taew2_2 --size 704x1280 --output bench.json
  tinyvae bench taehv --against taew2_2 taeltx_2 output/my_run --size 480x736 --size 1088x1920
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.options import MODEL, add_options, variant_of_each
from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.convert.bench import BenchmarkCase, Ceilings, ModelTiming, Timing
    from tinyvae.models.taehv import TAEHV

LEGEND = """\
memory     the most that a GPU holds beside weights and input; not measured on a CPU
error      how far the output is from the same network in {wider} (relative)
compute    share of the matrix product's speed that the arithmetic of the fused network reaches in that time
bandwidth  share of the copy's speed that the bytes it must move reach in that time
speed-up   how many times as fast as plain
The nearer compute or bandwidth is to 100 %, the less is left to gain on this device."""

AGAINST_LEGEND = """\
speed      how many times as fast as the first model
memory     the most that a GPU holds beside weights and input; not measured on a CPU
floor      share of the floor: the least time of its layers (arithmetic at the matrix product's speed or bytes at the
           copy's, whichever takes longer, layer by layer) / the measured time; 100 % leaves nothing to gain"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{MODEL}, or the name of a variant")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="MODEL", help="further models, files or variants, in one table"
    )
    variant = (
        "which variant the weights are, where the file cannot tell; with --against once for each model, - for none"
    )
    parser.add_argument("--variant", action="append", default=[], metavar="NAME", help=variant)
    add_options(parser, "--device")
    sizes = "size of the frames (default: 480x720); give it several times for several sizes"
    add_options(parser, "--size", action="append", help=sizes)
    add_options(parser, "--frames", default=49, help="frames of the video (default: 49)")
    add_options(parser, "--dtype", help="float32, float16 or bfloat16; default: float16 on a GPU, float32 on a CPU")
    add_options(parser, "--output", metavar="FILE", help="also write everything to this JSON file")
    repeats = "timed calls of each kind (default: 20 on a GPU, 5 on a CPU)"
    parser.add_argument("--repeats", type=int, metavar="N", help=repeats)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from tinyvae.convert.bench import BenchmarkCase, check_sizes
    from tinyvae.evaluation.cost import choose_devices, describe_device
    from tinyvae.files import atomic_write, check_output_file, writing_to

    if arguments.output:
        check_output_file(arguments.output, option="--output", suffix=".json")
    device = choose_devices(arguments.device)[0]
    if device.type not in ("cpu", "cuda") or "," in (arguments.device or ""):
        raise UserError(f"--device {arguments.device}: one device is timed; give cpu, cuda or cuda:1.")
    on_gpu = device.type == "cuda"
    dtype = arguments.dtype or (torch.float16 if on_gpu else torch.float32)
    sizes = arguments.size or [(480, 720)]
    if len(set(sizes)) < len(sizes):
        raise UserError("--size names one size twice; name each size once.")
    models = read_models([arguments.model, *arguments.against], arguments.variant)
    check_sizes([model.spec for model in models.values()], sizes)
    cases = [
        BenchmarkCase(
            height=height,
            width=width,
            num_frames=arguments.frames,
            repeats=arguments.repeats if arguments.repeats is not None else 20 if on_gpu else 5,
            warmups=3 if on_gpu else 1,
            show_progress_bar=True,
        )
        for height, width in sizes
    ]
    models = {name: model.to(device, dtype).eval() for name, model in models.items()}
    machine = {"device": describe_device(device), "torch": torch.__version__, "python": platform.python_version()}
    report: dict[str, object] = {"dtype": str(dtype).removeprefix("torch."), "machine": machine}
    if len(models) == len(cases) == 1:
        report |= bench_one(next(iter(models.values())), cases[0], machine)
    else:
        report |= bench_several(models, cases, machine)
    if arguments.output:
        with writing_to(arguments.output.parent), atomic_write(arguments.output, "w") as stream:
            stream.write(json.dumps(report, indent=1) + "\n")
        print(f"written to {arguments.output}")
    return 0


def bench_one(model: TAEHV, case: BenchmarkCase, machine: dict[str, str]) -> dict[str, object]:
    """Time plain, fused and stream, print the table, and give the numbers for the file."""
    from tinyvae.convert.bench import as_json, run_benchmark
    from tinyvae.evaluation.cost import fitting_in_memory

    with fitting_in_memory(f"a video of {case.num_frames} frames of {case.height}x{case.width}"):
        ceilings, timings, fused = run_benchmark(model, case)
    dtype_name = str(model.dtype).removeprefix("torch.")
    where = f"{dtype_name}, on {machine['device']}"
    print(f"{model.spec.name}, {case.height}x{case.width}, {case.num_frames} frames, {where}")
    encoder, decoder = fused.engines["encoder"], fused.engines["decoder"]
    engines = f"encoder and decoder {encoder}" if encoder == decoder else f"encoder {encoder}; decoder {decoder}"
    print(f"torch {machine['torch']}; {engines}")
    print(table(ceilings, timings))
    print("\n" + LEGEND.format(wider="float64" if dtype_name == "float32" else "float32"))
    described = {"variant": model.spec.name, "height": case.height, "width": case.width, "frames": case.num_frames}
    return {**described, "engines": fused.engines, **as_json(ceilings, timings)}


def bench_several(models: dict[str, TAEHV], cases: list[BenchmarkCase], machine: dict[str, str]) -> dict[str, object]:
    """Time the fused models at each size, print one table, and give the numbers for the file."""
    from tinyvae.convert.bench import as_json, compare_speed, measure_ceilings
    from tinyvae.evaluation.cost import fitting_in_memory

    first = next(iter(models.values()))
    timings: list[ModelTiming] = []
    sizes = " and ".join(f"{case.height}x{case.width}" for case in cases)
    with fitting_in_memory(f"timing {cases[0].num_frames} frames of {sizes}"):
        ceilings = measure_ceilings(first.device, first.dtype)
        for case in cases:
            timings += compare_speed(models, case, ceilings)
    dtype_name = str(first.dtype).removeprefix("torch.")
    print(f"{cases[0].num_frames} frames, {dtype_name}, fused, on {machine['device']}; torch {machine['torch']}")
    print(ceilings_line(ceilings))
    print(speed_table(timings))
    print("\n" + AGAINST_LEGEND)
    return {"frames": cases[0].num_frames, **as_json(ceilings, timings)}


def read_models(names: list[str], variants: list[str]) -> dict[str, TAEHV]:
    """The models by the names that tables show them under; what is named twice is refused before weights are read."""
    from tinyvae.evaluation.round_trip import label_of

    if len(variants) == 1:
        variants = [*variants, *["-"] * (len(names) - 1)]
    wanted = variant_of_each(names, variants)
    places = [Path(name).resolve() for name in names]
    twice = next((name for name, place in zip(names, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise UserError(f"{twice} is named twice; name each model once.")
    labels = [label_of(Path(name)) for name in names]
    if len(set(labels)) < len(labels):
        labels = names
    return {label: read_model(name, variant) for label, name, variant in zip(labels, names, wanted, strict=True)}


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


def ceilings_line(ceilings: Ceilings) -> str:
    product, copy = f"{ceilings.flops_per_s / 1e12:.3g} TFLOP/s", f"{ceilings.bytes_per_s / 1e12:.3g} TB/s"
    return f"this device, measured: matrix product {product}, copy {copy}"


def speed_table(timings: list[ModelTiming]) -> str:
    """The timings of several models as text, one row for each, grouped by size and operation."""
    width = max(len("model"), *(len(timing.model) for timing in timings))
    head = f"{'size':10} {'model':{width}} {'ms':>9} {'frames/s':>9} {'speed':>7} {'memory':>9} {'floor':>6}  engine"
    lines, before = [f"{'':8} {head}"], ""
    for timing in timings:
        group = f"{timing.operation:8} {'x'.join(map(str, timing.size)):10}"
        memory = "" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**30:.2f} GiB"
        shown, before = (" " * len(group) if group == before else group), group
        lines.append(
            f"{shown} {timing.model:{width}} {timing.milliseconds:9.2f} {timing.frames_per_s:9.1f} "
            f"{timing.speed:6.2f}x {memory:>9} {timing.share_of_floor:6.0%}  {timing.engine}"
        )
    return "\n".join(lines)


def table(ceilings: Ceilings, timings: list[Timing]) -> str:
    """The timings as text, plain and fused of each operation together."""
    heads = f"{'network':>16} {'ms':>14} {'frames/s':>9} {'memory':>9} {'error':>8} {'compute':>8} {'bandwidth':>9}"
    lines = [ceilings_line(ceilings), f"{heads} {'speed-up':>8}"]
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
