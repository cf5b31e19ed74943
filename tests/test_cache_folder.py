"""The folder that both caches keep their copies in; `tests/data/test_decoded_cache.py` has it at work."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tinyvae.cache_folder import GIB, CacheFolder, open_copy, user_cache


def add(cache: CacheFolder, key: str, *, age_s: float, size: int = 100) -> Path:
    file = cache.place(key, ".copy")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    used = time.time() - age_s
    os.utime(file, (used, used - 1000))
    return file


def test_downloads_of_a_user_without_a_home_lie_on_the_temporary_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "tinyvae"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "tinyvae"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54_321)  # nobody's
    assert user_cache() == Path(tempfile.gettempdir()) / "tinyvae-downloads-54321"


def test_the_longest_unused_copies_go_and_foreign_files_stay(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, max_gb=350 / GIB, run_start=time.time() - 150)
    old, older, new = (add(cache, key, age_s=age_s) for key, age_s in (("a", 200), ("b", 300), ("c", 100)))
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    assert cache.make_room(50, keep_used_since=time.time()) and cache.event == ""
    assert cache.make_room(100, keep_used_since=time.time()) and cache.event == "evicts"
    assert not older.exists() and old.exists() and new.exists()
    assert cache.make_room(300, keep_used_since=time.time()) and cache.event == "full", "a copy of this run went"
    assert not old.exists() and not new.exists() and (tmp_path / "notes.txt").exists()


def test_nothing_goes_for_what_does_not_fit_and_copies_in_use_stay(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, max_gb=350 / GIB)
    copy = add(cache, "a", age_s=5)
    assert not cache.make_room(400, keep_used_since=time.time()) and copy.exists()
    assert not cache.make_room(300, keep_used_since=time.time() - 1000) and copy.exists()


def test_a_disk_that_is_full_makes_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheFolder(tmp_path, max_gb=1)
    copies = [add(cache, key, age_s=age_s) for key, age_s in (("a", 300), ("b", 200), ("c", 100))]
    usage = shutil.disk_usage(tmp_path)._replace(free=60)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert cache.make_room(200, keep_used_since=time.time())
    assert [copy.exists() for copy in copies] == [False, False, True]


def test_a_use_is_a_time_of_access_and_no_change(tmp_path: Path) -> None:
    cache = CacheFolder(tmp_path, max_gb=1)
    copy = add(cache, "a", age_s=500)
    changed_at = copy.stat().st_mtime_ns
    stream = open_copy(copy, 100)
    assert stream is not None and open_copy(copy, 99) is None and open_copy(tmp_path / "none", None) is None
    stream.close()
    assert copy.stat().st_mtime_ns == changed_at and time.time() - copy.stat().st_atime < 400
