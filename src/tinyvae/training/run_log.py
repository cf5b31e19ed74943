"""What a run writes down: ``train.log``, ``metrics.jsonl`` and TensorBoard. Only the main process writes."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from tinyvae.config import TrainConfig
from tinyvae.config_files.saving import flat_for_tracker, to_json
from tinyvae.training.checkpoint import why_not_written

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
    rows = "\n".join(f"| {key} | {value} |" for key, value in flat_for_tracker(config).items())
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
