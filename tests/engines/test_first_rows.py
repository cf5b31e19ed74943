"""Who computes which rows. test_hopper.py compares the packed weights with torch, tests/gpu/test_gpu_first_conv.py the
kernel itself."""

from __future__ import annotations

import pytest
import torch

from tinyvae.engines import first_rows, hopper_kernels


@pytest.mark.parametrize("patch", [1, 2, 4])
@pytest.mark.parametrize("processors", [1, 7, 132])
def test_every_row_of_every_strip_has_one_warpgroup(patch: int, processors: int) -> None:
    for frames, height, width in ((1, 1, 2), (2, 240, 368), (3, 37, 63), (48, 120, 184), (5, 2, 200)):
        columns, rows, share, blocks = first_rows.cut_work(frames, height, width, patch, processors=processors)
        assert (columns - 1) * 16 < width <= columns * 16
        strips, rest = divmod(rows, height)
        assert rest == 0 and (strips - 1) * 4 < frames * columns <= strips * 4
        per_block = first_rows.WARPGROUPS[patch] * share
        assert (blocks - 1) * per_block < rows <= blocks * per_block
        assert blocks <= processors


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_shared_memory_holds_weights_and_rings(patch: int) -> None:
    assert first_rows.shared_bytes(patch) <= hopper_kernels.MAX_SHARED_BYTES
    weights = first_rows.pack_weights(torch.randn(64, 3 * patch**2, 3, 3), torch.randn(64), patch)
    ring = 3 + first_rows.AHEAD[patch]
    assert ring & (ring - 1) == 0, "the kernel finds a place of the ring with a mask"
    # A line: 16 patches, and 8 values on both sides. All copies are of 16 bytes.
    assert first_rows.LINE_BYTES[patch] >= (16 * patch + 16) * 2 and first_rows.LINE_BYTES[patch] % 16 == 0
    ring_bytes = 4 * first_rows.WARPGROUPS[patch] * ring * 3 * patch * first_rows.LINE_BYTES[patch]
    assert first_rows.shared_bytes(patch) == weights.packed.numel() * 2 + ring_bytes


def test_other_networks_keep_cudnn() -> None:
    assert first_rows.fits(torch.empty(64, 48, 3, 3), 4)
    assert not first_rows.fits(torch.empty(128, 12, 3, 3), 2)  # twice as wide
    assert not first_rows.fits(torch.empty(64, 12, 3, 3), 4)
    assert not first_rows.fits(torch.empty(64, 192, 3, 3), 8)
