"""What a run writes down: ``train.log``, ``metrics.jsonl`` and its tracker; and the numbers between two log lines."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import MemoryHandler
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.cache_folder import GIB
from tinyvae.config.schema import TrainConfig
from tinyvae.data.sizes import ClipSize
from tinyvae.errors import UserError, first_line
from tinyvae.files import atomic_write, why_not_written
from tinyvae.terminal import in_utf8
from tinyvae.training.engine import Engine, StepResult
from tinyvae.training.optim import learning_rates
from tinyvae.training.pictures import DrawingError, draw_pictures
from tinyvae.training.trackers import TITLES, Tracker, open_tracker, tracker_failures

log = logging.getLogger(__name__)


class _BarSafeHandler(logging.StreamHandler):
    """Prints above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=self.stream)


class _LogFile(logging.FileHandler):
    """``train.log``. If it cannot be written (a full disk), the run goes on and says so once."""

    _complained = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        if not self._complained:
            self._complained = True
            tqdm.write(f"train.log cannot be written: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # the stream's buffer still holds what the full disk did not take
            self.handleError(logging.makeLogRecord({}))


class RunLog:
    """The log of one run. Only the main process writes files; its lines wait in memory until `begin`."""

    def __init__(self, folder: Path, config: TrainConfig, *, is_main: bool) -> None:
        self._folder = folder
        self._config = config
        self._is_main = is_main
        self._shows = is_main and config.report_to != "none"
        self._metrics_file = folder / "metrics.jsonl"
        self._unwritten: list[str] = []  # lines of metrics.jsonl that a full disk did not take yet
        self._tracker: Tracker | None = None
        self._has_begun = False
        self._tracker_lock = threading.Lock()
        self._painter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pictures")
        self._painted: Future[None] | None = None
        self._package_log = logging.getLogger("tinyvae")
        self._before = (self._package_log.level, self._package_log.propagate)
        self._package_log.setLevel(logging.INFO if is_main else logging.WARNING)
        self._package_log.propagate = False
        self._handlers: list[logging.Handler] = []
        self._add(_BarSafeHandler(sys.stderr))
        self._waiting = MemoryHandler(capacity=1_000_000, flushLevel=logging.CRITICAL + 1)
        if is_main:
            self._add(self._waiting)

    def _add(self, handler: logging.Handler) -> None:
        self._handlers.append(handler)
        self._package_log.addHandler(handler)

    def _remove(self, handler: logging.Handler) -> None:
        self._handlers.remove(handler)
        self._package_log.removeHandler(handler)
        handler.close()

    def begin(self, *, from_step: int = 0, with_validation: bool = True) -> None:
        """Open the files where the run resumes; ``with_validation``: that step was validated, so its line stays."""
        if not self._is_main:
            return
        self._drop_lines_after(from_step, with_validation)
        file = _LogFile(self._folder / "train.log", encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._add(file)
        self._waiting.setTarget(file)
        self._remove(self._waiting)  # closing it sends its lines to the file
        self._show(from_step, lambda tracker: None)
        self._has_begun = True

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line of numbers at an optimizer step; names like ``train/loss`` and ``val/psnr``."""
        if not self._is_main:
            return
        self._unwritten.append(json.dumps({"step": step, **values}) + "\n")
        size = self._metrics_file.stat().st_size if self._metrics_file.exists() else 0
        try:
            with self._metrics_file.open("a") as stream:
                stream.writelines(self._unwritten)
            self._unwritten = []
        except OSError as fault:  # a full disk: checkpoints decide whether the run can go on, not its log
            if self._metrics_file.exists():
                os.truncate(self._metrics_file, size)  # half a line would spoil the one after it
            told = why_not_written(fault, self._folder)
            log.error("could not log step %d (%s); its line is written with the next one", step, told)
        self._show(step, lambda tracker: tracker.scalars(step, values))

    def videos(self, step: int, shown: list[tuple[str, Tensor, Tensor]]) -> None:
        """Log a picture and a short animation of input | output | error for each (name, input, output) TCHW.

        Another process draws them while the run goes on. The next call and `close` wait for it.
        """
        self._wait_for_pictures()
        if shown and self._shows:
            strips = [(in_utf8(name), side_by_side(frames, decoded)) for name, frames, decoded in shown]
            self._painted = self._painter.submit(self._paint, step, strips)

    def _paint(self, step: int, strips: list[tuple[str, npt.NDArray[np.uint8]]]) -> None:
        try:
            drawn = draw_pictures(strips)
        except (DrawingError, OSError) as fault:  # OSError: the system starts no more processes
            log.error("the pictures of step %d could not be drawn: %s", step, fault)
            return
        for pictures in drawn:
            self._show(step, methodcaller("pictures", step, pictures))

    def _wait_for_pictures(self) -> None:
        painted, self._painted = self._painted, None
        if painted is not None:
            painted.result()

    def note(self, text: str, *, level: int = logging.INFO) -> None:
        """Write a line to ``train.log`` alone."""
        record = logging.LogRecord(__name__, level, __file__, 0, text, None, None)
        for handler in self._handlers:
            if isinstance(handler, logging.FileHandler | MemoryHandler):
                handler.handle(record)

    def close(self) -> None:
        """Close the files; the package's logger is as it was before."""
        self._painter.shutdown()  # waits for pictures that are not written yet
        if self._tracker is not None:
            self._show(0, lambda tracker: tracker.close())
        for handler in list(self._handlers):
            self._remove(handler)
        level, self._package_log.propagate = self._before
        self._package_log.setLevel(level)
        self._wait_for_pictures()  # raises what went wrong there, after everything is closed

    def _show(self, step: int, add: Callable[[Tracker], object]) -> None:
        """Add something to the tracker; if that fails it is left out, and the next call opens the tracker again."""
        with self._tracker_lock:
            if not self._shows or (self._tracker is None and self._unwritten):
                return  # where metrics.jsonl cannot be written, a tracker's files cannot either
            failures = tracker_failures(self._config.report_to)
            if self._has_begun:  # then a tracker that cannot be opened again does not stop the run
                failures += (UserError,)
            try:
                self._tracker = self._tracker or open_tracker(self._folder, self._config, from_step=step)
                add(self._tracker)
            except failures as fault:
                self._tracker = None  # TensorBoard's thread has ended and takes nothing more
                why = why_not_written(fault, self._folder) if isinstance(fault, OSError) else first_line(fault)
                log.error("could not write to %s at step %d: %s", TITLES[self._config.report_to], step, why)

    def _drop_lines_after(self, step: int, with_validation: bool) -> None:
        """What a killed run logged beyond the checkpoint did not happen, and a kill can cut off a line."""
        if not self._metrics_file.is_file():
            return
        kept = []
        for line in self._metrics_file.read_text().splitlines():
            try:
                line_step = int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue
            will_be_written_again = line_step == step and not with_validation and '"val/' in line
            if line_step <= step and not will_be_written_again:
                kept.append(line + "\n")
        with atomic_write(self._metrics_file, "w") as stream:
            stream.writelines(kept)


def side_by_side(frames_TCHW: Tensor, decoded_TCHW: Tensor) -> npt.NDArray[np.uint8]:
    """input | output | error, next to each other: TH(3W)C in bytes, of frames in [0, 1]; the error is magnified
    fourfold."""
    decoded = decoded_TCHW.clamp(0, 1)
    error = (4 * (decoded - frames_TCHW).abs()).clamp(0, 1)
    strip = torch.cat([frames_TCHW, decoded, error], dim=3)
    return (strip * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


TOLD_WAITING = 0.1
"""From this share of the time on a line says how long the run waits for its clips."""


class StepLog:
    """Collects on the device, without waiting for it; only a log line reads the values back."""

    def __init__(self, config: TrainConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._step: dict[str, Tensor] = {}
        self.recent_loss = math.nan  # of the last line
        self._begin_line()

    def _begin_line(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # steps in each sum: a term can begin in the middle of a line
        self._norms: list[float] = []  # one for each step that was not skipped
        self._seconds = self._waited_s = 0.0
        self.num_clips = self.num_frames = 0  # of all ranks since the last line

    def begin_step(self) -> None:
        """A step's computation starts, or starts again: what a failed attempt left is discarded."""
        self._step = {}

    def add(self, losses: Mapping[str, Tensor], *, share: float) -> None:
        """Add the losses of some of the rank's clips; ``share``: their part of its clips of the step."""
        for name, value in losses.items():
            self._step[name] = self._step.get(name, 0.0) + value.float() * share

    def end_step(self, result: StepResult, *, num_clips: int, size: ClipSize, seconds: float, waited_s: float) -> None:
        """A step is over; ``num_clips``: of all ranks, each of ``size``; ``waited_s``: of its seconds, for them."""
        self._seconds += seconds
        self._waited_s += waited_s
        self.num_clips += num_clips
        self.num_frames += num_clips * size.n_frames
        if not result.stepped:
            return  # a loss that is not finite would hide the others of the line
        self._norms.append(result.gradient_norm)
        if len(self._config.sizes.sizes) > 1:
            self._step[f"loss_{size}"] = self._step["loss"]
        for name, value in self._step.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def own_loss(self) -> float:
        return float(self._step["loss"].item()) if "loss" in self._step else math.nan

    def is_due(self, step: int) -> bool:
        return step % self._config.log_every == 0 or step == 1 or step == self._config.max_train_steps

    def take(self, step: int) -> dict[str, float]:
        """The means since the last line, over all ranks, by their TensorBoard names, after ``step`` optimizer steps."""
        values: dict[str, float] = {}
        if self._norms:
            names = sorted(self._sums)
            means = torch.stack([self._sums[name] / self._counts[name] for name in names])
            self._engine.average_([means])
            values = {f"train/{name}": float(mean) for name, mean in zip(names, means.tolist(), strict=True)}
            steps = {name: count for name, count in self._counts.items() if name.startswith("loss_")}
            values |= {f"train/steps_{name.removeprefix('loss_')}": count for name, count in steps.items()}
            values["train/gradient_norm"] = sum(self._norms) / len(self._norms)
            self.recent_loss = values["train/loss"]
        on_gpu = self._engine.device.type == "cuda"
        values |= {f"train/{name}": rate for name, rate in learning_rates(step - 1, self._config).items()}
        seconds = max(self._seconds, 1e-9)
        values["train/frames_per_second"] = self.num_frames / seconds
        (slowest,) = self._engine.worst(round(1000 * self._waited_s / seconds))  # all ranks wait for it
        values["train/waiting_for_clips"] = slowest / 1000
        values["train/gpu_memory_gb"] = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
        if self._config.log_system_stats:
            values |= system_stats(self._engine.device)
        self._begin_line()
        return values

    def state_dict(self) -> dict[str, Any]:
        """This rank's unfinished line: a resumed run writes the line that an undisturbed one would have written."""
        return {
            "sums": {name: value.cpu() for name, value in self._sums.items()},
            "counts": dict(self._counts),
            "norms": list(self._norms),
            "seconds": self._seconds,
            "waited_s": self._waited_s,
            "clips": self.num_clips,
            "frames": self.num_frames,
            "recent_loss": self.recent_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums = {name: value.to(self._engine.device) for name, value in state["sums"].items()}
        # Older checkpoints have one count for all terms.
        self._counts = dict(state.get("counts") or dict.fromkeys(state["sums"], len(state["norms"])))
        self._norms = list(state["norms"])
        self._seconds, self.num_clips, self.recent_loss = state["seconds"], state["clips"], state["recent_loss"]
        self._waited_s = state.get("waited_s", 0.0)  # older checkpoints do not know it
        self.num_frames = state.get("frames", self.num_clips * self._config.n_frames)  # older ones have one size

    def bar_text(self, values: Mapping[str, float]) -> str:
        memory = values["train/gpu_memory_gb"] or psutil.Process().memory_info().rss / GIB
        loss = f"loss {values['train/loss']:.4g}, " if "train/loss" in values else ""
        speed = values["train/frames_per_second"]
        shown_speed = f"{speed:.0f}" if speed >= 10 else f"{speed:.2g}"  # 64, 1234; 0.35 instead of 0
        waits = values["train/waiting_for_clips"]
        shown_waits = f" ({waits:.0%} of the time waiting for clips)" if waits >= TOLD_WAITING else ""
        speed_words = f"{shown_speed} frames/s{shown_waits}"
        return f"{loss}lr {values['train/learning_rate']:.2e}, {speed_words}, {memory:.1f} GiB"


def system_stats(device: torch.device) -> dict[str, float]:
    """Use of this machine: CPU and memory always, GPU load and temperature where the driver tells."""
    stats = {"system/cpu_percent": psutil.cpu_percent(), "system/memory_percent": psutil.virtual_memory().percent}
    if device.type == "cuda":
        try:
            stats["system/gpu_percent"] = float(torch.cuda.utilization(device))
            stats["system/gpu_celsius"] = float(torch.cuda.temperature(device))
        except Exception:  # noqa: BLE001 (there is no pynvml, or it has an error of its own: a slice of a GPU has no load)
            total = torch.cuda.get_device_properties(device).total_memory
            stats["system/gpu_memory_percent"] = 100 * torch.cuda.memory_reserved(device) / total
    return stats
