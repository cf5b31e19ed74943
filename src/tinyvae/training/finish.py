"""What a finished run leaves: the final model in both formats, a card that describes it, and a report of its scores."""

from __future__ import annotations

import json
import logging
import shlex
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tinyvae.config.save import to_json
from tinyvae.config.schema import FIELDS, TrainConfig
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import ClipSource, Middle
from tinyvae.evaluation.evaluating import EvaluationSettings, evaluate_round_trip
from tinyvae.evaluation.open_model import open_model
from tinyvae.evaluation.report import publish
from tinyvae.losses.perceptual import LPIPS
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import save_model
from tinyvae.terminal import count_of
from tinyvae.training.checkpoint import WRITE_FAULTS, why_not_written
from tinyvae.training.clips import RunData
from tinyvae.training.ema import WeightAverage
from tinyvae.training.preflight import state_bytes
from tinyvae.training.resume import Progress
from tinyvae.training.validation import score_in_words
from tinyvae.version import __version__

log = logging.getLogger(__name__)

NO_TEACHER = "no teacher: nothing tied its latents to those of a diffusion model"
CARD = """\
---
library_name: tinyvae
tags: [video, autoencoder, taehv]
---

# {variant}, {parameters:.1f} M parameters

A tiny video autoencoder of the TAEHV family (stand-in for the VAE of {teacher_family}), trained with \
tinyvae {tinyvae} and torch {torch}.

- latents: {channels} channels, one for {time_factor} frames of {space_factor}x{space_factor} pixels; width factor \
{width:g}
- trained {start}, with {teacher}
- {steps} of {max_steps} steps, {samples} clips of {clip}, {duration} (h:mm:ss) in training steps
- losses (weight): {losses}
- weights: {weights}
- command: `{command}`

## Validation

{validation}

## Use

```python
from tinyvae import load_model
model = load_model("final_model.safetensors")
latents = model.encode_video(frames_NTCHW)  # frames in [0, 1]
frames = model.decode_video(latents)
```

## Settings

```json
{settings}
```
"""


def write_final_model(
    config: TrainConfig,
    folder: Path,
    model: TAEHV,
    average: WeightAverage | None,
    progress: Progress,
    *,
    command: str,
) -> None:
    """``final_model.safetensors``, ``final_model.pth`` (averaged weights if there are any) and ``model_card.md``."""
    try:
        with ExitStack() as swapped:
            if average is not None:
                swapped.enter_context(average.swapped_into(model))
            for name in ("final_model.safetensors", "final_model.pth"):
                save_model(model, folder / name, overwrite=True, training_step=progress.step)
        if config.save_model_card:
            card = model_card(config, folder, model, progress, command=command)
            (folder / "model_card.md").write_text(card, encoding="utf-8")
    except WRITE_FAULTS as fault:
        reason = why_not_written(fault, folder, needed_bytes=2 * state_bytes(config).weights)
        raise UserError(
            f"the final model could not be written to {folder} ({reason}); make room and go on with --resume latest: "
            "only the last files are missing."
        ) from None
    log.info("final model: %s", folder / "final_model.safetensors")


def model_card(config: TrainConfig, folder: Path, model: TAEHV, progress: Progress, *, command: str) -> str:
    """A model card in Markdown: what the weights are, how they were made, how good they are, how to use them."""
    spec = model.spec
    history = folder / "validation_history.json"
    suffix = "_loss_weight"
    losses = {key.removesuffix(suffix): getattr(config, key) for key in FIELDS if key.endswith(suffix)}
    teacher, ema_decay = config.teacher_path, config.ema_decay
    return CARD.format(
        variant=spec.name,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        teacher_family=spec.teacher,
        tinyvae=__version__,
        torch=torch.__version__,
        channels=spec.latent_channels,
        time_factor=spec.time_factor,
        space_factor=spec.space_factor,
        width=spec.width,
        start=f"from {config.pretrained_model_path}" if config.pretrained_model_path else "from fresh weights",
        teacher=f"the teacher {teacher}" if teacher else NO_TEACHER,
        steps=progress.step,
        max_steps=config.max_train_steps,
        samples=progress.samples_seen,
        clip=f"{config.n_frames} frames of {config.height}x{config.width}",
        duration=timedelta(seconds=round(progress.training_s)),
        losses=", ".join(f"{name} ({weight:g})" for name, weight in losses.items() if weight > 0),
        weights=f"running mean over the steps, decay {ema_decay:g}" if ema_decay > 0 else "of the last step",
        command=command,
        validation=_validation_table(config, json.loads(history.read_text()) if history.is_file() else []),
        settings=to_json(config),
    )


def _validation_table(config: TrainConfig, entries: list[dict[str, Any]]) -> str:
    if not entries:
        return "The run had no validation."
    n_frames, height, width = config.validation_size
    # A run that is resumed with LPIPS weights has the score from there on.
    names = [name for name in ("psnr", "ssim", "lpips") if any(name in entry for entry in entries)]
    rows = [
        f"Means over {count_of(entries[-1]['num_clips'], 'clip')}: the middle {n_frames} frames, at {height}x{width}, "
        "of files that were not trained on. The row of the best is that of `best_model/` and `report.html`, the last "
        "one that of these weights. (`tinyvae eval` takes whole files, so its numbers are others.)",
        "",
        f"| step | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    best = [entry for entry in entries if entry["is_best"]][-1:]
    for entry in entries:
        step = f"{entry['step']}, best" if entry in best else entry["step"]
        rows.append(f"| {step} | {' | '.join(score_in_words(name, entry.get(name)) for name in names)} |")
    return "\n".join(rows)


def write_run_report(
    config: TrainConfig, folder: Path, data: RunData, lpips: LPIPS | None, *, device: torch.device, command: str
) -> None:
    """Evaluate the run's best model (else its final one) and write ``results.json`` and ``report.html``.

    It takes the clips of the run's validations, so its numbers are those of the best validation. If the report cannot
    be made, that is a warning.
    """
    index, rows = data.validation.index, data.validation.rows[: config.num_validation_samples]
    clips = [ClipSource(name=row.path, path=index.full_path(row)) for row in (index.row(int(n)) for n in rows)]
    if not clips:
        log.info("no report: the run has no validation files")
        return
    best = folder / "best_model" if (folder / "best_model").is_dir() else folder
    n_frames, height, width = config.validation_size
    settings = EvaluationSettings(
        data=str(config.data_source),
        max_frames=n_frames,
        size=(height, width),
        max_clips=len(clips),
        middle=Middle(frame_step=config.min_frame_delta, scaled=config.random_resize),
    )
    try:
        round_trip = open_model(best, variant=config.variant, device=device, label=config.variant)
        with torch.no_grad():
            result = evaluate_round_trip(round_trip, clips, settings, devices=[device], lpips=lpips)
        publish(result, [round_trip], folder, command=command)
    except Exception as fault:
        words = ["--data", str(config.data_source), "--max_frames", str(n_frames), "--size", f"{height}x{width}"]
        log.warning(
            "the run is complete, but its report could not be made: %s; make it again with: %s",
            str(fault) or type(fault).__name__,
            shlex.join(["tinyvae", "eval", str(best), *words, "--output_dir", str(folder)]),
            exc_info=not isinstance(fault, UserError),  # a bug of ours comes with its traceback
        )
        return
    log.info("report: %s", folder / "report.html")
