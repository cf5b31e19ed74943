"""The index of a data set: one file, opened by memory map, with one row for each video.

Layout of the file: 16 bytes (magic, header length), the header as JSON, then at a page border the rows (``ROW``,
sorted by the hash of the path) and after them the text (paths and, for bad files, reasons). Sorting by hash makes the
index the same whatever order the files were listed in, and finds a path by binary search without reading the rest.

Five million rows are about 450 MB of rows and 300 MB of text on disk. Mapped pages count as resident memory of each
process that touches them, so readers go through the rows in chunks and give the pages back as they go.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinyvae.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from tinyvae.video.decode import VideoInfo

MAGIC = b"TVINDEX1"
PAGE = 4096
CHUNK_ROWS = 1 << 17
LOOKUPS_BEFORE_RELEASE = 8
"""With large folios one touch of the page cache maps 2 MB: this many lookups hold about 16 MB."""

STATUS_OK = 1
STATUS_BAD = 2
SPLIT_CODES = {"": 0, "train": 1, "val": 2, "test": 3}
SPLIT_OF_CODE = {code: name for name, code in SPLIT_CODES.items()}

ROW = np.dtype(
    [
        ("path_hash", "<u8"),
        ("text_start", "<u8"),
        ("path_bytes", "<u4"),
        ("reason_bytes", "<u4"),
        ("file_bytes", "<i8"),
        ("ends_crc", "<u4"),
        ("mtime_ns", "<i8"),
        ("frames", "<i4"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("fps", "<f8"),
        ("first_pts", "<i8"),
        ("pts_step", "<f8"),
        ("codec", "<u2"),
        ("status", "u1"),
        ("split", "u1"),
        ("interlaced", "u1"),
        ("pixel_aspect", "<f4"),
        ("thorough", "u1"),
    ]
)


def hash_of_path(path: str) -> int:
    """64 bits of the path relative to the data root; order of rows, splits and lookups all stand on it."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest(), "little")


@dataclass(frozen=True, kw_only=True)
class IndexRow:
    """What the index knows of one file."""

    number: int
    path: str
    """Relative to the data root."""
    status: int
    reason: str
    """Why a bad file is bad; empty for a good one."""
    split: str
    frames: int
    fps: float
    width: int
    height: int
    codec: str
    interlaced: bool
    file_bytes: int
    ends_crc: int
    mtime_ns: int
    first_pts: int
    pts_step: float
    pixel_aspect: float
    thorough: bool
    """Whether every frame was decoded when the file was probed."""

    @property
    def ok(self) -> bool:
        return self.status == STATUS_OK


class VideoIndex:
    """A read-only index. Cheap to open, to pickle (by its path) and to hold in many worker processes."""

    def __init__(self, file: Path, data_root: Path | None = None) -> None:
        self.file = Path(os.path.abspath(file))
        self.header = _read_header(self.file)
        self.data_root = Path(data_root if data_root is not None else self.header["data_root"])
        self._root_given = data_root
        self._codecs: list[str] = self.header["codecs"]
        with open(self.file, "rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._rows: npt.NDArray[Any] = np.frombuffer(
            self._map, dtype=ROW, count=self.header["num_rows"], offset=self.header["rows_start"]
        )
        self._lookups = 0

    def __reduce__(self) -> tuple[Callable[..., VideoIndex], tuple[Path, Path | None]]:
        return open_index, (self.file, self._root_given)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def source(self) -> str:
        """What the index was made from: the name to use in messages."""
        return str(self.header["source"] or self.file)

    @property
    def num_bad(self) -> int:
        return int(self.header["num_bad"])

    @property
    def fingerprint(self) -> str:
        """Changes when a file is added, removed, replaced or changes its split; not when the data root moves."""
        return str(self.header["fingerprint"])

    @property
    def has_splits(self) -> bool:
        """Whether the source told the split of at least one file."""
        return bool(self.header["has_splits"])

    def row(self, number: int) -> IndexRow:
        if not 0 <= number < len(self._rows):
            raise IndexError(f"row {number} of an index with {len(self._rows)} rows")
        raw = self._rows[number]
        path, reason = self._texts(raw)
        self._lookups += 1
        if self._lookups % LOOKUPS_BEFORE_RELEASE == 0:
            self.release_pages()
        return IndexRow(
            number=number,
            path=path,
            status=int(raw["status"]),
            reason=reason,
            split=SPLIT_OF_CODE[int(raw["split"])],
            frames=int(raw["frames"]),
            fps=float(raw["fps"]),
            width=int(raw["width"]),
            height=int(raw["height"]),
            codec=self._codecs[int(raw["codec"])],
            interlaced=bool(raw["interlaced"]),
            file_bytes=int(raw["file_bytes"]),
            ends_crc=int(raw["ends_crc"]),
            mtime_ns=int(raw["mtime_ns"]),
            first_pts=int(raw["first_pts"]),
            pts_step=float(raw["pts_step"]),
            pixel_aspect=float(raw["pixel_aspect"]),
            thorough=bool(raw["thorough"]),
        )

    def full_path(self, row: IndexRow) -> Path:
        return self.data_root / row.path

    def info(self, row: IndexRow) -> VideoInfo:
        """The probe's result as the decoder wants it, without touching the file."""
        from tinyvae.video.decode import VideoInfo

        return VideoInfo(
            path=self.full_path(row),
            frames=row.frames,
            fps=row.fps,
            width=row.width,
            height=row.height,
            codec=row.codec,
            interlaced=row.interlaced,
            first_pts=row.first_pts,
            pts_step=row.pts_step,
            pixel_aspect=row.pixel_aspect,
            ends_crc=row.ends_crc,
        )

    def find(self, path: str) -> int | None:
        """Number of the row with this relative path, or None."""
        wanted = hash_of_path(path)
        number = int(np.searchsorted(self._rows["path_hash"], np.uint64(wanted)))
        while number < len(self._rows) and int(self._rows[number]["path_hash"]) == wanted:
            if self._texts(self._rows[number])[0] == path:
                return number
            number += 1
        return None

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """``(number of the first row, rows as a structured array)``; valid until the next chunk is asked for."""
        for start in range(0, len(self._rows), CHUNK_ROWS):
            yield start, self._rows[start : start + CHUNK_ROWS]
            self.release_pages()

    def bad_rows(self) -> Iterator[IndexRow]:
        for start, rows in self.chunks():
            for offset in np.flatnonzero(rows["status"] == STATUS_BAD):
                yield self.row(start + int(offset))

    def codec_name(self, code: int) -> str:
        return self._codecs[code]

    def release_pages(self) -> None:
        """Drop the mapped pages from this process's resident memory; the next access maps them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _texts(self, raw: Any) -> tuple[str, str]:
        start = self.header["text_start"] + int(raw["text_start"])
        middle = start + int(raw["path_bytes"])
        end = middle + int(raw["reason_bytes"])
        return os.fsdecode(self._map[start:middle]), self._map[middle:end].decode("utf-8", "replace")


def open_index(file: Path, data_root: Path | None = None) -> VideoIndex:
    """Open an index made by ``tinyvae data index``.

    Args:
        file: the index.
        data_root: where the videos are now, when the data set has moved since it was indexed.
    """
    return VideoIndex(Path(file), data_root)


def is_index(file: Path) -> bool:
    """Whether a file is an index (by its first bytes, not by its name)."""
    if not file.is_file():
        return False
    with open(file, "rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _read_header(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise MissingFileError(f"there is no index at {file}; make it with: tinyvae data index DATA -o {file}")
    with open(file, "rb") as stream:
        start = stream.read(16)
        if len(start) < 16 or start[:8] != MAGIC:
            raise UserError(f"{file} is not an index of tinyvae; make one with: tinyvae data index DATA -o INDEX")
        (length,) = struct.unpack("<Q", start[8:])
        try:
            header: dict[str, Any] = json.loads(stream.read(min(length, 1 << 24)))
        except ValueError:
            raise UserError(f"the header of the index {file} is broken; delete the file and index again") from None
    if header.get("row_bytes") != ROW.itemsize:
        raise UserError(f"the index {file} was written by another version of tinyvae; delete it and index again")
    if file.stat().st_size != header["text_start"] + header["text_bytes"]:
        raise UserError(f"the index {file} is cut off; delete it and index again")
    return header


def pack_header(fields: dict[str, Any], num_rows: int, text_bytes: int) -> bytes:
    """The bytes before the rows. Where rows and text start is part of the header, so its length is fixed first."""
    room = PAGE * (1 + len(json.dumps(fields)) // PAGE)
    rows_start = room + PAGE
    layout = {
        "row_bytes": ROW.itemsize,
        "num_rows": num_rows,
        "rows_start": rows_start,
        "text_start": rows_start + num_rows * ROW.itemsize,
        "text_bytes": text_bytes,
    }
    body = json.dumps({**fields, **layout}).encode()
    assert 16 + len(body) <= rows_start, "the header outgrew its room"
    return (MAGIC + struct.pack("<Q", len(body)) + body).ljust(rows_start, b"\0")
