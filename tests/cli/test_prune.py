"""`tinyvae prune`: a file that every command reads, what it prints, and what it says to mistakes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.training.test_golden_losses import write_films
from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import run
from tinyvae.convert import prune
from tinyvae.errors import UserError


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_model(TAEHV("taecvx", width=0.25), tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


def test_a_file_of_half_the_width(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "CLIP_FRAMES", 5)
    monkeypatch.setattr(prune, "CLIP_LATENT_SIDE", 4)
    target = tmp_path / "one half.safetensors"
    films = write_films(tmp_path / "films")
    (films / "broken.mp4").write_bytes(b"no video")
    words = ["prune", str(weights), "--keep", "0.5", "--output", str(target), "--max_clips", "2"]
    with pytest.warns(UserWarning, match=r"left out: .*broken\.mp4"):
        assert run([*words, "--data", str(films), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    model = load_model(target)
    assert (model.spec.name, model.spec.width) == ("taecvx", 0.125)
    assert "taecvx, width 0.25 -> 0.125: 0.72 -> 0.18 M parameters" in shown
    assert " dB whole, " in shown and f"--pretrained_model_path '{target}'" in shown and "--model_width 0.125" in shown
    with pytest.raises(UserError, match="exists already"):
        run([*words, "--device", "cpu"])
    assert run([*words, "--device", "cpu", "--overwrite"]) == 0
    assert "by the norms of their weights alone" in capsys.readouterr().out


def test_the_printed_command_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a network with another latent space and activation than the released ones."""
    whole, films = tmp_path / "whole.safetensors", write_films(tmp_path / "films")
    save_model(TAEHV("taew2_1", width=0.25, latent_space="vae", activation="leaky_relu"), whole)
    assert run(["prune", str(whole), "--keep", "0.5", "--output", str(tmp_path / "half.safetensors")]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["tinyvae", "train", "distill"] and words[-1] == "VIDEOS"
    assert words[words.index("--variant") + 1] == "taew2_1"
    assert run(["check", *words[2:-1], str(films), "--quick"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--keep", "half"], "invalid float value: 'half'"),
        (["--keep", "0.3"], "use one of 0.5"),
        (["--keep", "0.5", "--output", "half.onnx"], "end its name in .safetensors or .pth"),
        (["--keep", "0.5", "--data", "nowhere"], "there is no data at nowhere"),
        ([], "--keep"),
    ],
)
def test_mistakes_end_in_a_sentence(weights: Path, tmp_path: Path, options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(["prune", str(weights), "--output", str(tmp_path / "out.safetensors"), "--device", "cpu", *options])
    assert not (tmp_path / "out.safetensors").exists()
