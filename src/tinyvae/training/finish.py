"""What a finished run leaves: the final model in both formats, and a card that says what it is."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from tinyvae.config import TrainConfig
from tinyvae.config_files.saving import to_json
from tinyvae.errors import UserError
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import save_model
from tinyvae.training.checkpoint import WRITE_FAULTS
from tinyvae.training.ema import WeightAverage
from tinyvae.training.progress import Progress
from tinyvae.version import __version__

log = logging.getLogger(__name__)


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
    except WRITE_FAULTS as fault:
        raise UserError(
            f"the final model could not be written to {folder} ({str(fault).splitlines()[0]}); make room and go on "
            "with --resume latest: only the last files are missing."
        ) from None
    if config.save_model_card:
        (folder / "model_card.md").write_text(model_card(config, folder, model, progress, command=command))
    log.info("final model: %s", folder / "final_model.safetensors")


def model_card(config: TrainConfig, folder: Path, model: TAEHV, progress: Progress, *, command: str) -> str:
    """A model card in Markdown: what the weights are, how they were made, how good they are, how to use them."""
    spec = model.spec
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    history = folder / "validation_history.json"
    entries = json.loads(history.read_text()) if history.is_file() else []
    taught = f"the teacher {config.teacher_path}" if config.teacher_path else "no teacher (its latent space is its own)"
    return "\n".join(
        [
            f"# {spec.name}, {parameters:.1f} M parameters",
            "",
            f"A tiny video autoencoder of the TAEHV family (stand-in for the VAE of {spec.teacher}), trained with "
            f"tinyvae {__version__} and torch {torch.__version__}.",
            "",
            f"- latents: {spec.latent_channels} channels, one for {spec.time_factor} frames of "
            f"{spec.space_factor}x{spec.space_factor} pixels; width factor {spec.width:g}",
            f"- trained with {taught}, {progress.step} steps, {progress.samples_seen} clips of {config.n_frames} "
            f"frames of {config.height}x{config.width}, {progress.training_s / 3600:.2f} h of training steps",
            f"- command: `{command}`",
            "",
            "## Validation",
            "",
            *_validation_table(entries),
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


def _validation_table(entries: list[dict[str, object]]) -> list[str]:
    if not entries:
        return ["The run had no validation."]
    names = [name for name in ("psnr", "ssim", "lpips") if name in entries[-1]]
    rows = [f"| step | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for entry in entries:
        rows.append(f"| {entry['step']} | {' | '.join(f'{entry[name]:.4g}' for name in names)} |")
    return rows
