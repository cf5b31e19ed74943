"""A few samples through a model, to look at: what ``inference.py`` at the root of the repository does.

For each sample a comparison video (input | outputs | errors), a picture of its middle frame, MSE and PSNR; in the end
the totals. A sample is at most ``num_frames`` long and is held in memory as bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinyvae.data.write import VideoWriter
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import ClipPart, ClipSource, find_clips, frame_chunks, measure_clip
from tinyvae.evaluation.evaluating import check_length
from tinyvae.evaluation.latent_file import LatentWriter
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.evaluation.output_folder import make_output_folder, writing_to
from tinyvae.evaluation.reconstruct import FALLBACK_FPS, latent_facts, pixel_format_for
from tinyvae.evaluation.resources import choose_devices, fitting_in_memory
from tinyvae.evaluation.round_trip import REFERENCE_KIND, RoundTrip, open_model, own_memory_bytes
from tinyvae.evaluation.side_by_side import side_by_side, side_by_side_width, write_picture
from tinyvae.evaluation.stage_cost import StageTimes, idle_bytes, memory_kind

BENCHMARK_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """What to run. Without ``data_root`` and ``annotation_file`` the procedural sample clips are used."""

    model_path: Path
    output_dir: Path
    num_samples: int = 5
    num_frames: int = 49
    variant: str | None = None
    reference_path: Path | None = None
    data_root: Path | None = None
    annotation_file: Path | None = None
    size: tuple[int, int] | None = None
    save_latents: bool = False
    benchmark: bool = False
    device: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampleScore:
    model: str
    mse: float
    psnr: float
    """Mean over frames, dB."""


@torch.no_grad()
def run_inference(options: InferenceOptions, say: Callable[[str], None] = print) -> int:
    """Do all samples; returns how many could not be read. ``say`` gets one line for each result."""
    if options.num_samples < 1 or options.num_frames < 1:
        raise UserError("--num_samples and --num_frames must be at least 1.")
    make_output_folder(options.output_dir)
    device = choose_devices(options.device)[0]
    models = [open_model(options.model_path, variant=options.variant, device=device)]
    if options.reference_path is not None:
        models.append(open_model(options.reference_path, device=device))
    clips = _samples(options, say)
    scores: list[list[SampleScore]] = []
    measured: list[ClipSource] = []
    skipped = 0
    for number, clip in enumerate(clips, start=1):
        try:
            with writing_to(options.output_dir), fitting_in_memory(clip.path):
                scores.append(_one_sample(clip, number, models, options))
        except UnreadableVideoError as bad:
            skipped += 1
            say(f"sample {number} of {len(clips)}  skipped: {bad}")
            continue
        measured.append(clip)
        say(f"sample {number} of {len(clips)}  {clip.name}: {_words(scores[-1])}")
    if not scores:
        raise UserError(f"none of the {len(clips)} samples could be read; the lines above say why.")
    totals = [
        SampleScore(
            model=one[0].model,
            mse=math.fsum(score.mse for score in one) / len(one),
            psnr=math.fsum(score.psnr for score in one) / len(one),
        )
        for one in zip(*scores, strict=True)
    ]
    say(f"total over {len(scores)} {'sample' if len(scores) == 1 else 'samples'}: {_words(totals)}")
    if options.benchmark:
        part = measure_clip(measured[0], max_frames=options.num_frames, size=options.size)
        for model in models:
            say(benchmark_line(model, part))
    say(f"comparison videos and pictures are in {options.output_dir}")
    return skipped


def _samples(options: InferenceOptions, say: Callable[[str], None]) -> list[ClipSource]:
    source = options.annotation_file or options.data_root
    if source is None:
        from tinyvae.data.sample_clips import write_sample_clips

        source = options.output_dir / "sample_clips"
        say(f"no --data_root and no --annotation_file: using the procedural sample clips, written to {source}")
        write_sample_clips(source, count=max(5, options.num_samples), overwrite=True)
    root = options.data_root if options.annotation_file is not None else None
    return find_clips(source, data_root=root, max_clips=options.num_samples)


def _one_sample(
    clip: ClipSource, number: int, models: Sequence[RoundTrip], options: InferenceOptions
) -> list[SampleScore]:
    part = measure_clip(clip, max_frames=options.num_frames, size=options.size)
    for model in models:
        check_length(part, model)
    shared = min(model.aligned_frames(part.num_frames) for model in models)
    stem = f"sample_{number:02d}_{Path(clip.name).stem}"
    target: Tensor | None = None
    outputs: list[Tensor] = []
    scores: list[SampleScore] = []
    for model in models:
        latents_file = options.output_dir / f"{stem}_{_file_word(model)}latents.safetensors"
        target, decoded = _decoded(model, part, latents_file if options.save_latents else None)
        target, decoded = target[:shared], decoded[:shared]
        errors = (decoded - target).square().flatten(1).mean(dim=1).tolist()
        psnr = math.fsum(map(psnr_from_mse, errors)) / len(errors)
        scores.append(SampleScore(model=model.facts.label, mse=math.fsum(errors) / len(errors), psnr=psnr))
        outputs.append(decoded)
    assert target is not None
    joined_TCHW = side_by_side(target, outputs)
    width = side_by_side_width(part.width, len(outputs))
    with VideoWriter(
        options.output_dir / f"{stem}.mp4",
        fps=part.fps or FALLBACK_FPS,
        width=width,
        height=part.height,
        pixel_format=pixel_format_for(part.height, width),
        overwrite=True,
    ) as writer:
        writer.write(joined_TCHW)
    write_picture(options.output_dir / f"{stem}.png", joined_TCHW[len(joined_TCHW) // 2])
    return scores


def _decoded(model: RoundTrip, part: ClipPart, latents_file: Path | None) -> tuple[Tensor, Tensor]:
    """(input, output) TCHW in [0, 1] on the CPU; the latents go to a file if one is named."""
    chunks = frame_chunks(part, chunk_frames=model.chunk_frames(part.height, part.width))
    latents: list[Tensor] = []
    targets: list[Tensor] = []
    outputs: list[Tensor] = []
    for piece in model.run(chunks, part.num_frames, StageTimes(), latents.append):
        targets.append(piece.target.cpu())
        outputs.append(piece.decoded.clamp(0, 1).cpu())
    if latents_file is not None:
        variant = model.facts.latent_variant or model.facts.variant
        with LatentWriter(latents_file, latent_facts(part, variant=variant), overwrite=True) as file:
            for made in latents:
                if made.shape[1]:
                    file.write(made)
    return torch.cat(targets), torch.cat(outputs)


def benchmark_line(model: RoundTrip, part: ClipPart) -> str:
    """Median speed of encoder and decoder over a few passes after a warm-up, frames read beforehand."""
    idle = idle_bytes(model.device)
    frames = list(frame_chunks(part, chunk_frames=model.chunk_frames(part.height, part.width)))
    passes: list[StageTimes] = []
    for _ in range(1 + BENCHMARK_REPEATS):
        passes.append(StageTimes(with_memory=True))
        for _ in model.run(frames, part.num_frames, passes[-1]):
            pass
    encode_fps = statistics.median(times.frames / times.encode_s for times in passes[1:])
    decode_fps = statistics.median(times.frames / times.decode_s for times in passes[1:])
    peak = max((times.peak_bytes for times in passes if times.peak_bytes is not None), default=None)
    kind = memory_kind(model.device)
    words = "peak memory not measured"
    if peak is not None:
        words = f"peak {kind} {own_memory_bytes(model.facts, model.device, idle=idle, peak=peak) / 2**20:.0f} MiB"
    return (
        f"benchmark of {model.facts.label} on {model.device}, {part.num_frames} frames of {part.height}x{part.width}: "
        f"encode {encode_fps:.1f} frames/s, decode {decode_fps:.1f} frames/s, {words}"
    )


def _file_word(model: RoundTrip) -> str:
    return "reference_" if model.facts.kind == REFERENCE_KIND else ""


def _words(scores: Sequence[SampleScore]) -> str:
    if len(scores) == 1:
        return f"MSE {scores[0].mse:.6f}, PSNR {scores[0].psnr:.2f} dB"
    return "; ".join(f"{score.model} MSE {score.mse:.6f}, PSNR {score.psnr:.2f} dB" for score in scores)
