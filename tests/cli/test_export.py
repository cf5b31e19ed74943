"""``tinyvae export``: the list, one line after writing, and mistakes that end in one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinyvae import TAEHV, VARIANTS, save_model
from tinyvae.cli.main import main, run


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save_model(TAEHV("taew2_1"), tmp_path_factory.mktemp("model") / "wan.safetensors")[0]


def test_the_list_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--to", "list"]) == 0
    out = capsys.readouterr().out
    assert all(variant in out for variant in VARIANTS) and "stable-diffusion.cpp" in out


def test_one_line_says_where_it_goes(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(model_file), "--to", "comfyui", "--slot", "preview", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and (tmp_path / "lighttaew2_1_preview.safetensors").is_file()
    assert "ComfyUI/models/vae_approx" in out and "cannot serve the VAE Decode node" in out


def test_onnx_takes_a_small_width(small_model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    assert run(["export", str(small_model_file), "--to", "onnx", "--output", str(tmp_path / "graphs")]) == 0
    assert sorted(file.name for file in (tmp_path / "graphs").iterdir()) == ["decoder.onnx", "encoder.onnx"]
    assert "examples/stream_onnx.py" in capsys.readouterr().out


MISTAKES = {
    "no model": (["--to", "sdcpp", "--output", "OUT"], "name the model to export"),
    "no output": (["MODEL", "--to", "sdcpp"], "name the place to write to with --output"),
    "missing model": (["absent.safetensors", "--to", "sdcpp", "--output", "OUT"], "there is no model at"),
    "unknown program": (["MODEL", "--to", "comfy", "--output", "OUT"], "Did you mean 'comfyui'?"),
    "unknown slot": (["MODEL", "--to", "sdcpp", "--slot", "x", "--output", "OUT"], "has no slot 'x'"),
    "unknown dtype": (["MODEL", "--to", "sdcpp", "--dtype", "int4", "--output", "OUT"], "'int4' is not known"),
    "half Wan": (["MODEL", "--to", "comfyui", "--slot", "preview", "--dtype", "fp16", "--output", "OUT"], "float16"),
    "VAE slot": (["MODEL", "--to", "comfyui", "--output", "OUT"], "the live preview works (--slot preview)"),
    "unwritable": (["MODEL", "--to", "sdcpp", "--output", "/proc/x"], "cannot be written"),
    "unwritable folder": (["MODEL", "--to", "onnx", "--output", "/proc/x"], "cannot be written"),
    "existing": (
        ["MODEL", "--to", "sdcpp", "--output", "THERE"],
        "exists already; name another --output, or add --overwrite",
    ),
    "a file as folder": (["MODEL", "--to", "onnx", "--output", "THERE"], "is a file; name a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    words, expected = MISTAKES[mistake]
    there = tmp_path / "there.safetensors"
    there.write_text("mine")
    places = {"MODEL": str(model_file), "OUT": str(tmp_path / "out"), "THERE": str(there)}
    with pytest.raises(SystemExit) as ended:
        main(["export", *(places.get(word, word) for word in words)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and expected in said
    assert said.startswith("tinyvae: error: ") and said.count("\n") == 1
    assert there.read_text() == "mine"
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob(".export-*"))
