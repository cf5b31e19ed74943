"""Files outside this machine: ``s3://``, ``hf://`` and every other URL that fsspec opens, with a local cache of files.

A place is a local path or a URL. Whoever opens a file calls `local_file` first: a local path stays as it is, and a file
behind a URL is fetched whole into the cache, once for all processes of the machine. Credentials come from the
environment (of boto3, huggingface_hub, ...). A URL that holds some is refused, so no log or file of ours can show them.

fsspec's file systems must not cross a fork. So they are asked for by URL each time: fsspec keeps one in each process.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import posixpath
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from tinyvae.cache_folder import CacheFolder, default_cache_folder, open_copy
from tinyvae.errors import UserError, require_package
from tinyvae.files import FULL_DISK_ERRORS, atomic_write, lock_file

SCHEME = re.compile(r"(?P<scheme>[a-zA-Z][\w+.:-]+)://")  # two letters or more: C:// is a disk of Windows
LOCAL_SCHEMES = ("file", "local")
SECRETS = re.compile(r"://[^/]*:[^/]*@|[?&][^=&]*(sig|token|key|secret|passw|credential|auth)[^=&]*=", re.IGNORECASE)
"""A password before the host, or a signed query string."""
CACHE_DIR_VARIABLE, CACHE_GB_VARIABLE = "TINYVAE_FILE_CACHE_DIR", "TINYVAE_FILE_CACHE_GB"
DEFAULT_CACHE_GB = 50.0
IN_USE_S = 10.0
"""A copy stays for this long after its last use, so that whoever asked for it can open it."""
NUM_LOCKS = 64
RETRY_WAITS_S = (2.0, 8.0, 20.0)
"""Before each further try to fetch a file. s3fs and boto have by then tried for about ten seconds themselves."""


class StorageError(UserError):
    """The storage as a whole cannot be used: every further file would fail too."""


class UnreachableStorageError(StorageError):
    """Nobody answers there, as often as it was tried."""


class FileVersion(NamedTuple):
    """Bytes of a file (-1: unknown), and a number that changes with its content: the time of change of a local file in
    nanoseconds, 63 bits of a hash of what the storage says (ETag, else hash, else time) for others."""

    size: int
    tag: int


@dataclass(frozen=True)
class Url:
    """A file or folder behind a URL, with those names of `pathlib.Path` that we need.

    >>> str(Url("s3://bucket/videos/") / "sea/a.mp4")
    's3://bucket/videos/sea/a.mp4'
    """

    text: str

    def __post_init__(self) -> None:
        scheme, _, path = self.text.partition("://")
        if SECRETS.search(self.text):
            raise UserError(
                f"the URL {without_secrets(self.text)} was given with a password, key or signature, which tinyvae does "
                "not take in a URL: set them in the environment (docs/object-storage.md#credentials)"
            )
        object.__setattr__(self, "text", f"{scheme.lower()}://{path.rstrip('/')}")

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, path: str) -> Url:
        return Url(self.text + ("" if self.text.endswith("://") else "/") + path)

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0]

    @property
    def name(self) -> str:
        return posixpath.basename(self.text.partition("://")[2])

    @property
    def suffix(self) -> str:
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> Url:
        return Url(self.text[: len(self.text) - len(self.name)])

    def absolute(self) -> Url:
        return self

    def exists(self) -> bool:
        return _facts(self) is not None

    def is_dir(self) -> bool:
        facts = _facts(self)
        return facts is not None and facts["type"] == "directory"

    def is_file(self) -> bool:
        facts = _facts(self)
        return facts is not None and facts["type"] != "directory"


Place = Path | Url


def place_of(text: str | Path | Url) -> Place:
    """A local path or a URL, from its text. ``file:///a`` is the local path ``/a``.

    >>> place_of("s3://bucket/a.mp4"), place_of("videos/a.mp4")
    (Url(text='s3://bucket/a.mp4'), PosixPath('videos/a.mp4'))
    """
    if not isinstance(text, str):
        return text
    found = SCHEME.match(text)
    if found is None:
        return Path(text)
    return Path(text[found.end() :]) if found["scheme"].lower() in LOCAL_SCHEMES else Url(text)


def absolute_text(place: Place) -> str:
    """The text that means this place from any working directory."""
    return str(place) if isinstance(place, Url) else os.path.abspath(place)


def version_of(place: Place) -> FileVersion:
    """The version of the file that is there now; an `OSError` where there is none."""
    if isinstance(place, Path):
        found = os.stat(place)
        return FileVersion(found.st_size, found.st_mtime_ns)
    facts = _facts(place)
    if facts is None:
        raise _not_there(place)
    return _version(facts)


def list_files(folder: Url) -> Iterator[tuple[str, FileVersion]]:
    """(path from the folder, version) of every file below it, sorted by path. Holds about 2 KB for each file."""
    with _reaching(folder) as (system, path):
        system.invalidate_cache()
        found: dict[str, dict[str, Any]] = system.find(path, detail=True)
    start = len(path.rstrip("/")) + 1
    for name in sorted(found):
        if not name.endswith("/") and found[name]["type"] != "directory":
            yield name[start:], _version(found[name])


def local_file(place: Place, version: FileVersion | None = None) -> Path:
    """The file on this machine: a path as it is, a URL's file fetched into the cache. Open it at once.

    ``version``: the one that is wanted; without it, the storage is asked for the one that is there now.

    >>> local_file(Path("videos/a.mp4"))
    PosixPath('videos/a.mp4')
    """
    if isinstance(place, Path):
        return place
    return file_cache().fetch(place, version if version is not None else version_of(place))


def upload(file: Path, url: Url) -> None:
    """Write a local file to a URL. On object storage it appears there complete or not at all."""
    try:
        with _reaching(url) as (system, path):
            system.put_file(str(file), path)
    except OSError as fault:
        raise StorageError(f"{url} cannot be written ({fault.strerror or fault}); name another place") from None


@contextmanager
def writing(place: Place, mode: str = "wb") -> Iterator[IO[Any]]:
    """`atomic_write` for a path or a URL: what is written appears there complete or not at all.

    Example: ``with writing(folder / "store.json", "w") as stream: json.dump(values, stream)``
    """
    if isinstance(place, Path):
        with atomic_write(place, mode) as stream:
            yield stream
        return
    with tempfile.TemporaryDirectory(prefix="tinyvae-upload-") as folder:
        with atomic_write(Path(folder, "file"), mode, sync=False) as stream:
            yield stream
        upload(Path(folder, "file"), place)


def work_folder(place: Place) -> Path:
    """A local folder for work that ends in ``place``: itself, or one beside the fetched files, always the same."""
    if isinstance(place, Path):
        return place
    cache = file_cache()
    return cache.folder / f"work-{cache.place(str(place), '').name}"


# the cache of fetched files


class FileCache(CacheFolder):
    """Fetched files: at most ``max_gb`` GiB, and what was used in the last seconds."""

    title = "the cache of fetched files"
    advice = (
        "file_cache_gb ({max_gb:.3g}) does not hold all files of this run, and those not used for the longest time are "
        "deleted and fetched again when needed; raise file_cache_gb, or name a file_cache_dir on a larger disk"
    )

    def fetch(self, url: Url, version: FileVersion) -> Path:
        """The copy of a file; processes that want the same one at the same time fetch it once."""
        key = f"{url}\0{version.size}\0{version.tag}"
        file = self.place(key, url.suffix if re.fullmatch(r"\.\w{1,8}", url.suffix) else ".file")
        try:
            if _is_there(file, version):
                return file
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self.folder / f"lock-{int(file.name[:8], 16) % NUM_LOCKS}", "ab") as lock:
                lock_file(lock, wait=True)
                if not _is_there(file, version):
                    if not self.make_room(max(version.size, 0), keep_used_since=time.time() - IN_USE_S):
                        self.event = "full"
                    _download(url, version, file)
        except OSError as fault:
            if fault.errno in FULL_DISK_ERRORS or str(fault.filename).startswith(str(self.folder)):
                raise StorageError(
                    f"the cache of fetched files {self.folder} cannot be written ({fault.strerror or fault}); free "
                    "some space, lower file_cache_gb, or name another file_cache_dir"
                ) from None
            raise
        return file


def _is_there(file: Path, version: FileVersion) -> bool:
    stream = open_copy(file, None if version.size < 0 else version.size)
    if stream is not None:
        stream.close()
    return stream is not None


def _download(url: Url, version: FileVersion, file: Path) -> None:
    for wait_s in (*RETRY_WAITS_S, None):
        try:
            with atomic_write(file, sync=False) as part:
                with _reaching(url) as (system, path):
                    system.get_file(path, part.name)
                size = os.stat(part.name).st_size
                if version.size not in (-1, size):
                    reason = f"it has {size} bytes there but had {version.size} when it was listed or indexed"
                    raise OSError(errno.ESTALE, f"{reason}; run `tinyvae data index` again", str(url))
            return
        except (UnreachableStorageError, OSError) as fault:
            is_passing = isinstance(fault, UnreachableStorageError) or fault.errno in (errno.EIO, errno.EBUSY)
            if wait_s is None or not is_passing:
                raise
            time.sleep(wait_s)


def use_file_cache(folder: Path | None, max_gb: float | None) -> None:
    """Let this process and those it starts, however it starts them, use this cache. None: as it is."""
    if folder is not None:
        os.environ[CACHE_DIR_VARIABLE] = str(folder)
    if max_gb is not None:
        os.environ[CACHE_GB_VARIABLE] = str(max_gb)


def file_cache() -> FileCache:
    """The cache that ``TINYVAE_FILE_CACHE_DIR`` and ``TINYVAE_FILE_CACHE_GB`` name, else the default one."""
    named = os.environ.get(CACHE_DIR_VARIABLE)
    text = os.environ.get(CACHE_GB_VARIABLE) or str(DEFAULT_CACHE_GB)
    try:
        max_gb = float(text)
    except ValueError:
        max_gb = 0.0
    if not 0 < max_gb < float("inf"):
        raise UserError(f"{CACHE_GB_VARIABLE} must be a number of GiB above 0, not {text!r}")
    return _file_cache(Path(named) if named else default_cache_folder("files"), max_gb)


@functools.cache
def _file_cache(folder: Path, max_gb: float) -> FileCache:
    return FileCache(folder, max_gb=max_gb, run_start=time.time())


# what fsspec says, in our words

CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
UNREACHABLE = {
    "ConnectionError", "HTTPClientError", "ClientConnectionError", "ClientPayloadError", "TransportError",
    "TimeoutError", "FSTimeoutError", "gaierror", "IncompleteRead", "OfflineModeIsEnabled",
}  # fmt: skip
"""Names of error classes (or of their bases) of botocore, aiohttp, httpx, requests, fsspec and Python."""
VERSION_KEYS = (
    "ETag", "etag", "blob_id", "md5Hash", "content_hash", "LastModified", "last_modified", "mtime", "created",
)  # fmt: skip


def without_secrets(text: str) -> str:
    """A text without the passwords and query strings of the URLs in it.

    >>> without_secrets("no answer from https://me:pw@host/a?sig=1")
    'no answer from https://host/a'
    """
    text = re.sub(r"(://)[^/\s]*@", r"\1", text)
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\")]*", r"\1", text)


def _open_system(url: Url) -> tuple[Any, str]:
    """The file system of this process for a URL, and the URL's path in it."""
    from fsspec.core import url_to_fs

    if url.scheme in ("s3", "s3a"):
        require_package("s3fs", extra="s3", needed_for=f"{url.scheme}://")
    try:
        system, path = url_to_fs(url.text, use_listings_cache=False)  # a cached listing would never change
    except ImportError as missing:
        raise UserError(f"{url.scheme}:// needs a package that is not installed: {missing}") from None
    except ValueError as unknown:
        raise UserError(
            f"{url} cannot be opened ({without_secrets(str(unknown))}); use s3://, hf:// or a path"
        ) from None
    return system, path


def _facts(url: Url) -> dict[str, Any] | None:
    """What the storage says of a file or folder; None where there is nothing."""
    try:
        with _reaching(url) as (system, path):
            return dict(system.info(path))
    except FileNotFoundError:
        return None


def _version(facts: dict[str, Any]) -> FileVersion:
    size = facts.get("size")
    stated = next((facts[key] for key in VERSION_KEYS if facts.get(key) is not None), "")
    words = str(stated.timestamp() if isinstance(stated, datetime) else stated)  # a list may tell it as a number
    tag = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
    return FileVersion(-1 if size is None else int(size), tag)


def _not_there(url: Url) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it is not there", str(url))


@contextmanager
def _reaching(url: Url) -> Iterator[tuple[Any, str]]:
    """Around each use of fsspec: gives the file system of a URL and the path in it. What goes wrong becomes an
    `OSError` about one file, or a `StorageError`."""
    try:
        yield _open_system(url)
    except UserError:
        raise
    except Exception as fault:  # each file system has errors of its own, of any class
        if type(fault).__module__ == "builtins" and not isinstance(fault, OSError | ValueError):
            raise  # a mistake of ours
        raise _in_our_words(url, fault) from None  # its own text may hold a signed URL


def _in_our_words(url: Url, fault: BaseException) -> Exception:
    names: set[str] = set()
    cause: BaseException | None = fault
    while cause is not None:
        names |= {kind.__name__ for kind in type(cause).__mro__}
        cause = cause.__cause__
    said = without_secrets(" ".join((str(fault) or type(fault).__name__).split()))[:300]
    if names & CREDENTIALS:
        return StorageError(f"there are no credentials for {url} ({said}); see docs/object-storage.md#credentials")
    if names & UNREACHABLE:
        text = f"the storage of {url} cannot be reached ({said}); check the network and the address"
        return UnreachableStorageError(f"{text} (AWS_ENDPOINT_URL)" if url.scheme.startswith("s3") else text)
    if isinstance(fault, FileNotFoundError):
        return _not_there(url)
    if isinstance(fault, PermissionError):
        return PermissionError(errno.EACCES, f"access denied ({said})", str(url))
    if isinstance(fault, OSError):
        return OSError(fault.errno or errno.EIO, said, str(url) if fault.filename is None else fault.filename)
    return StorageError(f"{url} cannot be used ({type(fault).__name__}: {said})")
