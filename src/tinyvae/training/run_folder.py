"""The folder of a run: which one it is, that no other run writes to it, and what the run puts there first.

A refused resume leaves the old run as it was: until `RunPlace.settle` only a marker and one hidden folder are written.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tinyvae.config.schema import RUN_FORMAT, TIME_DIRECTIVES, TrainConfig, to_json
from tinyvae.data.index_build import CACHED_INDEX
from tinyvae.errors import UserError
from tinyvae.files import atomic_write, home_folder, writing_to
from tinyvae.terminal import duration_in_words
from tinyvae.training.checkpoint import UNFINISHED, read_json, remove_unfinished
from tinyvae.training.validation import put_best_model_back

log = logging.getLogger(__name__)

MARKER = ".running"
HALF_WRITTEN_S = 2.0  # how long to wait for an empty marker: its process is writing it, or was killed there
BEAT_S = 30.0  # how often a run touches its marker
SILENT_S = 300.0  # a run on another machine that has not touched its marker for this long has ended
LATEST = "latest"
STAGED = f"{UNFINISHED}index"
TRIES_FOR_A_TIME = 60

_DIRECTIVE = re.compile(f"%[{TIME_DIRECTIVES}]")


def new_run_folder(output_dir: Path, now: datetime) -> Path:
    """``output_dir`` with its time directives filled in; other per cent signs stay as they are."""
    return Path(_DIRECTIVE.sub(lambda directive: now.strftime(directive.group()), str(output_dir)))


def has_time(output_dir: Path) -> bool:
    """Whether every start makes a folder of its own."""
    return _DIRECTIVE.search(str(output_dir)) is not None


def earlier_run_folders(output_dir: Path) -> list[Path]:
    """The folders that earlier starts with this ``output_dir`` made, the newest (by the time in its name) first.

    Example: ``output/run_%Y-%m-%d`` finds ``output/run_2026-11-15``.
    """
    text = str(output_dir)
    directives = _DIRECTIVE.findall(text)
    digits = _DIRECTIVE.sub(lambda found: rf"(\d{{{4 if found.group() == '%Y' else 2}}})", re.escape(text))
    found = []
    for name in glob.iglob(_DIRECTIVE.sub("*", glob.escape(text))):
        match = re.fullmatch(digits, name)
        if match and os.path.isdir(name):
            values = dict(zip(directives, match.groups(), strict=True))
            found.append((tuple(values.get(f"%{letter}", "") for letter in TIME_DIRECTIVES), Path(name)))
    return [folder for _, folder in sorted(found, reverse=True)]


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that writes to a folder. ``process_started``: by `_start_of`, because process numbers come again."""

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    process_started: float = field(default_factory=lambda: _start_of(os.getpid()))
    since: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    slurm_job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    slurm_restarts: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def is_gone(self, *, silent_s: float) -> bool:
        """Whether this process no longer writes. ``silent_s``: seconds since it last touched its marker."""
        me = Holder()
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

    def refusal(self, marker: Path, silent_s: float) -> str:
        """What to tell another run that wants the folder."""
        here = self.host == socket.gethostname()
        who = f"process {self.pid}" + ("" if here else f" on {self.host}")
        text = f"another run writes to {marker.parent} ({who}, since {self.since})"
        if here:
            return f"{text}; wait for its end, stop it with: kill {self.pid}, or choose another --output_dir."
        silent, limit = duration_in_words(silent_s), duration_in_words(SILENT_S)
        died = f"if its machine has died, start again in {limit}, or remove {marker}"
        return f"{text}, last active {silent} ago; wait for its end, or choose another --output_dir; {died}."


def _start_of(pid: int) -> float:
    """When a process started: in kernel ticks, which no change of the clock moves; without these by the clock."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return psutil.Process(pid).create_time()
    return float(fields[19])  # field 22 of proc(5); the process name with its bracket is field 2


class RunClaim:
    """A folder that only this process writes to, until `release`; a ``UserError`` if another run has it.

    Nothing except the marker is touched. Set ``is_used`` when the run writes into the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_used = False
        self._before = folder.stat()
        self._marker = folder / MARKER
        self._holder = _claim(self._marker)
        self._ends = threading.Event()
        self._beat = threading.Thread(target=self._touch_marker, name="run marker", daemon=True)
        self._beat.start()

    def _touch_marker(self) -> None:
        while not self._ends.wait(BEAT_S):
            with suppress(OSError):  # storage has bad moments; the next touch may reach it
                if self._is_ours():
                    os.utime(self._marker)

    def _is_ours(self) -> bool:
        """Whether the marker is there, can be read, and is this process's."""
        try:
            return _read(self._marker).token == self._holder.token
        except (OSError, UserError):
            return False

    def release(self) -> None:
        """Remove the marker. An unused folder gets its old time back."""
        self._ends.set()
        self._beat.join()
        if not self._is_ours():
            return  # somebody removed the marker by hand, and another run has the folder now; or the storage is gone
        with suppress(OSError):  # an error here would hide why the run ends
            self._marker.unlink(missing_ok=True)
            if not self.is_used:
                os.utime(self.folder, ns=(self._before.st_atime_ns, self._before.st_mtime_ns))


def _claim(marker: Path) -> Holder:
    while True:
        me = Holder()
        if _make(marker, me):
            return me
        try:
            there, silent_s = _read(marker), max(0.0, time.time() - marker.stat().st_mtime)
        except FileNotFoundError:  # it was removed just now
            continue
        if not there.is_gone(silent_s=silent_s):
            raise UserError(there.refusal(marker, silent_s))
        # Several processes may see the marker of a dead one, and one of them may replace it. They claim that right in
        # the same way, under a name that only this dead process has.
        turn = marker.with_name(f"{marker.name}-after-{there.token}")
        _claim(turn)
        try:
            with suppress(FileNotFoundError):
                if _read(marker).token == there.token:
                    marker.unlink()
        finally:
            turn.unlink(missing_ok=True)


def _make(marker: Path, holder: Holder) -> bool:
    """Make the marker; False if it is there already."""
    try:
        stream = marker.open("x")
    except FileExistsError:
        return False
    try:
        with stream:
            json.dump(asdict(holder), stream)
    except OSError:
        marker.unlink(missing_ok=True)
        raise
    return True


def _read(marker: Path) -> Holder:
    """The marker's holder. Raises ``FileNotFoundError`` if there is no marker."""
    deadline = time.monotonic() + HALF_WRITTEN_S
    while True:
        try:
            return Holder(**json.loads(marker.read_bytes()))
        except (ValueError, TypeError):
            if time.monotonic() > deadline:
                way_out = "if no run writes to this folder, remove the file and start again"
                raise UserError(f"{marker} is damaged; {way_out}.") from None
            time.sleep(0.02)


class RunPlace:
    """The folder of a run, on its main process: claimed at once, then settled or left as it was. Call `leave` last.

    A ``UserError`` if it holds another run or cannot be written. ``note``: why a resumed run gets a new folder.
    """

    def __init__(self, config: TrainConfig, checkpoint: Path | None) -> None:
        self.note = ""
        self._is_new = False
        self._is_timed = has_time(config.output_dir)
        self.folder = self._choose(config, checkpoint)
        with writing_to(self.folder):
            self._claim = RunClaim(self.folder)
        if refusal := why_taken(self.folder, checkpoint):
            self.leave()
            raise UserError(f"{refusal}.")

    def _choose(self, config: TrainConfig, checkpoint: Path | None) -> Path:
        """A fixed ``output_dir``; else the folder of the checkpoint's run; else a new one with the time in its name."""
        if checkpoint is not None and self._is_timed:
            home = checkpoint.parent
            if is_run_folder(home):
                return Path(os.path.realpath(home) if home.is_symlink() else home).absolute()
            self.note = f"{home} is no run's folder (it has no config.json of a run), so this run gets a new one"
        for _ in range(TRIES_FOR_A_TIME):
            folder = new_run_folder(config.output_dir, datetime.now()).absolute()
            with writing_to(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                try:
                    folder.mkdir()
                    self._is_new = True
                    return folder
                except FileExistsError:
                    if not folder.is_dir():
                        raise
                    if "%S" not in str(config.output_dir):
                        return folder
            time.sleep(1.0 - time.time() % 1.0)  # another run started in this second and has the folder
        raise UserError(f"{folder} and those of the minute before are taken; choose another --output_dir.")

    def index_folder(self) -> Path:
        """Where to make the list of videos. A resumed run may still be refused, so it changes a copy of the list."""
        if not is_run_folder(self.folder):
            return self.folder
        staged, old = self.folder / STAGED, self.folder / CACHED_INDEX
        with writing_to(self.folder):
            staged.mkdir(exist_ok=True)  # one that a kill left may hold half of the work
            if old.exists() and not (staged / CACHED_INDEX).exists():
                shutil.copy2(old, staged / CACHED_INDEX)
        return staged

    def settle(self) -> None:
        """The run is accepted: from here on it writes to the folder. Raises ``OSError`` if it cannot."""
        self._claim.is_used = True
        staged = self.folder / STAGED / CACHED_INDEX
        if staged.exists():
            staged.replace(self.folder / CACHED_INDEX)
        remove_unfinished(self.folder)
        put_best_model_back(self.folder)

    def sign(self, config: TrainConfig) -> None:
        """After all other first files: write ``config.json``, which makes this a run's folder, and ``latest``."""
        with atomic_write(self.folder / "config.json", "w") as stream:
            stream.write(to_json(config) + "\n")
        point_latest_at(self.folder)

    def leave(self) -> None:
        """The run has ended, well or not. A folder made for a run that never started is removed."""
        if not self._claim.is_used:
            shutil.rmtree(self.folder / STAGED, ignore_errors=True)
        self._claim.release()
        if self._is_new and not self._claim.is_used:
            with suppress(OSError):  # a fixed folder with a list of videos stays: the next start uses it
                shutil.rmtree(self.folder, ignore_errors=True) if self._is_timed else self.folder.rmdir()


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds a run, by its ``config.json``."""
    content = read_json(folder / "config.json")
    return isinstance(content, dict) and content.get("format") == RUN_FORMAT


def why_taken(folder: Path, checkpoint: Path | None) -> str:
    """Why a run may not begin in a folder, or go on there from a checkpoint; empty where it may.

    A folder that holds a run belongs to it: only a checkpoint in it may go on there.
    """
    homes = () if checkpoint is None else (checkpoint.parent.resolve(), checkpoint.resolve().parent)  # may link
    if folder.resolve() in homes or not os.path.exists(folder / "config.json"):
        return ""
    if not is_run_folder(folder):
        return f"{folder} holds a config.json that is not of a run; choose another --output_dir"
    other = "a run" if checkpoint is None else f"another run than that of {checkpoint}"
    return f"{folder} already holds {other}; choose another --output_dir, or go on with it by --resume latest"


def copy_past(old_run: Path, folder: Path) -> None:
    """Copy the metric lines and validations of the past to a run that goes on in a new folder."""
    for name in ("metrics.jsonl", "validation_history.json"):
        source, target = old_run / name, folder / name
        if source.is_file() and not target.exists():
            shutil.copyfile(source, target)


def point_latest_at(folder: Path) -> None:
    """Make the link ``latest`` beside the run folder lead to it. There is always an old link or a new one."""
    link = folder.parent / LATEST
    if folder.parent in (Path(folder.anchor), home_folder()) or (link.exists() and not link.is_symlink()):
        return  # a folder of this name is the user's own; and nobody looks for runs there
    fresh = link.with_name(f".{LATEST}-{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.name, target_is_directory=True)
        fresh.replace(link)
    except (OSError, NotImplementedError) as fault:
        log.info("no link %s was made: %s", link, fault)
