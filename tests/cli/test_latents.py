"""``tinyvae latents``: its words, and mistakes in one sentence."""

from __future__ import annotations

import pytest

from tinyvae.cli.latents import part_of
from tinyvae.cli.main import run
from tinyvae.errors import UserError


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstart"], "arguments are required: --clips, --output"),
        (["--clips", "4", "--output", "x"], "say what to store the latents of: a preset's name"),
        (["quickstart", "--clips", "0", "--output", "x"], "'0' is not a whole number, at least 1"),
        (["quickstart", "--clips", "4", "--output", "x", "--shard", "0/8"], "write I/N with I from 1 to N"),
        (["quickstart", "--clips", "4", "--output", "x", "--shard", "9/8"], "write I/N with I from 1 to N"),
        (["quickstart", "--clips", "4", "--output", "x", "--dtype", "fp16"], "use bfloat16 or float32"),
        (["quickstart", "--clips", "4", "--output", "x", "--hight", "8"], "there is no setting 'hight'.*'height'"),
        (["quickstart", "--clips", "4", "--output", "x"], "there is no teacher whose latents could be stored"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(["latents", *words])


def test_parts_count_from_one() -> None:
    assert part_of("1/8") == (1, 8) and part_of("8/8") == (8, 8)
