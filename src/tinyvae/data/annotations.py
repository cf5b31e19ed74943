"""Which video files are in a data set: a folder tree, a JSONL file or an annotation JSON, read as a stream.

The annotation format is ``{"total": N, "list": [{"path": ..., "split": ...}, ...]}``; a bare list works too. An entry
names its file by ``path`` or ``full_path``, relative to the data root or inside it. Other keys are ignored. Source and
data root may each be a path or a URL.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tinyvae.errors import MissingFileError, UserError
from tinyvae.storage import FileVersion, Place, Url, list_files, local_file

VIDEO_SUFFIXES = (
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".flv", ".wmv", ".ogv",
)  # fmt: skip
"""What counts as a video in a folder tree; annotation files may name files with any suffix."""

SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
"""Spellings of an annotation's ``split`` -> its meaning. ``test`` files are kept out of training and validation."""

READ_CHARS = 1 << 20
MAX_VALUE_CHARS = 64 << 20
"""A file with a longer JSON value than this counts as broken, so that a broken file is not read whole."""


@dataclass(frozen=True, kw_only=True)
class VideoEntry:
    """One file: its path from the data root (forward slashes, no ``..``); ``train``, ``val``, ``test`` or empty.

    ``version``: of a file whose storage told it with the list.
    """

    path: str
    split: str = ""
    version: FileVersion | None = None


def default_data_root(source: Place) -> Place:
    """The folder that relative paths start from: the folder tree itself, or the folder of the annotation file."""
    return source if source.is_dir() else source.absolute().parent


def iterate_entries(source: Place, data_root: Place | None = None) -> Iterator[VideoEntry]:
    """Every entry of ``source`` in its own order (folder trees: sorted by name inside each folder).

    >>> [entry.path for entry in iterate_entries(Path("videos/"))]  # doctest: +SKIP
    ['a.mp4', 'sub/b.mp4']

    ``UserError`` for a broken file, an entry without a path, or a path that leaves the data root; it names the entry.
    """
    if not source.exists():
        raise MissingFileError(f"the data source {source} does not exist; give a folder, a .jsonl or a .json file")
    named_root = data_root if data_root is not None else default_data_root(source)
    root = _UrlRoot(named_root) if isinstance(named_root, Url) else _Root(named_root)
    suffix = source.suffix.lower()
    if source.is_dir():
        if isinstance(source, Url) and isinstance(root, _UrlRoot):
            yield from _entries_of_url(source, root)
        elif isinstance(source, Path) and isinstance(root, _Root):
            yield from _entries_of_folder(source, root)
        else:
            raise _leaves_root("the data source", str(source), str(named_root))
    elif suffix in (".jsonl", ".ndjson", ".json"):
        records, word = (_records_of_json, "entry") if suffix == ".json" else (_records_of_jsonl, "line")
        try:
            with open(local_file(source), "rb") as stream:
                for number, record in records(stream, source):
                    yield _entry_of_record(record, f"{source}, {word} {number}", root)
        except OSError as fault:
            raise UserError(f"{source} cannot be read ({fault.strerror or fault}); fix its permissions") from None
    else:
        raise UserError(f"cannot tell what the data source {source} is; give a folder, a .jsonl or a .json file")


class _Root:
    """The data root. It makes paths relative, and refuses those whose words (not whose links) lead out of it."""

    def __init__(self, data_root: Path) -> None:
        self._root = os.path.abspath(data_root)
        roots = (self._root, os.path.realpath(data_root))
        # In this order: where both fit, the path must not depend on chance.
        self._prefixes = [root.rstrip(os.sep) + os.sep for root in roots]

    def relative(self, path: str, where: str) -> str:
        whole = os.path.normpath(os.path.join(self._root, path))
        for prefix in self._prefixes:
            if whole.startswith(prefix):
                return whole[len(prefix) :].replace(os.sep, "/")
        raise _leaves_root(where, path, self._root)


class _UrlRoot:
    """A data root behind a URL. The names in it stay as they are written: ``a//b.mp4`` is not ``a/b.mp4`` there."""

    def __init__(self, data_root: Url) -> None:
        self.url = data_root

    def relative(self, path: str, where: str) -> str:
        relative = path.removeprefix(str(self.url / "x")[:-1]).removeprefix("./")
        if not relative or relative.startswith("/") or "://" in relative or ".." in relative.split("/"):
            raise _leaves_root(where, path, str(self.url))
        return relative


def _leaves_root(where: str, path: str, root: str) -> UserError:
    return UserError(
        f"{where}: the path {path!r} leaves the data root {root}; "
        "fix the entry, or give the folder that holds all files as the data root (--data_root)"
    )


def _entries_of_url(folder: Url, root: _UrlRoot) -> Iterator[VideoEntry]:
    prefix = "" if folder == root.url else root.relative(str(folder), "the data source") + "/"
    for path, version in list_files(folder):
        is_hidden = any(part.startswith(".") for part in path.split("/"))
        if path.lower().endswith(VIDEO_SUFFIXES) and not is_hidden:
            yield VideoEntry(path=prefix + path, version=version if version.size >= 0 else None)


def _entries_of_folder(folder: Path, root: _Root) -> Iterator[VideoEntry]:
    # A stack of folders, not recursion: deep trees cannot overflow it. Each with whether a link leads to it.
    waiting = [(os.path.abspath(folder), False)]
    top = Path(os.path.realpath(folder))
    linked: set[str] = set()
    while waiting:
        current, is_linked = waiting.pop()
        if is_linked:  # perhaps by several ways, and no file may come twice
            real = os.path.realpath(current)
            if real in linked:
                continue
            linked.add(real)
        try:
            with os.scandir(current) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as fault:
            raise UserError(f"the folder {current} cannot be read ({fault.strerror}); fix it or move it") from None
        folders = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append((entry.path, is_linked))
            elif entry.is_symlink() and _leads_out(entry.path, top):
                folders.append((entry.path, True))
            elif entry.name.lower().endswith(VIDEO_SUFFIXES):
                yield VideoEntry(path=root.relative(entry.path, current))
        waiting.extend(reversed(folders))


def _leads_out(link: str, folder: Path) -> bool:
    """Whether a link leads to a folder that is neither in ``folder`` (where it is listed anyway) nor around it."""
    if not os.path.isdir(link):  # first: it is one question to the storage, and realpath asks for every folder above
        return False
    target = Path(os.path.realpath(link))
    return not target.is_relative_to(folder) and not folder.is_relative_to(target)


def _records_of_jsonl(stream: IO[bytes], file: Place) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as broken:
                raise UserError(f"{file}, line {number} is not JSON ({broken}); fix or remove the line") from None


def _records_of_json(stream: IO[bytes], file: Place) -> Iterator[tuple[int, object]]:
    number = 0
    with io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
        reader = _JsonReader(text, file)
        try:
            for number, record in enumerate(reader.items(), start=1):
                yield number, record
        except UnicodeDecodeError as broken:
            raise UserError(f"{file} is not UTF-8 text ({broken}); it must be a JSON file") from None
    total = reader.numbers.get("total", number)
    if total != number:  # Python shows the same warning once, however often the file is read
        warnings.warn(f"{file} says 'total': {total}, and its list has {number} entries; is it whole?", stacklevel=1)


def _entry_of_record(record: object, where: str, root: _Root | _UrlRoot) -> VideoEntry:
    if not isinstance(record, dict):
        raise UserError(f"{where}: an entry must be an object with a 'path', not {type(record).__name__}")
    path = record.get("path") or record.get("full_path")
    if not isinstance(path, str) or not path:
        raise UserError(f"{where}: the entry has no 'path' (or 'full_path') that names a file")
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise UserError(f"{where}: the path {path!r} cannot be a file name; fix or remove this entry")
    split = record.get("split")
    meaning = "" if split in (None, "") else SPLIT_NAMES.get(str(split).strip().lower())
    if meaning is None:
        raise UserError(f"{where}: the split {split!r} is unknown; use one of {', '.join(SPLIT_NAMES)}")
    return VideoEntry(path=root.relative(path, where), split=meaning)


class _JsonReader:
    """Reads the items of one list in a JSON document one after the other, and holds one item at a time."""

    def __init__(self, stream: IO[str], file: Place) -> None:
        self._stream, self._file = stream, file
        self._decoder = json.JSONDecoder()
        self._buffer, self._ended = "", False
        self._at = self._dropped = 0
        self.numbers: dict[str, float] = {}
        """Key -> number of the top-level object, as far as it has been read."""

    def items(self) -> Iterator[object]:
        """Items of the top-level list, or of the list under ``list`` of the top-level object."""
        if self._peek() == "[":
            yield from self._list()
        elif self._peek() == "{":
            yield from self._list_of_object()
        else:
            raise self._broken("must start with '{' or '['")
        if self._peek() != "":
            raise self._broken("has more text after its end")

    def _list(self) -> Iterator[object]:
        for _ in self._members("[", "]"):
            yield self._value()

    def _list_of_object(self) -> Iterator[object]:
        found = False
        for _ in self._members("{", "}"):
            name = self._value()
            if not isinstance(name, str):
                raise self._broken("has a key that is not text")
            self._take(":")
            if name == "list":
                found = True
                if self._peek() != "[":
                    raise self._broken("must hold a list under 'list'")
                yield from self._list()
            elif isinstance(value := self._value(), int | float):
                self.numbers[name] = value
        if not found:
            raise UserError(f"{self._file} has no 'list'; the format is {{'total': N, 'list': [{{'path': ...}}]}}")

    def _members(self, opening: str, closing: str) -> Iterator[None]:
        """One turn for each member of a list or object; the caller reads the member in its turn."""
        self._take(opening)
        while self._peek() != closing:
            yield
            if self._peek() == ",":
                self._take(",")
            elif self._peek() != closing:
                raise self._broken(f"lacks a comma or a closing {closing!r}")
        self._take(closing)

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            while self._at < len(self._buffer):
                if not self._buffer[self._at].isspace():
                    return self._buffer[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._fill()

    def _take(self, char: str) -> None:
        if self._peek() != char:
            raise self._broken(f"should have {char!r} here")
        self._at += 1

    def _value(self) -> object:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
                # A number near the buffer's end may continue in the next read ("1" of "1.5", "1" of "1e+3").
                if end + 3 < len(self._buffer) or self._ended:
                    self._at = end
                    return value
            except (ValueError, RecursionError):  # broken, a number of 5,000 digits, or thousands of brackets
                if self._ended or len(self._buffer) - self._at > MAX_VALUE_CHARS:
                    raise self._broken("is not valid JSON, or is cut off") from None
            self._fill()

    def _fill(self) -> None:
        """Read on, and drop what is already used."""
        more = self._stream.read(max(READ_CHARS, len(self._buffer) - self._at))
        self._dropped += self._at
        self._buffer = self._buffer[self._at :] + more
        self._at = 0
        self._ended = not more

    def _broken(self, what: str) -> UserError:
        return UserError(f"{self._file} {what} (character {self._dropped + self._at}); fix the file or make it again")
