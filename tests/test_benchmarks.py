"""Benchmarks that keep results in the repository do so only when they are told to."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/chaos.py``, whose kills take no time."""
    spec = importlib.util.spec_from_file_location("chaos", ROOT / "benchmarks" / "chaos.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chaos", module)
    spec.loader.exec_module(module)
    result = {"kills": 1, "in a save": 0, "in start-up": 1, "steps": 9, "differences": []}
    monkeypatch.setattr(module, "kills", lambda *_, **__: result)
    monkeypatch.setattr(module, "write_sample_clips", lambda folder: folder.mkdir(parents=True))
    monkeypatch.setattr(module.torch, "set_num_threads", lambda number: None)  # of this process: other tests run in it
    return module


def test_chaos_keeps_its_results_only_with_write(
    chaos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "chaos.json", tmp_path / "page.md"
    file.write_text("{}\n")
    page.write_text("before <!-- chaos: begin -->\n<!-- chaos: end --> after\n")
    words = ["chaos.py", "--kills", "1", "--results", str(file), "--work", str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", words)
    chaos.main()
    assert file.read_text() == "{}\n" and "is as it was; --write" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*words, "--write", str(page)])
    chaos.main()
    assert json.loads(file.read_text())["kills"]["result"]["kills"] == 1 and "kept in" in capsys.readouterr().out
    assert "1 x `kill -9`" in page.read_text() and page.read_text().startswith("before ")
