"""Who computes which rows, and for which networks. test_hopper.py compares the packed weights with torch, and
tests/gpu/test_gpu_grow_image.py the kernel itself."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from tinyvae import TAEHV
from tinyvae.engines import grow_image
from tinyvae.engines.fold import fold_layers


@pytest.mark.parametrize("processors", [1, 7, 132])
@pytest.mark.parametrize("grown", [1, 2])
def test_every_row_of_every_strip_has_one_warpgroup(processors: int, grown: int) -> None:
    processors = max(processors, grown)
    for frames, height, width in ((1, 1, 1), (2, 240, 360), (3, 37, 63), (26, 240, 64), (5, 2, 200)):
        (*_, strips, rows, share), blocks = grow_image.cut_work(frames, height, width, grown, processors=processors)
        assert (strips - 1) * 63 < width <= strips * 63
        taken: Counter[tuple[int, int]] = Counter()
        for block in range(blocks):
            for member in (0, 1):
                first = (block // grown * 2 + member) * share  # as in the kernel
                # The first warpgroup of a block always has work: it gets its turn from the second one.
                assert member == 1 or first < rows
                taken.update((block % grown, row) for row in range(first, min(rows, first + share)))
        assert taken == Counter((frame, row) for frame in range(grown) for row in range(frames * strips * height))
        assert blocks <= processors


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"variant": "taehv"}, True),
        ({"variant": "taehv", "preview": "time"}, True),
        ({"variant": "taehv", "preview": "space"}, False),  # nothing grows
        ({"variant": "taehv", "width": 2.0}, False),  # 128 channels
        ({"variant": "taehv", "activation": "leaky_relu"}, False),
        ({"variant": "taew2_2"}, False),  # 12 image channels
    ],
)
def test_which_networks_have_it(options: dict[str, object], fits: bool) -> None:
    decoder = TAEHV(**options).decoder  # type: ignore[arg-type]
    assert isinstance(decoder, nn.Sequential)
    assert grow_image.fits(*fold_layers(decoder)[-2:]) is fits
