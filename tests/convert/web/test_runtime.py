"""onnxruntime-web for the page: fetched once by npm, checked, kept; and what is said when that is not possible."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.engines.small_models import small
from tinyvae.convert import onnx, web
from tinyvae.convert.export import export
from tinyvae.errors import UserError


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tinyvae" / "onnxruntime-web-1.30.0"


def fake_npm(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = folder / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setattr(web.shutil, "which", lambda name: str(npm))


def test_without_npm(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    monkeypatch.setattr(web.shutil, "which", lambda name: None)
    monkeypatch.setattr(onnx, "build_graph", lambda *_: pytest.fail("it is asked before the work"))
    with pytest.raises(UserError, match=r"npm is not installed; install it .*or use --to onnx"):
        export(small("taehv"), to="web", output=tmp_path / "page")
    assert list((tmp_path / "page").iterdir()) == []


def test_without_a_network(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path, "echo 'npm error network is unreachable' >&2; exit 1", monkeypatch)
    with pytest.raises(UserError, match=r"npm could not fetch onnxruntime-web@1.30.0 \(npm error network is unreach"):
        web.find_runtime()


def pack_files(content: str) -> str:
    """The script of an npm that packs files of this content."""
    names = " ".join(f"package/dist/{name}" for name in web.RUNTIME_FILES)
    write = f"for f in {names}; do printf {content} > $f; done"
    return f"mkdir -p package/dist; {write}; tar czf ort.tgz package; rm -r package"


def test_another_file_is_not_kept(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path, pack_files("x"), monkeypatch)
    with pytest.raises(UserError, match="is not the file that was expected"):
        web.find_runtime()
    assert not empty_cache.exists()


def test_a_cache_that_cannot_be_written(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "RUNTIME_FILES", {"a.mjs": hashlib.sha256(b"right").hexdigest()})
    fake_npm(tmp_path, pack_files("right"), monkeypatch)
    (tmp_path / "cache").write_text("a file in its way")
    with pytest.raises(UserError, match=r"writing to .*cache/tinyvae/onnxruntime-web-\S+ failed \(Not a directory\)"):
        web.find_runtime()


def test_what_is_kept_is_used_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "RUNTIME_FILES", {"a.mjs": hashlib.sha256(b"right").hexdigest()})
    monkeypatch.setattr(web, "fetch_runtime", lambda folder: pytest.fail("fetched again"))
    empty_cache.mkdir(parents=True)
    (empty_cache / "a.mjs").write_bytes(b"right")
    assert web.find_runtime() == empty_cache


def test_a_damaged_copy_is_fetched_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "RUNTIME_FILES", {"a.mjs": hashlib.sha256(b"right").hexdigest()})
    fetched = []
    monkeypatch.setattr(web, "fetch_runtime", fetched.append)
    empty_cache.mkdir(parents=True)
    (empty_cache / "a.mjs").write_bytes(b"half")
    web.find_runtime()
    assert fetched == [empty_cache]
