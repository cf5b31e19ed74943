"""A folder of copies that can be made again, within a limit: what was not used for the longest time goes first.

Any number of processes share one folder without a lock: a copy appears by one rename and goes by one unlink. Each use
sets the file's time of last access; its time of change stays, because the decoder knows a file by it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Literal, NamedTuple

from tinyvae.files import home_folder

GIB = 2**30
ABANDONED_S = 3600.0
"""An unfinished copy that was not written to for this long belongs to a process that was killed."""
COPY_NAME = re.compile(r"[0-9a-f]{32}\.\w+")
"""Only files of such names are counted and deleted, whatever else a user keeps in the folder."""


class CacheNote(NamedTuple):
    """What a cache has to tell the user once. ``level``: one of `logging`'s."""

    level: int
    text: str


def default_cache_folder(kind: str) -> Path:
    """A folder of this user on the machine's own temporary disk; all runs there share it."""
    user = os.getuid() if hasattr(os, "getuid") else "cache"  # Windows: each user has a temporary folder
    return Path(tempfile.gettempdir()) / f"tinyvae-{kind}-{user}"


def user_cache() -> Path:
    """Where downloads of this user are kept: ``$XDG_CACHE_HOME/tinyvae``, else ``~/.cache/tinyvae``. A user without a
    home has a folder on the temporary disk."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "tinyvae"
    home = home_folder()
    return default_cache_folder("downloads") if home is None else home / ".cache" / "tinyvae"


class CacheFolder:
    """Copies by key, at most ``max_gb`` GiB of them. Copies used after ``run_start`` (of `time.time`) are this run's.

    A kind of cache has a ``title``, and ``advice`` for where it does not hold all files of a run.

    >>> folder = CacheFolder(Path("/fast/cache"), max_gb=50, run_start=time.time())  # doctest: +SKIP
    >>> folder.place("videos/a.mp4\\0" + "1234", ".rgb")  # doctest: +SKIP
    PosixPath('/fast/cache/5b36f1...rgb')
    """

    title = "the cache"
    advice = ""

    def __init__(self, folder: Path, *, max_gb: float, run_start: float = math.inf) -> None:
        self.folder, self.max_gb, self.run_start = folder, max_gb, run_start
        self.event: Literal["", "evicts", "full"] = ""
        """Nothing; copies of earlier runs were deleted; it does not hold all files of this run."""

    def place(self, key: str, suffix: str) -> Path:
        """Where the copy with this key is, if there is one. The key names the original and its version."""
        name = hashlib.blake2b(os.fsencode(key), digest_size=16).hexdigest()
        return self.folder / (name + suffix)

    def make_room(self, size: int, *, keep_used_since: float) -> bool:
        """Delete copies, the least recently used first, until one of ``size`` bytes fits; False where it cannot, and
        nothing is deleted then. Copies used after ``keep_used_since`` stay."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what is private in its place stays private
        surplus = size - int(self.max_gb * GIB)
        lack = size - shutil.disk_usage(self.folder).free  # the disk may be full before the cache is
        deletable: list[tuple[float, int, str]] = []
        for entry in os.scandir(self.folder):
            is_part = entry.name.endswith(".part")
            if is_part or COPY_NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):  # it was deleted meanwhile
                    found = entry.stat()
                    surplus += found.st_size
                    used_at = found.st_mtime if is_part else found.st_atime
                    if used_at < (time.time() - ABANDONED_S if is_part else keep_used_since):
                        deletable.append((used_at, found.st_size, entry.path))
        surplus = max(surplus, lack)
        if surplus > sum(copy_size for _, copy_size, _ in deletable):
            return False
        for used_at, copy_size, file in sorted(deletable):
            if surplus > 0:
                with suppress(PermissionError):  # not ours, or (on Windows) open: delete the next one
                    Path(file).unlink(missing_ok=True)
                    surplus -= copy_size
                    self.event = "full" if used_at >= self.run_start else self.event or "evicts"
        return surplus <= 0

    def notes(self) -> list[CacheNote]:
        """What a run should say about this cache, once."""
        start = f"{self.title} in {self.folder}"
        if self.event == "evicts":
            return [CacheNote(logging.INFO, f"{start} makes room: files of earlier runs are deleted")]
        if self.event == "full":
            return [CacheNote(logging.WARNING, f"{start} is full: {self.advice.format(max_gb=self.max_gb)}")]
        return []


def open_copy(file: Path, size: int | None) -> FileIO | None:
    """A copy to read from, marked as used now; None where there is none of that size (None: of any size)."""
    try:
        stream = file.open("rb", buffering=0)
    except FileNotFoundError:
        return None
    found = os.fstat(stream.fileno())
    if size is not None and found.st_size != size:
        stream.close()
        return None
    with suppress(OSError):  # deleted at this moment, or another user's: it can still be read
        os.utime(file, ns=(time.time_ns(), found.st_mtime_ns))
    return stream
