"""What a run writes down: ``train.log``, ``metrics.jsonl`` and TensorBoard. Only the main process writes."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.config.schema import FIELDS, TrainConfig, shown_value, to_json
from tinyvae.training.checkpoint import why_not_written
from tinyvae.training.engine import Engine, StepResult
from tinyvae.training.optim import learning_rate_factor

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


log = logging.getLogger(__name__)

VIDEO_FPS = 8
LOG_LINE = "%(asctime)s %(levelname)s %(message)s"


class _BarSafeHandler(logging.StreamHandler):
    """Prints above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=self.stream)


class _LogFile(logging.FileHandler):
    """``train.log``. Where it cannot be written (a full disk) the run goes on, and says so once."""

    _complained = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        if not self._complained:
            self._complained = True
            tqdm.write(f"train.log cannot be written: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # what the full disk did not take is still in the stream's buffer
            self.handleError(logging.makeLogRecord({}))


class RunLog:
    """The log of one run. A process that is not the main one has a `RunLog` too; it writes nothing."""

    def __init__(self, folder: Path, config: TrainConfig, *, is_main: bool) -> None:
        self._is_main = is_main
        self._metrics_file = folder / "metrics.jsonl"
        self._unwritten: list[str] = []  # lines of metrics.jsonl that a full disk did not take yet
        self._writer: SummaryWriter | None = None
        self._open_writer: Callable[[int], SummaryWriter] | None = None
        self._file = folder / "train.log"
        self._package_log = logging.getLogger("tinyvae")
        self._before = (self._package_log.level, self._package_log.propagate)
        self._package_log.setLevel(logging.INFO if is_main else logging.WARNING)
        self._package_log.propagate = False
        console = _BarSafeHandler(sys.stderr)
        console.setFormatter(logging.Formatter("%(message)s"))
        self._handlers: list[logging.Handler] = []
        self._add(console)
        # Lines wait for the file until `begin`.
        self._waiting = MemoryHandler(capacity=1_000_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        if is_main:
            self._add(self._waiting)
            if config.report_to == "tensorboard":
                self._open_writer = lambda step: _open_tensorboard(folder / config.logging_dir, config, step)

    def _add(self, handler: logging.Handler) -> None:
        self._handlers.append(handler)
        self._package_log.addHandler(handler)

    def begin(self, *, from_step: int = 0, with_validation: bool = True) -> None:
        """Begin at the step that the run resumes from; until then a resume can be refused, and no file is touched.

        ``with_validation``: whether that step had been validated, so that its line stays.
        """
        if not self._is_main:
            return
        self._drop_lines_after(from_step, with_validation)
        file = _LogFile(self._file)
        file.setFormatter(logging.Formatter(LOG_LINE))
        self._waiting.setTarget(file)
        self._waiting.flush()
        self._waiting.setTarget(None)
        self._remove(self._waiting)
        self._add(file)
        self._show(from_step, lambda writer: writer.flush())

    def _remove(self, handler: logging.Handler) -> None:
        self._handlers.remove(handler)
        self._package_log.removeHandler(handler)
        handler.close()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of numbers at an optimiser step; names like ``train/loss`` and ``val/psnr``."""
        if not self._is_main:
            return
        self._unwritten.append(json.dumps({"step": step, **values}) + "\n")
        try:
            _append_whole(self._metrics_file, "".join(self._unwritten))
            self._unwritten = []
        except OSError as fault:  # a full disk: checkpoints decide whether the run can go on, not its log
            told = why_not_written(fault, self._metrics_file.parent)
            log.error("could not log step %d (%s); its line is written with the next one", step, told)
        self._show(step, partial(_add_scalars, values=values, step=step))

    def _show(self, step: int, add: Callable[[SummaryWriter], object]) -> None:
        """Add something to TensorBoard; where that fails it is left out, and the next time a new file is begun."""
        if self._open_writer is None or (self._writer is None and self._unwritten):
            return  # where metrics.jsonl cannot be written, events cannot either
        try:
            if self._writer is None:
                self._writer = self._open_writer(step)
            add(self._writer)
        except OSError as fault:
            self._writer = None  # its thread has ended and takes nothing more
            told = why_not_written(fault, self._metrics_file.parent)
            log.error("could not write to TensorBoard at step %d: %s", step, told)

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        """Write a line to ``train.log`` alone."""
        record = logging.LogRecord(__name__, level, __file__, 0, text, None, None)
        for handler in self._handlers:
            if isinstance(handler, logging.FileHandler | MemoryHandler):
                handler.handle(record)

    def videos(self, step: int, shown: list[tuple[str, Tensor, Tensor]]) -> None:
        """Log a picture and a short animation of input | output | error for each (name, input, output) TCHW."""
        for name, frames, decoded in shown if self._open_writer is not None else []:
            strip = side_by_side(frames, decoded)
            self._show(step, partial(_add_pictures, name=name, strip=strip, step=step))

    def close(self) -> None:
        """Close the files; the package's logger is as it was before."""
        if self._writer is not None:
            self._show(0, lambda writer: writer.close())
        for handler in list(self._handlers):
            self._remove(handler)
        level, self._package_log.propagate = self._before
        self._package_log.setLevel(level)

    def _drop_lines_after(self, step: int, with_validation: bool) -> None:
        """A resumed run goes on from its checkpoint: what a killed run logged beyond it did not happen."""
        if not self._metrics_file.is_file():
            return
        lines = [line for line in self._metrics_file.read_text().splitlines() if _step_of(line, default=-1) <= step]
        kept = [line for line in lines if _step_of(line, default=-1) >= 0]
        if not with_validation:
            kept = [line for line in kept if _step_of(line, default=-1) < step or '"val/' not in line]
        temporary = self._metrics_file.with_suffix(".part")
        temporary.write_text("".join(line + "\n" for line in kept))
        temporary.replace(self._metrics_file)


def _append_whole(file: Path, text: str) -> None:
    """Add text to a file, or leave the file as it was: half a line would spoil the one after it."""
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a") as stream:
            stream.write(text)
    except OSError:
        if file.exists():
            os.truncate(file, size)
        raise


def _step_of(line: str, *, default: int) -> int:
    """The step of a metrics line; a line that a kill cut off has none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return default


def side_by_side(frames_TCHW: Tensor, decoded_TCHW: Tensor) -> Tensor:
    """input | output | error, next to each other: TCH(3W) in [0, 1]; the error is magnified fourfold."""
    decoded = decoded_TCHW.clamp(0, 1)
    error = (4 * (decoded - frames_TCHW).abs()).clamp(0, 1)
    return torch.cat([frames_TCHW, decoded, error], dim=3)


def _open_tensorboard(folder: Path, config: TrainConfig, from_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / config.tracker_name), purge_step=from_step + 1 if from_step else None)
    writer.add_text("config", f"```json\n{to_json(config)}\n```", from_step)
    rows = "\n".join(f"| {key} | {shown_value(getattr(config, key))} |" for key in FIELDS)
    writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}", from_step)
    return writer


def _add_scalars(writer: SummaryWriter, *, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def _add_pictures(writer: SummaryWriter, *, name: str, strip: Tensor, step: int) -> None:
    writer.add_image(f"val_picture/{name}", strip[len(strip) // 2], step)
    _add_animation(writer, f"val_video/{name}", strip, step)


def _add_animation(writer: SummaryWriter, name: str, frames_TCHW: Tensor, step: int) -> None:
    """TensorBoard plays GIF images; its own add_video would need a package that we do not depend on."""
    import io

    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    pixels = (frames_TCHW * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    pictures = [Image.fromarray(frame) for frame in pixels]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, format="GIF", save_all=True, append_images=pictures[1:], duration=1000 // VIDEO_FPS, loop=0
    )
    image: Any = Summary.Image(
        height=pixels.shape[1], width=pixels.shape[2], colorspace=3, encoded_image_string=buffer.getvalue()
    )
    writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


GIB = 2**30


class StepLog:
    """Collects on the device, without waiting for it; only a log line reads the values back."""

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # steps in each sum: a term can begin in the middle of a line
        self._step: dict[str, Tensor] = {}
        self._steps = 0
        self._norms: list[float] = []
        self._seconds = 0.0
        self._clips = 0
        self.recent_loss = math.nan

    def begin_step(self) -> None:
        """A step's computation starts (again: what a failed attempt left is forgotten)."""
        self._step = {}

    def add(self, losses: Mapping[str, Tensor], *, share: float) -> None:
        """The losses of a part of the step's clips; ``share`` of all the rank's clips of the step."""
        for name, value in losses.items():
            weighted = value.float() * share
            self._step[name] = self._step[name] + weighted if name in self._step else weighted

    def end_step(self, result: StepResult, *, num_clips: int, seconds: float) -> None:
        self._seconds += seconds
        self._clips += num_clips
        if not result.stepped:
            return  # a loss that is not finite would hide the others of the line
        self._steps += 1
        self._norms.append(result.gradient_norm)
        for name, value in self._step.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def own_loss(self) -> float:
        """This rank's loss of the step just computed."""
        return float(self._step["loss"].item()) if "loss" in self._step else math.nan

    def is_due(self, step: int) -> bool:
        return step % self._config.log_every == 0 or step == 1 or step == self._config.max_train_steps

    @property
    def is_empty(self) -> bool:
        """Whether no step, not even a skipped one, was done since the last line."""
        return self._clips == 0

    def take(self, step: int) -> dict[str, float]:
        """The averages since the last line, over all ranks, by their TensorBoard names; starts a new line.

        ``step``: how many optimiser steps are done; the learning rate is that of the last of them.
        """
        values: dict[str, float] = {}
        if self._steps:
            names = sorted(self._sums)
            means = torch.stack([self._sums[name] / self._counts[name] for name in names])
            self._engine.average_([means])
            values = {f"train/{name}": float(mean) for name, mean in zip(names, means.tolist(), strict=True)}
            values["train/gradient_norm"] = sum(self._norms) / len(self._norms)
            self.recent_loss = values["train/loss"]
        values |= {f"train/{name}": rate for name, rate in learning_rates(step - 1, self._config).items()}
        values["train/frames_per_second"] = self._clips * self._config.n_frames / max(self._seconds, 1e-9)
        values["train/gpu_memory_gb"] = (
            torch.cuda.max_memory_allocated() / GIB if self._engine.device.type == "cuda" else 0.0
        )
        if self._config.log_system_stats:
            values |= system_stats(self._engine.device)
        self._sums, self._counts, self._steps, self._norms, self._seconds, self._clips = {}, {}, 0, [], 0.0, 0
        return values

    def state_dict(self) -> dict[str, Any]:
        """This rank's unfinished line: a resumed run writes the line that an undisturbed one would have written."""
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "counts": dict(self._counts),
            "steps": self._steps,
            "norms": list(self._norms),
            "seconds": self._seconds,
            "clips": self._clips,
            "recent_loss": self.recent_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {name: value.to(self._engine.device) for name, value in state["sums"].items()}
        # Older checkpoints have one count for all terms.
        self._counts = dict(state.get("counts") or dict.fromkeys(state["sums"], state["steps"]))
        self._steps, self._norms = state["steps"], list(state["norms"])
        self._seconds, self._clips = state["seconds"], state["clips"]
        self.recent_loss = state["recent_loss"]

    def bar_text(self, values: Mapping[str, float]) -> str:
        """What stands behind the progress bar."""
        memory = values["train/gpu_memory_gb"] or psutil.Process().memory_info().rss / GIB
        loss = f"loss {values['train/loss']:.4g}, " if "train/loss" in values else ""
        return (
            f"{loss}lr {values['train/learning_rate']:.2e}, "
            f"{_two_digits(values['train/frames_per_second'])} frames/s, {memory:.1f} GiB"
        )


def learning_rates(step: int, config: TrainConfig) -> dict[str, float]:
    """The rates at an optimiser step (counted from 0), by name."""
    factor = learning_rate_factor(step, config)
    rates = {"learning_rate": config.learning_rate * factor}
    if config.optimizer == "muon":
        rates["muon_learning_rate"] = config.muon_learning_rate * factor
    return rates


def _two_digits(speed: float) -> str:
    """``64`` and ``1234`` as they are, ``0.35`` instead of 0."""
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"


def system_stats(device: torch.device) -> dict[str, float]:
    """Use of this machine: CPU and memory always, GPU load and temperature where the driver tells."""
    stats = {"system/cpu_percent": psutil.cpu_percent(), "system/memory_percent": psutil.virtual_memory().percent}
    if device.type == "cuda":
        try:
            stats["system/gpu_percent"] = float(torch.cuda.utilization(device))
            stats["system/gpu_celsius"] = float(torch.cuda.temperature(device))
        except (ModuleNotFoundError, RuntimeError):  # no pynvml: the numbers above are what there is
            stats["system/gpu_memory_percent"] = (
                100 * torch.cuda.memory_reserved(device) / (torch.cuda.get_device_properties(device).total_memory)
            )
    return stats
