"""Files on disk: write them whole or not at all, hash them, lock them, find out early whether a place is writable."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tinyvae.errors import FileExistsAlreadyError, UserError
from tinyvae.terminal import bytes_in_words

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of storage without locks: Lustre and NFS as often mounted
LITTLE_ROOM = 1 << 20  # bytes; a write that failed without a reason and with less free met a full disk


@contextmanager
def atomic_write(path: Path, mode: str = "wb", *, sync: bool = True) -> Iterator[IO[Any]]:
    """Open a file for writing that gets its name only when it is complete and on the disk.

    Until then it is hidden beside its place as ``.NAME.RANDOM.part``. A failure removes it; a kill leaves at most that.
    ``sync=False`` is for what can be made again: faster, and a power cut may leave it empty.

    Example: ``with atomic_write(folder / "config.json", "w") as stream: json.dump(values, stream)``
    """
    # Random: containers that share the folder have processes with the same number.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        with part.open(mode, encoding=None if "b" in mode else "utf-8") as stream:
            yield stream
            if sync:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def home_folder() -> Path | None:
    """Of this user; None for one without, as in containers that start with any user number."""
    found = os.path.expanduser("~")
    return Path(found) if os.path.isabs(found) else None


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def lock_file(stream: IO[bytes], *, wait: bool) -> None:
    """Lock a file until it is closed, where the system can. If another process holds it: wait, or `BlockingIOError`."""
    if fcntl is None:
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno not in NO_LOCKS:
            raise


def make_output_folder(folder: Path, *, option: str = "--output") -> None:
    """Create a folder and try to write into it. ``option`` is the user's word for the folder, for the message."""
    try:
        if folder.is_file():
            raise UserError(f"{option} {folder} is a file; name a folder.")
        _try_writing(folder)
    except OSError as refused:
        reason = refused.strerror or refused
        raise UserError(f"{option} {folder} cannot be written ({reason}); name another folder.") from None


def check_output_file(file: Path, *, option: str, suffix: str | None = None) -> None:
    """The same for one file: its folder can be written, and its place is no folder. Its name must end in ``suffix``."""
    if suffix is not None and file.suffix.lower() != suffix:
        kind = suffix.removeprefix(".").upper()
        raise UserError(f"{option} {file}: a {kind} file is written; give a name that ends in {suffix}.")
    try:
        if file.is_dir():
            raise UserError(f"{option} {file} is a folder; name a file in it.")
        _try_writing(file.parent)
        if file.exists():
            with file.open("ab"):  # nothing is changed
                pass
    except OSError as refused:
        reason = refused.strerror or refused
        raise UserError(f"{option} {file} cannot be written ({reason}); name another place.") from None


def check_readable(file: Path) -> bytes:
    """The first 16 bytes of a file; refuses one that may not be read. safetensors calls such a file missing."""
    try:
        with file.open("rb") as stream:
            return stream.read(16)
    except OSError as fault:
        raise UserError(f"{file} cannot be read ({fault.strerror}); check its permissions.") from None


def refuse_existing(files: Iterable[Path]) -> None:
    """Refuse to write over files; call it where the user did not ask for that."""
    for file in files:
        if os.path.exists(file):  # unlike Path.exists never an error: what cannot be reached is told elsewhere
            raise FileExistsAlreadyError(
                f"{file} exists already; name another --output, or add --overwrite (in Python: overwrite=True)."
            )


def _try_writing(folder: Path) -> None:
    if folder.is_file():  # mkdir would only say that something of that name exists
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists and is not inside a folder that is closed to us."""
    return next(place for place in (folder, *folder.absolute().parents) if os.path.isdir(place))


def why_not_written(fault: BaseException, folder: Path, *, needed_bytes: int | None = None) -> str:
    """Why a write into ``folder`` failed, in the system's words; for a full disk also how much is free and needed.

    Call it before the partial file is removed: if torch.save finds a full disk, only the free space tells it.
    """
    found: BaseException | None = fault
    while found is not None and not (isinstance(found, OSError) and found.errno):
        found = found.__cause__ or found.__context__
    said = (str(fault) or type(fault).__name__).splitlines()[0]
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return said
    number = found.errno if isinstance(found, OSError) else None
    if number is None and (free < LITTLE_ROOM or "os error 28" in said or "No space left" in said):
        number = errno.ENOSPC
    if number not in FULL_DISK_ERRORS:
        return said if number is None else os.strerror(number)
    needed = "" if needed_bytes is None else f", about {bytes_in_words(needed_bytes)} needed"
    return f"{os.strerror(number)}: {bytes_in_words(free)} free in {folder}{needed}"


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Around the work on one file: a full disk or a folder that went away becomes a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except OSError as fault:
        reason = why_not_written(fault, existing_folder(folder))
        raise UserError(f"writing to {folder} failed ({reason}); check its space and permissions.") from fault
