"""Who computes which rows. test_hopper.py compares the packed weights with torch, tests/gpu/test_gpu_conv_rows.py the
kernel itself."""

from __future__ import annotations

import pytest

from tinyvae.engines import conv_rows, hopper_kernels


@pytest.mark.parametrize("processors", [1, 7, 132])
def test_every_row_of_every_strip_has_one_warpgroup(processors: int) -> None:
    for frames, height, width in ((1, 1, 1), (2, 240, 360), (3, 37, 63), (26, 240, 64), (5, 2, 200), (13, 60, 90)):
        columns, rows, members, share, blocks = conv_rows.cut_work(frames, height, width, processors=processors)
        assert (columns - 1) * 8 < width <= columns * 8
        strips, rest = divmod(rows, height)
        assert rest == 0 and (strips - 1) * 8 < frames * columns <= strips * 8
        # The first warpgroup of a block always has work: it gets its turn from the second one.
        assert (blocks - 1) * members * share < rows <= blocks * members * share
        assert blocks <= processors


def test_few_rows_have_a_processor_alone() -> None:
    """taeltx_2's encoder, 49 frames: 28 frames of 60x92 in pairs, 14 of 30x46 and 7 of 15x23 alone."""
    sizes = ((28, 60, 92), (14, 30, 46), (7, 15, 23))
    cuts = [conv_rows.cut_work(*size, processors=132)[2:] for size in sizes]
    assert cuts == [(2, 10, 126), (1, 3, 110), (1, 1, 45)]


@pytest.mark.parametrize("sources", [1, 2])
def test_shared_memory_holds_weights_and_steps(sources: int) -> None:
    assert conv_rows.shared_bytes(sources) <= hopper_kernels.MAX_SHARED_BYTES
    # While the loading warps wait for room, a warpgroup must have a step that they announced, and one more on the way.
    assert 0 <= conv_rows.ON_THE_WAY[sources] <= conv_rows.RING[sources] - 2
