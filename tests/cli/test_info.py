"""``tinyvae info``: the list of variants, and help that does not wait for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tinyvae.cli.main import VERBS, run
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


@pytest.mark.parametrize("words", [["info"], ["export", "--to", "list"], *([verb, "--help"] for verb in VERBS)])
def test_lists_and_help_do_not_load_torch(words: list[str]) -> None:
    """torch takes seconds to load; nobody should wait for it to read a help text."""
    program = (
        "import sys\nfrom tinyvae.cli.main import run\n"
        f"try:\n    run({words!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tinyvae" in done.stdout or "taehv" in done.stdout
