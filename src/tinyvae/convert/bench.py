"""How fast a codec is here: medians in one run, plain against fused, beside what the device can do at most.

Times are medians of repeated calls after a warm-up, between device events on CUDA and by the wall clock elsewhere.
Plain and fused are timed in alternation, so a device that slows down slows both. Inputs are random, never zeros.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.engines.fold import (
    ClampLayer,
    ConvLayer,
    GrowLayer,
    Layer,
    MemLayer,
    PoolLayer,
    Size,
    SuperMemLayer,
    fold_layers,
)
from tinyvae.engines.fused import FusedTAEHV
from tinyvae.errors import UserError
from tinyvae.evaluation.cost import without_cudnn_trials
from tinyvae.models.codec import VideoCodec
from tinyvae.models.streaming import Side, StreamingDecoder, StreamingEncoder
from tinyvae.models.taehv import TAEHV
from tinyvae.terminal import progress_bar


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One folded layer over one video."""

    name: str
    flops: float
    bytes_moved: float


def count_layers(layers: list[Layer], size: Size, *, element_size: int) -> list[LayerWork]:
    """Work of each layer; ``size`` is what enters the first one."""
    counted: list[LayerWork] = []
    for layer in layers:
        after = layer.output(size)
        if isinstance(layer, MemLayer | SuperMemLayer):
            name, macs, values, weights = _block_work(layer, size)
        elif isinstance(layer, ClampLayer):
            name, macs, values, weights = "soft clamp", 0, 0, 0  # done where the next layer reads
        else:
            assert isinstance(layer, ConvLayer | PoolLayer | GrowLayer)
            weights, values = layer.weight.numel(), size.values + after.values
            grid = after if isinstance(layer, PoolLayer) else size  # where the convolution's outputs lie
            macs = grid.frames * grid.height * grid.width * weights
            name = f"conv to {layer.weight.shape[0]}"
            name = "pool, 3x3 stride 2" if isinstance(layer, PoolLayer) else name
            name = "upsample, grow, 3x3" if isinstance(layer, GrowLayer) else name
        counted.append(LayerWork(name=name, flops=2.0 * macs, bytes_moved=float((values + weights) * element_size)))
        size = after
    return counted


def _block_work(layer: MemLayer | SuperMemLayer, size: Size) -> tuple[str, int, int, int]:
    """(name, multiply-adds, activations moved, weights) of a memory block."""
    pixels = size.frames * size.height * size.width
    if isinstance(layer, MemLayer):
        weights = layer.first.numel() + layer.second.numel() + layer.third.numel()
        # three convolutions, each in and out, and the residual
        return f"memory block {size.channels}", pixels * weights, 7 * size.values, weights
    weights = layer.depth.numel() + layer.past_depth.numel() + layer.widen.numel() + layer.narrow.numel()
    moved = (1 + 2 + 2 + 4 + 4 + 1 + 1) * size.values
    return f"super memory block {size.channels}", pixels * weights, moved, weights


def layers_of(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> list[LayerWork]:
    """Work per layer of encoding ``num_frames`` frames of this size, or of decoding what they encode to."""
    spec = model.spec
    with torch.no_grad():
        layers = fold_layers(model.encoder if operation == "encode" else model.decoder)
    latents = spec.latents(num_frames)
    size = Size(latents, spec.latent_channels, height // spec.space_factor, width // spec.space_factor)
    if operation == "encode":
        patch = spec.patch_size
        size = Size(latents * spec.time_factor, spec.image_channels, height // patch, width // patch)
    return count_layers(layers, size, element_size=model.dtype.itemsize)


def count_work(model: TAEHV, operation: str, num_frames: int, height: int, width: int) -> tuple[float, float]:
    """(operations, bytes) of the whole pass."""
    layers = layers_of(model, operation, num_frames, height, width)
    return sum(layer.flops for layer in layers), sum(layer.bytes_moved for layer in layers)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device did in this run: a large copy (bytes read and written) and a large matrix product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One operation of one codec."""

    operation: str  # decode or encode
    codec: str  # plain, fused, or fused stream: in chunks of the default size, results let go
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
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
    bar: tqdm[NoReturn] | None = None,
) -> dict[str, list[float]]:
    """Times of each call, taken in turn: a, b, a, b, ... A ``bar`` goes on by one at each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmups + repeats):
        if turn == warmups:
            synchronize(device)
        for name, call in calls.items():
            if bar is not None:
                bar.set_postfix_str(f"{name}, {'warm-up' if turn < warmups else f'call {turn - warmups + 1}'}")
            if turn < warmups:
                call()
            else:
                times[name].append(time_once_ms(call, device))
            if bar is not None:
                bar.update()
    return times


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A large copy and a large matrix product, on random data."""
    is_cuda = device.type == "cuda"
    count, side = (2**29, 8192) if is_cuda else (2**24, 1024)
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
    """Most bytes a call has on the device beyond what was there before it (its arguments, weights); None off CUDA."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def relative_error(made: Tensor, reference: Tensor) -> float:
    difference = made.double() - reference.double()
    return (difference.norm() / reference.double().norm()).item()


@torch.no_grad()
def run_benchmark(model: TAEHV, case: BenchmarkCase) -> tuple[Ceilings, list[Timing], FusedTAEHV]:
    """Time encode and decode in one run: the plain network, its fused form, and that as a stream."""
    model.spec.check_size(case.height, case.width)
    if case.repeats < 3:
        raise UserError(f"a median needs at least 3 repeats, got {case.repeats}; raise --repeats.")
    device, dtype = model.device, model.dtype
    # Sizes change rarely here: let cuDNN pick its fastest algorithm, as a user who cares for speed does.
    torch.backends.cudnn.benchmark = True
    ceilings = measure_ceilings(device, dtype)
    fused = model.fused()
    frames = torch.rand(1, case.num_frames, 3, case.height, case.width, device=device).to(dtype)
    latents = model.encode_video(frames)
    codecs: dict[str, VideoCodec] = {"plain": model, "fused": fused}
    timings: list[Timing] = []
    for operation, argument in (("decode", latents), ("encode", frames)):
        calls: dict[str, Callable[[], object]] = {
            name: _call(codec, operation, argument) for name, codec in codecs.items()
        }
        calls["fused stream"] = partial(stream_through, fused, operation, argument)
        num_calls = len(calls) * (case.warmups + case.repeats)
        with progress_bar(desc=operation, total=num_calls, unit="call", disable=not case.show_progress_bar) as bar:
            times = time_alternating_ms(calls, device, repeats=case.repeats, warmups=case.warmups, bar=bar)
        peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
        # Last, because it is another length: a compiler has seen that of the timed calls first, as a user's would.
        errors = _errors(model, codecs, operation, argument)
        work = count_work(model, operation, case.num_frames, case.height, case.width)
        timings += [
            _timing(
                operation=operation,
                codec=name,
                times_ms=times[name],
                num_frames=case.num_frames,
                work=work,
                ceilings=ceilings,
                peak=peaks[name],
                error=errors.get(name),
            )
            for name in calls
        ]
    return ceilings, timings, fused


def stream_through(codec: VideoCodec, operation: str, video_NTCHW: Tensor, *, chunk_latents: int | None = None) -> None:
    """Push a video piece by piece and let each result go, as a consumer of a live stream does."""
    spec = codec.spec
    side: Side = "decoder" if operation == "decode" else "encoder"
    scale = 1 if side == "decoder" else spec.space_factor
    size = (video_NTCHW.shape[-2] // scale, video_NTCHW.shape[-1] // scale)
    chunk = chunk_latents or codec.stream_chunk_latents(side, *size, num_videos=video_NTCHW.shape[0]) or 1
    stream: StreamingDecoder | StreamingEncoder
    if side == "decoder":
        stream = StreamingDecoder(codec, num_latents=video_NTCHW.shape[1], chunk_latents=chunk)
    else:
        stream = StreamingEncoder(codec, num_frames=video_NTCHW.shape[1], chunk_latents=chunk)
    for part in video_NTCHW.split(chunk * (1 if side == "decoder" else spec.time_factor), dim=1):
        stream.push(part)
    stream.flush()


def _call(codec: VideoCodec, operation: str, argument: Tensor) -> Callable[[], Tensor]:
    run = codec.decode_video if operation == "decode" else codec.encode_video
    return lambda: run(argument)


def _errors(model: TAEHV, codecs: dict[str, VideoCodec], operation: str, argument: Tensor) -> dict[str, float]:
    """Relative error of each codec against the plain network in float32 (float64 for a float32 model), not clamped:
    fresh weights may decode to black alone.

    The first two latents' worth is enough, and fits where the whole video in the wider type would not.
    """
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(model).to(wider)
    argument = argument[:, : 2 if operation == "decode" else 2 * model.spec.time_factor]

    def run(codec: VideoCodec) -> Tensor:
        return codec.decode(argument) if operation == "decode" else codec.encode(argument)

    with without_cudnn_trials():
        reference = run(exact)
    return {name: relative_error(run(codec), reference) for name, codec in codecs.items()}


def _timing(
    *,
    operation: str,
    codec: str,
    times_ms: list[float],
    num_frames: int,
    work: tuple[float, float],
    ceilings: Ceilings,
    peak: int | None,
    error: float | None,
) -> Timing:
    median = statistics.median(times_ms)
    ordered = sorted(times_ms)
    quarter = len(ordered) // 4
    flops, moved = work
    return Timing(
        operation=operation,
        codec=codec,
        milliseconds=median,
        spread=(ordered[-1 - quarter] - ordered[quarter]) / median,
        frames_per_s=num_frames / median * 1e3,
        peak_bytes=peak,
        relative_error=error,
        share_of_flops=flops / (median / 1e3) / ceilings.flops_per_s,
        share_of_bytes=moved / (median / 1e3) / ceilings.bytes_per_s,
    )


def as_json(ceilings: Ceilings, timings: list[Timing]) -> dict[str, object]:
    return {"ceilings": asdict(ceilings), "timings": [asdict(timing) for timing in timings]}
