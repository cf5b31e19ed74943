"""``tinyvae compare``: paired differences in the terminal and in files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import run
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError
from tinyvae.evaluation.compare import warn_of_twins
from tinyvae.evaluation.round_trip import open_model


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, and two models whose last bias differs: grey is nearer to every picture than black."""
    folder = tmp_path_factory.mktemp("compare")
    write_sample_clips(folder / "clips", count=5, height=32, width=48, frames=9)
    for name, bias in (("black", 0.0), ("grey", 0.45)):
        torch.manual_seed(0)
        model = TAEHV("taehv", width=0.125)
        with torch.no_grad():
            model.decoder[-1].weight.zero_()
            model.decoder[-1].bias.fill_(bias)
        save_model(model, folder / f"{name}.safetensors", overwrite=True)
    return folder


def clips_of(setting: Path) -> list[Path]:
    return sorted((setting / "clips").rglob("*.mp4"))


def test_compare_names_the_winner(setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(setting / "black.safetensors"), str(setting / "grey.safetensors")]
    options = ["--data", str(setting / "clips"), "--output", str(tmp_path), "--lpips", "off", "--films", "1"]
    assert run(["compare", models[0], *options, models[1]]) == 0
    printed = capsys.readouterr().out
    assert "grey against black" in printed and "better   wins 5/5" in printed
    assert "clips by difference of PSNR:" in printed and "best mean:\n  PSNR            grey\n" in printed
    assert all(printed.count(f"dB  {clip.relative_to(setting / 'clips')}\n") == 1 for clip in clips_of(setting))
    assert max(map(len, printed.split("wrote ")[0].splitlines())) <= 80
    results = json.loads((tmp_path / "results.json").read_text())
    difference = results["comparison"]["differences"][0]["by_metric"]["psnr"]
    assert difference["verdict"] == "better" and difference["difference"]["low"] > 0
    first, second = (e["summary"]["psnr"]["mean"] for e in results["evaluations"])
    assert difference["difference"]["mean"] == pytest.approx(second - first, abs=1e-5)
    assert (tmp_path / "report.html").is_file()


def test_variants_are_given_for_each_model(setting: Path) -> None:
    models = [str(setting / "black.safetensors"), str(setting / "grey.safetensors")]
    with pytest.raises(UserError, match="--variant was given 1 time for 2 models"):
        run(["compare", *models, "--data", str(setting / "clips"), "--variant", "taehv"])
    with pytest.raises(UserError, match="at least two models"):
        run(["compare", "none.safetensors", "--data", "none"])


@pytest.mark.filterwarnings("ignore:.*holds values that are not finite")
def test_a_model_that_makes_nan_loses_and_is_named(
    setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(setting / "grey.safetensors")
    with torch.no_grad():
        model.decoder[-1].bias.fill_(float("nan"))
    save_model(model, tmp_path / "broken.safetensors")
    models = [str(tmp_path / "broken.safetensors"), str(setting / "grey.safetensors")]
    assert run(["compare", *models, "--data", str(setting / "clips"), "--lpips", "off", "--max_clips", "2"]) == 1
    shown = capsys.readouterr()
    assert "best mean:\n  PSNR            grey\n" in shown.out and "no clip has numbers of both models" in shown.out
    assert "nan" not in shown.out and "inf" not in shown.out and "NaN" in shown.out
    assert "(NaN) in 2 clips, first in" in shown.err


def test_the_same_weights_twice_are_told_before_the_work(
    setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, clips = str(setting / "black.safetensors"), str(setting / "clips")
    (tmp_path / "copy.safetensors").write_bytes(Path(model).read_bytes())
    for other, label in ((model, r"black \(2\)"), (str(tmp_path / "copy.safetensors"), "copy")):
        with pytest.warns(UserWarning, match=rf"^black \(.*\) and {label} \(.*\) are the same weights"):
            assert run(["compare", model, other, "--data", clips, "--lpips", "off", "--max_clips", "2"]) == 0
        assert re.search(r"best mean:\n  PSNR +tie\n  SSIM +tie\n", capsys.readouterr().out)


def test_plain_against_fused_and_two_models_are_no_twins(setting: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = setting / "black.safetensors"
    others = [
        open_model(path, fused=True),
        open_model(path, dtype=torch.float64),
        open_model(setting / "grey.safetensors"),
    ]
    warn_of_twins([open_model(path), *others])
    assert not [warning for warning in recwarn if "same weights" in str(warning.message)]
