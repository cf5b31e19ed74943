"""What every test may ask for: the shared folder (golden data, real clips) and a seeded torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# The tests' tensors are tiny: a second thread makes them up to twenty times slower when the other core is busy.
torch.set_num_threads(1)


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
