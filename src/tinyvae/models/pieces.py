"""Pieces of a video: how to join them, how to cut them, and which decoded frames to keep."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tinyvae.models.variants import VariantSpec


def join(parts: Iterator[Tensor], num_frames: int) -> Tensor:
    """Parts NTCHW of a video as one tensor of ``num_frames`` frames.

    Each part is copied as soon as it comes, and then freed. `torch.cat` would need all parts and the whole at once.
    """
    first = next(parts)
    if first.requires_grad:
        return torch.cat([first, *parts], dim=1)
    whole, place = first, first.shape[1]
    if place < num_frames:
        whole = first.new_empty(first.shape[0], num_frames, *first.shape[2:])
        whole[:, :place] = first
    del first
    for part in parts:
        whole[:, place : place + part.shape[1]] = part
        place += part.shape[1]
        del part  # before the next one is made
    assert place == num_frames, f"{place} of {num_frames} frames came"
    return whole


def joined_latents(chunk_latents: int) -> int:
    """How many latents of a chunk may be joined from several pushes; their frames are copied for it."""
    return max(1, 2 * chunk_latents // 3)


def chunk_lengths(num_latents: int, chunk: int, *, joined_first: bool, joined_last: bool) -> list[int]:
    """How many latents to run at a time: a chunk, or fewer where frames must be joined from several tensors."""
    most = joined_latents(chunk)
    first = min(most, num_latents) if joined_first else 0
    last = min(most, num_latents - first) if joined_last else 0
    between = num_latents - first - last
    lengths = [first, *[chunk] * (between // chunk), between % chunk, last]
    return [length for length in lengths if length]


def cut_out(pieces: list[Tensor], start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Frames ``start`` to ``stop`` of pieces NTCHW that follow each other; copied only if they lie in several."""
    parts, place = [], 0
    for piece in pieces:
        part = piece[:, max(0, start - place) : max(0, stop - place)]
        place += piece.shape[1]
        parts += [part] if part.shape[1] else []
    if len(parts) == 1:
        return parts[0]
    if any(part.requires_grad for part in parts):
        return torch.cat([part.to(dtype) for part in parts], dim=1)
    whole, place = parts[0].new_empty(parts[0].shape[0], stop - start, *parts[0].shape[2:], dtype=dtype), 0
    for part in parts:
        whole[:, place : place + part.shape[1]] = part
        place += part.shape[1]
    return whole


def keep_frames(raw_NTCHW: Tensor, *, first_index: int, num_latents: int, spec: VariantSpec) -> Tensor:
    """Drop the raw decoded frames that the frame rule drops; ``first_index`` is the place of frame 0 in the video."""
    kept = [t for t in range(raw_NTCHW.shape[1]) if spec.frame_is_kept(first_index + t, num_latents)]
    if not kept:
        return raw_NTCHW[:, :0]
    if kept[-1] - kept[0] + 1 == len(kept):
        return raw_NTCHW[:, kept[0] : kept[-1] + 1]
    return raw_NTCHW[:, kept]
