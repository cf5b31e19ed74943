"""How many latents a stream of a fused codec runs at once: as many as take about 600 MiB.

The widest frames of every network lie beside the image: the memory blocks on half the grid of the patches, and the
slices on the full grid. So four sizes say what a chunk takes, all of them values for one latent pixel:

- ``image``: the frames of one latent, as images;
- ``block``: the frames of one latent, as the widest memory block sees them;
- ``state``: what the stream carries from one chunk to the next;
- ``slice``: the frames of the full grid that run at once.

`tests/engines/test_chunks.py` compares this with what is alive while a stream runs, and with what an H200 showed.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from tinyvae.models.pieces import joined_latents
from tinyvae.models.streaming import Side
from tinyvae.models.variants import VariantSpec

Engine = Literal["hopper", "cudnn", "eager"]

STREAM_BYTES = 608 * 2**20
"""What a chunk may take beside its input."""
MOST_LATENTS = 4096
FEW_LATENTS = 4
"""On an H200 each chunk costs 0.2 to 0.7 ms in itself. A chunk of large frames may take twice as much memory, so that it
has this many latents."""
SUPER_COPIES: dict[Engine, int] = {"cudnn": 7, "eager": 10}
"""A super block holds its input, two tensors side by side and four widened ones; eager also both depthwise results and
one of them shifted. Other blocks hold three tensors."""


def chunk_latents(
    spec: VariantSpec, side: Side, engine: Engine, *, latent_pixels: int, element_size: int, slice_bytes: int
) -> int:
    """Latents of a chunk, at least 1. ``latent_pixels`` counts all videos of the batch."""

    def bytes_of(num_latents: int) -> int:
        return chunk_bytes(
            spec,
            side,
            engine,
            num_latents=num_latents,
            latent_pixels=latent_pixels,
            element_size=element_size,
            slice_bytes=slice_bytes,
        )

    fits = bisect_right(range(1, MOST_LATENTS + 1), STREAM_BYTES, key=bytes_of)
    if engine == "hopper" and fits < FEW_LATENTS:
        fits = bisect_right(range(1, FEW_LATENTS + 1), 2 * STREAM_BYTES, key=bytes_of)
    return max(1, fits)


def chunk_bytes(
    spec: VariantSpec,
    side: Side,
    engine: Engine,
    *,
    num_latents: int,
    latent_pixels: int,
    element_size: int,
    slice_bytes: int,
) -> int:
    """The most bytes alive at once while a chunk runs in the middle of a stream; ``slice_bytes`` as in `Stack`."""
    is_encoder = side == "encoder"
    is_super = not is_encoder and spec.decoder == "super"
    is_chunked = spec.frame_rule == "chunked"  # joins frames that waited, adds zeros before them, drops some behind
    stride = spec.encoder_strides[0] if is_encoder else spec.decoder_strides[2]
    narrow, hidden = spec.hidden(64), spec.hidden(128 if is_super else 64)
    image = spec.time_factor * 64 * spec.image_channels
    frame = 16 * hidden
    block = spec.time_factor // stride * frame
    state = (63 if is_encoder else 84) * hidden  # one frame of each of the nine memory blocks
    smallest = stride * 64 * narrow

    def values(count: int) -> float:
        sliced = min(max(slice_bytes / element_size / latent_pixels, smallest), spec.time_factor * 64 * narrow * count)
        if engine == "cudnn" and is_encoder:
            sliced *= 1 + 2 * spec.image_channels / hidden  # with its image cast and laid out
        elif engine != "hopper":
            sliced *= 2
        in_blocks = (SUPER_COPIES[engine] if is_super else 3) * block * count + frame
        if not is_encoder:
            results = (3 if is_chunked else 2) * image * count
            return max(in_blocks, (block + image) * count + sliced, results)
        whole_images = (engine == "eager") + 3 * is_chunked
        in_slices = block * count + sliced + image * count * (engine == "eager")
        return max(in_blocks, in_slices) + whole_images * image * count

    alive = values(num_latents)
    if is_encoder:  # frames that waited are joined with new ones in a tensor of their own
        joined = joined_latents(num_latents)
        alive = max(alive, values(joined) + image * joined)
    return round((alive + state) * latent_pixels * element_size)
