"""``notify_command``: the user's shell command that is told how a run ends, and when it stalls.

The main process runs it. Its environment says what happened; docs/guide-training.md lists the ``TINYVAE_`` variables.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.training.guards import StopRequested, kill_children
from tinyvae.training.resume import Progress

log = logging.getLogger(__name__)

COMMAND_LIMIT_S = 60.0
LOOKS_PER_STALL = 20


class Notifier:
    """A context around one run: it runs the command at the end, whatever the end is, and when the run stalls.

    Without a command, or on a process that is not the main one, it does nothing.
    """

    def __init__(self, config: TrainConfig, folder: Path, *, is_main: bool) -> None:
        self._config = config
        self._command = config.notify_command if is_main else None
        self._folder = folder
        self._progress = Progress()
        self.is_saved = True  # whether the newest save that was tried is on disk
        self._alive_at: float | None = None  # None: before the loop, or after this stall was told
        self._ended = threading.Event()
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> Notifier:
        if self._command is not None:
            threading.Thread(target=self._watch, name="stall watch", daemon=True).start()
        return self

    def is_at(self, progress: Progress) -> None:
        """The loop has started, or something in it is done: the run does not stall."""
        self._progress, self._alive_at = progress, time.monotonic()

    def __exit__(self, kind: object, fault: BaseException | None, traceback: object) -> None:
        self._ended.set()
        self._tell(*self._end(fault))

    def _end(self, fault: BaseException | None) -> tuple[str, str]:
        config, progress = self._config, self._progress
        if isinstance(fault, StopRequested):
            saved = "the run is saved" if self.is_saved else "its state could not be saved, see train.log"
            return "stopped", f"stopped by {fault} at step {progress.step}; {saved}"
        if fault is not None:
            return "failed", str(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {fault}"
        if progress.step < config.max_train_steps:
            return "early_stop", f"no better {config.metric_for_best_model} in {progress.stale_validations} validations"
        return "finished", f"all {progress.step} steps are done"

    def _watch(self) -> None:
        limit_s = self._config.notify_stall_s
        while not self._ended.wait(limit_s / LOOKS_PER_STALL):
            alive_at = self._alive_at
            if alive_at is not None and time.monotonic() - alive_at > limit_s:
                self._alive_at = None
                self._tell("stalled", f"no step has finished for {limit_s:g} s after step {self._progress.step}")

    def _tell(self, event: str, reason: str) -> None:
        """Run the command. If it fails, that is a warning: the run is more important."""
        if self._command is None:
            return
        progress = self._progress
        facts = {
            "TINYVAE_EVENT": event,
            "TINYVAE_REASON": reason,
            "TINYVAE_RUN": str(self._folder),
            "TINYVAE_STEP": str(progress.step),
            "TINYVAE_MAX_STEPS": str(self._config.max_train_steps),
            "TINYVAE_METRIC": self._config.metric_for_best_model,
            "TINYVAE_BEST": "" if progress.best_score is None else f"{progress.best_score:.6g}",
            "TINYVAE_BEST_STEP": "" if progress.best_step is None else str(progress.best_step),
        }
        with self._one_at_a_time:
            try:
                failure = _run_command(self._command, {**os.environ, **facts})
            except OSError as fault:  # such as a full disk where temporary files are
                failure = f"could not be run: {fault}"
        if failure:
            log.warning("notify_command (%s) %s", event, failure)


def _run_command(command: str, environment: dict[str, str]) -> str:
    """Run a shell command, for a limited time; return what went wrong, empty where nothing did."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            shell=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a signal to the job does not end it
        )
        try:
            code = process.wait(COMMAND_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_children(process.pid)
            process.kill()
            process.wait()
            return f"was ended: it took longer than {COMMAND_LIMIT_S:g} s"
        said.seek(0)
        lines = [line.strip() for line in said.read().decode(errors="replace").split("\n") if line.strip()]
        return f"failed with exit code {code}: {lines[-1] if lines else 'it said nothing'}" if code else ""
