"""Who computes which rows. test_hopper.py compares the packed weights with torch, tests/gpu/test_gpu_first_conv.py the
kernel itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinyvae.engines import first_pool, fold, hopper_kernels


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("processors", [1, 7, 132])
def test_every_row_of_every_strip_has_one_block(patch: int, processors: int) -> None:
    for pairs, height, width in ((1, 8, 8), (2, 240, 368), (3, 16, 128), (25, 480, 720), (5, 8, 248)):
        strips, rows, share, blocks = first_pool.cut_work(pairs, height, width, patch, processors=processors)
        assert (strips - 1) * first_pool.STRIP[patch] < width // 2 <= strips * first_pool.STRIP[patch]
        assert rows == pairs * strips * height // 2
        assert (blocks - 1) * share < rows <= blocks * share
        assert blocks <= processors


@pytest.mark.parametrize("patch", [1, 2])
def test_shared_memory_and_places(patch: int) -> None:
    assert first_pool.shared_bytes(patch) <= hopper_kernels.MAX_SHARED_BYTES
    ring = 3 + first_pool.AHEAD[patch]
    assert ring & (ring - 1) == 0, "the kernel finds a place of the ring with a mask"
    # A strip's image rows begin at a multiple of 16 bytes; its last pixel reads a column that the strip makes.
    assert 2 * first_pool.STRIP[patch] * patch % 8 == 0 and first_pool.STRIP[patch] < 64


def test_other_networks_keep_two_kernels() -> None:
    first = fold.ConvLayer(weight=torch.empty(64, 12, 3, 3), bias=torch.empty(64), relu=True)
    pool = fold.PoolLayer(weight=torch.empty(64, 128, 3, 3), stride=2)
    assert first_pool.fits(first, pool, 2)
    assert not first_pool.fits(replace(first, weight=torch.empty(64, 48, 3, 3)), pool, 4)
    assert not first_pool.fits(first, fold.PoolLayer(weight=torch.empty(64, 64, 3, 3), stride=1), 2)
    assert not first_pool.fits(replace(first, weight=torch.empty(128, 12, 3, 3)), pool, 2)
    assert not first_pool.fits(replace(first, relu=False), pool, 2)
