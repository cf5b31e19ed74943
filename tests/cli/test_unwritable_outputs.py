"""Every verb that writes refuses a place that cannot be written: one sentence, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyvae.cli.main import run
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError
from tinyvae.losses import perceptual


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unwritable")
    write_sample_clips(folder / "clips", count=2, height=32, width=32, frames=5)
    (folder / "file.txt").touch()
    return folder


COMMANDS = {
    "data index --output": ["data", "index", "CLIPS", "--output", "PLACE/y.tvi"],
    "data check --contact_sheet": ["data", "check", "CLIPS", "--contact_sheet", "PLACE/y.png"],
    "data sample": ["data", "sample", "PLACE/clips"],
    "lpips-weights --output": ["lpips-weights", "--output", "PLACE/x.safetensors"],
    "bench --output": ["bench", "taehv", "--device", "cpu", "--output", "PLACE/x.json"],
    "eval --output": ["eval", "no_model", "--data", "CLIPS", "--output", "PLACE/x"],
    "compare --output": ["compare", "no_model", "no_model", "--data", "CLIPS", "--output", "PLACE/x"],
    "reconstruct --output": ["reconstruct", "no_model", "CLIPS", "--output", "PLACE/x"],
    "encode --output": ["encode", "no_model", "CLIPS", "--output", "PLACE/x"],
    "decode --output": ["decode", "no_model", "x.safetensors", "--output", "PLACE/x"],
}


@pytest.mark.parametrize("place", ["/proc", "FILE", "/dev/null", "n" * 300])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_unwritable_place_is_one_sentence(
    setting: Path, command: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(perceptual, "download_package", lambda _: pytest.fail("downloaded before the place was tried"))
    clips, where = str(setting / "clips"), str(setting / "file.txt") if place == "FILE" else place
    arguments = [word.replace("CLIPS", clips).replace("PLACE", where) for word in COMMANDS[command]]
    with pytest.raises(UserError, match="cannot be written") as refused:
        run(arguments)
    assert "\n" not in str(refused.value)


def test_a_contact_sheet_is_a_png(setting: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"y\.xyz: a PNG file is written; give a name that ends in \.png"):
        run(["data", "check", str(setting / "clips"), "--contact_sheet", str(tmp_path / "y.xyz")])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_a_file(setting: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for words in (["data", "index", str(setting / "clips")], ["lpips-weights"], ["bench", "taehv", "--device", "cpu"]):
        with pytest.raises(UserError, match="is a folder; name a file in it"):
            run([*words, "--output", str(tmp_path / "folder.json")])
