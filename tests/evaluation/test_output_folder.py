"""Output folders: proved before the work, and faults told in one sentence."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tinyvae.errors import MissingFileError, UserError
from tinyvae.evaluation.output_folder import make_output_folder, writing_to


def test_folders_are_made_and_left_empty(tmp_path: Path) -> None:
    for _ in range(2):
        make_output_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; name a folder"):
        make_output_folder(tmp_path / "file")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\)"):
        make_output_folder(tmp_path / "file" / "below")


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"writing to .* failed \(No space left on device\)"), writing_to(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(MissingFileError, match="gone"), writing_to(tmp_path):
        raise MissingFileError("gone")
