"""Input, output and error beside each other, as frames for a video or as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tinyvae.data.contact_sheet import fitting_text
from tinyvae.evaluation.pictures import HEAT_FULL_SCALE, heat_map, to_bytes_range
from tinyvae.evaluation.round_trip import REFERENCE_KIND, ModelFacts

GAP_PIXELS = 8  # even: the width of a video must stay even
GAP_LEVEL = 24
LABEL_LEVEL = 236
FONT_SIZES = (11, 28)  # pixels, by the width of a panel


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


def panel_labels(models: Sequence[ModelFacts]) -> list[list[str]]:
    """What stands above each panel of `side_by_side`, the longest form first; the first that fits is taken."""
    levels = round(HEAT_FULL_SCALE * 255)
    outputs, errors = [], []
    for model in models:
        role = "teacher" if model.kind == REFERENCE_KIND else "output"
        outputs.append([f"{role}: {model.label}", role])
        of = f"error of {model.label}"
        errors.append([f"{of}, 0 to {levels} of 255", of, "error" if role == "output" else f"{role}'s error"])
    return [["input"], *outputs, *errors]


def with_labels(joined_TCHW: Tensor, labels: Sequence[Sequence[str]], *, panel_width: int) -> Tensor:
    """Frames of `side_by_side` with a strip above them that names each panel: uint8 TCHW, its height still even."""
    from PIL import Image, ImageDraw, ImageFont

    size = min(max(FONT_SIZES[0], panel_width // 16), FONT_SIZES[1])
    font = ImageFont.load_default(size=size)
    height = (size + size // 2 + 1) // 2 * 2
    strip = Image.new("RGB", (joined_TCHW.shape[-1], height), (GAP_LEVEL,) * 3)
    pen = ImageDraw.Draw(strip)
    indent = size // 4
    room = panel_width - 2 * indent
    for number, forms in enumerate(labels):
        text = next((form for form in forms if font.getlength(form) <= room), forms[-1])
        place = (number * (panel_width + GAP_PIXELS) + indent, size // 5)
        pen.text(place, fitting_text(text, font, room), fill=(LABEL_LEVEL,) * 3, font=font)
    strip_CHW = torch.from_numpy(np.asarray(strip).copy()).movedim(-1, 0).to(joined_TCHW.device)
    return torch.cat([strip_CHW.expand(joined_TCHW.shape[0], -1, -1, -1), joined_TCHW], dim=-2)


def write_picture(file: Path, image_CHW: Tensor) -> None:
    """A uint8 picture as PNG."""
    from PIL import Image

    Image.fromarray(image_CHW.movedim(0, -1).contiguous().cpu().numpy()).save(file)
