"""How fast codecs are here, beside what the device can do at most: plain against fused, or several models.

Times are medians of repeated calls after a warm-up, between device events on CUDA and by the wall clock elsewhere.
What is compared is timed in turn, so a device that slows down slows all of it. Inputs are random, never zeros.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyvae.engines import fold
from tinyvae.engines.fused import FusedTAEHV
from tinyvae.engines.replay import forget_recordings, idle_bytes
from tinyvae.errors import UserError
from tinyvae.evaluation.cost import without_cudnn_trials
from tinyvae.models.codec import VideoCodec
from tinyvae.models.streaming import Side, StreamingDecoder, StreamingEncoder
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec
from tinyvae.terminal import progress_bar

SIDES: dict[str, Side] = {"decode": "decoder", "encode": "encoder"}
"""Operation -> the side of a network that does it."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device did in this run: a large copy (bytes read and written) and a large matrix product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One operation of one codec."""

    operation: str  # decode or encode
    codec: str  # plain, fused, or fused stream: in chunks of the default size, results discarded
    milliseconds: float  # median
    spread: float  # (slowest - fastest) / median over the middle half of the repeats
    frames_per_s: float
    peak_bytes: int | None  # CUDA only: the most the call had on the device beyond its arguments and the weights
    relative_error: float | None  # against the plain network in float32
    share_of_flops: float  # of the measured matrix product, by the operations the folded form needs
    share_of_bytes: float  # of the measured copy, by the fewest bytes the folded form moves


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """What is timed: ``height`` x ``width`` x ``num_frames`` of one video."""

    height: int
    width: int
    num_frames: int
    repeats: int = 20
    warmups: int = 3
    show_progress_bar: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 3:
            raise UserError(f"a median needs at least 3 repeats, got {self.repeats}; raise --repeats.")


def time_once_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)  # without it, events are those of the first GPU
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        call()
        stop.record(stream)
        stop.synchronize()
        return start.elapsed_time(stop)
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def time_alternating_ms(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    warmups: int,
    title: str | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turn: a, b, a, b, ... With a ``title`` there is a progress bar.

    Example: ``time_alternating_ms({"a": work_a, "b": work_b}, torch.device("cuda"), repeats=20, warmups=3)["a"]``
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    num_calls = len(calls) * (warmups + repeats)
    with progress_bar(desc=title, total=num_calls, unit="call", disable=title is None) as bar:
        for turn in range(warmups + repeats):
            for name, call in calls.items():
                bar.set_postfix_str(f"{name}, {'warm-up' if turn < warmups else f'call {turn - warmups + 1}'}")
                took_ms = time_once_ms(call, device)
                if turn >= warmups:
                    times[name].append(took_ms)
                bar.update()
    return times


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    count, side = (2**29, 8192) if device.type == "cuda" else (2**24, 1024)
    source = torch.rand(count, device=device).to(dtype)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    times = time_alternating_ms(
        {"copy": lambda: target.copy_(source), "product": lambda: a @ b}, device, repeats=10, warmups=3
    )
    moved = 2 * source.numel() * source.element_size()
    return Ceilings(
        bytes_per_s=moved / statistics.median(times["copy"]) * 1e3,
        flops_per_s=2 * side**3 / statistics.median(times["product"]) * 1e3,
    )


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Most bytes a call has on a CUDA device beyond what was there before it (its arguments, weights), with what CUDA
    graphs keep for it. It may be called three times."""
    if device.type != "cuda":
        return None
    forget_recordings()  # those of other calls and models
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    for _ in range(2):  # the second one records again
        call()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + idle_bytes(device)


def relative_error(made: Tensor, reference: Tensor) -> float:
    """Norm of the difference / norm of the reference, in float64."""
    difference = made.double() - reference.double()
    return (difference.norm() / reference.double().norm()).item()


@torch.no_grad()
def run_benchmark(model: TAEHV, case: BenchmarkCase) -> tuple[Ceilings, list[Timing], FusedTAEHV]:
    """Time encode and decode in one run: the plain network, its fused form, and that as a stream."""
    model.spec.check_size(case.height, case.width)
    device, dtype = model.device, model.dtype
    # Sizes change rarely here: let cuDNN pick its fastest algorithm, as a user who cares for speed does.
    torch.backends.cudnn.benchmark = True
    ceilings = measure_ceilings(device, dtype)
    fused = model.fused()
    frames = torch.rand(1, case.num_frames, 3, case.height, case.width, device=device).to(dtype)
    latents = model.encode_video(frames)
    timings = [
        *_time_operation(model, fused, "decode", latents, case, ceilings),
        *_time_operation(model, fused, "encode", frames, case, ceilings),
    ]
    return ceilings, timings, fused


def _time_operation(
    model: TAEHV, fused: FusedTAEHV, operation: str, argument: Tensor, case: BenchmarkCase, ceilings: Ceilings
) -> list[Timing]:
    codecs: dict[str, VideoCodec] = {"plain": model, "fused": fused}
    calls: dict[str, Callable[[], object]] = {
        name: partial(getattr(codec, f"{operation}_video"), argument) for name, codec in codecs.items()
    }
    calls["fused stream"] = partial(stream_through, fused, operation, argument)
    title = operation if case.show_progress_bar else None
    times = time_alternating_ms(calls, model.device, repeats=case.repeats, warmups=case.warmups, title=title)
    peaks = {name: peak_bytes(call, model.device) for name, call in calls.items()}
    # Last, because it is another length: a compiler has seen that of the timed calls first, as a user's would.
    errors = _errors(model, codecs, operation, argument)
    flops, moved = count_work(model, operation, case.num_frames, case.height, case.width)
    timings = []
    for name in calls:
        ordered = sorted(times[name])
        quarter = len(ordered) // 4
        median = statistics.median(ordered)
        timings.append(
            Timing(
                operation=operation,
                codec=name,
                milliseconds=median,
                spread=(ordered[-1 - quarter] - ordered[quarter]) / median,
                frames_per_s=case.num_frames / median * 1e3,
                peak_bytes=peaks[name],
                relative_error=errors.get(name),
                share_of_flops=flops / (median / 1e3) / ceilings.flops_per_s,
                share_of_bytes=moved / (median / 1e3) / ceilings.bytes_per_s,
            )
        )
    return timings


def count_work(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> tuple[float, float]:
    """(floating point operations, bytes moved) of encoding this many frames, or of decoding their latents, folded."""
    flops, moved = zip(*layer_work(model, operation, num_frames, height, width), strict=True)
    return sum(flops), sum(moved)


def floor_ms(model: TAEHV, operation: str, case: BenchmarkCase, ceilings: Ceilings) -> float:
    """The least time that the layers take one after another: each computes at the speed of the matrix product or moves
    its bytes at the speed of the copy, whichever takes longer."""
    work = layer_work(model, operation, case.num_frames, case.height, case.width)
    return 1e3 * sum(max(flops / ceilings.flops_per_s, moved / ceilings.bytes_per_s) for flops, moved in work)


@torch.no_grad()
def layer_work(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> Iterator[tuple[float, float]]:
    """(floating point operations, bytes moved) of each folded layer."""
    spec = model.spec
    latents, factor, patch = spec.latents(num_frames), spec.space_factor, spec.patch_size
    size = fold.Size(latents, spec.latent_channels, height // factor, width // factor)
    if operation == "encode":
        size = fold.Size(latents * spec.time_factor, spec.image_channels, height // patch, width // patch)
    for layer in fold.fold_layers(getattr(model, SIDES[operation])):
        after = layer.output(size)
        grid = after if isinstance(layer, fold.PoolLayer) else size  # where the outputs of the convolution lie
        kernels: tuple[Tensor, ...]
        if isinstance(layer, fold.ClampLayer):
            kernels, values = (), 0  # done where the next layer reads
        elif isinstance(layer, fold.MemLayer):
            kernels = (layer.first, layer.second, layer.third)
            values = 7 * size.values  # three convolutions, each in and out, and the residual
        elif isinstance(layer, fold.WideMemLayer):
            kernels = (layer.first, layer.second, layer.third, layer.fourth)
            values = 9 * size.values  # four convolutions, each in and out, and the residual
        elif isinstance(layer, fold.SuperMemLayer):
            kernels = (layer.depth, layer.past_depth, layer.widen, layer.narrow)
            values = (1 + 2 + 2 + 4 + 4 + 1 + 1) * size.values
        else:
            assert isinstance(layer, fold.ConvLayer | fold.PoolLayer | fold.GrowLayer), layer
            kernels, values = (layer.weight,), size.values + after.values
        weights = sum(kernel.numel() for kernel in kernels)
        macs = grid.frames * grid.height * grid.width * weights
        yield 2.0 * macs, float((values + weights) * model.dtype.itemsize)
        size = after


def stream_through(
    codec: VideoCodec,
    operation: str,
    video_NTCHW: Tensor,
    *,
    chunk_latents: int | None = None,
    pushed_latents: int | None = None,
) -> None:
    """Push a video piece by piece and discard each result, as a consumer of a live stream does. A piece is a chunk
    (default: the codec's choice), or with ``pushed_latents`` this many latents, which wait for whole chunks."""
    is_decoder, (num_videos, length) = operation == "decode", video_NTCHW.shape[:2]
    pixels, frames = (1, 1) if is_decoder else (codec.spec.space_factor, codec.spec.time_factor)  # of one latent
    size = (side // pixels for side in video_NTCHW.shape[-2:])
    chunk = chunk_latents or codec.stream_chunk_latents(SIDES[operation], *size, num_videos=num_videos) or 1
    how: dict[str, Any] = {"chunk_latents": chunk, "whole_chunks": pushed_latents is not None}
    stream: StreamingDecoder | StreamingEncoder
    if is_decoder:
        stream = StreamingDecoder(codec, num_latents=length, **how)
    else:
        stream = StreamingEncoder(codec, num_frames=length, **how)
    for part in video_NTCHW.split((pushed_latents or chunk) * frames, dim=1):
        stream.push(part)
    stream.flush()


def _errors(model: TAEHV, codecs: dict[str, VideoCodec], operation: str, argument: Tensor) -> dict[str, float]:
    """Relative error of each codec against the plain network in float32 (float64 for a float32 model).

    Not clamped, because fresh weights may decode to black only. Two latents of the wider type always fit.
    """
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(model).to(wider)
    argument = argument[:, : 2 if operation == "decode" else 2 * model.spec.time_factor]

    with without_cudnn_trials():
        reference = getattr(exact, operation)(argument)
    return {name: relative_error(getattr(codec, operation)(argument), reference) for name, codec in codecs.items()}


# several models


@dataclass(frozen=True, kw_only=True)
class ModelTiming:
    """One operation of one fused model among others, at one size."""

    model: str
    variant: str
    width: float  # of the network: factor on its channels
    engine: str
    size: tuple[int, int]  # height and width of the frames
    operation: str  # decode or encode
    milliseconds: float  # median
    frames_per_s: float
    speed: float  # how many times as fast as the first model
    peak_bytes: int | None  # as in `Timing`
    share_of_floor: float  # the least time that its layers could take here (`floor_ms`) / the measured time


@torch.no_grad()
def compare_speed(models: Mapping[str, TAEHV], case: BenchmarkCase, ceilings: Ceilings) -> list[ModelTiming]:
    """Time the fused forms of several models in turn, so that a device that slows down slows all of them. ``models`` by
    name, on one device and in one dtype; the first is the one that the others are compared with.

    Example: ``compare_speed({"whole": load_model("a"), "half": load_model("b")}, case, ceilings)[0].milliseconds``
    """
    check_sizes([model.spec for model in models.values()], [(case.height, case.width)])
    first = next(iter(models.values()))
    torch.backends.cudnn.benchmark = True  # as in `run_benchmark`
    fused = {name: model.fused() for name, model in models.items()}
    frames = torch.rand(1, case.num_frames, 3, case.height, case.width, device=first.device).to(first.dtype)
    latents = {name: codec.encode_video(frames) for name, codec in fused.items()}
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "decode": {name: partial(codec.decode_video, latents[name]) for name, codec in fused.items()},
        "encode": {name: partial(codec.encode_video, frames) for name, codec in fused.items()},
    }
    timings = []
    for operation, by_model in calls.items():
        title = f"{case.height}x{case.width} {operation}" if case.show_progress_bar else None
        times = time_alternating_ms(by_model, first.device, repeats=case.repeats, warmups=case.warmups, title=title)
        medians = {name: statistics.median(values) for name, values in times.items()}
        for (name, model), median in zip(models.items(), medians.values(), strict=True):
            timings.append(
                ModelTiming(
                    model=name,
                    variant=model.spec.name,
                    width=model.spec.width,
                    engine=fused[name].engines[SIDES[operation]].split(" ")[0],
                    size=(case.height, case.width),
                    operation=operation,
                    milliseconds=median,
                    frames_per_s=case.num_frames / median * 1e3,
                    speed=next(iter(medians.values())) / median,
                    peak_bytes=peak_bytes(by_model[name], first.device),
                    share_of_floor=floor_ms(model, operation, case, ceilings) / median,
                )
            )
    return timings


def check_sizes(specs: Sequence[VariantSpec], sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse a frame size that does not fit one of the models; the nearest sizes that are named fit all of them."""
    for height, width in sizes:
        # Space factors are 8, 16 and 32: what fits the largest fits all.
        max(specs, key=lambda spec: spec.space_factor).check_size(height, width)


def as_json(ceilings: Ceilings, timings: Sequence[Timing | ModelTiming]) -> dict[str, object]:
    """All numbers as plain dicts, for ``tinyvae bench --output``."""
    return {"ceilings": asdict(ceilings), "timings": [asdict(timing) for timing in timings]}
