"""Files of the old trainer, tried as they stand; and the migration guide names every one of their keys.

The files in ``tests/config/old_settings`` are our own text with the keys, values and style in circulation.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tinyvae import TAEHV
from tinyvae.cli.main import run
from tinyvae.config import load_config
from tinyvae.config.load import preset_names
from tinyvae.config.old_files import ALIASES, CHECKED_KEYS, OLD_KEYS
from tinyvae.config.schema import FIELDS
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError
from tinyvae.training.deepspeed import read_launch_file

ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / "tests" / "config" / "old_settings"
GUIDES = [ROOT / "docs" / name for name in ("migration.md", "migration.zh-CN.md")]


def keys_of(file: Path) -> set[str]:
    return set(re.findall(r"^args\.(\w+) = ", file.read_text(), re.MULTILINE))


def mistakes(file: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(file, words)
    return str(caught.value)


# settings files


def test_a_file_of_sixteen_frames_works_as_it_is() -> None:
    file = OLD / "taehv_config_h100_fixed.py"
    loaded = load_config(file)
    config = loaded.config
    assert config.variant == "taecvx" and config.n_frames == 16
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (2, 8)
    assert config.output_dir == ROOT / "output" / "%Y-%m-%d_%H-%M-%S", "the clock of the run's start, not of the file"
    told = {notice.split()[0] for notice in loaded.notices}
    gone = keys_of(file) - {*FIELDS, *ALIASES}
    assert gone and gone <= told, "each key that is no setting any more is told"


def test_a_file_of_twelve_frames_needs_another_length() -> None:
    """The clip length, and what hangs on it, is all that is wrong with such a file."""
    file = OLD / "taehv_config.py"
    text = mistakes(file)
    assert re.findall(r"\b[a-z_]+=\S+(?= does not)", text) == ["n_frames=12"]
    assert "use a length of 8k or 8k+1, here 9 or 16" in text
    assert "n_seraena_frames=3 does not divide the 16 padded frames" in mistakes(file, "--n_frames", "16")
    config = load_config(file, ["--n_frames", "16", "--n_seraena_frames", "4"]).config
    assert config.n_frames == 16 and config.variant == "taecvx"


def test_check_finds_nothing_wrong_but_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    file = tmp_path / "training" / "configs" / "mine.py"
    file.parent.mkdir(parents=True)
    shutil.copy(OLD / "taehv_config_h100_fixed.py", file)
    with pytest.raises(UserError) as caught:
        run(["check", str(file), "--quick"])
    lines = re.findall(r"^  - (\w+)=(.*)$", str(caught.value), re.MULTILINE)
    named = dict(lines)
    files = {"data_root", "annotation_file", "pretrained_model_path", "cogvideox_model_path"}
    assert files <= set(named) <= {*files, "perceptual_loss_weight"}, str(caught.value)
    assert f"looked for {tmp_path}/checkpoints/taecvx.pth" in named["pretrained_model_path"]


@pytest.mark.slow
def test_a_file_of_the_old_trainer_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as it is, but for a size and a number of steps that a CPU can do."""
    from diffusers import AutoencoderKLCogVideoX

    (tmp_path / "setup.py").touch()
    shutil.copy(OLD / "taehv_config_h100_fixed.py", tmp_path / "mine.py")
    videos = tmp_path / "data" / "videos"
    write_sample_clips(videos, count=8, height=64, width=64, frames=33)
    entries = [{"path": str(clip.relative_to(videos))} for clip in sorted(videos.rglob("*.mp4"))]
    (tmp_path / "data" / "annotations.json").write_text(json.dumps({"total": len(entries), "list": entries}))
    (tmp_path / "checkpoints").mkdir()
    torch.manual_seed(0)
    torch.save(TAEHV("taecvx").state_dict(), tmp_path / "checkpoints" / "taecvx.pth")
    AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2, latent_channels=16
    ).save_pretrained(tmp_path / "CogVideoX-2b" / "vae")
    words = "--n_frames 16 --height 32 --width 32 --train_batch_size 1 --gradient_accumulation_steps 1"
    words += " --mixed_precision no --max_train_steps 2 --validation_steps 2 --num_validation_samples 1"
    words += " --checkpointing_steps 2 --dataloader_num_workers 0 --perceptual_loss_weight 0 --report false"
    words += " --use_seraena false"
    monkeypatch.chdir(tmp_path)
    assert run(["train", str(tmp_path / "mine.py"), *words.split()]) == 0
    (folder,) = (folder for folder in (tmp_path / "output").iterdir() if not folder.is_symlink())
    assert (folder / "final_model.pth").is_file() and (folder / "best_model" / "model_info.json").is_file()
    assert (folder / "checkpoint-2" / "model.safetensors").is_file()


# launch files


def test_an_old_launch_file_is_refused_for_the_lines_that_the_guide_names(tmp_path: Path) -> None:
    file = OLD / "deepspeed_8gpu.yaml"
    with pytest.raises(UserError) as caught:
        read_launch_file(file)
    refused = re.search(r"does not pass on ([\w, ]+) of deepspeed_config", str(caught.value))[1].split(", ")
    assert len(refused) > 5
    for guide in GUIDES:
        text = guide.read_text()
        assert not {key for key in refused if f"`{key}`" not in text}, guide.name
    content = yaml.safe_load(file.read_text())
    for key in refused:
        del content["deepspeed_config"][key]
    shorter = tmp_path / "deepspeed.yaml"
    shorter.write_text(yaml.safe_dump(content))
    launch = read_launch_file(shorter)
    config = load_config(OLD / "taehv_config_h100_fixed.py").config
    assert ["gradient_accumulation_steps" in line for line in launch.disagreements(config)] == [True]


# the guide


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_the_guide_names_every_old_key_and_every_preset(guide: Path) -> None:
    text = guide.read_text()
    for name in (*OLD_KEYS, *CHECKED_KEYS, *preset_names()):
        assert f"`{name}`" in text, name


def test_the_files_hold_the_old_keys() -> None:
    """Nearly all of them: what is tried with the files is tried with every kind of key."""
    held = set().union(*(keys_of(file) for file in OLD.glob("*.py")))
    assert held <= {*FIELDS, *ALIASES, *OLD_KEYS, *CHECKED_KEYS}
    assert {*OLD_KEYS, *CHECKED_KEYS} - held <= {"save_best", "save_best_model"}
