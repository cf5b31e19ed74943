"""What a finished run leaves: the final model in both formats, and a card that says what it is."""

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


def write_run_report(
    config: TrainConfig, folder: Path, data: RunData, lpips: LPIPS | None, *, device: torch.device, command: str
) -> None:
    """Evaluate the run's best model (else its final one) and write ``results.json`` and ``report.html``.

    The same clips as in the run's validations, so that its numbers are those of the best validation.
    """
    clips = validation_clips(config, data)
    if not clips:
        log.info("no report: the run has no validation files")
        return
    try:
        _write(config, folder, clips, lpips, device=device, command=command)
    except Exception as fault:
        log.warning(
            "the run is complete, but its report could not be made: %s; make it again with: %s",
            str(fault) or type(fault).__name__,
            command_again(config, folder),
            exc_info=not isinstance(fault, UserError),  # a mistake of ours comes with the place
        )
        return
    log.info("report: %s", folder / "report.html")


def command_again(config: TrainConfig, folder: Path) -> str:
    """The command that makes a report of the run's model."""
    n_frames, height, width = config.validation_size
    words = ["--data", str(config.data_source), "--max_frames", str(n_frames), "--size", f"{height}x{width}"]
    return shlex.join(["tinyvae", "eval", str(_best_model(folder)), *words, "--output_dir", str(folder)])


def _best_model(folder: Path) -> Path:
    return folder / "best_model" if (folder / "best_model").is_dir() else folder


def _write(
    config: TrainConfig,
    folder: Path,
    clips: list[ClipSource],
    lpips: LPIPS | None,
    *,
    device: torch.device,
    command: str,
) -> None:
    n_frames, height, width = config.validation_size
    source = config.data_source
    settings = EvaluationSettings(
        data=str(source),
        max_frames=n_frames,
        size=(height, width),
        max_clips=len(clips),
        middle=Middle(frame_step=config.min_frame_delta, scaled=config.random_resize),
    )
    round_trip = open_model(_best_model(folder), variant=config.variant, device=device, label=config.variant)
    with torch.no_grad():
        result = evaluate_round_trip(round_trip, clips, settings, devices=[device], lpips=lpips)
    publish(result, [round_trip], folder, command=command)


def validation_clips(config: TrainConfig, data: RunData) -> list[ClipSource]:
    """The files of the run's validations, in the same order."""
    index = data.validation.index
    rows = [index.row(int(number)) for number in data.validation.rows[: config.num_validation_samples]]
    return [ClipSource(name=row.path, path=index.full_path(row)) for row in rows]


log = logging.getLogger(__name__)

FRONT_MATTER = ("---", "library_name: tinyvae", "tags: [video, autoencoder, taehv]", "---", "")


def write_final_model(
    config: TrainConfig,
    folder: Path,
    model: TAEHV,
    average: WeightAverage | None,
    progress: Progress,
    *,
    command: str,
) -> None:
    """``final_model.safetensors``, ``final_model.pth`` (averaged weights where there are any) and ``model_card.md``."""
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
        told = why_not_written(fault, folder, needed_bytes=2 * state_bytes(config).weights)
        raise UserError(
            f"the final model could not be written to {folder} ({told}); make room and go on with --resume latest: "
            "only the last files are missing."
        ) from None
    log.info("final model: %s", folder / "final_model.safetensors")


def model_card(config: TrainConfig, folder: Path, model: TAEHV, progress: Progress, *, command: str) -> str:
    """A model card in Markdown: what the weights are, how they were made, how good they are, how to use them."""
    spec = model.spec
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    history = folder / "validation_history.json"
    entries = json.loads(history.read_text()) if history.is_file() else []
    return "\n".join(
        [
            *FRONT_MATTER,
            f"# {spec.name}, {parameters:.1f} M parameters",
            "",
            f"A tiny video autoencoder of the TAEHV family (stand-in for the VAE of {spec.teacher}), trained with "
            f"tinyvae {__version__} and torch {torch.__version__}.",
            "",
            f"- latents: {spec.latent_channels} channels, one for {spec.time_factor} frames of "
            f"{spec.space_factor}x{spec.space_factor} pixels; width factor {spec.width:g}",
            f"- trained {_beginning(config)}, with {_teaching(config)}",
            f"- {progress.step} of {config.max_train_steps} steps, {progress.samples_seen} clips of {config.n_frames} "
            f"frames of {config.height}x{config.width}, "
            f"{timedelta(seconds=round(progress.training_s))} (h:mm:ss) in training steps",
            f"- losses (weight): {_losses(config)}",
            f"- weights: {_weights(config)}",
            f"- command: `{command}`",
            "",
            "## Validation",
            "",
            *_validation_table(config, entries),
            "",
            "## Use",
            "",
            "```python",
            "from tinyvae import load_model",
            'model = load_model("final_model.safetensors")',
            "latents = model.encode_video(frames_NTCHW)  # frames in [0, 1]",
            "frames = model.decode_video(latents)",
            "```",
            "",
            "## Settings",
            "",
            "```json",
            to_json(config),
            "```",
            "",
        ]
    )


def _beginning(config: TrainConfig) -> str:
    return f"from {config.pretrained_model_path}" if config.pretrained_model_path else "from fresh weights"


def _teaching(config: TrainConfig) -> str:
    if config.teacher_path is None:
        return "no teacher: nothing tied its latents to those of a diffusion model"
    return f"the teacher {config.teacher_path}"


def _losses(config: TrainConfig) -> str:
    suffix = "_loss_weight"
    weights = {key.removesuffix(suffix): getattr(config, key) for key in FIELDS if key.endswith(suffix)}
    return ", ".join(f"{name} ({weight:g})" for name, weight in weights.items() if weight > 0)


def _weights(config: TrainConfig) -> str:
    return f"running mean over the steps, decay {config.ema_decay:g}" if config.ema_decay > 0 else "of the last step"


def _validation_table(config: TrainConfig, entries: list[dict[str, Any]]) -> list[str]:
    if not entries:
        return ["The run had no validation."]
    n_frames, height, width = config.validation_size
    # A run that is resumed with LPIPS weights has the score from there on.
    names = [name for name in ("psnr", "ssim", "lpips") if any(name in entry for entry in entries)]
    rows = [
        f"Means over {count_of(entries[-1]['num_clips'], 'clip')}: the middle {n_frames} frames, at {height}x{width}, "
        "of files that were not trained on. The row of the best is that of `best_model/` and `report.html`, the last "
        "one that of these weights. (`tinyvae eval` takes whole files, so its numbers are others.)",
        "",
    ]
    rows += [f"| step | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    best = [entry for entry in entries if entry["is_best"]][-1:]
    for entry in entries:
        step = f"{entry['step']}, best" if entry in best else entry["step"]
        scores = [score_in_words(name, entry.get(name)) for name in names]
        rows.append(f"| {step} | {' | '.join(scores)} |")
    return rows
