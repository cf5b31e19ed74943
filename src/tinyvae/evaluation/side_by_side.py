"""Input, output and error beside each other, as frames for a video or as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tinyvae.evaluation.pictures import heat_map, to_bytes_range

GAP_PIXELS = 8  # even: the width of a video must stay even
GAP_LEVEL = 24


def side_by_side(target_TCHW: Tensor, decoded: Sequence[Tensor], *, with_error: bool = True) -> Tensor:
    """Input | outputs | errors of the outputs: uint8 TCHW. Inputs TCHW in [0, 1], all of one size."""
    panels = [to_bytes_range(target_TCHW), *(to_bytes_range(frames_TCHW) for frames_TCHW in decoded)]
    if with_error:
        panels += [heat_map(frames_TCHW, target_TCHW) for frames_TCHW in decoded]
    t, c, height, _ = panels[0].shape
    gap = torch.full((t, c, height, GAP_PIXELS), GAP_LEVEL, dtype=torch.uint8, device=panels[0].device)
    joined: list[Tensor] = [panels[0]]
    for panel in panels[1:]:
        joined += [gap, panel]
    return torch.cat(joined, dim=-1)


def side_by_side_width(width: int, num_outputs: int) -> int:
    """Width of `side_by_side` with errors, in pixels."""
    num_panels = 1 + 2 * num_outputs
    return width * num_panels + GAP_PIXELS * (num_panels - 1)


def write_picture(file: Path, image_CHW: Tensor) -> None:
    """A uint8 picture as PNG."""
    from PIL import Image

    Image.fromarray(image_CHW.movedim(0, -1).contiguous().cpu().numpy()).save(file)
