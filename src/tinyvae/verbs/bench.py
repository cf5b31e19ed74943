"""Measure how fast a model encodes and decodes here: plain, fused, and fused as a stream, in one run.

Medians after a warm-up, memory, frames per second, the error against float32, and how much of this device's own
ceilings (a large copy, a large matrix product, measured in the same run) the fused form uses. MODEL may be a weights
file, a run folder, or the name of a variant (then with random weights; speed does not depend on them).

example:
  tinyvae bench best_model/model.safetensors --size 480x720 --frames 49 --dtype fp16 --device cuda
  tinyvae bench taew2_2 --size 704x1280 --output bench.json
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.errors import MissingFileError, UserError

if TYPE_CHECKING:
    import torch

    from tinyvae.evaluation.benchmark import Ceilings, Timing
    from tinyvae.models.taehv import TAEHV

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a weights file, a run folder, or the name of a variant")
    parser.add_argument("--variant", help="the variant, where the file does not state it")
    parser.add_argument("--size", default="480x720", help="HEIGHTxWIDTH (default: 480x720)")
    parser.add_argument("--frames", type=int, default=49, help="frames of the video (default: 49)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: fp16 on a GPU, fp32 on a CPU")
    parser.add_argument("--device", help="cuda, cuda:1, cpu (default: cuda where there is one)")
    parser.add_argument("--repeats", type=int, help="timed calls of each kind (default: 20 on a GPU, 5 on a CPU)")
    parser.add_argument("--output", type=Path, help="also write everything to this JSON file")


def run(arguments: argparse.Namespace) -> int:
    import torch

    from tinyvae.evaluation.benchmark import BenchmarkCase, as_json, run_benchmark
    from tinyvae.evaluation.output_folder import writing_to
    from tinyvae.evaluation.resources import fitting_in_memory

    height, width = parse_size(arguments.size)
    if arguments.frames < 1:
        raise UserError(f"--frames must be at least 1, got {arguments.frames}.")
    if arguments.output:
        check_output(arguments.output)
    device = choose_device(arguments.device)
    dtype_name = arguments.dtype or ("fp16" if device.type == "cuda" else "fp32")
    model = read_model(arguments.model, arguments.variant)
    model.spec.check_size(height, width)
    model = model.to(device, getattr(torch, DTYPES[dtype_name])).eval()
    repeats, warmups = (20, 3) if device.type == "cuda" else (5, 1)
    case = BenchmarkCase(
        height=height,
        width=width,
        num_frames=arguments.frames,
        repeats=repeats if arguments.repeats is None else arguments.repeats,
        warmups=warmups,
        show_progress_bar=True,
    )
    with fitting_in_memory(f"a video of {arguments.frames} frames of {height}x{width}"):
        ceilings, timings, fused = run_benchmark(model, case)
    machine = describe_machine(device)
    print(f"{model.spec.name}, {height}x{width}, {arguments.frames} frames, {dtype_name}, on {machine['device']}")
    print(f"torch {machine['torch']}; encoder {fused.engines['encoder']}; decoder {fused.engines['decoder']}")
    print(table(ceilings, timings))
    if arguments.output:
        described = {"variant": model.spec.name, "height": height, "width": width, "frames": arguments.frames}
        report = {**described, "dtype": dtype_name, "machine": machine, "engines": fused.engines}
        with writing_to(arguments.output.parent):
            arguments.output.write_text(json.dumps({**report, **as_json(ceilings, timings)}, indent=1) + "\n")
        print(f"written to {arguments.output}")
    return 0


def parse_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--size {text!r} is not a size; write HEIGHTxWIDTH, for example 480x720.")
    return int(parts[0]), int(parts[1])


def check_output(file: Path) -> None:
    """Refuse a result file that could not be written, or that is something else, before the minutes of work."""
    if file.suffix != ".json":
        raise UserError(f"--output {file}: the results are JSON; give a name that ends in .json.")
    if not file.parent.is_dir():
        raise MissingFileError(f"--output {file}: the folder {file.parent} does not exist.")
    if file.is_dir():
        raise UserError(f"--output {file} is a folder; name a file in it.")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as refused:
        reason = refused.strerror or refused
        raise UserError(f"--output {file}: {file.parent} cannot be written ({reason}); name another folder.") from None


def choose_device(name: str | None) -> torch.device:
    """The device that is named, else the first GPU, else the CPU."""
    from tinyvae.evaluation.resources import choose_devices

    devices = choose_devices(name)
    if name is not None and (len(devices) > 1 or devices[0].type not in ("cpu", "cuda")):
        raise UserError(f"--device {name}: one device is timed, cpu or a CUDA device; give cpu, cuda or cuda:1.")
    return devices[0]


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


def describe_machine(device: torch.device) -> dict[str, str]:
    import torch

    if device.type == "cuda":
        words = torch.cuda.get_device_name(device)
    else:
        words = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {"device": words, "torch": torch.__version__, "python": platform.python_version()}


def table(ceilings: Ceilings, timings: list[Timing]) -> str:
    """The timings as text, plain and fused of each operation together with their ratio."""
    lines = [
        f"this device, measured: copy {ceilings.bytes_per_s / 1e12:.3g} TB/s, "
        f"matrix product {ceilings.flops_per_s / 1e12:.3g} TFLOP/s",
        f"{'':8} {'':12} {'ms':>9} {'frames/s':>9} {'memory':>9} {'error':>8} {'of product':>10} {'of copy':>8}  ratio",
    ]
    plain_ms = {timing.operation: timing.milliseconds for timing in timings if timing.codec == "plain"}
    for timing in timings:
        memory = "" if timing.peak_bytes is None else f"{timing.peak_bytes / 2**30:.2f} GiB"
        error = "" if timing.relative_error is None else f"{timing.relative_error:.1e}"
        lines.append(
            f"{timing.operation:8} {timing.codec:12} {timing.milliseconds:9.2f} {timing.frames_per_s:9.1f} {memory:>9} "
            f"{error:>8} {timing.share_of_flops:10.0%} {timing.share_of_bytes:8.0%}  "
            f"{plain_ms[timing.operation] / timing.milliseconds:.2f}x"
        )
    return "\n".join(lines)
