"""Writing an index: an append-only journal that survives a kill, and its turning into a sorted index at once.

While a build runs, each outcome goes to ``INDEX.journal-rows`` and ``INDEX.journal-text``. A kill leaves them behind;
the next build makes ``INDEX.resume`` of them (itself an index) and looks there before it probes a file again. The
finished index replaces the old one by one rename, so a reader sees the old one or the new one, never a half.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyvae.data.index import (
    CHUNK_ROWS,
    ROW,
    SPLIT_CODES,
    STATUS_BAD,
    VideoIndex,
    hash_of_path,
    is_index,
    open_index,
    pack_header,
)
from tinyvae.errors import UserError
from tinyvae.files import lock_file

ROWS_PER_FLUSH = 256
MAX_REASON_BYTES = 600
FINGERPRINT_FIELDS = ("path_hash", "file_bytes", "frames", "width", "height", "status", "split")


@dataclass(frozen=True, kw_only=True)
class IndexRecord:
    """One file's outcome, as it goes into the journal. ``reason`` is empty for a good file."""

    path: str
    status: int
    reason: str = ""
    split: str = ""
    frames: int = 0
    fps: float = 0.0
    width: int = 0
    height: int = 0
    codec: str = ""
    interlaced: bool = False
    file_bytes: int = -1
    ends_crc: int = 0
    mtime_ns: int = -1
    first_pts: int = 0
    pts_step: float = 0.0
    pixel_aspect: float = 1.0
    thorough: bool = False


@dataclass(frozen=True, kw_only=True)
class WrittenIndex:
    """What went into an index that has just been written."""

    num_rows: int
    num_bad: int
    num_duplicates: int


class IndexJournal:
    """The growing journal of one build. Only one process may hold it."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._rows_file = _beside(output, "journal-rows")
        self._text_file = _beside(output, "journal-text")
        output.parent.mkdir(parents=True, exist_ok=True)
        # The lock is on a file of its own: the journal files come and go, the lock must not.
        self._lock = open(_beside(output, "lock"), "wb")  # noqa: SIM115 - held for the life of the journal
        try:
            lock_file(self._lock, wait=False)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"another process is building the index {output} now; wait for it or stop it") from None
        self.resumed = self._keep_interrupted_work()
        self._codecs: list[str] = [""]
        self._rows = open(self._rows_file, "wb")  # noqa: SIM115
        self._text = open(self._text_file, "wb")  # noqa: SIM115
        self._text_bytes = 0
        self._waiting: list[tuple[Any, ...]] = []

    def append(self, record: IndexRecord) -> None:
        path = os.fsencode(record.path)
        reason = record.reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        if record.codec not in self._codecs:
            self._codecs.append(record.codec)
        values = {
            "path_hash": hash_of_path(record.path),
            "text_start": self._text_bytes,
            "path_bytes": len(path),
            "reason_bytes": len(reason),
            "file_bytes": record.file_bytes,
            "ends_crc": record.ends_crc,
            "mtime_ns": record.mtime_ns,
            "frames": record.frames,
            "width": record.width,
            "height": record.height,
            "fps": record.fps,
            "first_pts": record.first_pts,
            "pts_step": record.pts_step,
            "codec": self._codecs.index(record.codec),
            "status": record.status,
            "split": SPLIT_CODES[record.split],
            "interlaced": record.interlaced,
            "pixel_aspect": record.pixel_aspect,
            "thorough": record.thorough,
        }
        self._waiting.append(tuple(values[name] for name in ROW.names or ()))
        self._text.write(path + reason)
        self._text_bytes += len(path) + len(reason)
        if len(self._waiting) >= ROWS_PER_FLUSH:
            self.flush()

    def flush(self) -> None:
        """Text first: a row in the journal always has its text, whenever the process dies."""
        self._text.flush()
        _beside(self.output, "journal-codecs").write_text("\n".join(self._codecs), encoding="utf-8")
        self._rows.write(np.array(self._waiting, dtype=ROW).tobytes())
        self._rows.flush()
        self._waiting.clear()

    def finish(self, header: dict[str, Any]) -> WrittenIndex:
        """Write the index in place of the old one and remove the journal."""
        self.flush()
        written = write_index(
            self.output, self._rows_file, self._text_file, self._codecs, header, refuse_split_conflicts=True
        )
        self.close()
        for name in ("journal-rows", "journal-text", "journal-codecs", "resume", "lock"):
            _beside(self.output, name).unlink(missing_ok=True)
        return written

    def close(self) -> None:
        """Let go of the files; what was flushed stays for the next build."""
        if not self._rows.closed:
            self.flush()
        self._rows.close()
        self._text.close()
        self._lock.close()

    def _keep_interrupted_work(self) -> VideoIndex | None:
        """Make one index, ``INDEX.resume``, of what earlier builds left behind; None where there is nothing."""
        resume = _beside(self.output, "resume")
        codecs_file = _beside(self.output, "journal-codecs")
        if self._rows_file.exists() and self._text_file.exists() and codecs_file.exists():
            codecs = codecs_file.read_text(encoding="utf-8").split("\n")
            _cut_torn_rows(self._rows_file, self._text_file, len(codecs))
            if is_index(resume):
                _append_index(open_index(resume), self._rows_file, self._text_file, codecs)
            header = {"data_root": "", "source": ""}
            write_index(resume, self._rows_file, self._text_file, codecs, header, refuse_split_conflicts=False)
        return open_index(resume) if is_index(resume) else None


def write_index(
    output: Path,
    rows_file: Path,
    text_file: Path,
    codecs: list[str],
    header: dict[str, Any],
    *,
    refuse_split_conflicts: bool,
) -> WrittenIndex:
    """Sort the journal by path hash, drop repeated paths (the last one stays) and put the file in place at once."""
    num_journal_rows = rows_file.stat().st_size // ROW.itemsize
    rows: npt.NDArray[Any] = (
        np.memmap(rows_file, dtype=ROW, mode="r", shape=(num_journal_rows,)) if num_journal_rows else np.zeros(0, ROW)
    )
    order = np.argsort(np.array(rows["path_hash"]), kind="stable")
    order = _without_repeats(rows, order, text_file, refuse_split_conflicts)
    digest = hashlib.blake2b(digest_size=16)
    num_bad = 0
    has_splits = False
    for chunk in _chunks_of(rows, order):
        num_bad += int((chunk["status"] == STATUS_BAD).sum())
        has_splits = has_splits or bool((chunk["split"] != 0).any())
        for field in FINGERPRINT_FIELDS:
            digest.update(np.ascontiguousarray(chunk[field]).tobytes())
    fields = {
        **header,
        "codecs": codecs,
        "num_bad": num_bad,
        "has_splits": has_splits,
        "fingerprint": digest.hexdigest(),
    }
    growing = output.with_name(f"{output.name}.writing-{os.getpid()}")
    try:
        with open(growing, "wb") as out, open(text_file, "rb") as text:
            out.write(pack_header(fields, len(order), text_file.stat().st_size))
            for chunk in _chunks_of(rows, order):
                out.write(chunk.tobytes())
            shutil.copyfileobj(text, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        os.replace(growing, output)
    finally:
        growing.unlink(missing_ok=True)
    return WrittenIndex(num_rows=len(order), num_bad=num_bad, num_duplicates=num_journal_rows - len(order))


def _chunks_of(rows: npt.NDArray[Any], order: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(order), CHUNK_ROWS):
        yield rows[order[start : start + CHUNK_ROWS]]


def _without_repeats(
    rows: npt.NDArray[Any], order: npt.NDArray[np.int64], text_file: Path, refuse_split_conflicts: bool
) -> npt.NDArray[np.int64]:
    hashes = rows["path_hash"][order]
    twins = np.flatnonzero(hashes[:-1] == hashes[1:])
    if len(twins) == 0:
        return order
    keep = np.ones(len(order), dtype=bool)
    with open(text_file, "rb") as text:

        def path_at(place: int) -> str:
            raw = rows[order[place]]
            text.seek(int(raw["text_start"]))
            return os.fsdecode(text.read(int(raw["path_bytes"])))

        for place in map(int, twins):
            # Two paths with one 64-bit hash would be a wonder; they are compared all the same, and both are kept.
            if path_at(place) != path_at(place + 1):
                continue
            keep[place] = False
            if refuse_split_conflicts and rows[order[place]]["split"] != rows[order[place + 1]]["split"]:
                raise UserError(
                    f"the file {path_at(place)!r} is listed twice with different splits; "
                    "training and validation must not share a file: remove one of the two entries"
                )
    return order[keep]


def _cut_torn_rows(rows_file: Path, text_file: Path, num_codecs: int) -> None:
    """A kill can leave half a row at the end, or (after a crash of the machine) rows without their text."""
    whole = rows_file.stat().st_size // ROW.itemsize
    if whole:
        rows = np.memmap(rows_file, dtype=ROW, mode="r", shape=(whole,))
        ends = rows["text_start"] + rows["path_bytes"] + rows["reason_bytes"]
        sound = (ends <= text_file.stat().st_size) & (rows["codec"] < num_codecs) & (rows["status"] > 0)
        whole = whole if sound.all() else int(np.argmin(sound))
        del rows
    os.truncate(rows_file, whole * ROW.itemsize)


def _append_index(index: VideoIndex, rows_file: Path, text_file: Path, codecs: list[str]) -> None:
    """Append a whole index to a journal: rows with shifted text, text as it is."""
    shift = text_file.stat().st_size
    new_code = np.array([_code_of(index.codec_name(code), codecs) for code in range(len(index.header["codecs"]))])
    with open(rows_file, "ab") as rows_out:
        for _, rows in index.chunks():
            moved = rows.copy()
            moved["text_start"] += shift
            moved["codec"] = new_code[rows["codec"]]
            rows_out.write(moved.tobytes())
    with open(text_file, "ab") as text_out, open(index.file, "rb") as text_in:
        text_in.seek(index.header["text_start"])
        shutil.copyfileobj(text_in, text_out, 1 << 20)


def _code_of(codec: str, codecs: list[str]) -> int:
    if codec not in codecs:
        codecs.append(codec)
    return codecs.index(codec)


def _beside(output: Path, name: str) -> Path:
    return output.with_name(f"{output.name}.{name}")
