"""Where results go: proved writable before the work, and a failed write told in one sentence."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinyvae.errors import UserError


def make_output_folder(folder: Path) -> None:
    """Create a folder and write into it once, so that hours of work do not end at a folder that cannot be written."""
    if folder.is_file():
        raise UserError(f"--output_dir {folder} is a file; name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as refused:
        raise UserError(
            f"--output_dir {folder} cannot be written ({refused.strerror or refused}); name another folder."
        ) from None


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Around the work on one file: a full disk or a folder that went away is the user's to mend, not a bug."""
    try:
        yield
    except UserError:
        raise
    except OSError as fault:
        raise UserError(
            f"writing to {folder} failed ({fault.strerror or fault}); check its space and permissions."
        ) from fault
