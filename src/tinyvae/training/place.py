"""Where a run writes: which folder, alone in it, and what it puts there first.

A resume can be refused until its whole past is taken over, and a refused one leaves the old run as it was: until
`RunPlace.settle` nothing but the marker of `tinyvae.training.run_claim` and one folder of our own lie there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tinyvae.config import TrainConfig
from tinyvae.config_files.run_folder import has_time, new_run_folder
from tinyvae.config_files.saving import RUN_FORMAT, to_json
from tinyvae.data.index_build import CACHED_INDEX
from tinyvae.errors import UserError
from tinyvae.training.checkpoint import UNFINISHED, remove_unfinished, why_not_written
from tinyvae.training.run_claim import RunClaim
from tinyvae.training.validation import put_best_model_back

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
