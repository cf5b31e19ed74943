"""Pictures of clips: heat maps of errors, latents as colors, and what a report shows of a clip.

Measuring keeps no picture, so the few clips that a report shows go through the models a second time. What is kept is
bounded: `PLAYER_FRAMES` frames of `PLAYER_WIDTH` pixels for each panel, around the worst frame of the clip.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.evaluation.clip_sources import FALLBACK_FPS, ClipPart, ClipSource, measure_clip
from tinyvae.evaluation.cost import StageTimes, fitting_in_memory
from tinyvae.evaluation.evaluating import ClipResult, EvaluationResult
from tinyvae.evaluation.metrics import sortable
from tinyvae.evaluation.round_trip import MIXED_KIND, RoundTrip, in_chunks_that_fit, shared_part
from tinyvae.storage import place_of
from tinyvae.terminal import progress_bar

PLAYER_FRAMES = 96
PLAYER_WIDTH = 384  # pixels of each panel, less where many stand side by side
MAX_FILM_WIDTH = 4096  # pixels of all panels together: hardware decodes no wider H.264
PLAYER_CRF = 23
PATCH_SIDE = 64  # pixels of a magnified patch
NUM_LATENT_PICTURES = 4
FRAMES_AT_ONCE = 8  # that are colored together: a heat map takes twenty times the memory of its frame while it is made
DRAWING_THREADS = 4

HEAT_FULL_SCALE = 0.25  # mean absolute error over RGB (values in [0, 1]) that gets the brightest color
HEAT_STOPS = torch.tensor(
    [[8, 9, 14], [38, 16, 78], [110, 24, 110], [185, 44, 86], [236, 98, 42], [250, 178, 44], [255, 250, 200]]
).float()
"""Dark to bright through violet and orange. The lightness rises, so the scale also reads in gray."""


def heat_map(decoded_TCHW: Tensor, target_TCHW: Tensor) -> Tensor:
    """Absolute error, averaged over RGB, in color: uint8 TCHW. Inputs in [0, 1]."""
    error_THW = (decoded_TCHW.clamp(0, 1) - target_TCHW).abs().mean(dim=1)
    # The square root spreads the small errors, where all the structure is.
    place = ((error_THW / HEAT_FULL_SCALE).clamp(0, 1).sqrt() * (len(HEAT_STOPS) - 1)).nan_to_num(len(HEAT_STOPS) - 1)
    lower = place.floor().clamp(max=len(HEAT_STOPS) - 2).long()
    stops = HEAT_STOPS.to(error_THW.device)
    weight = (place - lower).unsqueeze(-1)
    color = stops[lower] * (1 - weight) + stops[lower + 1] * weight
    return color.round().to(torch.uint8).movedim(-1, 1)


def to_bytes_range(frames_TCHW: Tensor) -> Tensor:
    """Values in [0, 1] as uint8 0..255, rounded. NaN becomes magenta, so that nobody overlooks it."""
    frames = frames_TCHW.clamp(0, 1)
    broken = frames.isnan().any(dim=-3, keepdim=True)
    magenta = frames.new_tensor([1.0, 0.0, 1.0]).view(3, 1, 1)
    return (torch.where(broken, magenta, frames) * 255).round().to(torch.uint8)


def latents_as_color(latents_TCHW: Tensor) -> Tensor:
    """The three strongest directions of the latents (PCA over all their pixels) as RGB: uint8 TCHW.

    All pictures of a call have one scale, from the 2nd to the 98th percentile, so that they can be compared.
    """
    latents = latents_TCHW.detach().float().cpu().nan_to_num()
    samples = latents.movedim(1, -1).flatten(0, 2)
    centered = samples - samples.mean(dim=0)
    # Of the C x C covariance, not of the samples: C is at most 128.
    _, directions = torch.linalg.eigh(centered.double().T @ centered.double())
    strongest = directions[:, -3:].flip(1).float()
    # The sign of an eigenvector is arbitrary; the same latents must give the same picture everywhere.
    strongest = strongest * strongest.gather(0, strongest.abs().argmax(dim=0, keepdim=True)).sign()
    projected = centered @ strongest
    spread = projected[torch.linspace(0, len(projected) - 1, min(len(projected), 100_000)).long()]
    low, high = spread.quantile(0.02, dim=0), spread.quantile(0.98, dim=0)
    scaled = ((projected - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return (scaled * 255).round().to(torch.uint8).unflatten(0, latents.movedim(1, -1).shape[:3]).movedim(-1, 1)


def shrink(frames_TCHW: Tensor, *, width: int) -> Tensor:
    """Scale frames down to at most ``width`` pixels wide (never up), to even sizes: uint8 TCHW, on the CPU."""
    in_height, in_width = frames_TCHW.shape[-2:]
    scale = min(1.0, width / in_width)
    size = tuple(max(2, round(length * scale / 2) * 2) for length in (in_height, in_width))
    if size == (in_height, in_width):
        return frames_TCHW.cpu()
    # In float: torch scales bytes on a CPU only.
    scaled = F.interpolate(frames_TCHW.float(), size=size, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8).cpu()


def worst_patch(decoded_CHW: Tensor, target_CHW: Tensor, *, side: int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the square of about ``side`` pixels with the largest error."""
    error = (decoded_CHW.clamp(0, 1) - target_CHW).square().mean(dim=0)[None, None].nan_to_num(1.0)
    height, width = min(side, error.shape[-2]), min(side, error.shape[-1])
    stride = max(1, side // 8)
    means = F.avg_pool2d(error, (height, width), stride=stride)[0, 0]
    row, column = divmod(int(means.argmax()), means.shape[1])
    return row * stride, column * stride, height, width


def picture_uri(image_CHW: Tensor, kind: str = "PNG", **options: int) -> str:
    """A uint8 picture as a ``data:`` address: PNG without loss, or JPEG."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(image_CHW.movedim(0, -1).contiguous().cpu().numpy()).save(stream, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


@dataclass(frozen=True, kw_only=True)
class Film:
    """An mp4 whose frames hold all panels side by side: one decoder plays it, so the panels stay in step."""

    src: str  # the mp4 as a ``data:`` address
    fps: float
    first_frame: int  # of the clip
    num_frames: int
    panels: tuple[str, ...]
    panel_width: int
    panel_height: int


@dataclass(frozen=True, kw_only=True)
class WorstFrame:
    """The worst frame of a clip for one model. Pictures are ``data:`` addresses."""

    model: str
    frame: int
    psnr: float
    whole: str  # the input frame, small
    box: dict[str, float]  # of the worst patch: left, top, width, height as shares of the frame
    patches: dict[str, str]  # the worst patch of input, output and error
    patch_width: int
    patch_height: int


@dataclass(frozen=True, kw_only=True)
class SameFrame:
    """One frame of a clip as input and as each model gives it back; pictures are ``data:`` addresses by label."""

    frame: int
    psnr: dict[str, float]
    whole: dict[str, str]  # small; "input" comes first
    patches: dict[str, str]  # one square of it, pixel by pixel: where the worst of the models is worst


@dataclass(frozen=True, kw_only=True)
class ClipEvidence:
    """What a report shows of one clip, and why it shows this clip (worst, best, ...)."""

    name: str
    why: str
    film: Film
    worst_frames: tuple[WorstFrame, ...]
    latents: dict[str, dict[int, str]]  # model -> number of the latent -> its picture as a ``data:`` address
    same_frame: SameFrame | None  # beside a teacher

    @property
    def lowest_psnr(self) -> float:
        return min((worst.psnr for worst in self.worst_frames), key=sortable)


def choose_clips(evaluations: Sequence[EvaluationResult], *, limit: int) -> list[tuple[str, str]]:
    """(name, why) of at most ``limit`` clips: worst, best, largest differences of models, median, more bad ones."""
    tables = [evaluation.by_name() for evaluation in evaluations]
    first, last = tables[0], tables[-1]
    shared = [name for name in first if all(name in table for table in tables)]
    score = {name: sortable(sum(table[name].psnr for table in tables) / len(tables)) for name in shared}
    by_score = sorted(shared, key=lambda name: score[name])
    wanted = [(by_score[0], "worst"), (by_score[-1], "best")]
    if len(evaluations) > 1:
        by_gain = sorted(shared, key=lambda name: sortable(last[name].psnr - first[name].psnr))
        label = evaluations[-1].model.label
        wanted += [(by_gain[-1], f"where {label} gains most"), (by_gain[0], f"where {label} gains least")]
    wanted += [(by_score[len(by_score) // 2], "median"), *((name, "among the worst") for name in by_score[1:])]
    chosen: dict[str, str] = {}
    for name, why in wanted:
        chosen.setdefault(name, why)
    return list(chosen.items())[:limit]


@torch.no_grad()
def gather_evidence(
    round_trips: Sequence[RoundTrip],
    evaluations: Sequence[EvaluationResult],
    *,
    limit: int,
    clips: Sequence[ClipSource] = (),
    show_progress_bar: bool = False,
) -> list[ClipEvidence]:
    """Send the chosen clips through the models again and keep pictures of them.

    While the models run a clip, threads draw those before it (FFmpeg and Pillow work beside each other).
    """
    chosen, settings = choose_clips(evaluations, limit=limit), evaluations[0].settings
    known, labels = {clip.name: clip for clip in clips}, [trip.facts.label for trip in round_trips]
    is_beside_teacher = any(trip.facts.kind == MIXED_KIND for trip in round_trips)
    stills = {name: hardest_frame(evaluations, name) for name, _ in chosen} if is_beside_teacher else {}
    drawn: list[Future[ClipEvidence]] = []
    is_silent = not (show_progress_bar and chosen)
    with ThreadPoolExecutor(max_workers=DRAWING_THREADS) as pool:
        for name, why in progress_bar(chosen, desc="films for the report", unit="clip", disable=is_silent):
            results = [next(clip for clip in e.clips if clip.name == name) for e in evaluations]
            source = known.get(name) or ClipSource(name=name, path=place_of(results[0].path))
            part = measure_clip(source, max_frames=settings.max_frames, size=settings.size, middle=settings.middle)
            part = shared_part(part, round_trips)
            with fitting_in_memory(part.path):
                looks = _look_at_clip(part, round_trips, results, still=stills.get(name))
            drawn.append(pool.submit(_draw, part, why, labels, looks, results))
            if len(drawn) > DRAWING_THREADS:
                drawn[-DRAWING_THREADS - 1].result()  # so that few clips wait in memory
        return [future.result() for future in drawn]


def hardest_frame(evaluations: Sequence[EvaluationResult], name: str) -> int:
    """The frame of a clip with the lowest PSNR over all models."""
    curves = [evaluation.by_name()[name].psnr_by_frame for evaluation in evaluations]
    means = [sortable(sum(values) / len(values)) for values in zip(*curves, strict=True)]
    return means.index(min(means))


def _look_at_clip(
    part: ClipPart, round_trips: Sequence[RoundTrip], results: Sequence[ClipResult], *, still: int | None
) -> list[_Look]:
    """What each model makes of the frames to show. ``still``: a frame to keep whole, of all models."""
    compared = results[0].metrics.num_frames
    first = max(0, min(results[-1].metrics.worst_frame - PLAYER_FRAMES // 2, compared - PLAYER_FRAMES))
    window = range(first, min(compared, first + PLAYER_FRAMES))
    # Input, outputs and errors of all models fit into one film, of even width.
    width = min(PLAYER_WIDTH, MAX_FILM_WIDTH // (1 + 2 * len(round_trips)) // 2 * 2)
    return [
        _look_at(part, trip, window, (result.metrics.worst_frame, still), width)
        for trip, result in zip(round_trips, results, strict=True)
    ]


def _draw(
    part: ClipPart, why: str, labels: Sequence[str], looks: Sequence[_Look], results: Sequence[ClipResult]
) -> ClipEvidence:
    """The film and the pictures of one clip."""
    outputs = labels if len(labels) > 1 else ["output"]
    errors = [f"error of {label}" for label in labels] if len(labels) > 1 else ["error"]
    panels = [looks[0].input, *(look.output for look in looks), *(look.error for look in looks)]
    names = ("input", *outputs, *errors)
    with fitting_in_memory(part.path):
        return ClipEvidence(
            name=results[0].name,
            why=why,
            film=_film(names, [torch.cat(panel) for panel in panels], part, first_frame=looks[0].window.start),
            worst_frames=tuple(
                _worst_frame(label, result, look) for label, result, look in zip(labels, results, looks, strict=True)
            ),
            latents={label: look.latent_pictures() for label, look in zip(labels, looks, strict=True) if look.latents},
            same_frame=_same_frame(labels, results, looks),
        )


class _Look:
    """What one pass of a model over a clip leaves: small frames of the window, one or two whole ones, some latents."""

    def __init__(self, window: range, kept: tuple[int, int | None], latent_places: Sequence[int], width: int) -> None:
        """``kept``: the model's worst frame, and one that is kept of all models, if any."""
        self.window, self._width = window, width
        self.worst, self.still = kept
        self._kept = {frame for frame in kept if frame is not None}
        self._latent_places = set(latent_places)
        self._num_frames = self._num_latents = 0
        self.input: list[Tensor] = []
        self.output: list[Tensor] = []
        self.error: list[Tensor] = []
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}  # kept frame -> decoded, target
        self.latents: dict[int, Tensor] = {}

    def see(self, decoded_TCHW: Tensor, target_TCHW: Tensor) -> None:
        first, last = self._num_frames, self._num_frames + len(decoded_TCHW)
        begin, end = max(self.window.start, first) - first, min(self.window.stop, last) - first
        for start in range(begin, end, FRAMES_AT_ONCE):
            some = slice(start, min(start + FRAMES_AT_ONCE, end))
            decoded, target = decoded_TCHW[some], target_TCHW[some]
            self.input.append(shrink(to_bytes_range(target), width=self._width))
            self.output.append(shrink(to_bytes_range(decoded), width=self._width))
            self.error.append(shrink(heat_map(decoded, target), width=self._width))
        for kept in self._kept:
            if first <= kept < last:
                self.pairs[kept] = decoded_TCHW[kept - first].cpu(), target_TCHW[kept - first].cpu()
        self._num_frames = last

    def see_latents(self, latents_NTCHW: Tensor) -> None:
        for latent_CHW in latents_NTCHW[0]:
            if self._num_latents in self._latent_places:
                self.latents[self._num_latents] = latent_CHW.float().cpu()
            self._num_latents += 1

    def latent_pictures(self) -> dict[int, str]:
        pictures_TCHW = latents_as_color(torch.stack(list(self.latents.values())))
        return {place: picture_uri(picture) for place, picture in zip(self.latents, pictures_TCHW, strict=True)}

    @property
    def is_done(self) -> bool:
        return self._num_frames >= self.window.stop and self._kept <= self.pairs.keys()


def _look_at(part: ClipPart, round_trip: RoundTrip, window: range, kept: tuple[int, int | None], width: int) -> _Look:
    last = round_trip.spec.latents(round_trip.used_frames(window.stop)) - 1
    places = sorted({round(i * last / (NUM_LATENT_PICTURES - 1)) for i in range(NUM_LATENT_PICTURES)})

    def look_at(chunks: Iterator[Tensor]) -> _Look:
        look = _Look(window, kept, places, width)
        for piece in round_trip.run(chunks, part.num_frames, StageTimes(), look.see_latents):
            look.see(piece.decoded, piece.target)
            if look.is_done:
                break
        return look

    return in_chunks_that_fit(round_trip, part, look_at)


def _worst_frame(label: str, result: ClipResult, look: _Look) -> WorstFrame:
    decoded, target = look.pairs[look.worst]
    top, left, height, width = worst_patch(decoded, target, side=PATCH_SIDE)
    here = (..., slice(top, top + height), slice(left, left + width))
    frame_height, frame_width = target.shape[-2:]
    return WorstFrame(
        model=label,
        frame=look.worst,
        psnr=result.metrics.psnr_by_frame[look.worst],
        whole=picture_uri(shrink(to_bytes_range(target[None]), width=PLAYER_WIDTH)[0], "JPEG", quality=85),
        box={
            "left": left / frame_width,
            "top": top / frame_height,
            "width": width / frame_width,
            "height": height / frame_height,
        },
        patches={
            "input": picture_uri(to_bytes_range(target[here])),
            "output": picture_uri(to_bytes_range(decoded[here])),
            "error": picture_uri(heat_map(decoded[here][None], target[here][None])[0]),
        },
        patch_width=width,
        patch_height=height,
    )


def _same_frame(labels: Sequence[str], results: Sequence[ClipResult], looks: Sequence[_Look]) -> SameFrame | None:
    if (frame := looks[0].still) is None:
        return None
    psnr = {label: result.metrics.psnr_by_frame[frame] for label, result in zip(labels, results, strict=True)}
    target = looks[0].pairs[frame][1]
    frames = {"input": target, **{label: look.pairs[frame][0] for label, look in zip(labels, looks, strict=True)}}
    worst = min(psnr, key=lambda label: sortable(psnr[label]))
    top, left, height, width = worst_patch(frames[worst], target, side=PATCH_SIDE)
    small = {label: shrink(to_bytes_range(image[None]), width=PLAYER_WIDTH)[0] for label, image in frames.items()}
    here = (..., slice(top, top + height), slice(left, left + width))
    return SameFrame(
        frame=frame,
        psnr=psnr,
        whole={label: picture_uri(image, "JPEG", quality=90) for label, image in small.items()},
        patches={label: picture_uri(to_bytes_range(image[here])) for label, image in frames.items()},
    )


def _film(names: tuple[str, ...], panels: Sequence[Tensor], part: ClipPart, *, first_frame: int) -> Film:
    from tinyvae.video.write import VideoWriter

    num_frames, _, height, width = panels[0].shape
    fps = part.fps or FALLBACK_FPS
    with tempfile.TemporaryDirectory(prefix="tinyvae-report-") as folder:
        file = Path(folder) / "film.mp4"
        with VideoWriter(file, fps=fps, width=width * len(panels), height=height, crf=PLAYER_CRF) as writer:
            writer.write(torch.cat(list(panels), dim=-1))
        mp4 = base64.b64encode(file.read_bytes()).decode()
    return Film(
        src=f"data:video/mp4;base64,{mp4}",
        fps=fps,
        first_frame=first_frame,
        num_frames=num_frames,
        panels=names,
        panel_width=width,
        panel_height=height,
    )
