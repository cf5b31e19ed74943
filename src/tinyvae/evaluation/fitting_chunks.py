"""A clip through a model in chunks that fit: where the GPU runs out of memory, again in smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from tinyvae.evaluation.clip_sources import ClipPart, frame_chunks
from tinyvae.evaluation.round_trip import RoundTrip

Made = TypeVar("Made")


def in_chunks_that_fit(round_trip: RoundTrip, part: ClipPart, attempt: Callable[[Iterator[Tensor]], Made]) -> Made:
    """What ``attempt`` makes of the clip's chunks of frames.

    It is called again from the clip's first frame, with chunks of half the size, until they fit or are single frames
    (a stream that failed has lost what it remembered). The model keeps the size that fits for the clips that follow.
    """
    while True:
        chunk_frames = round_trip.chunk_frames(part.height, part.width)
        try:
            return attempt(frame_chunks(part, chunk_frames=chunk_frames))
        except torch.OutOfMemoryError:
            if not round_trip.take_smaller_chunks(part.height, part.width):
                raise
        # Out here the failed attempt and its tensors are gone, so that what it held can be given back.
        torch.cuda.empty_cache()
