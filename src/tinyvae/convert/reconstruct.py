"""Whole videos through a model: video to video, video to latents, latents to video; any length in constant memory.

A film comes back with all of its frames. The codec's frame rule gives back fewer frames than went in for most lengths
(48 frames make 12 latents, which make 45 frames). So the last frame is repeated until every frame is covered, and what
was repeated is cut off again. Frames of uneven times keep their times, so that picture and sound stay together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinyvae.convert.latent_file import LatentFacts, LatentReader, write_latents
from tinyvae.data.check import draw_text, drawable
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import FALLBACK_FPS, ClipPart, ClipSource, frame_chunks, measure_clip
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.evaluation.pictures import HEAT_FULL_SCALE, heat_map, to_bytes_range
from tinyvae.evaluation.round_trip import TEACHER_KIND, ModelFacts, Piece, RoundTrip, StreamedCodec, to_unit_range
from tinyvae.files import atomic_write
from tinyvae.heap import trim_heap
from tinyvae.models.codec import pad_to_multiple
from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
from tinyvae.models.variants import VARIANTS, LatentSpaceName, VariantSpec
from tinyvae.storage import local_file
from tinyvae.video.write import VideoWriter

GAP_PIXELS = 8  # even: the width of a video must stay even
GAP_LEVEL = 24
LABEL_LEVEL = 236
FONT_SIZES = (11, 28)  # pixels, by the width of a panel

OnFrames = Callable[[int, int], None]
"""Gets how many frames were done since the last call, and how many there are in all, for a progress bar."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Which files to write of one video; None for not."""

    video: Path | None = None
    side_by_side: Path | None = None
    picture: Path | None = None  # the middle frame of the side-by-side film, as PNG
    latents: Path | None = None
    labels: bool = False  # whether a strip above the side-by-side film names each panel
    overwrite: bool = False
    crf: float = 18

    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.video, self.side_by_side, self.picture, self.latents) if path is not None)


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """What was written, and how close it is: PSNR in dB (mean over frames) and MSE of the frames before compression."""

    written: tuple[Path, ...]
    num_frames: int
    psnr: float
    mse: float
    seconds: float
    note: str = ""


@torch.no_grad()
def reconstruct_video(
    round_trip: RoundTrip,
    source: Path,
    outputs: Outputs,
    *,
    beside: Sequence[RoundTrip] = (),
    max_frames: int | None = None,
    size: tuple[int, int] | None = None,
    on_frames: OnFrames = lambda done, total: None,
) -> Reconstruction:
    """Encode and decode a video; same frames, same times, same size, its sound carried over.

    ``beside``: further models, for the side-by-side film only. ``size``: (height, width) to crop and scale to.

    Example: ``reconstruct_video(open_model("output/my_run"), Path("film.mp4"), Outputs(video=Path("out.mp4"))).psnr``
    """
    started = time.perf_counter()
    clip = ClipSource(name=source.name, path=source)
    part = measure_clip(clip, max_frames=max_frames, size=size, with_times=True)
    errors: list[float] = []
    with ExitStack() as stack:
        files = _OpenFiles(stack, part, outputs, [model.facts for model in (round_trip, *beside)])
        on_latents = files.latents.write if files.latents is not None else None
        runs = [_run_all_frames(round_trip, part, on_latents), *(_run_all_frames(model, part) for model in beside)]
        for pieces in in_step(runs):
            target, decoded = pieces[0].target, [piece.decoded.clamp(0, 1) for piece in pieces]
            errors += (decoded[0] - target).square().flatten(1).mean(dim=1).tolist()
            files.add_frames(target, decoded)
            on_frames(target.shape[0], part.num_frames)
    assert len(errors) == part.num_frames, (len(errors), part)
    return Reconstruction(
        written=outputs.paths(),
        num_frames=len(errors),
        psnr=math.fsum(map(psnr_from_mse, errors)) / len(errors),
        mse=math.fsum(errors) / len(errors),
        seconds=time.perf_counter() - started,
        note=short_note(part, round_trip),
    )


class _OpenFiles:
    """The files of one reconstruction, which are closed with ``stack``."""

    def __init__(self, stack: ExitStack, part: ClipPart, outputs: Outputs, models: Sequence[ModelFacts]) -> None:
        self._video = self._film = self.latents = None
        self._picture, self._middle = outputs.picture, part.num_frames // 2
        self._strip_CHW = label_strip(panel_labels(models), panel_width=part.width) if outputs.labels else None
        self._num_frames = 0
        if outputs.video is not None:
            self._video = stack.enter_context(_video_writer(part, outputs.video, outputs, part.height, part.width))
        if outputs.side_by_side is not None:
            height = part.height + (self._strip_CHW.shape[-2] if self._strip_CHW is not None else 0)
            width = side_by_side_width(part.width, len(models))
            self._film = stack.enter_context(_video_writer(part, outputs.side_by_side, outputs, height, width))
        if outputs.latents is not None:
            variant = models[0].latent_variant if models[0].kind == TEACHER_KIND else models[0].variant
            facts = latent_facts(part, variant, models[0].latent_space)
            self.latents = stack.enter_context(write_latents(outputs.latents, facts, overwrite=outputs.overwrite))

    def add_frames(self, target_TCHW: Tensor, decoded: Sequence[Tensor]) -> None:
        """The next frames, in [0, 1]: of the input and of each model."""
        if self._video is not None:
            self._video.write(to_bytes_range(decoded[0]))
        if self._film is not None or self._picture is not None:
            joined_TCHW = side_by_side(target_TCHW, decoded)
            if self._strip_CHW is not None:
                strip_TCHW = self._strip_CHW.to(joined_TCHW.device).expand(len(joined_TCHW), -1, -1, -1)
                joined_TCHW = torch.cat([strip_TCHW, joined_TCHW], dim=-2)
            if self._film is not None:
                self._film.write(joined_TCHW)
            middle = self._middle - self._num_frames
            if self._picture is not None and 0 <= middle < len(joined_TCHW):
                from PIL import Image

                with atomic_write(self._picture) as stream:
                    image_HWC = joined_TCHW[middle].movedim(0, -1).contiguous()
                    Image.fromarray(image_HWC.cpu().numpy()).save(stream, "PNG")
        self._num_frames += target_TCHW.shape[0]


def _run_all_frames(
    round_trip: RoundTrip, part: ClipPart, on_latents: Callable[[Tensor], None] | None = None
) -> Iterator[Piece]:
    covered, chunks = covering_chunks(round_trip, part)
    left = part.num_frames
    for piece in round_trip.run(chunks, covered, StageTimes(), on_latents):
        keep = min(piece.decoded.shape[0], left)
        left -= keep
        if keep:
            yield Piece(decoded=piece.decoded[:keep], target=piece.target[:keep])


def in_step(runs: Sequence[Iterator[Piece]]) -> Iterator[list[Piece]]:
    """Pieces of the same frames by several models: each is cut to the shortest, the rest of it comes next."""
    held = [next(run, None) for run in runs]
    while (pieces := [piece for piece in held if piece is not None]) and len(pieces) == len(held):
        length = min(piece.target.shape[0] for piece in pieces)
        yield [Piece(decoded=piece.decoded[:length], target=piece.target[:length]) for piece in pieces]
        held = [
            Piece(decoded=piece.decoded[length:], target=piece.target[length:])
            if piece.target.shape[0] > length
            else next(run, None)
            for piece, run in zip(pieces, runs, strict=True)
        ]


def side_by_side(target_TCHW: Tensor, decoded: Sequence[Tensor]) -> Tensor:
    """Input | outputs | errors of the outputs: uint8 TCHW. Inputs TCHW in [0, 1], all of one size."""
    panels = [to_bytes_range(target_TCHW), *(to_bytes_range(frames_TCHW) for frames_TCHW in decoded)]
    panels += [heat_map(frames_TCHW, target_TCHW) for frames_TCHW in decoded]
    gap = panels[0].new_full((*target_TCHW.shape[:3], GAP_PIXELS), GAP_LEVEL)
    return torch.cat([panels[0], *(part for panel in panels[1:] for part in (gap, panel))], dim=-1)


def side_by_side_width(width: int, num_outputs: int) -> int:
    """Pixels of `side_by_side`, for panels of this width."""
    return (1 + 2 * num_outputs) * (width + GAP_PIXELS) - GAP_PIXELS


def panel_labels(models: Sequence[ModelFacts]) -> list[list[str]]:
    """What stands above each panel of `side_by_side`, the longest form first; the first that fits is taken."""
    levels = round(HEAT_FULL_SCALE * 255)
    outputs, errors = [], []
    for model in models:
        role = "teacher" if model.kind == TEACHER_KIND else "output"
        outputs.append([f"{role}: {model.label}", role])
        of = f"error of {model.label}"
        errors.append([f"{of}, 0 to {levels} of 255", of, "error" if role == "output" else f"{role}'s error"])
    return [["input"], *outputs, *errors]


def label_strip(labels: Sequence[Sequence[str]], *, panel_width: int) -> Tensor:
    """A strip to put above frames of `side_by_side`, which names each panel: uint8 CHW, its height even."""
    from PIL import Image, ImageDraw

    size = min(max(FONT_SIZES[0], panel_width // 16), FONT_SIZES[1])
    width = len(labels) * (panel_width + GAP_PIXELS) - GAP_PIXELS
    strip = Image.new("RGB", (width, (size + size // 2 + 1) // 2 * 2), (GAP_LEVEL,) * 3)
    pen = ImageDraw.Draw(strip)
    indent = size // 4
    room = panel_width - 2 * indent
    for number, forms in enumerate(labels):
        drawn = ((form, *drawable(form, size)) for form in forms)
        text = next((form for form, text, font in drawn if font.getlength(text) <= room), forms[-1])
        place = (number * (panel_width + GAP_PIXELS) + indent, size // 5)
        draw_text(pen, place, text, size=size, room=room, fill=(LABEL_LEVEL,) * 3)
    return torch.from_numpy(np.asarray(strip).copy()).movedim(-1, 0)


@torch.no_grad()
def encode_to_file(
    round_trip: StreamedCodec,
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    max_frames: int | None = None,
    on_frames: OnFrames = lambda done, total: None,
) -> int:
    """Latents of a whole video to a safetensors file; returns how many. `decode_to_video` gives every frame back."""
    part = measure_clip(ClipSource(name=source.name, path=source), max_frames=max_frames, size=None)
    covered, chunks = covering_chunks(round_trip, part)
    codec = round_trip.codec
    encoder = StreamingEncoder(codec, num_frames=covered)
    left = part.num_frames  # of the video's own frames; the repeated ones are no progress
    with write_latents(
        target, latent_facts(part, codec.spec.name, codec.spec.latent_space), overwrite=overwrite
    ) as file:
        for frames_TCHW in chunks:
            frames = to_unit_range(frames_TCHW, codec.device)[None]
            file.write(encoder.push(pad_to_multiple(frames, codec.spec.space_factor)))
            done = min(left, frames_TCHW.shape[0])
            left -= done
            on_frames(done, part.num_frames)
        file.write(encoder.flush())
        return file.num_latents


@torch.no_grad()
def decode_to_video(
    round_trip: StreamedCodec,
    source: Path,
    target: Path,
    *,
    fps: float | None = None,
    audio_from: Path | None = None,
    overwrite: bool = False,
    crf: float = 18,
    on_frames: OnFrames = lambda done, total: None,
) -> int:
    """A video of a latents file; returns its frame count. Size, length and frame rate are those the file states.

    ``fps`` overrules the file. ``audio_from`` names a video whose sound and, if uneven, frame times are carried over.
    """
    reader, codec = LatentReader(source), round_trip.codec
    facts, spec = reader.facts, codec.spec
    height, width = _frame_size(reader, spec)
    limit = facts.num_frames or spec.frames_from_latents(reader.num_latents)
    decoder = StreamingDecoder(codec, num_latents=reader.num_latents)
    written = 0
    writer = VideoWriter(
        target,
        fps=fps or facts.fps or FALLBACK_FPS,
        width=width,
        height=height,
        crf=crf,
        audio_from=audio_from,
        times_s=_times_of(audio_from, limit) if audio_from is not None and fps is None else None,
        overwrite=overwrite,
        pixel_format=pixel_format_for(height, width),
    )
    with writer:
        chunks = reader.chunks(max(1, round_trip.chunk_frames(height, width) // spec.time_factor))
        for latents_NTCHW in with_steady_heap(chunks, codec.device):
            if not latents_NTCHW.float().isfinite().all():  # torch cannot check float8
                raise UserError(f"{source} holds values that are NaN or infinite; look at what made these latents.")
            decoded_NTCHW = decoder.push(latents_NTCHW.to(codec.device, codec.dtype))
            frames_TCHW = decoded_NTCHW[0, : limit - written, :, :height, :width].float()
            if frames_TCHW.shape[0]:
                writer.write(to_bytes_range(frames_TCHW))
                written += frames_TCHW.shape[0]
            on_frames(frames_TCHW.shape[0], limit)
        decoder.flush()
    return written


def _frame_size(reader: LatentReader, spec: VariantSpec) -> tuple[int, int]:
    """Height and width of the video of a latents file; latents of other networks are refused."""
    source, facts, (channels, *sides) = reader.path, reader.facts, reader.frame_shape
    same_latents = [name for name, other in VARIANTS.items() if other.teacher == spec.teacher]
    if facts.variant not in (None, *same_latents):  # noise to this model, even where the shapes agree
        advice = f"use a {facts.variant} model (or --variant {facts.variant}, if the weights are)"
        raise UserError(f"{source} holds {facts.variant} latents and the model is {spec.name}; {advice}.")
    if facts.latent_space != spec.latent_space:
        what = f"{source} holds latents of {facts.latent_space} space and the model is for {spec.latent_space} space"
        raise UserError(f"{what}; use a model of the same latent space.")
    if channels != spec.latent_channels:
        what = f"{source} holds latents of {channels} channels and {spec.name} has {spec.latent_channels}"
        raise UserError(f"{what}; name another model, or write them as N T C H W (diffusers has N C T H W).")
    full_height, full_width = (side * spec.space_factor for side in sides)
    height, width = facts.height or full_height, facts.width or full_width
    if height > full_height or width > full_width:
        what = f"{source} states {height}x{width} pixels, and its latents make only {full_height}x{full_width}"
        raise UserError(f"{what}; encode the video again.")
    return height, width


def covering_chunks(round_trip: RoundTrip, part: ClipPart) -> tuple[int, Iterator[Tensor]]:
    """(how many frames to send through a model so that every frame of the clip comes back, their chunks TCHW)."""
    covered = next(t for t in count(part.num_frames) if round_trip.aligned_frames(t) >= part.num_frames)
    chunks = frame_chunks(part, chunk_frames=round_trip.chunk_frames(part.height, part.width))
    return covered, repeat_last(with_steady_heap(chunks, round_trip.device), covered)


def with_steady_heap(chunks: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The chunks, with the heap trimmed before each on a CPU.

    Without trimming the heap had grown by 95 of 742 MiB after two minutes of 480x720; with it, it does not grow. It
    costs a tenth of the speed.
    """
    for chunk in chunks:
        if device.type == "cpu":
            trim_heap()
        yield chunk


def repeat_last(chunks: Iterable[Tensor], total: int) -> Iterator[Tensor]:
    """The chunks (TCHW), then their last frame repeated until there are ``total`` frames."""
    seen, last = 0, None
    for chunk in chunks:
        seen, last = seen + chunk.shape[0], chunk[-1:]
        yield chunk
    assert last is not None, "a video has at least one frame"
    if seen < total:
        yield last.expand(total - seen, -1, -1, -1)


def latent_facts(part: ClipPart, variant: str | None, latent_space: LatentSpaceName) -> LatentFacts:
    """What a latents file states of the video that it comes from."""
    return LatentFacts(
        variant=variant,
        latent_space=latent_space,
        num_frames=part.num_frames,
        fps=part.fps or FALLBACK_FPS,
        height=part.height,
        width=part.width,
        source=str(part.path),
    )


def short_note(part: ClipPart, round_trip: RoundTrip) -> str:
    """What the user should know of a video that does not fill one latent; empty for others."""
    needed = round_trip.spec.time_factor
    if part.num_frames >= needed:
        return ""
    short = f"it has {part.num_frames} of the {needed} frames that one {round_trip.facts.variant} latent needs"
    return f"{part.path}: {short}, so the last frame was repeated for the encoder"


def pixel_format_for(height: int, width: int) -> Literal["yuv420p", "yuv444p"]:
    """4:2:0 holds even sizes only; a video of an odd size keeps every pixel as 4:4:4."""
    return "yuv444p" if height % 2 or width % 2 else "yuv420p"


def _times_of(film: Path, num_frames: int) -> npt.NDArray[np.float64] | None:
    """Uneven times of a film that has at least ``num_frames`` frames; None where they are even or too few."""
    part = measure_clip(ClipSource(name=film.name, path=film), max_frames=num_frames, size=None, with_times=True)
    return part.times_s if part.num_frames == num_frames else None


def _video_writer(part: ClipPart, path: Path, outputs: Outputs, height: int, width: int) -> VideoWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    return VideoWriter(
        path,
        fps=part.fps or FALLBACK_FPS,
        width=width,
        height=height,
        crf=outputs.crf,
        pixel_aspect=part.pixel_aspect,
        audio_from=local_file(part.path),
        times_s=part.times_s,
        overwrite=outputs.overwrite,
        pixel_format=pixel_format_for(height, width),
    )
