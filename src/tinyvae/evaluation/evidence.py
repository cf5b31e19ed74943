"""What a report shows of a clip: a film of input, output and error in step, the worst frame magnified, latents.

The measuring pass keeps no picture, so the few clips worth showing go through the models a second time. What is kept
is bounded: `PLAYER_FRAMES` frames of `PLAYER_WIDTH` pixels for each panel, around the worst frame of the clip.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinyvae.evaluation.clip_sources import ClipPart, ClipSource, measure_clip
from tinyvae.evaluation.cost import StageTimes, fitting_in_memory
from tinyvae.evaluation.evaluating import ClipResult, EvaluationResult
from tinyvae.evaluation.metrics import sortable
from tinyvae.evaluation.pictures import (
    heat_map,
    jpeg_uri,
    latents_as_colour,
    png_uri,
    shrink,
    to_bytes_range,
    worst_patch,
)
from tinyvae.evaluation.round_trip import RoundTrip, in_chunks_that_fit
from tinyvae.terminal import progress_bar

PLAYER_FRAMES = 96
PLAYER_WIDTH = 384  # pixels of each panel, less where many stand side by side
MAX_FILM_WIDTH = 4096  # pixels of all panels together: wider H.264 is beyond what hardware decodes
PATCH_SIDE = 64  # pixels of a magnified piece
LATENT_PICTURES = 4
PLAYER_CRF = 23
FALLBACK_FPS = 24.0  # for files that do not tell


@dataclass(frozen=True, kw_only=True)
class Film:
    """An mp4 whose frames hold all panels side by side: one decoder, so the panels cannot drift apart."""

    mp4: bytes
    fps: float
    first_frame: int
    """Which frame of the clip the film begins with."""
    num_frames: int
    panels: tuple[str, ...]
    panel_width: int
    panel_height: int


@dataclass(frozen=True, kw_only=True)
class WorstFrame:
    """The worst frame of a clip for one model: where it is, and its worst patch without loss (``data:`` addresses)."""

    model: str
    frame: int
    psnr: float
    whole: str
    """The input frame, small."""
    box: tuple[float, float, float, float]
    """Of the patch: left, top, width, height as shares of the frame."""
    input: str
    output: str
    error: str
    patch_width: int
    patch_height: int


@dataclass(frozen=True, kw_only=True)
class LatentPictures:
    model: str
    places: tuple[int, ...]
    pictures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ClipEvidence:
    name: str
    why: str
    """Why this clip is shown: worst, best, ..."""
    film: Film
    worst_frames: tuple[WorstFrame, ...]
    latents: tuple[LatentPictures, ...]


def choose_clips(evaluations: Sequence[EvaluationResult], *, limit: int) -> list[tuple[str, str]]:
    """(name, why) of at most ``limit`` clips: worst, best, largest differences of models, median, more bad ones."""
    tables = [evaluation.by_name() for evaluation in evaluations]
    first, last = tables[0], tables[-1]
    shared = [name for name in first if all(name in table for table in tables)]
    score = {name: sortable(sum(table[name].psnr for table in tables) / len(tables)) for name in shared}
    by_score = sorted(shared, key=lambda name: score[name])
    wanted: list[tuple[str, str]] = [(by_score[0], "worst"), (by_score[-1], "best")]
    if len(evaluations) > 1:
        by_gain = sorted(shared, key=lambda name: sortable(last[name].psnr - first[name].psnr))
        label = evaluations[-1].model.label
        wanted += [(by_gain[-1], f"where {label} gains most"), (by_gain[0], f"where {label} gains least")]
    wanted += [(by_score[len(by_score) // 2], "median")]
    wanted += [(name, "among the worst") for name in by_score[1:]]
    chosen: dict[str, str] = {}
    for name, why in wanted:
        if name not in chosen and len(chosen) < limit:
            chosen[name] = why
    return list(chosen.items())


@torch.no_grad()
def gather_evidence(
    round_trips: Sequence[RoundTrip],
    evaluations: Sequence[EvaluationResult],
    *,
    limit: int,
    show_progress_bar: bool = False,
) -> list[ClipEvidence]:
    """Run the chosen clips through the models again and keep pictures of them."""
    shown: list[ClipEvidence] = []
    chosen = choose_clips(evaluations, limit=limit)
    for name, why in progress_bar(chosen, desc="films for the report", unit="clip", disable=not show_progress_bar):
        results = [next(clip for clip in e.clips if clip.name == name) for e in evaluations]
        settings = evaluations[0].settings
        source = ClipSource(name=name, path=Path(results[0].path))
        part = measure_clip(source, max_frames=settings.max_frames, size=settings.size, middle=settings.middle)
        with fitting_in_memory(part.path):
            shown.append(_evidence_of(part, why, round_trips, results))
    return shown


def _evidence_of(
    part: ClipPart, why: str, round_trips: Sequence[RoundTrip], results: Sequence[ClipResult]
) -> ClipEvidence:
    compared = results[0].metrics.num_frames
    worst = [result.metrics.worst_frame for result in results]
    first = max(0, min(worst[-1] - PLAYER_FRAMES // 2, compared - PLAYER_FRAMES))
    window = range(first, min(compared, first + PLAYER_FRAMES))
    width = panel_width(len(round_trips))
    looks = [_look_at(part, trip, window, place, width) for trip, place in zip(round_trips, worst, strict=True)]
    labels = [trip.facts.label for trip in round_trips]
    single = len(labels) == 1
    panels = [("input", looks[0].input)]
    panels += [("output" if single else label, look.output) for label, look in zip(labels, looks, strict=True)]
    panels += [
        ("error" if single else f"error of {label}", look.error) for label, look in zip(labels, looks, strict=True)
    ]
    return ClipEvidence(
        name=results[0].name,
        why=why,
        film=_film(panels, fps=part.fps or FALLBACK_FPS, first_frame=first),
        worst_frames=tuple(
            _worst_frame(label, place, result, look)
            for label, place, result, look in zip(labels, worst, results, looks, strict=True)
        ),
        latents=tuple(
            LatentPictures(
                model=label,
                places=tuple(look.latent_places),
                pictures=tuple(png_uri(picture) for picture in latents_as_colour(torch.cat(look.latents))),
            )
            for label, look in zip(labels, looks, strict=True)
            if look.latents
        ),
    )


class _Look:
    """What one pass of a model over a clip leaves behind: small frames of the window, one whole frame, some latents."""

    def __init__(self, window: range, worst: int, latent_places: Sequence[int], width: int) -> None:
        self._window, self._worst, self._width = window, worst, width
        self._wanted_latents = set(latent_places)
        self._frames = self._latents_seen = 0
        self._input: list[Tensor] = []
        self._output: list[Tensor] = []
        self._error: list[Tensor] = []
        self.worst_pair: tuple[Tensor, Tensor] | None = None
        self.latents: list[Tensor] = []
        self.latent_places: list[int] = []

    def see(self, decoded_TCHW: Tensor, target_TCHW: Tensor) -> None:
        for decoded_CHW, target_CHW in zip(decoded_TCHW, target_TCHW, strict=True):
            if self._frames in self._window:
                pair = decoded_CHW[None], target_CHW[None]
                self._input.append(_small(to_bytes_range(pair[1]), self._width))
                self._output.append(_small(to_bytes_range(pair[0]), self._width))
                self._error.append(_small(heat_map(*pair), self._width))
            if self._frames == self._worst:
                self.worst_pair = decoded_CHW.cpu(), target_CHW.cpu()
            self._frames += 1

    def see_latents(self, latents_NTCHW: Tensor) -> None:
        for latent_CHW in latents_NTCHW[0]:
            if self._latents_seen in self._wanted_latents:
                self.latents.append(latent_CHW[None].float().cpu())
                self.latent_places.append(self._latents_seen)
            self._latents_seen += 1

    @property
    def is_done(self) -> bool:
        return self._frames >= self._window.stop and self._frames > self._worst

    input = property(lambda self: torch.cat(self._input))
    output = property(lambda self: torch.cat(self._output))
    error = property(lambda self: torch.cat(self._error))


def _look_at(part: ClipPart, round_trip: RoundTrip, window: range, worst: int, width: int) -> _Look:
    num_latents = round_trip.latents(window.stop)
    places = sorted({round(i * (num_latents - 1) / (LATENT_PICTURES - 1)) for i in range(LATENT_PICTURES)})

    def look_at(chunks: Iterator[Tensor]) -> _Look:
        look = _Look(window, worst, places, width)
        for piece in round_trip.run(chunks, part.num_frames, StageTimes(), look.see_latents):
            look.see(piece.decoded, piece.target)
            if look.is_done:
                break
        return look

    return in_chunks_that_fit(round_trip, part, look_at)


def _worst_frame(label: str, place: int, result: ClipResult, look: _Look) -> WorstFrame:
    assert look.worst_pair is not None
    decoded, target = look.worst_pair
    top, left, height, width = worst_patch(decoded, target, side=PATCH_SIDE)
    here = (..., slice(top, top + height), slice(left, left + width))
    frame_height, frame_width = target.shape[-2:]
    return WorstFrame(
        model=label,
        frame=place,
        psnr=result.metrics.psnr_by_frame[place],
        whole=jpeg_uri(_small(to_bytes_range(target[None]), PLAYER_WIDTH)[0]),
        box=(left / frame_width, top / frame_height, width / frame_width, height / frame_height),
        input=png_uri(to_bytes_range(target[here])),
        output=png_uri(to_bytes_range(decoded[here])),
        error=png_uri(heat_map(decoded[here][None], target[here][None])[0]),
        patch_width=width,
        patch_height=height,
    )


def _film(panels: Sequence[tuple[str, Tensor]], *, fps: float, first_frame: int) -> Film:
    from tinyvae.video.write import VideoWriter

    num_frames, _, height, width = panels[0][1].shape
    with tempfile.TemporaryDirectory(prefix="tinyvae-report-") as folder:
        file = Path(folder) / "film.mp4"
        with VideoWriter(file, fps=fps, width=width * len(panels), height=height, crf=PLAYER_CRF) as writer:
            writer.write(torch.cat([frames for _, frames in panels], dim=-1))
        mp4 = file.read_bytes()
    return Film(
        mp4=mp4,
        fps=fps,
        first_frame=first_frame,
        num_frames=num_frames,
        panels=tuple(label for label, _ in panels),
        panel_width=width,
        panel_height=height,
    )


def panel_width(num_models: int) -> int:
    """Pixels of a panel at most: input, outputs and errors of all models fit into one film."""
    return min(PLAYER_WIDTH, MAX_FILM_WIDTH // (1 + 2 * num_models) // 2 * 2)


def _small(frames_TCHW: Tensor, width: int) -> Tensor:
    return shrink(frames_TCHW, width=width).cpu()
