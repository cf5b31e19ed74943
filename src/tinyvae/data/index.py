"""The index of a data set: one file with one row for each video, read by memory map and written through a journal.

The file holds 64 KiB of header (magic bytes, then JSON), the rows (``ROW``, sorted by the hash of the path), and the
text (paths and, for bad files, reasons). The order by hash does not depend on how the files were listed, and finds a
path by binary search. Mapped pages count as memory of each process that touches them, so readers give them back.

A build appends each row to ``INDEX.new-rows`` and ``INDEX.new-text``. If it is killed, the next one makes
``INDEX.resume`` from them (an index too) and looks there before it probes a file again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvae.errors import MissingFileError, UserError
from tinyvae.files import atomic_write, check_readable, lock_file
from tinyvae.storage import FileVersion, Place, Url, local_file, place_of

if TYPE_CHECKING:
    from tinyvae.video.decode import VideoInfo

ANY_MAGIC = b"TVINDEX"
MAGIC = ANY_MAGIC + b"2"
HEADER_BYTES = 1 << 16
HEADER_KEYS = {"num_rows", "text_bytes", "num_bad", "has_splits", "fingerprint", "data_root", "source"}
CHUNK_ROWS = 1 << 17
MAX_REASON_BYTES = 600
LOOKUPS_BEFORE_RELEASE = 8  # one touch of the page cache may map 2 MB
SPLITS = ("", "train", "val", "test")  # a row stores the place of its split in this list


def _column(dtype: str, default: Any) -> Any:
    return field(default=default, metadata={"dtype": dtype})


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """What the index knows of one file. All but the two texts are columns of ``ROW``, with the dtype given here."""

    path: str
    """Relative to the data root."""
    reason: str = ""
    """Why a bad file is bad; empty for a good one."""
    split: str = _column("u1", "")
    file_bytes: int = _column("<i8", -1)
    mtime_ns: int = _column("<i8", -1)
    """The tag of the file's `FileVersion`: a time for a local file, a hash for one behind a URL."""
    frames: int = _column("<i4", 0)
    fps: float = _column("<f8", 0.0)
    width: int = _column("<i4", 0)
    height: int = _column("<i4", 0)
    codec: str = _column("S16", "")
    first_pts: int = _column("<i8", 0)
    pts_step: float = _column("<f8", 0.0)
    pixel_aspect: float = _column("<f4", 1.0)
    ends_crc: int = _column("<u4", 0)
    thorough: bool = _column("?", False)
    """Whether every frame was decoded when the file was probed."""

    @property
    def ok(self) -> bool:
        return not self.reason


COLUMNS = {column.name: column.metadata["dtype"] for column in fields(IndexRow) if column.metadata}
ROW = np.dtype(
    [("path_hash", "<u8"), ("text_start", "<u8"), ("path_bytes", "<u4"), ("reason_bytes", "<u4"), *COLUMNS.items()]
)


def hash_of_path(path: str) -> int:
    """64 bits of the path relative to the data root. The order of rows, splits and lookups all use it."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest(), "little")


class VideoIndex:
    """A read-only index. Cheap to open, to pickle (by its path) and to hold in many worker processes.

    An index behind a URL is fetched whole; ``file`` is the local copy.
    """

    def __init__(self, file: Place, data_root: Place | None = None) -> None:
        try:
            self.file = Path(os.path.abspath(local_file(file)))
            self.header = _read_header(self.file)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            make = f"make it with: tinyvae data index DATA --output {file}"
            raise MissingFileError(f"there is no index at {file}; {make}") from None
        self.data_root = place_of(data_root if data_root is not None else self.header["data_root"])
        self.source = str(self.header["source"] or self.file)
        """What the index was made from: the name to use in messages."""
        self.num_bad: int = self.header["num_bad"]
        self.has_splits: bool = self.header["has_splits"]
        """Whether the source gave the split of at least one file."""
        self.fingerprint: str = self.header["fingerprint"]
        """Changes with the files and their splits; not when the data root moves."""
        self._given = file if isinstance(file, Url) else self.file, data_root
        with open(self.file, "rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._rows: npt.NDArray[Any] = np.frombuffer(
            self._map, dtype=ROW, count=self.header["num_rows"], offset=HEADER_BYTES
        )
        self._text_start = HEADER_BYTES + self._rows.nbytes
        self._lookups = 0

    def __reduce__(self) -> tuple[Callable[..., VideoIndex], tuple[Place, Place | None]]:
        return open_index, self._given

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> IndexRow:
        raw = self._rows[number]
        path, reason = self._texts(raw)
        values = dict(zip(COLUMNS, raw.item()[-len(COLUMNS) :], strict=True))
        values |= {"split": SPLITS[values["split"]], "codec": values["codec"].decode()}
        self._lookups += 1
        if self._lookups % LOOKUPS_BEFORE_RELEASE == 0:
            self.release_pages()
        return IndexRow(path=path, reason=reason, **values)

    def full_path(self, row: IndexRow) -> Place:
        return self.data_root / row.path

    def version(self, row: IndexRow) -> FileVersion:
        """The version of the file that was indexed."""
        return FileVersion(row.file_bytes, row.mtime_ns)

    def info(self, row: IndexRow) -> VideoInfo:
        """The probe's result as the decoder wants it; the file is not opened."""
        from tinyvae.video.decode import VideoInfo

        known = {name: getattr(row, name) for name in VideoInfo.__dataclass_fields__ if name != "path"}
        place = self.full_path(row)
        return VideoInfo(path=place if isinstance(place, Path) else Path(row.path), **known)

    def find(self, path: str) -> int | None:
        """Number of the row with this relative path, or None."""
        number = int(np.searchsorted(self._rows["path_hash"], np.uint64(hash_of_path(path))))
        return number if number < len(self._rows) and self._texts(self._rows[number])[0] == path else None

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """``(number of the first row, rows as a structured array)``; valid until the next chunk is asked for."""
        for start in range(0, len(self._rows), CHUNK_ROWS):
            yield start, self._rows[start : start + CHUNK_ROWS]
            self.release_pages()

    def bad_rows(self) -> Iterator[IndexRow]:
        for start, rows in self.chunks():
            for offset in np.flatnonzero(is_bad(rows)):
                yield self.row(start + int(offset))

    def release_pages(self) -> None:
        """Drop the mapped pages from this process's resident memory; the next access maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _texts(self, raw: Any) -> tuple[str, str]:
        start = self._text_start + int(raw["text_start"])
        middle = start + int(raw["path_bytes"])
        end = middle + int(raw["reason_bytes"])
        return os.fsdecode(self._map[start:middle]), self._map[middle:end].decode("utf-8", "replace")


def is_bad(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows are of bad files: those with a reason."""
    bad: npt.NDArray[np.bool_] = rows["reason_bytes"] > 0
    return bad


def open_index(file: Place, data_root: Place | None = None) -> VideoIndex:
    """Open an index made by ``tinyvae data index``.

    >>> index = open_index(Path("videos.tvi"))  # doctest: +SKIP
    >>> index.row(0).path  # doctest: +SKIP
    'holiday/sea.mp4'

    Args:
        data_root: where the videos are now, when the data set has moved since it was indexed.
    """
    return VideoIndex(place_of(file), data_root)


def is_index(file: Place) -> bool:
    """Whether a file is an index of any version (by its first bytes, not by its name)."""
    return file.is_file() and check_readable(local_file(file)).startswith(ANY_MAGIC)


def _read_header(file: Path) -> dict[str, Any]:
    with open(file, "rb") as stream:
        start = stream.read(HEADER_BYTES)
    if not start.startswith(ANY_MAGIC):
        raise UserError(f"{file} is not an index of tinyvae; make one with: tinyvae data index DATA --output INDEX")
    if not start.startswith(MAGIC):
        raise UserError(
            f"the index {file} was written by another version of tinyvae; "
            f"make it again with: tinyvae data index DATA --output {file}"
        )
    try:
        header: dict[str, Any] = json.loads(start[len(MAGIC) :])
        is_whole = header.keys() >= HEADER_KEYS
    except (ValueError, AttributeError):
        is_whole = False
    if not is_whole:
        raise UserError(f"the header of the index {file} is broken; delete the file and index again")
    if file.stat().st_size != HEADER_BYTES + header["num_rows"] * ROW.itemsize + header["text_bytes"]:
        raise UserError(f"the index {file} is cut off; delete it and index again")
    return header


class IndexJournal:
    """The rows of one build, as they come. Only one process may hold it."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._rows_file, self._text_file = _beside(output, "new-rows"), _beside(output, "new-text")
        output.parent.mkdir(parents=True, exist_ok=True)
        # The lock is a file of its own: the journal files come and go, the lock must not.
        self._lock = open(_beside(output, "lock"), "wb")  # noqa: SIM115 - held for the life of the journal
        try:
            lock_file(self._lock, wait=False)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"another process is building the index {output} now; wait for it or stop it") from None
        self._rows = open(self._rows_file, "ab")  # noqa: SIM115
        # Without a buffer: a row that is on the disk has its text there too, whenever the process dies.
        self._text = open(self._text_file, "ab", buffering=0)  # noqa: SIM115
        self._first_text = self._text_bytes = self._text.tell()
        self._first_row = self._drop_torn_rows()
        self.resumed: VideoIndex | None = None
        """What earlier builds left behind."""
        if self._first_row:
            resume = _beside(output, "resume")
            header = {"data_root": "", "source": ""}
            _write_index(resume, self._journal_rows(0), self._text_file, 0, header)
            self.resumed = open_index(resume)

    def append(self, row: IndexRow) -> None:
        path = os.fsencode(row.path)
        reason = row.reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        values = {name: getattr(row, name) for name in COLUMNS}
        values |= {"split": SPLITS.index(row.split), "codec": row.codec.encode()}
        texts = (hash_of_path(row.path), self._text_bytes, len(path), len(reason))
        self._text.write(path + reason)
        self._text_bytes += len(path) + len(reason)
        self._rows.write(np.array((*texts, *values.values()), dtype=ROW).tobytes())

    def finish(self, header: dict[str, Any]) -> None:
        """Write the index in place of the old one and remove the journal."""
        self._rows.flush()
        _write_index(self.output, self._journal_rows(self._first_row), self._text_file, self._first_text, header)
        self._rows.close()
        self._text.close()
        # All under the lock: the files of a build that starts now have the same names.
        for name in ("new-rows", "new-text", "resume"):
            _beside(self.output, name).unlink(missing_ok=True)
        with suppress(PermissionError):  # Windows keeps a file that is open
            _beside(self.output, "lock").unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the files; they stay for the next build."""
        self._rows.close()
        self._text.close()
        self._lock.close()

    def _journal_rows(self, first: int) -> npt.NDArray[Any]:
        count = self._rows_file.stat().st_size // ROW.itemsize - first
        if count == 0:
            return np.zeros(0, ROW)
        return np.memmap(self._rows_file, dtype=ROW, mode="r", offset=first * ROW.itemsize, shape=(count,))

    def _drop_torn_rows(self) -> int:
        """Cut what a kill or a crash left: half a row at the end, or rows without their text. Returns how many stay."""
        rows = self._journal_rows(0)
        ends = rows["text_start"] + rows["path_bytes"] + rows["reason_bytes"]
        sound = (ends <= self._text_bytes) & (rows["path_bytes"] > 0)
        count = len(rows) if sound.all() else int(np.argmin(sound))
        del rows
        os.truncate(self._rows_file, count * ROW.itemsize)
        return count


def _write_index(
    output: Path, rows: npt.NDArray[Any], text_file: Path, first_text: int, header: dict[str, Any]
) -> None:
    """Sort the journal's rows by path hash and write them; of several rows with one path the last one.

    ``first_text``: where the text of these rows starts.
    """
    order = np.argsort(np.array(rows["path_hash"]), kind="stable")
    hashes = rows["path_hash"][order]
    order = np.delete(order, np.flatnonzero(hashes[:-1] == hashes[1:]))
    digest = hashlib.blake2b(digest_size=16)
    num_bad, has_splits = 0, False
    with atomic_write(output) as out, open(text_file, "rb") as text:
        out.seek(HEADER_BYTES)
        for start in range(0, len(order), CHUNK_ROWS):
            chunk = rows[order[start : start + CHUNK_ROWS]]
            bad = is_bad(chunk)
            num_bad += int(bad.sum())
            has_splits = has_splits or bool(chunk["split"].any())
            for name in ("path_hash", "file_bytes", "frames", "width", "height"):
                digest.update(chunk[name].tobytes())
            digest.update(np.where(bad, 2, 1).astype("u1").tobytes())  # codes that older runs have in their checkpoints
            digest.update(chunk["split"].tobytes())
            chunk["text_start"] -= np.uint64(first_text)
            out.write(chunk.tobytes())
        text.seek(first_text)
        shutil.copyfileobj(text, out, 1 << 20)
        sizes = {"num_rows": len(order), "text_bytes": text.tell() - first_text, "num_bad": num_bad}
        facts = {"has_splits": has_splits, "fingerprint": digest.hexdigest()}
        packed = MAGIC + json.dumps({**header, **sizes, **facts}).encode()
        assert len(packed) <= HEADER_BYTES, "two paths of 4096 bytes fit"
        out.seek(0)
        out.write(packed.ljust(HEADER_BYTES))


def _beside(output: Path, name: str) -> Path:
    return output.with_name(f"{output.name}.{name}")
