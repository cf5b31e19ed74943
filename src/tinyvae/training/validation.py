"""How good the model is now: the metrics of `tinyvae eval` on the validation clips, shared among the ranks.

Each rank measures its own clips; all ranks then hold all results and so take the same decisions (best model, early
stop, start of Seraena) from the same numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.data.clip_reading import ClipBatch
from tinyvae.data.loader import ValidationLoader
from tinyvae.errors import UserError
from tinyvae.evaluation.cost import without_cudnn_trials
from tinyvae.evaluation.metrics import ClipMetrics, clip_metrics
from tinyvae.evaluation.statistics import Summary, summarise
from tinyvae.losses.perceptual import LPIPS
from tinyvae.models.codec import VideoCodec
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import save_model
from tinyvae.training.checkpoint import WRITE_FAULTS
from tinyvae.training.engine import Engine
from tinyvae.training.guards import Status, StopRequested, is_out_of_memory

SHOWN_CLIPS = 4
RECORDED_METRICS = ("psnr", "ssim", "lpips", "mse", "mae", "flicker_error", "flicker_energy")


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """``metrics``: name -> mean over clips, and name_std -> spread over clips. ``shown``: a few (input, output) pairs
    TCHW in [0, 1] on the CPU, of this rank's first clips."""

    metrics: dict[str, float]
    num_clips: int
    shown: list[tuple[str, Tensor, Tensor]]


def score_in_words(name: str, score: float | None) -> str:
    """``11.00 dB`` for psnr, ``0.9314`` for all others; a dash where there is none."""
    if score is None:
        return "–"
    return f"{score:.2f} dB" if name == "psnr" else f"{score:.4f}"


class ValidationCut(Exception):  # noqa: N818 (news for the loop)
    """All ranks left a validation half-way. ``reason``: what this rank has to say of it; None: another rank knows."""

    def __init__(self, reason: Exception | None) -> None:
        super().__init__(str(reason or "another rank cannot go on"))
        self.reason = reason


def validate(
    model: VideoCodec,
    loader: ValidationLoader,
    engine: Engine,
    *,
    lpips: LPIPS | None,
    num_shown: int = SHOWN_CLIPS,
    stop_signal: Callable[[], int] = lambda: 0,
) -> ValidationResult:
    """Score a codec on the validation clips of all ranks; a validation with no usable clip is an error.

    Before each batch the ranks ask each other whether to go on: ``stop_signal`` is the number of a signal that this
    rank has received, 0 for none. Whatever stops one of them raises `ValidationCut` on all; what is wrong with the
    clips of all ranks together raises the same ``UserError`` on all.
    """
    own: dict[str, ClipMetrics] = {}
    shown: list[tuple[str, Tensor, Tensor]] = []
    batches = iter(loader)
    batch: ClipBatch | None = None
    status = Status.WELL
    trouble: Exception | None = None
    while True:
        try:
            if batch is not None:
                with without_cudnn_trials():
                    own |= _measure(model, batch, engine, lpips, shown, num_shown)
            batch = next(batches, None)
        except Exception as fault:  # noqa: BLE001 (all ranks hear of it, then the trainer raises it)
            if is_out_of_memory(fault):  # which is not kept: its traceback would hold the tensors of that moment
                status = Status.OUT_OF_MEMORY
            else:
                status, trouble = Status.HAS_TO_STOP, fault
        signal_number, worst, anybody_has_more = engine.worst(stop_signal(), status, batch is not None)
        if signal_number or worst != Status.WELL:
            raise ValidationCut(_reason_to_stop(signal_number, Status(worst), trouble)) from trouble
        if not anybody_has_more:
            break
    everybody = engine.gather((own, loader.reads))
    loader.check([reads for _, reads in everybody])
    clips: dict[str, ClipMetrics] = {}
    for of_rank, _ in everybody:
        clips |= of_rank
    assert clips, "a validation without a clip that passed the loader's check"
    # Sorted by name, so that the sums do not depend on how the clips were shared out.
    summary = summarise([clips[name] for name in sorted(clips)])
    return ValidationResult(metrics=_flat(summary), num_clips=len(clips), shown=shown)


def _reason_to_stop(signal_number: int, worst: Status, trouble: Exception | None) -> Exception | None:
    """What this rank has to say where all ranks stop; ``trouble``: its own, if it has any. None: others know."""
    if signal_number:
        return StopRequested(signal_number)
    if worst == Status.OUT_OF_MEMORY:
        return UserError(
            "out of memory in validation; the run is saved. Use --validation_batch_size 1 or a smaller "
            "--validation_height and --validation_width, then --resume latest."
        )
    return trouble


@torch.no_grad()
def _measure(
    model: VideoCodec,
    batch: ClipBatch,
    engine: Engine,
    lpips: LPIPS | None,
    shown: list[tuple[str, Tensor, Tensor]],
    num_shown: int,
) -> dict[str, ClipMetrics]:
    """Metrics of each clip of a batch, by name; adds to ``shown`` until it has ``num_shown``."""
    frames = batch.model_input(engine.device)
    decoded = model.reconstruct(frames).float()
    target = model.target(frames)
    for i in range(min(len(batch), num_shown - len(shown))):
        shown.append((batch.names[i], target[i].cpu(), decoded[i].cpu()))
    return dict(zip(batch.names, clip_metrics(decoded, target, lpips=lpips), strict=True))


def _flat(summary: Summary) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name in RECORDED_METRICS:
        estimate = summary.value(name)
        if estimate is not None:
            flat[name] = estimate.mean
            flat[f"{name}_std"] = estimate.std if estimate.std is not None else 0.0
    return flat


class ValidationHistory:
    """``validation_history.json``: one entry per validation, rewritten whole after each (main process only)."""

    def __init__(self, file: Path, *, up_to_step: int) -> None:
        self._file = file
        self.entries: list[dict[str, Any]] = []
        if file.is_file():
            # Entries beyond the step that the run resumes from belong to a future that did not happen.
            self.entries = [entry for entry in json.loads(file.read_text()) if entry["step"] <= up_to_step]

    def write_what_is_left(self) -> None:
        """Let the file forget that future too, though no validation may follow."""
        if self._file.is_file() and json.loads(self._file.read_text()) != self.entries:
            write_json(self._file, self.entries)

    def add(self, entry: Mapping[str, Any]) -> None:
        self.entries = [*(e for e in self.entries if e["step"] != entry["step"]), dict(entry)]
        write_json(self._file, self.entries)


def write_best_model(run_folder: Path, model: TAEHV, info: Mapping[str, Any]) -> None:
    """Replace ``best_model/``: the new one is whole on disk before the old one goes."""
    best, fresh, old = (run_folder / name for name in ("best_model", ".best_model.fresh", ".best_model.old"))
    put_best_model_back(run_folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        save_model(model, fresh, training_step=int(info["step"]))
        write_json(fresh / "model_info.json", {**info, "timestamp": datetime.now(UTC).isoformat()})
    except WRITE_FAULTS:
        shutil.rmtree(fresh, ignore_errors=True)  # a full disk needs the room
        raise
    if best.exists():
        best.rename(old)
    fresh.rename(best)
    shutil.rmtree(old, ignore_errors=True)


def put_best_model_back(run_folder: Path) -> None:
    """Where a kill fell between the two renames of `write_best_model`, the old best model has its name again."""
    best, old = run_folder / "best_model", run_folder / ".best_model.old"
    if old.is_dir() and not best.exists():
        old.rename(best)


def write_json(file: Path, content: object) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    temporary = file.with_name(f".{file.name}.part")
    try:
        with temporary.open("w") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
