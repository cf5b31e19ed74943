"""A few samples through a model, to look at: what ``inference.py`` at the root of the repository does.

For each sample a comparison video (input | outputs | errors), a picture of its middle frame, MSE and PSNR; in the end
the totals, and all of it in ``results.json``. A sample is at most ``num_frames`` long and is held in memory as bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinyvae.convert.latent_file import LatentWriter
from tinyvae.convert.reconstruct import (
    FALLBACK_FPS,
    latent_facts,
    panel_labels,
    pixel_format_for,
    side_by_side,
    with_labels,
    write_picture,
)
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import (
    ClipPart,
    ClipSource,
    choose_split,
    find_clips,
    frame_chunks,
    measure_clip,
)
from tinyvae.evaluation.cost import (
    StageTimes,
    choose_devices,
    command_line,
    environment_facts,
    fitting_in_memory,
    idle_bytes,
    memory_kind,
)
from tinyvae.evaluation.evaluating import check_length
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.evaluation.open_model import open_model
from tinyvae.evaluation.results import plain_json, write_json
from tinyvae.evaluation.round_trip import REFERENCE_KIND, RoundTrip, in_chunks_that_fit, own_memory_bytes
from tinyvae.files import make_output_folder, writing_to
from tinyvae.video.write import VideoWriter

BENCHMARK_REPEATS = 3
RESULTS_FORMAT, RESULTS_VERSION = "tinyvae-inference", 1

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """What to run. Without ``data_root`` and ``annotation_file`` the procedural sample clips are used."""

    model_path: Path
    output_dir: Path
    num_samples: int = 5
    num_frames: int = 49
    variant: str | None = None
    reference: str | None = None
    """A diffusers VAE to run beside the model: a folder or a hub name."""
    data_root: Path | None = None
    annotation_file: Path | None = None
    split: str | None = None
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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One video: what of it was compared, where its pictures are, and a score for each model."""

    name: str
    path: str
    num_frames: int
    height: int
    width: int
    video: str
    picture: str
    scores: tuple[SampleScore, ...]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Median speed of encoder and decoder over a few passes after a warm-up, frames read beforehand."""

    model: str
    device: str
    num_frames: int
    height: int
    width: int
    encode_fps: float
    decode_fps: float
    peak_memory_bytes: int | None
    memory_kind: str

    def line(self) -> str:
        memory = "peak memory not measured"
        if self.peak_memory_bytes is not None:
            memory = f"peak {self.memory_kind} {self.peak_memory_bytes / 2**20:.0f} MiB"
        return (
            f"benchmark of {self.model} on {self.device}, {self.num_frames} frames of {self.height}x{self.width}: "
            f"encode {self.encode_fps:.1f} frames/s, decode {self.decode_fps:.1f} frames/s, {memory}"
        )


@torch.no_grad()
def run_inference(options: InferenceOptions, say: Say = print) -> int:
    """Do all samples; returns how many could not be read. ``say`` gets one line for each result."""
    if options.num_samples < 1 or options.num_frames < 1:
        raise UserError("--num_samples and --num_frames must be at least 1.")
    make_output_folder(options.output_dir, option="--output_dir")
    models = _open_models(options)
    source, split, clips = _clips(options, say)
    samples: list[Sample] = []
    measured: list[ClipSource] = []
    skipped: dict[str, str] = {}
    for number, clip in enumerate(clips, start=1):
        try:
            with writing_to(options.output_dir), fitting_in_memory(clip.path):
                samples.append(_one_sample(clip, number, models, options))
        except UnreadableVideoError as bad:
            skipped[clip.name] = str(bad)
            say(f"sample {number} of {len(clips)}  skipped: {bad}")
            continue
        measured.append(clip)
        say(f"sample {number} of {len(clips)}  {clip.name}: {_words(samples[-1].scores)}")
    if not samples:
        raise UserError(f"none of the {len(clips)} samples could be read; the lines above say why.")
    totals = _totals(samples)
    say(f"total over {len(samples)} {'sample' if len(samples) == 1 else 'samples'}: {_words(totals)}")
    speeds: list[Speed] = []
    if options.benchmark:
        with fitting_in_memory(measured[0].path):
            part = measure_clip(measured[0], max_frames=options.num_frames, size=options.size)
            speeds = [measure_speed(model, part) for model in models]
    for speed in speeds:
        say(speed.line())
    content = {
        "format": RESULTS_FORMAT,
        "version": RESULTS_VERSION,
        "command": command_line(),
        "models": [asdict(model.facts) for model in models],
        "data": str(source),
        "split": split,
        "totals": [asdict(total) for total in totals],
        "samples": [asdict(sample) for sample in samples],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
        "benchmark": [asdict(speed) for speed in speeds],
        "environment": environment_facts([models[0].device]),
    }
    with writing_to(options.output_dir):
        write_json(options.output_dir / "results.json", plain_json(content))
    say(f"comparison videos, pictures and results.json are in {options.output_dir}")
    return len(skipped)


def _open_models(options: InferenceOptions) -> list[RoundTrip]:
    device = choose_devices(options.device)[0]
    models = [open_model(options.model_path, variant=options.variant, device=device)]
    if options.reference is not None:
        from tinyvae.evaluation.teacher_codec import open_reference_vae

        models.append(open_reference_vae(Path(options.reference), device=device, dtype=None, label=None))
    return models


def _clips(options: InferenceOptions, say: Say) -> tuple[Path, str | None, list[ClipSource]]:
    """(source, split, clips)."""
    source = options.annotation_file or options.data_root
    if source is None:
        from tinyvae.data.sample_clips import write_sample_clips

        source = options.output_dir / "sample_clips"
        say(f"no --data_root and no --annotation_file: using the procedural sample clips, written to {source}")
        write_sample_clips(source, count=max(5, options.num_samples), overwrite=True)
    root = options.data_root if options.annotation_file is not None else None
    split, note = choose_split(source, data_root=root, wanted=options.split)
    if note:
        say(f"note: {note}")
    return source, split, find_clips(source, data_root=root, split=split, max_clips=options.num_samples)


def _one_sample(clip: ClipSource, number: int, models: Sequence[RoundTrip], options: InferenceOptions) -> Sample:
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
    labels = panel_labels([model.facts for model in models])
    joined_TCHW = with_labels(side_by_side(target, outputs), labels, panel_width=part.width)
    height, width = joined_TCHW.shape[-2:]
    video, picture = options.output_dir / f"{stem}.mp4", options.output_dir / f"{stem}.png"
    with VideoWriter(
        video,
        fps=part.fps or FALLBACK_FPS,
        width=width,
        height=height,
        pixel_format=pixel_format_for(height, width),
        overwrite=True,
    ) as writer:
        writer.write(joined_TCHW)
    write_picture(picture, joined_TCHW[len(joined_TCHW) // 2])
    return Sample(
        name=clip.name,
        path=str(clip.path),
        num_frames=shared,
        height=part.height,
        width=part.width,
        video=video.name,
        picture=picture.name,
        scores=tuple(scores),
    )


def _totals(samples: Sequence[Sample]) -> list[SampleScore]:
    return [
        SampleScore(
            model=one[0].model,
            mse=math.fsum(score.mse for score in one) / len(one),
            psnr=math.fsum(score.psnr for score in one) / len(one),
        )
        for one in zip(*(sample.scores for sample in samples), strict=True)
    ]


def _decoded(model: RoundTrip, part: ClipPart, latents_file: Path | None) -> tuple[Tensor, Tensor]:
    """(input, output) TCHW in [0, 1] on the CPU; the latents go to a file if one is named."""

    def decode(chunks: Iterator[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        latents: list[Tensor] = []
        targets: list[Tensor] = []
        outputs: list[Tensor] = []
        for piece in model.run(chunks, part.num_frames, StageTimes(), latents.append):
            targets.append(piece.target.cpu())
            outputs.append(piece.decoded.clamp(0, 1).cpu())
        return latents, targets, outputs

    latents, targets, outputs = in_chunks_that_fit(model, part, decode)
    if latents_file is not None:
        variant = model.facts.latent_variant or model.facts.variant
        with LatentWriter(latents_file, latent_facts(part, variant=variant), overwrite=True) as file:
            for made in latents:
                if made.shape[1]:
                    file.write(made)
    return torch.cat(targets), torch.cat(outputs)


def measure_speed(model: RoundTrip, part: ClipPart) -> Speed:
    """Run a clip several times and take the medians."""
    idle = idle_bytes(model.device)
    frames = list(frame_chunks(part, chunk_frames=model.chunk_frames(part.height, part.width)))
    passes: list[StageTimes] = []
    for _ in range(1 + BENCHMARK_REPEATS):
        passes.append(StageTimes(with_memory=True))
        for _ in model.run(frames, part.num_frames, passes[-1]):
            pass
    peak = max((times.peak_bytes for times in passes if times.peak_bytes is not None), default=None)
    return Speed(
        model=model.facts.label,
        device=str(model.device),
        num_frames=part.num_frames,
        height=part.height,
        width=part.width,
        encode_fps=statistics.median(times.frames / times.encode_s for times in passes[1:]),
        decode_fps=statistics.median(times.frames / times.decode_s for times in passes[1:]),
        peak_memory_bytes=None if peak is None else own_memory_bytes(model.facts, model.device, idle=idle, peak=peak),
        memory_kind=memory_kind(model.device),
    )


def _file_word(model: RoundTrip) -> str:
    return "reference_" if model.facts.kind == REFERENCE_KIND else ""


def _words(scores: Sequence[SampleScore]) -> str:
    if len(scores) == 1:
        return f"MSE {scores[0].mse:.6f}, PSNR {scores[0].psnr:.2f} dB"
    return "; ".join(f"{score.model} MSE {score.mse:.6f}, PSNR {score.psnr:.2f} dB" for score in scores)
