"""One run folder, one run: a marker file that says who writes there.

The marker is made with O_EXCL, which every file system and also NFS (since version 3) decides for exactly one of
several starts. It names the process, so that one left by a killed run is told from one of a run that goes on:

- the process is of this machine and gone: the marker is taken over, by exactly one of those who try;
- the same Slurm job, started again: taken over too, for Slurm never runs a job twice at a time;
- a process of another machine cannot be looked at. A run therefore touches its marker every half minute, and one that
  was not touched for minutes is taken over.

Two containers that share a host name are taken for one machine; clocks of machines must agree within a minute or two.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tinyvae.errors import UserError
from tinyvae.quantities import duration_in_words

MARKER = ".running"
HALF_WRITTEN_S = 2.0
"""How long an empty marker is waited for: its maker is between two system calls, or was killed there."""
BEAT_S = 30.0
"""How often a run touches its marker."""
SILENT_S = 300.0
"""After so long without a touch, a run on another machine has ended."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who writes into a folder."""

    host: str
    pid: int
    process_started: float
    """As `_start_of` tells it: numbers of processes are used again."""
    since: str
    slurm_job: str = ""
    slurm_restarts: int = 0
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def this_process(cls) -> Holder:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=_start_of(os.getpid()),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
            slurm_restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )

    def is_gone(self, *, silent_s: float) -> bool:
        """Whether this process writes no more. ``silent_s``: seconds since it last touched its marker."""
        me = Holder.this_process()
        if self.slurm_job and self.slurm_job == me.slurm_job and self.slurm_restarts < me.slurm_restarts:
            return True
        if self.host != me.host:
            return silent_s > SILENT_S
        try:
            same = abs(_start_of(self.pid) - self.process_started) < 1.0
            return not same or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def _start_of(pid: int) -> float:
    """When a process began: in the kernel's ticks since the machine's start where they can be read, which no change of
    the clock moves; else by the clock. Raises psutil's ``NoSuchProcess``."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return psutil.Process(pid).create_time()
    return float(fields[19])  # the 22nd of all; the name before it ends with the bracket


class RunClaim:
    """A folder that this process alone writes to, until `release`."""

    def __init__(self, folder: Path) -> None:
        """Raises ``UserError`` at once where another run has the folder. Nothing but the marker is touched."""
        self.folder = folder
        before = folder.stat()
        self._times = (before.st_atime_ns, before.st_mtime_ns)
        self._marker = folder / MARKER
        self._holder = _claim(self._marker)
        self.is_used = False
        """Whether the run has written anything into the folder."""
        self._ends = threading.Event()
        self._beat = threading.Thread(target=self._touch_again_and_again, name="run marker", daemon=True)
        self._beat.start()

    def _touch_again_and_again(self) -> None:
        while not self._ends.wait(BEAT_S):
            with suppress(OSError):  # storage has bad moments; the next touch may reach it
                if self._is_ours():
                    os.utime(self._marker)

    def _is_ours(self) -> bool:
        holder = _read(self._marker)
        return holder is not None and holder.token == self._holder.token

    def release(self) -> None:
        """Take the marker away. A folder that nothing was written to is as it was, by its time too."""
        self._ends.set()
        self._beat.join()
        if not self._is_ours():
            return  # somebody removed the marker by hand, and another run has the folder now
        self._marker.unlink(missing_ok=True)
        if not self.is_used:
            with suppress(OSError):  # not ours, though we may write into it: its time stays that of now
                os.utime(self.folder, ns=self._times)


def _claim(marker: Path) -> Holder:
    while True:
        me = Holder.this_process()
        if _make(marker, me):
            return me
        there = _read(marker)
        if there is None:
            continue  # it went in this moment
        silent_s = _seconds_since_touched(marker)
        if not there.is_gone(silent_s=silent_s):
            raise UserError(_refusal(marker, there, silent_s))
        # One of those who see the dead process's marker may replace it. The right to do so is claimed in the same way,
        # under a name that only this dead process has.
        turn = marker.with_name(f"{marker.name}-after-{there.token}")
        _claim(turn)
        try:
            still = _read(marker)
            if still is not None and still.token == there.token:
                marker.unlink()
        finally:
            turn.unlink(missing_ok=True)


def _make(marker: Path, holder: Holder) -> bool:
    """Whether the marker was not there, and is now."""
    try:
        descriptor = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, json.dumps(asdict(holder)).encode())
    except OSError:
        marker.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return True


def _read(marker: Path) -> Holder | None:
    """The marker's holder; None where there is no marker."""
    deadline = time.monotonic() + HALF_WRITTEN_S
    while True:
        try:
            return Holder(**json.loads(marker.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{marker} is not whole, so it cannot be told which run has this folder; where none does, remove "
                    "the file and start again."
                ) from None
            time.sleep(0.02)


def _seconds_since_touched(marker: Path) -> float:
    try:
        return max(0.0, time.time() - marker.stat().st_mtime)
    except FileNotFoundError:  # it went in this moment
        return 0.0


def _refusal(marker: Path, holder: Holder, silent_s: float) -> str:
    folder = marker.parent
    here = holder.host == socket.gethostname()
    who = f"process {holder.pid}" + ("" if here else f" on {holder.host}")
    text = f"another run writes to {folder} ({who}, since {holder.since})"
    if here:
        return f"{text}; wait for its end, stop it with: kill {holder.pid}, or choose another --output_dir."
    silent, limit = duration_in_words(silent_s), duration_in_words(SILENT_S)
    return (
        f"{text}, and gave its last sign of life {silent} ago; wait for its end, or choose another --output_dir. "
        f"If its machine has died, start again in {limit}, or remove {marker} now."
    )
