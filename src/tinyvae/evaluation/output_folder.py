"""Where results go: proved writable before the work, and a failed write told in one sentence."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyvae.errors import UserError


def make_output_folder(folder: Path, *, option: str = "--output_dir") -> None:
    """Create a folder and write into it once, so that hours of work do not end at a folder that cannot be written.

    ``option``: what the user gave the folder by, for the message.
    """
    try:
        if folder.is_file():
            raise UserError(f"{option} {folder} is a file; name a folder.")
        _prove_writable(folder)
    except OSError as refused:
        raise UserError(
            f"{option} {folder} cannot be written ({refused.strerror or refused}); name another folder."
        ) from None


def check_output_file(file: Path, *, option: str, suffix: str | None = None) -> None:
    """The same for one file: its folder is made and written to, and the file itself can be one.

    ``suffix``: what its name must end in, where the content is always of one kind.
    """
    if suffix is not None and file.suffix.lower() != suffix:
        kind = suffix.removeprefix(".").upper()
        raise UserError(f"{option} {file}: a {kind} file is written; give a name that ends in {suffix}.")
    try:
        if file.is_dir():
            raise UserError(f"{option} {file} is a folder; name a file in it.")
        _prove_writable(file.parent)
        if file.exists():
            with file.open("ab"):  # nothing is changed
                pass
    except OSError as refused:
        raise UserError(
            f"{option} {file} cannot be written ({refused.strerror or refused}); name another place."
        ) from None


def _prove_writable(folder: Path) -> None:
    if folder.is_file():  # mkdir would only say that something of that name exists
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Around the work on one file: a full disk or a folder that went away is the user's to fix, not a bug."""
    try:
        yield
    except UserError:
        raise
    except OSError as fault:
        raise UserError(
            f"writing to {folder} failed ({fault.strerror or fault}); check its space and permissions."
        ) from fault
