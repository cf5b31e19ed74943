"""Shared options: one meaning in every verb, and old words that still work."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from tinyvae.cli.main import VERBS, build_parser
from tinyvae.cli.options import OLD_WORDS, SHARED, OldWord, Parser, add_options, dtype, number, size
from tinyvae.errors import UserError

OF_THIS_ROOM = [verb for verb in VERBS if verb not in ("train", "data", "latents")]  # two also take settings


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {word: action for action in parser._actions for word in action.option_strings}


@pytest.mark.parametrize("verb", OF_THIS_ROOM)
def test_a_word_means_the_same_in_every_verb(verb: str) -> None:
    found = options_of(build_parser(verb))
    same = SHARED.keys() - ({"--dtype"} if verb == "export" else set())  # export has int8 too, which no weights have
    for word in found.keys() & same:
        assert found[word].type is SHARED[word].get("type"), word
        for old in OLD_WORDS.get(word, []):
            assert isinstance(found[old], OldWord) and found[old].dest == found[word].dest


def test_old_words_work_and_say_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="tinyvae try")
    add_options(parser, "--output", required=True)
    add_options(parser, "--frames", "--overwrite", "--workers")
    words = ["--output_dir", "a", "--max_frames=3", "--force", "--num_workers", "2"]
    old = parser.parse_args(words)
    assert capsys.readouterr().err.splitlines() == [
        "--output_dir is called --output now; both work",
        "--max_frames is called --frames now; both work",
        "--force is called --overwrite now; both work",
        "--num_workers is called --workers now; both work",
    ]
    new = parser.parse_args(["--output", "a", "--frames", "3", "--overwrite", "--workers", "2"])
    assert old == new == argparse.Namespace(output=Path("a"), frames=3, overwrite=True, workers=2)
    assert capsys.readouterr().err == "" and "--output_dir" not in parser.format_help()
    with pytest.raises(UserError, match="arguments are required: --output; see `tinyvae try --help`"):
        fresh = Parser(prog="tinyvae try")
        add_options(fresh, "--output", required=True)
        fresh.parse_args([])


def test_values() -> None:
    assert size("480x720") == (480, 720) and number(int, 1)("3") == 3 and number(float, 0, 51)("18.5") == 18.5
    for text, wanted in (("fp16", torch.float16), ("float16", torch.float16), ("bf16", torch.bfloat16)):
        assert dtype(text) is wanted
    for convert, text in (
        *((size, text) for text in ("480", "0x4", "4x", "-1x4", "²x2")),
        *((number(int, 1), text) for text in ("0", "1.5", "x", "")),
        *((number(float, 0, 51), text) for text in ("nan", "51.1", "-0.1")),
        (dtype, "float61"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not"):
            convert(text)
