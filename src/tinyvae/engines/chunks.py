"""How many latents a stream of a fused codec runs at once: as many as take about 600 MiB.

The widest frames of every network lie next to the image: the last memory blocks of a decoder (the first ones of an
encoder) on half the grid, and what runs in slices on the full grid. So a few sizes of the variant say what a chunk
takes; nobody has to follow the layers. `tests/engines/test_chunks.py` compares the result with the stored lengths, with
what is alive while a stream runs, and with what an H200 showed.
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
"""On an H200 each chunk costs 0.2 to 0.7 ms in itself. To have this many latents, a chunk of large frames may take
twice the memory."""
SUPER_COPIES: dict[Engine, int] = {"cudnn": 7, "eager": 10}
"""A super block holds its input, two tensors side by side and four widened ones; in the eager engine also both
depthwise results and one of them shifted. Other blocks hold three tensors."""


def chunk_latents(
    spec: VariantSpec, side: Side, engine: Engine, *, latent_pixels: int, element_size: int, slice_bytes: int
) -> int:
    """Latents of a chunk, at least 1. ``latent_pixels`` counts all videos of the batch."""

    def bytes_of(num_latents: int) -> int:
        return chunk_bytes(spec, side, engine, num_latents, latent_pixels, element_size, slice_bytes)

    fits = bisect_right(range(1, MOST_LATENTS + 1), STREAM_BYTES, key=bytes_of)
    if engine == "hopper" and fits < FEW_LATENTS:
        fits = bisect_right(range(1, FEW_LATENTS + 1), 2 * STREAM_BYTES, key=bytes_of)
    return max(1, fits)


def chunk_bytes(
    spec: VariantSpec,
    side: Side,
    engine: Engine,
    num_latents: int,
    latent_pixels: int,
    element_size: int,
    slice_bytes: int,
) -> int:
    """The most bytes alive at once while a chunk runs in the middle of a stream; ``slice_bytes`` as in `stack`."""
    is_encoder = side == "encoder"
    # Values for one latent pixel:
    slice_values = slice_bytes / element_size / latent_pixels
    state = (63 if is_encoder else 84) * _block_channels(spec, side)  # one frame of each of the nine memory blocks
    alive = _values_alive(spec, side, engine, num_latents, slice_values)
    if is_encoder:  # frames that waited and new ones are joined in a tensor of their own
        joined = joined_latents(num_latents)
        alive = max(alive, _values_alive(spec, side, engine, joined, slice_values) + joined * _image_values(spec))
    return round((alive + state) * latent_pixels * element_size)


def _values_alive(spec: VariantSpec, side: Side, engine: Engine, num_latents: int, slice_values: float) -> float:
    """Values alive at once for one latent pixel, without the state."""
    is_chunked = spec.frame_rule == "chunked"
    stride = spec.encoder_strides[0] if side == "encoder" else spec.decoder_strides[2]
    image = num_latents * _image_values(spec)
    frame = 16 * _block_channels(spec, side)  # of the widest memory block
    block = num_latents * spec.time_factor // stride * frame
    copies = SUPER_COPIES[engine] if side == "decoder" and spec.decoder == "super" else 3
    in_blocks = copies * block + frame
    full_frame = 64 * spec.hidden(64)  # on the full grid
    one_slice = min(max(slice_values, stride * full_frame), num_latents * spec.time_factor * full_frame)
    two_slices = one_slice if engine == "hopper" else 2 * one_slice  # the kernels need no second one
    if side == "decoder":
        results = (3 if is_chunked else 2) * image  # written, perhaps chosen from, and clamped
        return max(in_blocks, block + image + two_slices, results)
    whole_images = 3 * image if is_chunked else 0  # taeh3 joins each push with frames that waited and with zeros
    if engine == "eager":  # which casts and lays out the whole push
        return max(in_blocks, block + image + two_slices) + whole_images + image
    if engine == "cudnn":  # which casts and lays out the image of one slice
        two_slices = one_slice * (1 + 2 * spec.image_channels / spec.hidden(64))
    return max(in_blocks, block + two_slices) + whole_images


def _image_values(spec: VariantSpec) -> int:
    """Values of the frames of one latent, for one latent pixel."""
    return spec.time_factor * 64 * spec.image_channels


def _block_channels(spec: VariantSpec, side: Side) -> int:
    """Channels of the memory blocks next to the image."""
    return spec.hidden(128 if side == "decoder" and spec.decoder == "super" else 64)
