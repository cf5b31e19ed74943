"""Draws without state: keys matter, values are uniform, shuffles are shuffles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tinyvae.data.clip import below, fractions_of_hashes, hash_key, mix, shuffled, uniform


def test_mix_is_splitmix64() -> None:
    # The first outputs of splitmix64 with seed 0, which are public reference values.
    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF
    assert mix(2 * golden & (1 << 64) - 1) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1000])
def test_shuffled_is_a_bijection(size: int) -> None:
    assert sorted(shuffled(place, size, 1, 2) for place in range(size)) == list(range(size))


def test_shuffles_of_other_epochs_and_seeds_are_other_shuffles() -> None:
    orders = {tuple(shuffled(place, 50, seed, epoch) for place in range(50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_a_shuffle_of_five_million_needs_no_table() -> None:
    seen = {shuffled(place, 5_000_000, 42, 0) for place in range(2000)}
    assert len(seen) == 2000 and max(seen) > 4_900_000 and min(seen) < 100_000


def test_every_place_of_a_small_shuffle_is_equally_likely() -> None:
    counts = Counter(shuffled(0, 5, seed) for seed in range(5000))
    assert all(abs(counts[value] - 1000) < 150 for value in range(5))  # five standard deviations


def test_draws_are_uniform_and_depend_on_every_part_of_the_key() -> None:
    draws = np.array([uniform(3, position, 1) for position in range(20_000)])
    assert abs(draws.mean() - 0.5) < 0.01 and np.histogram(draws, 10, (0, 1))[0].min() > 1800
    other = np.array([uniform(3, position, 2) for position in range(20_000)])
    assert abs(np.corrcoef(draws, other)[0, 1]) < 0.03
    assert hash_key(1, 2) != hash_key(2, 1) and hash_key(1) != hash_key(1, 0) and hash_key(-1) != hash_key(1)
    assert {below(3, key) for key in range(100)} == {0, 1, 2}


def test_whole_columns_are_mixed_like_single_values() -> None:
    hashes = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    expected = [(mix((int(value) + hash_key(7)) % 2**64) >> 11) * 2.0**-53 for value in hashes]
    assert fractions_of_hashes(hashes, 7).tolist() == expected
