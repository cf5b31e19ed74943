"""What the training tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.tiny_runs import write_clips


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tiny videos. Treat as read-only."""
    return write_clips(tmp_path_factory.mktemp("clips"))
