"""Whole videos through a model: video to video, video to latents, latents to video; any length in constant memory.

A film comes back with all of its frames. The codec's frame rule gives back fewer than went in for most lengths (48
frames make 12 latents, which make 45 frames), so the last frame is repeated until every frame is covered, and what was
repeated is cut off again. Frames of uneven times keep their times, so that picture and sound stay together.
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

from tinyvae.convert.latent_file import LatentFacts, LatentReader, LatentWriter
from tinyvae.data.check import fitting_text
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import ClipPart, ClipSource, frame_chunks, measure_clip
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.evaluation.pictures import HEAT_FULL_SCALE, heat_map, to_bytes_range
from tinyvae.evaluation.round_trip import REFERENCE_KIND, ModelFacts, RoundTrip, StreamedCodec, to_unit_range
from tinyvae.heap import trim_heap
from tinyvae.models.codec import pad_to_multiple
from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
from tinyvae.video.write import VideoWriter

GAP_PIXELS = 8  # even: the width of a video must stay even
GAP_LEVEL = 24
LABEL_LEVEL = 236
FONT_SIZES = (11, 28)  # pixels, by the width of a panel


def side_by_side(target_TCHW: Tensor, decoded: Sequence[Tensor], *, with_error: bool = True) -> Tensor:
    """Input | outputs | errors of the outputs: uint8 TCHW. Inputs TCHW in [0, 1], all of one size."""
    panels = [to_bytes_range(target_TCHW), *(to_bytes_range(frames_TCHW) for frames_TCHW in decoded)]
    if with_error:
        panels += [heat_map(frames_TCHW, target_TCHW) for frames_TCHW in decoded]
    t, c, height, _ = panels[0].shape
    gap = torch.full((t, c, height, GAP_PIXELS), GAP_LEVEL, dtype=torch.uint8, device=panels[0].device)
    joined: list[Tensor] = [panels[0]]
    for panel in panels[1:]:
        joined += [gap, panel]
    return torch.cat(joined, dim=-1)


def side_by_side_width(width: int, num_outputs: int) -> int:
    """Width of `side_by_side` with errors, in pixels."""
    num_panels = 1 + 2 * num_outputs
    return width * num_panels + GAP_PIXELS * (num_panels - 1)


def panel_labels(models: Sequence[ModelFacts]) -> list[list[str]]:
    """What stands above each panel of `side_by_side`, the longest form first; the first that fits is taken."""
    levels = round(HEAT_FULL_SCALE * 255)
    outputs, errors = [], []
    for model in models:
        role = "teacher" if model.kind == REFERENCE_KIND else "output"
        outputs.append([f"{role}: {model.label}", role])
        of = f"error of {model.label}"
        errors.append([f"{of}, 0 to {levels} of 255", of, "error" if role == "output" else f"{role}'s error"])
    return [["input"], *outputs, *errors]


def with_labels(joined_TCHW: Tensor, labels: Sequence[Sequence[str]], *, panel_width: int) -> Tensor:
    """Frames of `side_by_side` with a strip above them that names each panel: uint8 TCHW, its height still even."""
    from PIL import Image, ImageDraw, ImageFont

    size = min(max(FONT_SIZES[0], panel_width // 16), FONT_SIZES[1])
    font = ImageFont.load_default(size=size)
    height = (size + size // 2 + 1) // 2 * 2
    strip = Image.new("RGB", (joined_TCHW.shape[-1], height), (GAP_LEVEL,) * 3)
    pen = ImageDraw.Draw(strip)
    indent = size // 4
    room = panel_width - 2 * indent
    for number, forms in enumerate(labels):
        text = next((form for form in forms if font.getlength(form) <= room), forms[-1])
        place = (number * (panel_width + GAP_PIXELS) + indent, size // 5)
        pen.text(place, fitting_text(text, font, room), fill=(LABEL_LEVEL,) * 3, font=font)
    strip_CHW = torch.from_numpy(np.asarray(strip).copy()).movedim(-1, 0).to(joined_TCHW.device)
    return torch.cat([strip_CHW.expand(joined_TCHW.shape[0], -1, -1, -1), joined_TCHW], dim=-2)


def write_picture(file: Path, image_CHW: Tensor) -> None:
    """A uint8 picture as PNG."""
    from PIL import Image

    Image.fromarray(image_CHW.movedim(0, -1).contiguous().cpu().numpy()).save(file)


FALLBACK_FPS = 24.0  # for files that do not tell

OnFrames = Callable[[int, int], None]
"""Told how many frames were done since the last call, and how many there are in all, for a progress bar."""


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """What was written, and how close it is: PSNR in dB (mean over frames) and MSE of the frames before compression."""

    source: Path
    written: tuple[Path, ...]
    num_frames: int
    num_latents: int
    psnr: float
    mse: float
    seconds: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Which files to write of one video; None for not."""

    video: Path | None = None
    side_by_side: Path | None = None
    latents: Path | None = None
    overwrite: bool = False
    crf: float = 18

    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.video, self.side_by_side, self.latents) if path is not None)


@torch.no_grad()
def reconstruct_video(
    round_trip: RoundTrip,
    source: Path,
    outputs: Outputs,
    *,
    max_frames: int | None = None,
    on_frames: OnFrames | None = None,
) -> Reconstruction:
    """Encode and decode a video; same frames, same times, same size, its sound carried over."""
    started = time.perf_counter()
    part = measure_clip(ClipSource(name=source.name, path=source), max_frames=max_frames, size=None, with_times=True)
    covered = frames_to_cover(round_trip, part.num_frames)
    chunks = frame_chunks(part, chunk_frames=round_trip.chunk_frames(part.height, part.width))
    chunks = repeat_last(with_steady_heap(chunks, round_trip.device), covered)
    errors: list[float] = []
    num_latents = 0
    with ExitStack() as files:
        video = files.enter_context(_video_writer(part, outputs.video, outputs)) if outputs.video else None
        beside = None
        if outputs.side_by_side is not None:
            width = side_by_side_width(part.width, num_outputs=1)
            beside = files.enter_context(_video_writer(part, outputs.side_by_side, outputs, width=width))
        latents = None
        if outputs.latents is not None:
            facts = latent_facts(part, variant=round_trip.facts.latent_variant or round_trip.facts.variant)
            latents = files.enter_context(LatentWriter(outputs.latents, facts, overwrite=outputs.overwrite))

        def keep_latents(latents_NTCHW: Tensor) -> None:
            nonlocal num_latents
            num_latents += latents_NTCHW.shape[1]
            if latents is not None and latents_NTCHW.shape[1]:
                latents.write(latents_NTCHW)

        for piece in round_trip.run(chunks, covered, StageTimes(), keep_latents):
            keep = min(piece.decoded.shape[0], part.num_frames - len(errors))
            if keep == 0:
                continue
            decoded, target = piece.decoded[:keep].clamp(0, 1), piece.target[:keep]
            errors += (decoded - target).square().flatten(1).mean(dim=1).tolist()
            if video is not None:
                video.write(to_bytes_range(decoded))
            if beside is not None:
                beside.write(side_by_side(target, [decoded]))
            if on_frames is not None:
                on_frames(keep, part.num_frames)
    assert len(errors) == part.num_frames, (len(errors), part)
    return Reconstruction(
        source=source,
        written=outputs.paths(),
        num_frames=len(errors),
        num_latents=num_latents,
        psnr=math.fsum(map(psnr_from_mse, errors)) / len(errors),
        mse=math.fsum(errors) / len(errors),
        seconds=time.perf_counter() - started,
        note=short_note(part, round_trip),
    )


@torch.no_grad()
def encode_to_file(
    round_trip: StreamedCodec,
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    max_frames: int | None = None,
    on_frames: OnFrames | None = None,
) -> int:
    """Latents of a whole video to a safetensors file; returns how many. `decode_to_video` gives every frame back."""
    part = measure_clip(ClipSource(name=source.name, path=source), max_frames=max_frames, size=None)
    covered = frames_to_cover(round_trip, part.num_frames)
    codec = round_trip.codec
    encoder = StreamingEncoder(codec)
    chunks = frame_chunks(part, chunk_frames=round_trip.chunk_frames(part.height, part.width))
    facts = latent_facts(part, variant=codec.spec.name)
    left = part.num_frames  # of the video's own frames; the repeated ones are no progress
    with LatentWriter(target, facts, overwrite=overwrite) as file:
        for frames_TCHW in repeat_last(with_steady_heap(chunks, codec.device), covered):
            frames = to_unit_range(frames_TCHW, codec.device)[None]
            made = encoder.push(pad_to_multiple(frames, codec.spec.space_factor))
            if made.shape[1]:
                file.write(made)
            done = min(left, frames_TCHW.shape[0])
            left -= done
            if on_frames is not None and done:
                on_frames(done, part.num_frames)
        rest = encoder.flush()
        if rest.shape[1]:
            file.write(rest)
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
    on_frames: OnFrames | None = None,
) -> int:
    """A video of a latents file; returns its frame count. Size, length and frame rate are those the file states.

    ``fps`` overrules the file; ``audio_from`` names a video whose sound is carried over, and the times of its frames
    where they are uneven and it has as many.
    """
    reader, codec = LatentReader(source), round_trip.codec
    check_variant(reader, codec.spec.name)
    facts = reader.facts
    factor = codec.spec.space_factor
    height, width = facts.height or reader.frame_shape[1] * factor, facts.width or reader.frame_shape[2] * factor
    limit = facts.num_frames or codec.spec.frames_from_latents(reader.num_latents)
    frames_each = round_trip.chunk_frames(height, width)
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
        chunks = reader.chunks(max(1, frames_each // codec.spec.time_factor))
        for latents_NTCHW in with_steady_heap(chunks, codec.device):
            decoded_NTCHW = decoder.push(latents_NTCHW.to(codec.device, codec.dtype))
            frames_TCHW = decoded_NTCHW[0, : limit - written, :, :height, :width].float()
            if frames_TCHW.shape[0]:
                writer.write(to_bytes_range(frames_TCHW))
                written += frames_TCHW.shape[0]
            if on_frames is not None:
                on_frames(frames_TCHW.shape[0], limit)
        decoder.flush()
    return written


def frames_to_cover(round_trip: RoundTrip, num_frames: int) -> int:
    """How many frames to send through so that at least ``num_frames`` come back; the codec's rule decides."""
    return next(t for t in count(num_frames) if round_trip.aligned_frames(t) >= num_frames)


def with_steady_heap(chunks: Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The chunks, with the heap trimmed before each on a CPU.

    What a chunk's tensors leave behind are holes of many sizes. Without trimming they had grown by 95 of 742 MiB after
    two minutes of 480x720; with it a minute takes what two seconds take. It costs a tenth of the speed.
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


def latent_facts(part: ClipPart, *, variant: str) -> LatentFacts:
    return LatentFacts(
        variant=variant,
        num_frames=part.num_frames,
        fps=part.fps or FALLBACK_FPS,
        height=part.height,
        width=part.width,
        source=str(part.path),
    )


def check_variant(reader: LatentReader, variant: str) -> None:
    """Latents of one variant are noise to another, even where the shapes agree."""
    stated = reader.facts.variant
    if stated is not None and stated != variant:
        raise UserError(
            f"{reader.path} holds {stated} latents and the model is {variant}; use a {stated} model "
            f"(or --variant {stated}, if the weights are)."
        )


def short_note(part: ClipPart, round_trip: RoundTrip) -> str:
    needed = round_trip.frames_per_latent()
    if part.num_frames >= needed:
        return ""
    return (
        f"{part.path}: it has {part.num_frames} of the {needed} frames that one {round_trip.facts.variant} latent "
        "needs, so the last frame was repeated for the encoder"
    )


def pixel_format_for(height: int, width: int) -> Literal["yuv420p", "yuv444p"]:
    """4:2:0 holds even sizes only; a video of an odd size keeps every pixel as 4:4:4."""
    return "yuv444p" if height % 2 or width % 2 else "yuv420p"


def _times_of(film: Path, num_frames: int) -> npt.NDArray[np.float64] | None:
    """Uneven times of a film that has at least ``num_frames`` frames; None where they are even or too few."""
    part = measure_clip(ClipSource(name=film.name, path=film), max_frames=num_frames, size=None, with_times=True)
    return part.times_s if part.num_frames == num_frames else None


def _video_writer(part: ClipPart, path: Path, outputs: Outputs, *, width: int | None = None) -> VideoWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    width = width or part.width
    return VideoWriter(
        path,
        fps=part.fps or FALLBACK_FPS,
        width=width,
        height=part.height,
        crf=outputs.crf,
        pixel_aspect=part.pixel_aspect,
        audio_from=part.path,
        times_s=part.times_s,
        overwrite=outputs.overwrite,
        pixel_format=pixel_format_for(part.height, width),
    )
