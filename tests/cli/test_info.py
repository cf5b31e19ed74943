"""``tinyvae info``: the list of variants, and what it says of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyvae import TAEHV, save_model
from tinyvae.cli.main import run
from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS


def test_without_a_model_it_lists_the_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(VARIANTS)]] == list(VARIANTS)
    (cogvideox,) = [line for line in lines if line.startswith("taecvx ")]
    assert cogvideox.split() == ["taecvx", "CogVideoX", "16", "4", "8x8", "8,", "9,", "16,", "17,", "..."]
    assert max(map(len, lines)) <= 100


def test_a_variant_is_an_argument_not_an_option() -> None:
    with pytest.raises(UserError, match="tinyvae info taehv"):
        run(["info", "--variant", "taehv"])


def test_a_variant_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["info", "taeh3"])
    of_variant = capsys.readouterr().out
    assert "4 frames of 16x16 pixels" in of_variant and "17, 34, 51, ... frames\n" in of_variant
    assert "training step" not in of_variant
    save_model(TAEHV("taecvx", width=0.25), tmp_path / "m", training_step=1200)
    run(["info", str(tmp_path / "m"), "--frames", "5"])
    shown = capsys.readouterr().out
    assert "taecvx, stands in for the VAE of CogVideoX" in shown and "training step    1200\n" in shown
    assert "5 frames -> 2 latents -> 8 frames, of which the first 5 are the input's" in shown
