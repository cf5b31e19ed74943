"""Random numbers without state: every draw is a function of its key alone.

A key is a tuple of integers such as (seed, epoch, position, purpose). The mixing is splitmix64's finaliser applied
after each part of the key; it needs no generator, so a worker can make the draws of any position at once, and any two
processes agree. ``shuffled`` is a permutation of 0..n-1 that holds no table: a Feistel network over the next even
power of two, walked until it lands inside the range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FEISTEL_ROUNDS = 6


def mix(value: int) -> int:
    """splitmix64's output function: a bijection of 64-bit integers in which every bit depends on every bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def hash_key(*parts: int) -> int:
    """64 bits that depend on every part of the key and on their order."""
    state = 0
    for part in parts:
        state = mix((state + GOLDEN + (part & MASK)) & MASK)
    return state


def uniform(*key: int) -> float:
    """A float in [0, 1), with 53 bits."""
    return (hash_key(*key) >> 11) * 2.0**-53


def below(limit: int, *key: int) -> int:
    """An integer in 0..limit-1. The bias is under limit / 2^64."""
    assert limit > 0, "there is nothing to draw from"
    return (hash_key(*key) * limit) >> 64


def shuffled(place: int, size: int, *key: int) -> int:
    """Where a shuffle of ``size`` things, named by ``key``, puts place ``place``: a bijection of 0..size-1."""
    assert 0 <= place < size, "the place is outside the shuffle"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    round_keys = [hash_key(*key, round_number) for round_number in range(FEISTEL_ROUNDS)]
    value = place
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (mix((right + round_key) & MASK) & half_mask)
        value = (left << half_bits) | right
        # At most four times as many values as places, so this ends after under four turns on average; it always
        # ends, because a bijection's cycle through ``place`` must come back inside.
        if value < size:
            return value


def fractions_of_hashes(hashes: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[Any]:
    """Each hash with a salt, mixed, as a float in [0, 1): ``uniform`` for whole columns."""
    value = hashes + np.uint64(hash_key(salt))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
