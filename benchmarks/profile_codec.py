"""Where the time of `model.fused()` goes on a GPU: one row per kernel and layer, and the gaps between kernels.

    python benchmarks/profile_codec.py [--variants taew2_2 taeltx_2] [--sizes 480x736x49] [--output DIR]

Of each variant: a whole decode, a whole encode, and a push of three latents in the middle of a stream, all replayed
from CUDA graphs as users get them. Columns: calls of the kernel, microseconds in which it was the newest one running,
microseconds in which the GPU waited for it, and its share of both together. Times are medians over the calls.

A replayed kernel does not know its layer. The same calls launched one by one do, in the same order: names come from
there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from speed_codec import DTYPES, spread_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from tinyvae import TAEHV, StreamingDecoder
from tinyvae.engines.fused import FusedTAEHV
from tinyvae.engines.stack import Stack
from tinyvae.files import make_output_folder

CALLS, WARMUPS = 9, 4  # the second call of a shape records a graph, the third is the first replayed one
PUSHED = 3  # latents
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LABEL = "layer: "
Event = dict[str, Any]  # of a Chrome trace, times in microseconds


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel or copy of one call."""

    name: str
    grid: tuple[int, ...]
    layer: str  # "" if nobody knows
    busy_us: float  # in which no kernel that began later ran
    gap_us: float  # before it, in which nothing ran; 0 for the first one of a call


def find_kernels(events: Sequence[Event], *, calls: int) -> list[Kernel]:
    """The kernels of one of ``calls`` equal calls in a Chrome trace, in order; times are medians over the calls."""
    found = sorted((event for event in events if event.get("cat") in ON_GPU), key=lambda event: event["ts"])
    assert len(found) % calls == 0, f"{len(found)} kernels in {calls} equal calls"
    count, layers = len(found) // calls, layers_of_launches(events)
    timed = [time_kernels(found[call * count : (call + 1) * count]) for call in range(calls)]
    return [
        Kernel(
            name=event["name"],
            grid=tuple(event["args"].get("grid", ())),
            layer=layers.get(event["args"].get("correlation"), ""),
            busy_us=statistics.median(times[place][0] for times in timed),
            gap_us=statistics.median(times[place][1] for times in timed),
        )
        for place, event in enumerate(found[:count])
    ]


def time_kernels(events: Sequence[Event]) -> list[tuple[float, float]]:
    """(busy, gap before it) of each kernel of one call. A kernel that began while another one ran has no gap, and of
    both only the time that it adds: together the times are those of the call."""
    times, latest = [], events[0]["ts"] if events else 0.0
    for event in events:
        stop = event["ts"] + event["dur"]
        times.append((max(0.0, stop - max(event["ts"], latest)), max(0.0, event["ts"] - latest)))
        latest = max(latest, stop)
    return times


def layers_of_launches(events: Sequence[Event]) -> dict[int, str]:
    """The layer inside of which the host launched each kernel, by the kernel's correlation."""
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(LABEL)]
    layers = {}
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver"):
            continue
        around = [part for part in ranges if part["ts"] <= event["ts"] < part["ts"] + part["dur"]]
        if around:
            layers[event["args"]["correlation"]] = min(around, key=lambda part: part["dur"])["name"][len(LABEL) :]
    return layers


def name_layers(kernels: Sequence[Kernel], launched: Sequence[Kernel]) -> list[Kernel]:
    """``kernels`` of a replayed call with the layers of the same call launched one by one: the same kernels in the same
    order. What only one of both has (copies in and out) keeps what it knows."""
    here, there = ([(one.name, one.grid) for one in call] for call in (kernels, launched))
    named = list(kernels)
    for start, source, count in SequenceMatcher(None, here, there, autojunk=False).get_matching_blocks():
        for place in range(count):
            named[start + place] = replace(kernels[start + place], layer=launched[source + place].layer)
    return named


def make_table(kernels: Sequence[Kernel]) -> list[dict[str, object]]:
    """One row per kernel, grid and layer, in the order in which they first ran; the last row is the whole call."""
    total = sum(one.busy_us + one.gap_us for one in kernels) or 1.0
    groups: dict[tuple[object, ...], list[Kernel]] = {}
    for one in kernels:
        groups.setdefault((one.layer, one.name, one.grid), []).append(one)
    groups["all", "", ()] = list(kernels)
    return [
        {
            "layer": layer,
            "kernel": short_name(str(name)),
            "grid": grid,
            "calls": len(same),
            "busy_us": sum(one.busy_us for one in same),
            "gap_us": sum(one.gap_us for one in same),
            "share": sum(one.busy_us + one.gap_us for one in same) / total,
        }
        for (layer, name, grid), same in groups.items()
    ]


def short_name(name: str) -> str:
    return name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")[:56]


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"{title}\n  {'layer':44} {'kernel':56} {'blocks':>7} {'calls':>5} {'busy us':>8} {'gap us':>7} {'share':>6}")
    for row in rows:
        blocks = torch.Size(row["grid"]).numel() if row["grid"] else ""
        print(
            f"  {row['layer']:44} {row['kernel']:56} {blocks:>7} {row['calls']:>5} {row['busy_us']:8.1f}"
            f" {row['gap_us']:7.1f} {row['share']:6.1%}",
            flush=True,
        )


def label_layers(stack: Stack) -> None:
    """Let every layer of ``stack`` mark what it launches: its place, kind and the shape of its input."""

    def labeled(method: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            with record_function(LABEL + name(*words)):
                return method(*words)

        return call

    def describe(first: int, last: int, x: Tensor) -> str:
        places = f"{first}-{last}" if last > first else f"{first}"
        kinds = "+".join(type(layer).__name__.removesuffix("Layer") for layer in stack.layers[first : last + 1])
        return f"{places} {kinds} {'x'.join(map(str, x.shape))}"

    for name in ("compute", "write"):
        setattr(stack, name, labeled(getattr(stack, name), lambda start, stop, x, *_: describe(start, stop - 1, x)))
    stack.block = labeled(stack.block, lambda place, x, *_: describe(place, place, x))  # type: ignore[method-assign]
    places = {id(layer): place for place, layer in enumerate(stack.layers)}

    def one_layer(layer: object, *words: Tensor) -> str:
        return describe(places[id(layer)], places[id(layer)], words[-1])

    if hasattr(stack, "_layer"):  # the engines of GPUs
        stack._layer = labeled(stack._layer, one_layer)


def trace(call: Callable[[], object], device: torch.device) -> list[Event]:
    """The Chrome trace of CALLS calls, each after the one before has finished."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARMUPS):
        call()
    wait()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as found:
        for _ in range(CALLS):
            call()
            wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        return json.loads(file.read_text())["traceEvents"]


def calls_of(codec: FusedTAEHV, latents: Tensor, frames: Tensor) -> dict[str, Callable[[], object]]:
    stream = StreamingDecoder(codec, num_latents=None)
    return {
        "decode": lambda: codec.decode_video(latents),
        "encode": lambda: codec.encode_video(frames),
        f"push of {PUSHED} latents": lambda: stream.push(latents[:, :PUSHED]),
    }


def profile_variant(model: TAEHV, height: int, width: int, num_frames: int) -> dict[str, list[dict[str, object]]]:
    """Tables by the name of the call."""
    frames = torch.rand(1, num_frames, 3, height, width, device=model.device).to(model.dtype)
    launched = FusedTAEHV(model)
    launched._replays.clear()
    for stack in launched._stacks.values():
        label_layers(stack)
    latents = launched.encode_video(frames)
    tables = {}
    replayed = calls_of(FusedTAEHV(model), latents, frames)
    for name, call in calls_of(launched, latents, frames).items():
        known = find_kernels(trace(call, model.device), calls=CALLS)
        found = name_layers(find_kernels(trace(replayed[name], model.device), calls=CALLS), known)
        tables[name] = make_table(found)
        tables[f"{name}, by kernel"] = make_table([replace(one, layer="", grid=()) for one in found])
    return tables


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--variants", nargs="+", default=["taew2_2", "taeltx_2"])
    parser.add_argument("--sizes", nargs="+", default=["480x736x49"])
    parser.add_argument("--output", type=Path, help="folder for profile.json")
    arguments = parser.parse_args()
    if arguments.output:
        make_output_folder(arguments.output)
    torch.backends.cudnn.benchmark = True  # as in `run_benchmark`
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found: dict[str, object] = {}
    for variant in arguments.variants:
        model = spread_model(variant).to(device, DTYPES[arguments.dtype])
        for size in arguments.sizes:
            height, width, frames = map(int, size.split("x"))
            found[f"{variant} {size}"] = tables = profile_variant(model, height, width, frames)
            for name, rows in tables.items():
                print_table(f"{variant} {size}, {name}", rows)
    if arguments.output:
        (arguments.output / "profile.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
