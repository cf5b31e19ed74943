"""Where relative paths start from.

In a file: from the file's project, the nearest folder at or above it that holds a project marker (``.git``,
``pyproject.toml``, ...), else the file's own folder. In a built-in preset: from the project of the shell's folder,
found the same way. On the command line: from the shell's folder itself. So a file gives the same run from any folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from tinyvae.config.rules import is_seen
from tinyvae.config.schema import path_keys

PROJECT_MARKERS = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg", "environment.yml", "requirements.txt")

PATH_KEYS = tuple(key for key in path_keys() if key != "logging_dir")
"""Keys that always name a file or folder. ``logging_dir`` is not here: it is relative to the run's folder."""

TEACHER_KEYS = ("ref_vae_path", "cogvideox_model_path")
"""Keys that name a folder or, where there is no such folder, a hub name."""


def project_of(folder: Path) -> Path:
    """The nearest folder at or above ``folder`` that holds a project marker; ``folder`` itself where there is none.

    The home folder and the root never count: dotfiles kept in git would make one project of all a user has.
    """
    folder = Path(os.path.abspath(folder))
    home = Path.home()
    for candidate in (folder, *folder.parents):
        if candidate == home or candidate == candidate.parent:
            break
        if any((candidate / marker).exists() for marker in PROJECT_MARKERS):
            return candidate
    return folder


def resolved(path: str | Path, base: Path) -> Path:
    """An absolute path without ``..``; ``~`` is the home folder. Links are left as they are."""
    return Path(os.path.normpath(base / Path(path).expanduser()))


def resolved_teacher(name: str, base: Path) -> str:
    """A teacher's folder as an absolute path; a hub name (``owner/name``) stays as it is.

    ``owner/name`` is a folder when it exists, or when ``owner`` is a folder here: then the name in it is a mistake
    worth reporting, not something to look for in the network.
    """
    here = resolved(name, base)
    parts = Path(name).parts
    looks_local = len(parts) != 2 or name.startswith(("~", ".", "/")) or (base / parts[0]).is_dir()
    return str(here) if looks_local or is_seen(here) else name


def resolved_checkpoint(name: str, base: Path) -> str:
    """``latest`` and a bare name stay as they are (the run folders are searched); anything else is a path."""
    return name if Path(name).name == name and not name.startswith(("~", ".")) else str(resolved(name, base))
