"""The examples run as they stand; the example of a settings file trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tinyvae.cli import run
from tinyvae.config_files import load_config
from tinyvae.data.sample_clips import write_sample_clips

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "examples" / "my_settings.py"
EXAMPLES = sorted(file for file in SETTINGS.parent.glob("*.py") if file != SETTINGS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_settings_file_is_right_as_it_stands() -> None:
    loaded = load_config(SETTINGS)
    assert loaded.config.output_dir == ROOT / "output" / "mine_%Y-%m-%d_%H-%M-%S", "a start gets a folder of its own"
    assert not loaded.notices, "nothing is decided for the user"


@pytest.mark.slow
def test_the_settings_file_trains_and_goes_on(tmp_path: Path) -> None:
    """The two lines of the README, at a size that a CPU can do."""
    write_sample_clips(tmp_path / "videos", count=6, height=64, width=64, frames=20)
    words = (
        f"--data_root {tmp_path / 'videos'} --output_dir {tmp_path / 'output'}/%Y-%m-%d_%H-%M-%S --height 32 --width 32"
    )
    words += " --model_width 0.125 --train_batch_size 1 --validation_steps 0 --checkpointing_steps 2"
    words += " --report false --compile_model false --mixed_precision no --dataloader_num_workers 0 --train_split 0.8"
    start = ["train", str(SETTINGS), *words.split()]
    assert run([*start, "--max_train_steps", "2"]) == 0
    assert run([*start, "--max_train_steps", "4", "--resume", "latest"]) == 0
    (folder,) = (entry for entry in (tmp_path / "output").iterdir() if entry.is_dir() and not entry.is_symlink())
    assert {entry.name for entry in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
