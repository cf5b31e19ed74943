"""Where a run writes: which folder, alone in it, and what it puts there first.

A resume can be refused until its whole past is taken over, and a refused one leaves the old run as it was: until
`RunPlace.settle` nothing but the marker of `tinyvae.training.run_folder` and one folder of our own lie there.
"""

from __future__ import annotations

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
from tinyvae.terminal import duration_in_words
from tinyvae.training.checkpoint import UNFINISHED, remove_unfinished, why_not_written
from tinyvae.training.validation import put_best_model_back

_DIRECTIVE = re.compile(f"%[{TIME_DIRECTIVES}]")
_DIGITS = {"%Y": r"\d{4}"}
_TWO_DIGITS = r"\d{2}"


def new_run_folder(output_dir: Path, now: datetime) -> Path:
    """``output_dir`` with its time directives filled in; other per cent signs stay as they are."""
    return Path(_DIRECTIVE.sub(lambda directive: now.strftime(directive.group()), str(output_dir)))


def has_time(output_dir: Path) -> bool:
    """Whether every start makes a folder of its own."""
    return _DIRECTIVE.search(str(output_dir)) is not None


def earlier_run_folders(output_dir: Path) -> list[Path]:
    """Existing folders of the experiment that ``output_dir`` names, the newest (by its own time) first."""
    fixed = Path(output_dir.anchor)
    parts = [part for part in output_dir.parts if part != output_dir.anchor]
    while parts and not _DIRECTIVE.search(parts[0]):
        fixed /= parts.pop(0)
    found = [fixed]
    for part in parts:
        pattern = _pattern_of(part)
        found = [
            entry for folder in found if folder.is_dir() for entry in folder.iterdir() if pattern.fullmatch(entry.name)
        ]
    folders = [folder for folder in found if folder.is_dir()]
    return sorted(folders, key=lambda folder: _time_of(folder, output_dir), reverse=True)


def _pattern_of(part: str) -> re.Pattern[str]:
    text, end = "", 0
    for directive in _DIRECTIVE.finditer(part):
        digits = _DIGITS.get(directive.group(), _TWO_DIGITS)
        text += re.escape(part[end : directive.start()]) + f"({digits})"
        end = directive.end()
    return re.compile(text + re.escape(part[end:]))


def _time_of(folder: Path, output_dir: Path) -> tuple[str, ...]:
    """The folder's time as (year, month, day, hour, minute, second), as far as its name holds them."""
    directives = _DIRECTIVE.findall(str(output_dir))
    match = _pattern_of(str(output_dir)).fullmatch(str(folder))
    values = dict(zip(directives, match.groups(), strict=True)) if match else {}
    return tuple(values.get(f"%{letter}", "") for letter in TIME_DIRECTIVES)


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


log = logging.getLogger(__name__)

LATEST = "latest"
STAGED = f"{UNFINISHED}index"
TRIES_FOR_A_TIME = 60


class RunPlace:
    """The folder of a run, seen by its main process: claimed at once, `settle`d in or left as it was, then `leave`d."""

    def __init__(self, config: TrainConfig, checkpoint: Path | None) -> None:
        """Raises ``UserError`` where another run writes to the folder or is in it, or where nobody can write."""
        self.note = ""
        self._is_new = False
        self._is_settled = False
        self._is_timed = has_time(config.output_dir)
        self.folder = self._choose(config, checkpoint)
        try:
            self._claim = RunClaim(self.folder)
        except OSError as fault:
            raise cannot_write(self.folder, fault) from None
        try:
            self._refuse_other_run(checkpoint)
        except UserError:
            self.leave()
            raise

    def _choose(self, config: TrainConfig, checkpoint: Path | None) -> Path:
        """A resumed run goes on in the folder of its checkpoint, unless ``output_dir`` names one folder for good or the
        checkpoint lies among other things, as a copied one does. Every other run gets the folder of its time."""
        if checkpoint is not None and has_time(config.output_dir):
            home = checkpoint.parent
            if is_run_folder(home):
                return Path(os.path.realpath(home) if home.is_symlink() else home).absolute()
            self.note = f"{home} is no run's folder (it has no config.json of a run), so this run gets a new one"
        for _ in range(TRIES_FOR_A_TIME):
            folder = new_run_folder(config.output_dir, datetime.now()).absolute()
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir()
                self._is_new = True
                return folder
            except FileExistsError as taken:
                if not folder.is_dir():
                    raise cannot_write(folder, taken) from None
                if "%S" not in str(config.output_dir):
                    return folder
            except OSError as fault:
                raise cannot_write(folder, fault) from None
            time.sleep(1.0 - time.time() % 1.0)  # another run began in this second, and the folder is its own
        raise UserError(f"{folder} and those of the minute before are taken; choose another --output_dir.")

    def _refuse_other_run(self, checkpoint: Path | None) -> None:
        """A folder that holds a run belongs to it: only a checkpoint that lies there goes on in it."""
        homes = () if checkpoint is None else (checkpoint.parent.resolve(), checkpoint.resolve().parent)  # may link
        if self.folder.resolve() not in homes and (self.folder / "config.json").exists():
            other = "a run" if checkpoint is None else f"another run than that of {checkpoint}"
            way_out = "choose another --output_dir, or go on with it by --resume latest"
            raise UserError(f"{self.folder} already holds {other}; {way_out}.")

    def index_folder(self) -> Path:
        """Where the list of videos is made. Of a run that may yet be refused: beside the old list, with a second name
        of it, so that what is known of each video is not looked up again."""
        if not is_run_folder(self.folder):
            return self.folder
        staged, old = self.folder / STAGED, self.folder / CACHED_INDEX
        try:
            staged.mkdir(exist_ok=True)  # one that a kill left may hold half of the work
            if old.exists() and not (staged / CACHED_INDEX).exists():
                try:
                    os.link(old, staged / CACHED_INDEX)
                except OSError:  # a file system without links
                    shutil.copy2(old, staged / CACHED_INDEX)
        except OSError as fault:
            raise cannot_write(self.folder, fault) from None
        return staged

    def settle(self) -> None:
        """From here on the folder is this run's own; raises ``OSError`` where it cannot be written."""
        self._is_settled = True
        self._claim.is_used = True
        staged = self.folder / STAGED / CACHED_INDEX
        if staged.exists():
            staged.replace(self.folder / CACHED_INDEX)
        remove_unfinished(self.folder)
        put_best_model_back(self.folder)

    def sign(self, config: TrainConfig) -> None:
        """Last of all, once the first files could be written: ``config.json``, which makes this a run's folder."""
        write_run_config(self.folder, config)
        point_latest_at(self.folder)

    def leave(self) -> None:
        """The run has ended, well or not. A folder that was made for it goes, where it never began."""
        if not self._is_settled:
            shutil.rmtree(self.folder / STAGED, ignore_errors=True)
        self._claim.release()
        if self._is_new and not self._is_settled:
            if self._is_timed:  # nobody will come back to it
                shutil.rmtree(self.folder, ignore_errors=True)
            else:
                with suppress(OSError):  # it is not empty: the list of videos in it is of use to the next start
                    self.folder.rmdir()


def is_run_folder(folder: Path) -> bool:
    """Whether a folder holds a run: by its ``config.json``."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == RUN_FORMAT


def cannot_write(folder: Path, fault: OSError) -> UserError:
    place = next((there for there in (folder, *folder.parents) if there.is_dir()), folder)
    reason = why_not_written(fault, place)
    return UserError(f"cannot write to the run folder {folder} ({reason}); make room, or choose another --output_dir.")


def bring_past_along(old_run: Path, folder: Path) -> None:
    """A run that goes on in a new folder has the lines and validations of its past there too."""
    for name in ("metrics.jsonl", "validation_history.json"):
        source, target = old_run / name, folder / name
        if source.is_file() and not target.exists():
            shutil.copyfile(source, target)


def write_run_config(folder: Path, config: TrainConfig) -> None:
    """``config.json``: the run's settings as they were resolved."""
    temporary = folder / ".config.json.part"
    temporary.write_text(to_json(config) + "\n")
    temporary.replace(folder / "config.json")


def point_latest_at(folder: Path) -> None:
    """``latest`` beside the run folder leads to it; whoever looks sees the old link or the new one, never none."""
    link = folder.parent / LATEST
    if folder.parent in (Path(folder.anchor), Path.home()) or (link.exists() and not link.is_symlink()):
        return  # a folder of this name is somebody's own; and nobody looks for runs there
    fresh = link.with_name(f".{LATEST}-{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.name, target_is_directory=True)
        fresh.replace(link)
    except (OSError, NotImplementedError) as fault:
        log.info("no link %s was made: %s", link, fault)
