"""Output folders: proved before the work, and faults told in one sentence."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tinyvae.errors import MissingFileError, UserError
from tinyvae.files import (
    atomic_write,
    check_readable,
    existing_folder,
    lock_file,
    make_output_folder,
    sha256_of,
    writing_to,
)
from tinyvae.training.run_folder import why_taken


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
    with (
        pytest.raises(UserError, match=r"writing to .* failed \(No space left on device: .* free in .*\)"),
        writing_to(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(MissingFileError, match="gone"), writing_to(tmp_path):
        raise MissingFileError("gone")


def test_a_file_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text("old")
    with atomic_write(file, "w") as stream:
        stream.write("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "values.bin"
    file.write_bytes(b"old")
    with pytest.raises(KeyError), atomic_write(file) as stream:
        stream.write(b"half")
        raise KeyError
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("number", "is_refused"), [(errno.ENOSYS, False), (errno.ENOLCK, False), (errno.EIO, True)])
def test_storage_without_locks_lets_everybody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_refused: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tinyvae.files.fcntl.flock", refuse)
    with (tmp_path / "file").open("wb") as stream, pytest.raises(OSError) if is_refused else nullcontext():
        lock_file(stream, wait=True)


def test_what_may_not_be_read_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "file").touch()
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"file cannot be read \(Permission denied\)"):
        patch.setattr(Path, "open", refuse)
        check_readable(tmp_path / "file")


def test_two_writes_of_one_file_at_once_both_succeed(tmp_path: Path) -> None:
    """As by two containers that share a folder, each with a process of the same number."""
    with atomic_write(tmp_path / "file", "w") as first, atomic_write(tmp_path / "file", "w") as second:
        first.write("first")
        second.write("second")
    assert (tmp_path / "file").read_text() == "first" and len(list(tmp_path.iterdir())) == 1


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")  # the example of FIPS 180-4
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_place_inside_a_folder_that_is_closed_to_us_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, ask = tmp_path / "closed", os.stat
    closed.mkdir()

    def stat(place: Any, **options: Any) -> os.stat_result:
        if str(place).startswith(f"{closed}/"):  # root may look into any folder
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return ask(place, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert existing_folder(closed / "run") == closed and why_taken(closed / "run", None) == ""
