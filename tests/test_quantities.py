"""Amounts are told in the unit that a reader would choose."""

from __future__ import annotations

import pytest

from tinyvae.terminal import bytes_in_words, count_of, duration_in_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.351, "0.35 s"),
        (57, "57 s"),
        (130, "2.2 min"),
        (3000, "50 min"),
        (9771.87, "2.7 hours"),
        (86_400, "24 hours"),
        (200_000, "2.3 days"),
        (86_400 * 300, "300 days"),
        (86_400 * 11_310, "31 years"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration_in_words(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (5_000_000, "4.77 MiB"),
        (1010 * 2**20, "0.99 GiB"),
        (139 * 2**30, "139 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(count: int, words: str) -> None:
    assert bytes_in_words(count) == words


def test_counted_things() -> None:
    assert [count_of(n, "clip") for n in (0, 1, 2)] == ["0 clips", "1 clip", "2 clips"]
