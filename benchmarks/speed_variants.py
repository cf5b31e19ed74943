"""Every variant at several sizes: speed, memory and share of the floor, written as one page of benchmarks/results.

python benchmarks/speed_variants.py --output benchmarks/results/DATE-variants.md
python benchmarks/speed_variants.py --sizes 480x736 --variants taehv taew2_2 --frames 49

All fused networks are timed in turn at each size (`tinyvae bench --against`). The speed-up is that of a second run, in
which each plain network takes turns with its fused form. Variants that are one network (taehv, taew2_1, ...) share a
row. Sizes must be multiples of 32, which every variant takes.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from speed_codec import spread_model

from tinyvae import TAEHV, VARIANTS, list_variants
from tinyvae.cli.options import dtype as dtype_of
from tinyvae.convert.bench import (
    BenchmarkCase,
    Ceilings,
    ModelTiming,
    Timing,
    compare_speed,
    measure_ceilings,
    run_benchmark,
)
from tinyvae.evaluation.cost import choose_devices, describe_device
from tinyvae.files import check_output_file


def one_of_each_network(names: list[str]) -> dict[str, list[str]]:
    """The first variant of each network, with all those that share it; their frame rules cost nothing."""
    networks: dict[str, list[str]] = {}
    for name in names:
        spec = VARIANTS[name]
        shared = (spec.patch_size, spec.latent_channels, spec.decoder, spec.encoder_strides, spec.decoder_strides)
        networks.setdefault(str(shared), []).append(name)
    return {same[0]: same for same in networks.values()}


def plain_against_fused(model: TAEHV, case: BenchmarkCase) -> dict[tuple[str, str], Timing]:
    """By operation and codec; nothing where the plain network does not fit into the memory."""
    try:
        return {(timing.operation, timing.codec): timing for timing in run_benchmark(model, case)[1]}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {}


def row(timing: ModelTiming, both: dict[tuple[str, str], Timing]) -> str:
    operation = timing.operation
    speed_up, stream, error = "does not fit", "", ""
    if both:
        plain, fused, streamed = (both[operation, codec] for codec in ("plain", "fused", "fused stream"))
        speed_up = f"{plain.milliseconds / fused.milliseconds:.2f}x"
        stream = f"{fused.milliseconds / streamed.milliseconds:.2f}"
        error = f"{plain.relative_error:.1e} / {fused.relative_error:.1e}"
    memory = "" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**30:.2f} GiB"
    cells = [operation, timing.variant, timing.engine, f"{timing.milliseconds:.2f}", f"{timing.frames_per_s:.0f}"]
    cells += [f"{timing.speed:.2f}x", speed_up, stream, memory, f"{timing.share_of_floor:.0%}", error]
    return f"| {' | '.join(cells)} |"


def section(models: dict[str, TAEHV], case: BenchmarkCase, ceilings: Ceilings) -> list[str]:
    """One size as the lines of a table."""
    timings = compare_speed(models, case, ceilings)
    both = {name: plain_against_fused(model, case) for name, model in models.items()}
    first = next(iter(models))
    heads = ["", "variant", "engine", "ms", "frames/s", f"of {first}", "of plain", "stream", "memory", "floor"]
    heads += ["error plain / fused"]
    lines = [f"## {case.height}x{case.width}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*lines, *(row(timing, both[timing.model]) for timing in timings), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list_variants())
    parser.add_argument("--sizes", nargs="+", default=["480x736", "736x1280", "1088x1920"])
    parser.add_argument("--frames", type=int, default=49)
    parser.add_argument("--dtype", type=dtype_of, default=torch.float16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, help="Markdown file to write; it grows size by size")
    arguments = parser.parse_args()
    if arguments.output:
        check_output_file(arguments.output, option="--output")
    device = choose_devices(arguments.device)[0]
    models, networks = {}, one_of_each_network(arguments.variants)
    for name in networks:
        models[name] = spread_model(name).to(device, arguments.dtype)
    ceilings = measure_ceilings(device, arguments.dtype)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [
        f"# Every variant, {date}, {describe_device(device)}, torch {torch.__version__}",
        "",
        f"`python {' '.join(sys.argv)}`: {arguments.frames} frames, {arguments.dtype}, medians of {arguments.repeats}.",
        f"Matrix product {ceilings.flops_per_s / 1e12:.3g} TFLOP/s, copy {ceilings.bytes_per_s / 1e12:.3g} TB/s. "
        "Stream: its speed as a part of the whole video's.",
        "".join(f" {', '.join(same)} are one network." for same in networks.values() if len(same) > 1).strip(),
        "",
    ]
    for size in arguments.sizes:
        height, width = map(int, size.split("x"))
        case = BenchmarkCase(height=height, width=width, num_frames=arguments.frames, repeats=arguments.repeats)
        lines += section(models, case, ceilings)
        print("\n".join(lines[-len(models) * 2 - 5 :]), flush=True)
        if arguments.output:
            arguments.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
