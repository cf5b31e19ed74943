"""docs/architecture.md names every file of the house, and the three ways of the data are as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.data_flow import DataFlow
from tests.training.test_golden_losses import recipe_for, write_films
from tests.training.tiny_runs import train_here
from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import run

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tinyvae"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def files_in(heading: str) -> list[str]:
    """The files that the list items under a heading begin with."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^(?:\d+\.|-) `([\w/]+\.\w+)`", section, flags=re.MULTILINE)


def test_every_file_is_named_once_and_exists() -> None:
    found = {str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*") if file.is_file()}
    found = {name for name in found if "__pycache__" not in name and name != "py.typed"}
    named = files_in("Every file")
    assert len(named) == len(set(named))
    assert set(named) == found


def check_way(heading: str, flow: DataFlow, *, at_most: int) -> None:
    named = files_in(heading)
    assert set(named) == flow.files
    assert len(named) == len(set(named)) <= at_most


def test_the_way_of_a_video_into_a_checkpoint(tmp_path: Path) -> None:
    arguments = recipe_for(tmp_path, seraena_start=1, max_train_steps=3, lr_warmup_steps=1, checkpointing_steps=3)
    with DataFlow() as flow:
        train_here(arguments)
    check_way("From a video to a checkpoint", flow, at_most=32)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_model(TAEHV("taehv", width=0.125), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_the_way_of_weights_into_frames(weights: Path) -> None:
    with DataFlow() as flow, torch.no_grad():
        load_model(weights).fused().decode(torch.randn(1, 3, 16, 4, 4))
    check_way("From weights to frames", flow, at_most=10)


def test_the_way_of_an_evaluation_into_a_report(weights: Path, tmp_path: Path) -> None:
    films = write_films(tmp_path / "films")
    words = ["eval", str(weights), "--data", str(films), "--output", str(tmp_path / "report"), "--lpips", "off"]
    with DataFlow() as flow:
        assert run([*words, "--max_clips", "2"]) == 0
    check_way("From an evaluation to a report", flow, at_most=14)
