"""The site has every document and every public name, and its plots are those of the tables. CI builds it as well."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
PUBLIC = ("tinyvae", "tinyvae.config", "tinyvae.data", "tinyvae.evaluation", "tinyvae.teachers", "tinyvae.diffusers")


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which also names functions."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    assert parts is not None
    return [page for part in parts for page in nav_pages(part)]


def test_every_document_is_in_the_navigation() -> None:
    named = nav_pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    documents = [file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")]
    documents += [file.relative_to(ROOT).as_posix() for file in (ROOT / "benchmarks" / "results").glob("*.md")]
    assert sorted(named) == sorted([*documents, "index.md", "index.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md"])


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    if module == "tinyvae.diffusers":
        pytest.importorskip("diffusers")
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    public = set(importlib.import_module(module).__all__) - {"__version__"}
    assert not {f"{module}.{name}" for name in public} - shown


def test_names_of_the_reference_exist() -> None:
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            assert hasattr(importlib.import_module(module), name), f"{page.name} names {path}"


def test_the_plots_are_those_of_the_tables() -> None:
    for name, draw in runpy.run_path(str(IMAGES / "draw_results.py"))["PLOTS"].items():
        assert (IMAGES / name).read_text() == draw(), f"run docs/images/draw_results.py: {name} is old"
