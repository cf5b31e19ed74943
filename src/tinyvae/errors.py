"""The errors a user can cause.

Each is a ``ValueError`` whose text is one sentence: what is wrong, where, and what to do. The command line prints that
sentence and exits with 2. Any other error is our own bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

NEAR = 0.65
"""A name this near is suggested: ``quickstart`` for ``quick``, but not ``use_sample_clips`` for ``use_amp``."""


class UserError(ValueError):
    """A mistake in what the user gave us; the message says how to fix it."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that the user named and that is not there."""

    __str__ = BaseException.__str__  # OSError would print the number of its error too


class FileExistsAlreadyError(UserError, FileExistsError):
    """Something would be written over, and the user did not ask for that."""

    __str__ = BaseException.__str__


class UnreadableVideoError(UserError):
    """A video (path or URL) that cannot give the frames asked for. Its text is ``path: reason``."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(path, reason)  # both as arguments: the error can then travel between processes
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@contextmanager
def closed_paths_told() -> Iterator[None]:
    """A path that the system does not let us look at (``PermissionError``) becomes a `UserError`: where paths are
    checked, or around a short command. A long run keeps the traceback, and exit code 1: a restart may help it."""
    try:
        yield
    except PermissionError as refused:
        if refused.filename is None:
            raise
        way_out = "check its permissions, and those of the folders above it"
        raise UserError(f"{refused.filename} is closed to you ({refused.strerror}); {way_out}.") from None


def why_unreadable(fault: UnreadableVideoError | OSError) -> str:
    """Why a video could not be read, for the list of bad files."""
    return fault.reason if isinstance(fault, UnreadableVideoError) else f"cannot be read: {fault.strerror or fault}"


def first_line(failure: Exception) -> str:
    """What an error says first; its class where it says nothing."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else type(failure).__name__


def nearest_name(wrong: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the known name closest to ``wrong``, or an empty string."""
    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=NEAR)
    return f" Did you mean {close[0]!r}?" if close else ""


def require_package(module: str, *, extra: str, needed_for: str) -> ModuleType:
    """Import an optional package, or say in one sentence how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.split(".")[0] != module.split(".")[0]:
            raise  # the package is there, and one of its own imports is missing
        text = f"{needed_for} needs the package {module!r}, which is not installed; "
        raise UserError(f"{text}install it with: pip install 'tinyvae[{extra}]'") from None
