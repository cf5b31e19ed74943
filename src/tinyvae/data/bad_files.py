"""Files that turn out bad while a run reads them: named once, written down, counted, and too many stop the run."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from tinyvae.data.index import VideoIndex
from tinyvae.data.splits import DEFAULT_BAD_FILE_LIMIT
from tinyvae.errors import UserError
from tinyvae.file_lock import lock_file

log = logging.getLogger(__name__)

TRIES_BEFORE_JUDGEMENT = 64
"""A share means little over fewer reads than this."""


@dataclass(frozen=True, kw_only=True)
class BadFile:
    """A file (relative to the data root) and why it could not be used."""

    path: str
    reason: str


class BadFileLog:
    """``bad_files.jsonl``: one line ``{"path": ..., "reason": ...}`` for each bad file, however often it is met.

    Several ranks, and a resumed run, may write to the same file: each line is added under a lock, after a look at
    what is already there.
    """

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self._known: set[str] = set()
        self._read_up_to = 0

    def add(self, *bad_files: BadFile) -> None:
        fresh = [bad for bad in bad_files if bad.path not in self._known]
        if not fresh:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a+b") as stream:
            lock_file(stream, wait=True)
            stream.seek(self._read_up_to)
            for line in stream:
                if line.endswith(b"\n"):
                    self._known.add(json.loads(line)["path"])
                else:
                    # A kill cut this line off; the file it named is simply named again.
                    stream.truncate(stream.tell() - len(line))
            stream.seek(0, os.SEEK_END)
            for bad in fresh:
                if bad.path not in self._known:
                    self._known.add(bad.path)
                    line_out = json.dumps({"path": bad.path, "reason": bad.reason}, ensure_ascii=True)
                    stream.write(line_out.encode() + b"\n")
            stream.flush()
            self._read_up_to = stream.tell()

    def add_index(self, index: VideoIndex) -> int:
        """Write down every file that is bad in the index; returns how many there are."""
        batch: list[BadFile] = []
        for row in index.bad_rows():
            batch.append(BadFile(path=row.path, reason=row.reason))
            if len(batch) == 1024:
                self.add(*batch)
                batch.clear()
        self.add(*batch)
        return index.num_bad


@dataclass(kw_only=True)
class BadFileWatch:
    """Follows one loader: names each bad file once in the log, and stops the run when their share is too large.

    The share is bad reads / reads since the loader started, judged from ``TRIES_BEFORE_JUDGEMENT`` reads on.
    """

    limit: float = DEFAULT_BAD_FILE_LIMIT
    written_to: BadFileLog | None = None
    num_tries: int = 0
    num_bad_tries: int = 0
    named: dict[str, str] = field(default_factory=dict)
    """Path -> reason of every bad file met so far."""

    def see(self, bad_files: tuple[BadFile, ...], num_tries: int) -> None:
        self.num_tries += num_tries
        self.num_bad_tries += len(bad_files)
        for bad in bad_files:
            if bad.path not in self.named:
                self.named[bad.path] = bad.reason
                log.warning("bad file %s skipped: %s", bad.path, bad.reason)
        if self.written_to is not None:
            self.written_to.add(*bad_files)
        share = self.num_bad_tries / max(1, self.num_tries)
        if self.num_tries >= TRIES_BEFORE_JUDGEMENT and share > self.limit:
            path, reason = next(iter(self.named.items()))
            raise UserError(
                f"{self.num_bad_tries} of {self.num_tries} clips read so far ({share:.1%}) were bad, above the limit "
                f"of {self.limit:.1%}; the first was {path!r}: {reason}; mend the data (all bad files are named in "
                f"{self.written_to.file if self.written_to else 'the log'}) or raise bad_file_limit"
            )
