"""What the training tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_golden_losses import write_teacher
from tests.training.tiny_runs import arguments_for, train_here, write_clips


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tiny videos. Treat as read-only."""
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny CogVideoX VAE. Treat as read-only."""
    return write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def undisturbed(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps of two micro-batches. Treat as read-only."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train_here(arguments_for(clips, run, gradient_accumulation_steps=2))
    return run
