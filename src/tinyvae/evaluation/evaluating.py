"""Evaluate one model on a set of videos: every clip streamed through it, measured, averaged.

`evaluate` is the door for Python. The verbs ``eval`` and ``compare`` and the report of a run use the same code.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import ClipSource, Middle, choose_split, find_clips, measure_clip
from tinyvae.evaluation.cost import (
    StageTimes,
    choose_devices,
    environment_facts,
    fitting_in_memory,
    give_back_freed_memory,
)
from tinyvae.evaluation.metrics import ClipMeter, ClipMetrics, open_lpips
from tinyvae.evaluation.round_trip import TEACHER_KIND, Model, ModelFacts, RoundTrip, in_chunks_that_fit, open_model
from tinyvae.evaluation.statistics import Summary, summarise
from tinyvae.terminal import count_of, progress_bar

if TYPE_CHECKING:
    from tinyvae.losses.perceptual import LPIPS

TEACHER_MAX_FRAMES = 49
"""Frames of each clip where a teacher takes part and the user set no limit: it holds a whole clip in memory."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which frames are compared; two evaluations with equal settings saw the same pictures."""

    data: str
    data_root: str | None = None
    split: str | None = None
    max_clips: int | None = None
    max_frames: int | None = None
    size: tuple[int, int] | None = None
    """(height, width) that clips were cropped and scaled to; None: as they are in the file."""
    middle: Middle | None = None
    """The middle frames of each video, as a run validates on them; None: the first ones."""


@dataclass(frozen=True, kw_only=True)
class ClipResult:
    """One clip: what was read, what it scored, how long encoder and decoder took."""

    name: str
    path: str
    num_frames: int
    """Frames that went into the encoder; ``metrics.num_frames`` of them came back aligned."""
    fps: float
    height: int
    width: int
    metrics: ClipMetrics
    encode_s: float
    decode_s: float


@dataclass(frozen=True, kw_only=True)
class SkippedClip:
    """A video that was not measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Speed and memory of the model, without reading files and measuring.

    Frames per second at the sizes of the clips, over all clips except the first of each device (it warms up), where
    there is more than one. Several devices add up. Memory is that of encoder and decoder while they ran, the most of
    all clips and devices.
    """

    encode_fps: float
    decode_fps: float
    encode_megapixels_per_s: float
    decode_megapixels_per_s: float
    peak_memory_bytes: int | None
    memory_kind: str
    """``GPU memory`` (this model's, allocated by torch) or ``process memory`` (resident, with all that is in it)."""
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
        """Itself, as a `Comparison` has several."""
        return (self,)

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

    Example::

        result = evaluate("output/my_run", "videos/val", max_frames=49)
        print(result.summary.psnr.mean, result.cost.decode_fps)
    """
    # A model that is in memory stays where it is unless a device is named.
    devices = [model.device] if device is None and not isinstance(model, str | os.PathLike) else choose_devices(device)
    settings = EvaluationSettings(
        data=str(data),
        data_root=str(data_root) if data_root is not None else None,
        split=split,
        max_clips=max_clips,
        max_frames=max_frames,
        size=size,
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
    ruler, lpips_notes = open_lpips(lpips)
    return [
        evaluate_round_trip(
            round_trip,
            clips,
            settings,
            devices=devices,
            lpips=ruler,
            notes=[*notes, *lpips_notes],
            compared_with=round_trips,
            show_progress_bar=show_progress_bar,
        )
        for round_trip in round_trips
    ]


def _open_clips(
    settings: EvaluationSettings, round_trips: Sequence[RoundTrip]
) -> tuple[EvaluationSettings, list[ClipSource], list[str]]:
    """The settings with a split and a frame limit where the user set none, the clips, and notes on what was chosen."""
    for name, value in (("max_frames", settings.max_frames), ("max_clips", settings.max_clips)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    if settings.size is not None and min(settings.size) < 1:
        raise UserError(f"size must be height and width in pixels, got {settings.size[0]}x{settings.size[1]}.")
    source, root = Path(settings.data), Path(settings.data_root) if settings.data_root is not None else None
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
    """`evaluate` for a model and clips that are open already.

    ``compared_with``: only frames that these models give back too are compared.
    """
    give_back_freed_memory()
    stop = threading.Event()
    with fitting_in_memory(f"{round_trip.facts.label} with its metrics"):
        workers = [
            _Worker(round_trip.to(device), settings, deepcopy(lpips).to(device) if lpips else None, compared_with, stop)
            for device in devices
        ]
    bar = progress_bar(total=len(clips), desc=round_trip.facts.label, unit="clip", disable=not show_progress_bar)
    with bar:
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
        summary=summarise([clip.metrics for clip in results]),
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


class _Worker:
    """One model on one device, which measures one clip at a time."""

    def __init__(
        self,
        round_trip: RoundTrip,
        settings: EvaluationSettings,
        lpips: LPIPS | None,
        compared_with: Sequence[RoundTrip],
        stop: threading.Event,
    ) -> None:
        self.round_trip, self._settings, self._lpips = round_trip, settings, lpips
        self._compared_with, self._stop = compared_with, stop
        self.results: list[ClipResult] = []
        self.peak_bytes: int | None = None

    @torch.no_grad()
    def measure(self, clip: ClipSource) -> ClipResult | SkippedClip:
        """Send a clip through the model; `_StoppedError` when somebody sets ``stop``."""
        asked, device = self._settings, self.round_trip.device
        # Kernels that are compiled at run time go to the current GPU of the thread.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        try:
            with current, fitting_in_memory(clip.path):
                part = measure_clip(clip, max_frames=asked.max_frames, size=asked.size, middle=asked.middle)
                needed = self.round_trip.spec.time_factor
                if part.num_frames < needed:  # almost nothing of it could be compared
                    short = f"it has {part.num_frames} of the {needed} frames that one {self.round_trip.facts.variant}"
                    raise UnreadableVideoError(part.path, f"{short} latent needs; use a longer video")
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
        )
        self.results.append(result)
        return result

    def _measure_chunks(self, chunks: Iterator[Tensor], num_frames: int) -> tuple[ClipMetrics, StageTimes]:
        round_trip, device = self.round_trip, self.round_trip.device
        wanted = min(trip.aligned_frames(num_frames) for trip in (round_trip, *self._compared_with))
        meter, times = ClipMeter(self._lpips), StageTimes(with_memory=True)
        idle = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        measured = 0
        for piece in round_trip.run(chunks, num_frames, times):
            if self._stop.is_set():
                raise _StoppedError
            keep = min(piece.decoded.shape[0], wanted - measured)
            meter.push(piece.decoded[:keep], piece.target[:keep])
            measured += keep
        assert measured == wanted, (measured, wanted, num_frames)
        if times.peak_bytes is not None:
            own_bytes = own_memory_bytes(round_trip.facts, device, idle=idle, peak=times.peak_bytes)
            self.peak_bytes = max(self.peak_bytes or 0, own_bytes)
        return meter.result(), times


class _StoppedError(Exception):
    """The evaluation ends early; nobody outside sees this."""


def own_memory_bytes(facts: ModelFacts, device: torch.device, *, idle: int, peak: int) -> int:
    """Memory of one model: on a GPU its weights and what was allocated on top of ``idle`` while it ran, so that other
    models and metrics on that GPU do not count; on a CPU the whole process."""
    if device.type != "cuda":
        return peak
    itemsize: int = getattr(torch, facts.dtype).itemsize
    return peak - idle + facts.parameters * itemsize


def _cost(workers: Sequence[_Worker]) -> Cost:
    encode_fps = decode_fps = encode_pixels = decode_pixels = 0.0
    for worker in workers:
        counted = worker.results[1:] or worker.results
        if counted:
            num_frames = [worker.round_trip.used_frames(clip.num_frames) for clip in counted]
            frames = sum(num_frames)
            pixels = sum(n * clip.height * clip.width for n, clip in zip(num_frames, counted, strict=True))
            encode_s, decode_s = sum(clip.encode_s for clip in counted), sum(clip.decode_s for clip in counted)
            encode_fps += frames / encode_s
            decode_fps += frames / decode_s
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
