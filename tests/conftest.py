"""What every test may ask for: the shared folder (golden data, real clips) and a seeded torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

DEFAULT_MARKS = "not slow and not gpu"  # of pyproject.toml

# The tests' tensors are tiny: a second thread makes them up to twenty times slower when the other core is busy.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A plain ``pytest`` runs in two processes, file by file; ``-n 0`` is for a debugger.

    Named tests and the slow and GPU suites stay in one: many of those start processes of their own.
    """
    is_plain = config.args_source == pytest.Config.ArgsSource.TESTPATHS and config.option.markexpr == DEFAULT_MARKS
    is_worker = hasattr(config, "workerinput")
    if is_plain and not is_worker and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"


def find_shared() -> Path | None:
    """``TINYVAE_SHARED`` or ``../shared`` beside the checkout; None where neither exists."""
    named = os.environ.get("TINYVAE_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if (folder / "golden" / "cases.json").exists() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = find_shared()
    if folder is None:
        pytest.skip("no shared data here (../shared or TINYVAE_SHARED)")
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
