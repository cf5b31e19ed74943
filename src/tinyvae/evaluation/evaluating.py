"""Evaluate one model on a set of videos: every clip streamed through it, measured, averaged.

`evaluate` is the door for Python. The verbs ``eval`` and ``compare`` and the report of a run use the same code.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import ClipSource, Middle, choose_split, find_clips, measure_clip
from tinyvae.evaluation.cost import StageTimes, choose_devices, environment_facts, fitting_in_memory, free_memory
from tinyvae.evaluation.metrics import ClipMeter, ClipMetrics, open_lpips
from tinyvae.evaluation.round_trip import (
    MIXED_KIND,
    TEACHER_KIND,
    Model,
    ModelFacts,
    RoundTrip,
    in_chunks_that_fit,
    open_model,
    shared_part,
)
from tinyvae.evaluation.statistics import Summary, summarize
from tinyvae.storage import place_of
from tinyvae.terminal import count_of, progress_bar

if TYPE_CHECKING:
    from tinyvae.losses.perceptual import LPIPS

TEACHER_MAX_FRAMES = 49  # of each clip, where the user set no limit: a teacher holds a whole clip in memory


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which frames are compared; two evaluations with equal settings saw the same pictures."""

    data: str
    data_root: str | None = None
    split: str | None = None
    max_clips: int | None = None
    max_frames: int | None = None
    size: tuple[int, int] | None = None  # (height, width) after crop and scaling; None: as in the file
    middle: Middle | None = None  # the middle frames, as a run validates on them; None: the first ones


@dataclass(frozen=True, kw_only=True)
class ClipResult:
    """One clip: what was read, what it scored, how long encoder and decoder took."""

    name: str
    path: str
    num_frames: int  # encoded; ``metrics.num_frames`` of them came back aligned
    fps: float
    height: int
    width: int
    metrics: ClipMetrics
    encode_s: float
    decode_s: float
    is_warm_up: bool = False  # the first clip of its device: its times are not those of later clips


@dataclass(frozen=True, kw_only=True)
class SkippedClip:
    """A video that was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Speed and memory of encoder and decoder, without reading files and measuring.

    Speed is over all clips except the first of each device (it warms up), where there is more than one; several devices
    add up. Memory is the most of all clips and devices.
    """

    encode_fps: float
    decode_fps: float
    encode_megapixels_per_s: float
    decode_megapixels_per_s: float
    peak_memory_bytes: int | None
    memory_kind: str  # "GPU memory" (this model's, allocated by torch) or "process memory" (resident, all of it)
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """All that is known after an evaluation; plain data."""

    model: ModelFacts
    settings: EvaluationSettings
    summary: Summary
    clips: tuple[ClipResult, ...]
    skipped: tuple[SkippedClip, ...]
    cost: Cost
    environment: dict[str, str]
    notes: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every video was measured and every number is finite."""
        return not self.skipped and all(clip.metrics.is_finite for clip in self.clips)

    @property
    def evaluations(self) -> tuple[EvaluationResult, ...]:
        return (self,)  # a `Comparison` has several

    def by_name(self) -> dict[str, ClipMetrics]:
        return {clip.name: clip.metrics for clip in self.clips}


@torch.no_grad()
def evaluate(
    model: Model,
    data: str | os.PathLike[str],
    *,
    variant: str | None = None,
    device: str | torch.device | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    lpips: LPIPS | str | os.PathLike[str] | None = "auto",
    max_frames: int | None = None,
    max_clips: int | None = None,
    size: tuple[int, int] | None = None,
    split: str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    label: str | None = None,
    show_progress_bar: bool = False,
) -> EvaluationResult:
    """Measure a model on the videos of a folder, annotation file, index, or on one video.

    Args:
        model: a weights file, model, checkpoint or run folder; a diffusers VAE folder; or one in memory.
        device: one or several (``"cuda:0,cuda:1"``); None: every GPU, else the CPU.
        dtype: precision of the weights; None: the file's on a GPU, float32 on a CPU.
        lpips: an `LPIPS`, a weights file, None for without, or "auto": as found by `find_lpips_weights`, else without.
        max_frames: only the first frames of each video. max_clips: that many videos, evenly spread.
        size: (height, width) to crop and scale to; None: every pixel, sizes that do not fit are padded by their edge.
        split: only videos annotated as train, val or test, or "all"; None: val where the data has splits, else all.

    Raises:
        UserError: when there is no video, or not one could be measured.

    Example: ``evaluate("output/my_run", "videos/val", max_frames=49).summary.psnr.mean``
    """
    # A model that is in memory stays where it is unless a device is named.
    devices = [model.device] if device is None and not isinstance(model, str | os.PathLike) else choose_devices(device)
    root = str(data_root) if data_root is not None else None
    settings = EvaluationSettings(
        data=str(data), data_root=root, split=split, max_clips=max_clips, max_frames=max_frames, size=size
    )
    round_trip = open_model(model, variant=variant, device=devices[0], dtype=dtype, label=label)
    return evaluate_models([round_trip], settings, devices=devices, lpips=lpips, show_progress_bar=show_progress_bar)[0]


def evaluate_models(
    round_trips: Sequence[RoundTrip],
    settings: EvaluationSettings,
    *,
    devices: Sequence[torch.device],
    lpips: LPIPS | str | os.PathLike[str] | None,
    show_progress_bar: bool,
) -> list[EvaluationResult]:
    """Evaluate open models, one after the other, on the frames that every one of them gives back."""
    settings, clips, notes = _open_clips(settings, round_trips)
    opened, lpips_notes = open_lpips(lpips)
    return [
        evaluate_round_trip(
            round_trip,
            clips,
            settings,
            devices=devices,
            lpips=opened,
            notes=[*notes, *lpips_notes],
            compared_with=round_trips,
            show_progress_bar=show_progress_bar,
        )
        for round_trip in round_trips
    ]


def _open_clips(
    settings: EvaluationSettings, round_trips: Sequence[RoundTrip]
) -> tuple[EvaluationSettings, list[ClipSource], list[str]]:
    """The settings with a split and a frame limit where the user set none, the clips, and notes for the user."""
    for name, value in (("max_frames", settings.max_frames), ("max_clips", settings.max_clips)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    needed = max(trip.spec.time_factor for trip in round_trips)
    if settings.max_frames is not None and settings.max_frames < needed:
        text = f"--frames {settings.max_frames} (max_frames) is less than the {needed} frames of one latent"
        raise UserError(f"{text}; ask for at least {needed}.")
    if settings.size is not None and min(settings.size) < 1:
        raise UserError(f"size must be height and width in pixels, got {settings.size[0]}x{settings.size[1]}.")
    source, root = place_of(settings.data), place_of(settings.data_root) if settings.data_root is not None else None
    split, note = choose_split(source, data_root=root, wanted=settings.split)
    notes = [note] if note else []
    max_frames = settings.max_frames
    if max_frames is None and any(trip.facts.kind == TEACHER_KIND for trip in round_trips):
        max_frames = TEACHER_MAX_FRAMES
        notes.append(f"only the first {max_frames} frames of each clip: a teacher holds a whole clip in memory.")
    clips = find_clips(source, data_root=root, split=split, max_clips=settings.max_clips)
    return replace(settings, split=split, max_frames=max_frames), clips, notes


def evaluate_round_trip(
    round_trip: RoundTrip,
    clips: Sequence[ClipSource],
    settings: EvaluationSettings,
    *,
    devices: Sequence[torch.device],
    lpips: LPIPS | None = None,
    notes: Sequence[str] = (),
    compared_with: Sequence[RoundTrip] = (),
    show_progress_bar: bool = False,
) -> EvaluationResult:
    """`evaluate` for an open model and clips. Only frames that the models of ``compared_with`` give back too count."""
    free_memory()
    stop = threading.Event()
    with fitting_in_memory(f"{round_trip.facts.label} with its metrics"):
        workers = [
            _Worker(
                round_trip=round_trip.to(device),
                settings=settings,
                lpips=deepcopy(lpips).to(device) if lpips else None,
                compared_with=compared_with,
                stop=stop,
            )
            for device in devices
        ]
    label = round_trip.facts.label
    with progress_bar(total=len(clips), desc=label, unit="clip", disable=not show_progress_bar) as bar:
        outcomes = _measure_all(workers, clips, stop, bar)
    results = tuple(outcome for outcome in outcomes if isinstance(outcome, ClipResult))
    skipped = tuple(outcome for outcome in outcomes if isinstance(outcome, SkippedClip))
    if not results:
        more = f" (and {len(skipped) - 1} more like it)" if len(skipped) > 1 else ""
        raise UserError(f"no video of {settings.data} could be measured: {skipped[0].reason}{more}.")
    broken = [clip.name for clip in results if not clip.metrics.is_finite]
    if broken:
        count = count_of(len(broken), "clip")
        notes = [*notes, f"the decoder made values that are no numbers (NaN) in {count}, first in {broken[0]}."]
    return EvaluationResult(
        model=round_trip.facts,
        settings=settings,
        summary=summarize([clip.metrics for clip in results]),
        clips=results,
        skipped=skipped,
        cost=_cost(workers),
        environment=environment_facts(devices),
        notes=tuple(notes),
    )


def _measure_all(
    workers: Sequence[_Worker], clips: Sequence[ClipSource], stop: threading.Event, bar: tqdm[Any]
) -> list[ClipResult | SkippedClip]:
    """The outcomes in the order of the clips; each worker takes the next clip when it is free."""
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def measure(clip: ClipSource) -> ClipResult | SkippedClip:
        worker = free.get()
        try:
            outcome = worker.measure(clip)
        finally:
            free.put(worker)
        if isinstance(outcome, ClipResult):
            bar.set_postfix_str(f"{outcome.metrics.psnr:.2f} dB", refresh=False)
        bar.update()
        return outcome

    with ThreadPoolExecutor(max_workers=len(workers)) as pool:
        try:
            futures = [pool.submit(measure, clip) for clip in clips]
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        finally:  # one device failed, or the user pressed Ctrl-C: the others do not go through all the rest
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]


@dataclass(kw_only=True)
class _Worker:
    """One model on one device, which measures one clip at a time."""

    round_trip: RoundTrip
    settings: EvaluationSettings
    lpips: LPIPS | None
    compared_with: Sequence[RoundTrip]
    stop: threading.Event
    results: list[ClipResult] = field(default_factory=list)
    peak_bytes: int | None = None

    @torch.no_grad()
    def measure(self, clip: ClipSource) -> ClipResult | SkippedClip:
        """Send a clip through the model; `CancelledError` when somebody sets ``stop``."""
        asked, device = self.settings, self.round_trip.device
        # Kernels that are compiled at run time go to the current GPU of the thread.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with current, fitting_in_memory(clip.path):
                part = measure_clip(clip, max_frames=asked.max_frames, size=asked.size, middle=asked.middle)
                needed = self.round_trip.spec.time_factor
                if part.num_frames < needed:  # almost nothing of it could be compared
                    short = f"it has {part.num_frames} of the {needed} frames that one {self.round_trip.facts.variant}"
                    raise UnreadableVideoError(part.path, f"{short} latent needs; use a longer video")
                part = shared_part(part, [self.round_trip, *self.compared_with])
                metrics, times = in_chunks_that_fit(
                    self.round_trip, part, lambda chunks: self._measure_chunks(chunks, part.num_frames)
                )
        except UnreadableVideoError as bad:
            return SkippedClip(name=clip.name, reason=str(bad))
        result = ClipResult(
            name=clip.name,
            path=str(clip.path),
            num_frames=part.num_frames,
            fps=part.fps,
            height=part.height,
            width=part.width,
            metrics=metrics,
            encode_s=times.encode_s,
            decode_s=times.decode_s,
            is_warm_up=not self.results,
        )
        self.results.append(result)
        return result

    def _measure_chunks(self, chunks: Iterator[Tensor], num_frames: int) -> tuple[ClipMetrics, StageTimes]:
        round_trip, device = self.round_trip, self.round_trip.device
        wanted = min(trip.aligned_frames(num_frames) for trip in (round_trip, *self.compared_with))
        meter, times = ClipMeter(self.lpips), StageTimes(with_memory=True)
        idle = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        measured = 0
        for piece in round_trip.run(chunks, num_frames, times):
            if self.stop.is_set():
                raise CancelledError
            keep = min(piece.decoded.shape[0], wanted - measured)
            meter.push(piece.decoded[:keep], piece.target[:keep])
            measured += keep
        assert measured == wanted, (measured, wanted, num_frames)
        # Two models work in a mixed round trip, and latents may come from an earlier pass: its memory says nothing.
        if times.peak_bytes is not None and round_trip.facts.kind != MIXED_KIND:
            own_bytes = own_memory_bytes(round_trip.facts, device, idle=idle, peak=times.peak_bytes)
            self.peak_bytes = max(self.peak_bytes or 0, own_bytes)
        return meter.result(), times


def own_memory_bytes(facts: ModelFacts, device: torch.device, *, idle: int, peak: int) -> int:
    """On a GPU the model's weights and what was allocated on top of ``idle`` while it ran; on a CPU the process."""
    weights: int = facts.parameters * getattr(torch, facts.dtype).itemsize
    return peak - idle + weights if device.type == "cuda" else peak


def _cost(workers: Sequence[_Worker]) -> Cost:
    encode_fps = decode_fps = encode_pixels = decode_pixels = 0.0
    for worker in workers:
        if counted := worker.results[1:] or worker.results:
            num_frames = sum(clip.num_frames for clip in counted)
            pixels = sum(clip.num_frames * clip.height * clip.width for clip in counted)
            encode_s, decode_s = sum(clip.encode_s for clip in counted), sum(clip.decode_s for clip in counted)
            encode_fps += num_frames / encode_s
            decode_fps += num_frames / decode_s
            encode_pixels += pixels / encode_s
            decode_pixels += pixels / decode_s
    return Cost(
        encode_fps=encode_fps,
        decode_fps=decode_fps,
        encode_megapixels_per_s=encode_pixels / 1e6,
        decode_megapixels_per_s=decode_pixels / 1e6,
        peak_memory_bytes=max((worker.peak_bytes for worker in workers if worker.peak_bytes is not None), default=None),
        memory_kind="GPU memory" if workers[0].round_trip.device.type == "cuda" else "process memory",
        num_devices=len(workers),
    )
