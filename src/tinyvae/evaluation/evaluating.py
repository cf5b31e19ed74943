"""Evaluate one model on a set of videos: every clip streamed through it, measured, averaged.

`evaluate` is the door for Python; the verbs ``eval`` and ``compare`` and the trainer's tools use the same code.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import (
    ClipPart,
    ClipSource,
    Middle,
    choose_split,
    find_clips,
    measure_clip,
)
from tinyvae.evaluation.cost import (
    StageTimes,
    choose_devices,
    environment_facts,
    fitting_in_memory,
    give_back_freed_memory,
    idle_bytes,
    memory_kind,
    on_device,
)
from tinyvae.evaluation.metrics import ClipMeter, ClipMetrics, open_lpips
from tinyvae.evaluation.open_model import open_model
from tinyvae.evaluation.round_trip import (
    Model,
    ModelFacts,
    RoundTrip,
    in_chunks_that_fit,
    own_memory_bytes,
    reference_limit,
)
from tinyvae.evaluation.statistics import Summary, summarise
from tinyvae.terminal import progress_bar

if TYPE_CHECKING:
    from tinyvae.losses.perceptual import LPIPS

FrameLimit = Callable[[int], int]
"""Frames of a T-frame clip -> how many leading frames are compared."""


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

    Frames per second at the sizes of the clips, over all clips but the first of each device (it warms up), where
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
        size: (height, width) to crop and scale to; None: every pixel, odd sizes padded by their edge and cropped back.
        split: only videos annotated as train, val or test, or "all"; None: val where the data has splits, else all.

    Raises:
        UserError: when there is no video, or not one could be measured.
    """
    # A model that is in memory stays where it is unless a device is named.
    devices = [model.device] if device is None and not isinstance(model, str | os.PathLike) else choose_devices(device)
    round_trip = open_model(model, variant=variant, device=devices[0], dtype=dtype, label=label)
    max_frames, limit_notes = reference_limit([round_trip], max_frames)
    settings, clips, split_notes = open_clips(
        data, data_root=data_root, split=split, max_clips=max_clips, max_frames=max_frames, size=size
    )
    ruler, lpips_notes = open_lpips(lpips)
    return evaluate_round_trip(
        round_trip,
        clips,
        settings,
        devices=devices,
        lpips=ruler,
        notes=[*split_notes, *limit_notes, *lpips_notes],
        show_progress_bar=show_progress_bar,
    )


def open_clips(
    data: str | os.PathLike[str],
    *,
    data_root: str | os.PathLike[str] | None,
    split: str | None,
    max_clips: int | None,
    max_frames: int | None,
    size: tuple[int, int] | None,
) -> tuple[EvaluationSettings, list[ClipSource], tuple[str, ...]]:
    """The settings of an evaluation, checked, the clips that they choose, and notes; arguments as in `evaluate`."""
    source, root = Path(data), Path(data_root) if data_root is not None else None
    split, note = choose_split(source, data_root=root, wanted=split)
    settings = EvaluationSettings(
        data=str(source),
        data_root=str(root) if root is not None else None,
        split=split,
        max_clips=max_clips,
        max_frames=max_frames,
        size=size,
    )
    check_settings(settings)
    clips = find_clips(source, data_root=root, split=split, max_clips=max_clips)
    return settings, clips, (note,) if note else ()


def evaluate_round_trip(
    round_trip: RoundTrip,
    clips: Sequence[ClipSource],
    settings: EvaluationSettings,
    *,
    devices: Sequence[torch.device],
    lpips: LPIPS | None = None,
    notes: Sequence[str] = (),
    frame_limit: FrameLimit | None = None,
    show_progress_bar: bool = False,
) -> EvaluationResult:
    """`evaluate` for a model and clips that are open already. ``frame_limit`` compares fewer frames than come back."""
    waiting: queue.SimpleQueue[tuple[int, ClipSource]] = queue.SimpleQueue()
    for item in enumerate(clips):
        waiting.put(item)
    bar = progress_bar(total=len(clips), desc=round_trip.facts.label, unit="clip", disable=not show_progress_bar)
    give_back_freed_memory()
    stop = threading.Event()
    with fitting_in_memory(f"{round_trip.facts.label} with its metrics"):
        workers = [
            _Worker(round_trip.to(device), settings, deepcopy(lpips).to(device) if lpips else None, frame_limit, stop)
            for device in devices
        ]
    with bar, ThreadPoolExecutor(max_workers=len(workers)) as pool:
        try:
            running = [pool.submit(worker.run, waiting, bar) for worker in workers]
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        finally:
            stop.set()  # one device failed, or the user pressed Ctrl-C: the others do not go through all the rest
    outcomes = [outcome for _, outcome in sorted((pair for w in workers for pair in w.outcomes), key=lambda p: p[0])]
    results = tuple(outcome for outcome in outcomes if isinstance(outcome, ClipResult))
    skipped = tuple(outcome for outcome in outcomes if isinstance(outcome, SkippedClip))
    if not results:
        more = f" (and {len(skipped) - 1} more like it)" if len(skipped) > 1 else ""
        raise UserError(f"no video of {settings.data} could be measured: {skipped[0].reason}{more}.")
    return EvaluationResult(
        model=round_trip.facts,
        settings=settings,
        summary=summarise([clip.metrics for clip in results]),
        clips=results,
        skipped=skipped,
        cost=_cost(workers, devices[0]),
        environment=environment_facts(devices),
        notes=(*notes, *_notes_on(results)),
    )


class _Worker:
    """One device: takes clips from the queue until it is empty."""

    def __init__(
        self,
        round_trip: RoundTrip,
        settings: EvaluationSettings,
        lpips: LPIPS | None,
        frame_limit: FrameLimit | None,
        stop: threading.Event,
    ) -> None:
        self._stop = stop
        self._round_trip = round_trip
        self._settings = settings
        self._lpips = lpips
        self._frame_limit = frame_limit
        self.outcomes: list[tuple[int, ClipResult | SkippedClip]] = []
        self.times: list[StageTimes] = []
        self.memory_bytes: list[int] = []

    def run(self, waiting: queue.SimpleQueue[tuple[int, ClipSource]], bar: tqdm[Any]) -> None:
        """Until the queue is empty or somebody sets ``stop``."""
        with torch.no_grad(), on_device(self._round_trip.device):
            for number, clip in _taken_from(waiting):
                outcome: ClipResult | SkippedClip
                try:
                    with fitting_in_memory(clip.path):
                        outcome = self._measure(clip)
                except _StoppedError:
                    return
                except UnreadableVideoError as bad:
                    outcome = SkippedClip(name=clip.name, reason=str(bad))
                self.outcomes.append((number, outcome))
                if isinstance(outcome, ClipResult):
                    bar.set_postfix_str(f"{outcome.metrics.psnr:.2f} dB", refresh=False)
                bar.update()

    def _measure(self, clip: ClipSource) -> ClipResult:
        asked = self._settings
        part = measure_clip(clip, max_frames=asked.max_frames, size=asked.size, middle=asked.middle)
        check_length(part, self._round_trip)
        metrics, times = in_chunks_that_fit(
            self._round_trip, part, lambda chunks: self._measure_chunks(chunks, part.num_frames)
        )
        self.times.append(times)
        return ClipResult(
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

    def _measure_chunks(self, chunks: Iterator[Tensor], num_frames: int) -> tuple[ClipMetrics, StageTimes]:
        round_trip = self._round_trip
        wanted = round_trip.aligned_frames(num_frames)
        if self._frame_limit is not None:
            wanted = min(wanted, self._frame_limit(num_frames))
        meter, times = ClipMeter(self._lpips), StageTimes(with_memory=True)
        idle = idle_bytes(round_trip.device)
        measured = 0
        for piece in round_trip.run(chunks, num_frames, times):
            if self._stop.is_set():
                raise _StoppedError
            keep = min(piece.decoded.shape[0], wanted - measured)
            meter.push(piece.decoded[:keep], piece.target[:keep])
            measured += keep
        assert measured == wanted, (measured, wanted, num_frames)
        if times.peak_bytes is not None:
            self.memory_bytes.append(
                own_memory_bytes(round_trip.facts, round_trip.device, idle=idle, peak=times.peak_bytes)
            )
        return meter.result(), times


class _StoppedError(Exception):
    """The evaluation ends early; nobody outside sees this."""


def _taken_from(waiting: queue.SimpleQueue[tuple[int, ClipSource]]) -> Iterator[tuple[int, ClipSource]]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def check_length(part: ClipPart, round_trip: RoundTrip) -> None:
    """Refuse a clip that does not fill one latent: almost nothing of it could be compared."""
    needed = round_trip.frames_per_latent()
    if part.num_frames < needed:
        raise UnreadableVideoError(
            part.path,
            f"it has {part.num_frames} of the {needed} frames that one {round_trip.facts.variant} latent needs; "
            "use a longer video",
        )


def check_settings(settings: EvaluationSettings) -> None:
    for name, value in (("max_frames", settings.max_frames), ("max_clips", settings.max_clips)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    if settings.size is not None and min(settings.size) < 1:
        raise UserError(f"size must be height and width in pixels, got {settings.size[0]}x{settings.size[1]}.")


def _cost(workers: Sequence[_Worker], device: torch.device) -> Cost:
    encode_fps = decode_fps = encode_pixels = decode_pixels = 0.0
    for worker in workers:
        counted = worker.times[1:] or worker.times
        frames, pixels = sum(t.frames for t in counted), sum(t.pixels for t in counted)
        encode_s, decode_s = sum(t.encode_s for t in counted), sum(t.decode_s for t in counted)
        if frames:
            encode_fps += frames / encode_s
            decode_fps += frames / decode_s
            encode_pixels += pixels / encode_s
            decode_pixels += pixels / decode_s
    return Cost(
        encode_fps=encode_fps,
        decode_fps=decode_fps,
        encode_megapixels_per_s=encode_pixels / 1e6,
        decode_megapixels_per_s=decode_pixels / 1e6,
        peak_memory_bytes=max((bytes_ for worker in workers for bytes_ in worker.memory_bytes), default=None),
        memory_kind=memory_kind(device),
        num_devices=len(workers),
    )


def _notes_on(results: Sequence[ClipResult]) -> tuple[str, ...]:
    broken = [clip.name for clip in results if not clip.metrics.is_finite]
    if not broken:
        return ()
    count = "one clip" if len(broken) == 1 else f"{len(broken)} clips"
    return (f"the decoder made values that are no numbers (NaN) in {count}, first in {broken[0]}.",)
