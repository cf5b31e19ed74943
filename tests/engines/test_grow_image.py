"""Who computes which rows, and for which networks. test_hopper.py compares the packed weights with torch, and
tests/gpu/test_gpu_grow_image.py the kernel itself."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from tinyvae import TAEHV
from tinyvae.engines import grow_image, hopper_kernels
from tinyvae.engines.fold import fold_layers


@pytest.mark.parametrize("processors", [1, 7, 132])
@pytest.mark.parametrize("grown", [1, 2])
@pytest.mark.parametrize("patch", [1, 2])
def test_every_row_of_every_strip_has_one_taker(processors: int, grown: int, patch: int) -> None:
    """For RGB a warpgroup of two, for patches a block."""
    processors, takers = max(processors, grown), 2 if patch == 1 else 1
    for frames, height, width in ((1, 1, 1), (2, 240, 360), (3, 37, 63), (26, 240, 64), (5, 2, 200), (28, 60, 92)):
        (*_, rows, share), blocks = grow_image.cut_work(frames, height, width, grown, patch, processors=processors)
        strips = rows // height
        assert rows == strips * height and (strips - 1) * 63 < frames * (width + 1) <= strips * 63
        taken: Counter[tuple[int, int]] = Counter()
        for block in range(blocks):
            for member in range(takers):
                first = (block // grown * takers + member) * share  # as in the kernel
                # The first warpgroup of a block always has work: it gets its turn from the second one.
                assert member == 1 or first < rows
                taken.update((block % grown, row) for row in range(first, min(rows, first + share)))
        assert taken == Counter((frame, row) for frame in range(grown) for row in range(rows))
        assert blocks <= processors


@pytest.mark.parametrize("patch", grow_image.PATCH_SIZES)
def test_the_shared_memory_of_a_block_is_enough(patch: int) -> None:
    constants, shared_bytes = grow_image.room(patch)
    assert shared_bytes <= hopper_kernels.MAX_SHARED_BYTES
    assert constants["RING"] >= 3, "two rows are in use while the next one comes"
    assert constants.get("PIXEL_ROWS", 1) >= 1


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"variant": "taehv"}, True),
        ({"variant": "taehv", "preview": "time"}, True),
        ({"variant": "taehv", "preview": "space"}, False),  # nothing grows
        ({"variant": "taehv", "width": 2.0}, False),  # 128 channels
        ({"variant": "taehv", "activation": "leaky_relu"}, True),
        ({"variant": "taew2_2"}, True),
        ({"variant": "taeltx_2", "activation": "leaky_relu"}, True),
        ({"variant": "taeltx2_3_wide"}, False),  # 256 channels
    ],
)
def test_which_networks_have_it(options: dict[str, object], fits: bool) -> None:
    decoder = TAEHV(**options).decoder  # type: ignore[arg-type]
    assert isinstance(decoder, nn.Sequential)
    assert grow_image.fits(*fold_layers(decoder)[-2:]) is fits
