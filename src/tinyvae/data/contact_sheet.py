"""One picture of a data set: each file's frame with the training window on it, beside what the model would see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tinyvae.data.stages import StagedSample

COLUMNS, COLUMNS_WITHOUT_MODEL = 3, 5
THUMB_WIDTH, THUMB_HEIGHT = 288, 162
MODEL_WIDTH = 216
GAP, PADDING, CAPTION_HEIGHT, HEADER_HEIGHT = 8, 20, 40, 76

PAPER = (24, 26, 30)
CARD = (36, 39, 45)
INK = (236, 238, 242)
QUIET = (152, 158, 170)
ACCENT = (255, 196, 61)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def draw_contact_sheet(samples: Sequence[StagedSample], *, title: str, subtitle: str) -> Image.Image:
    """A sheet of cards; each card says which file it shows. Where no sample reached the model, cards are narrower."""
    with_model = any(sample.model_frame is not None for sample in samples)
    room = THUMB_WIDTH + (GAP + MODEL_WIDTH if with_model else 0)
    card_width = room + 2 * GAP
    card_height = THUMB_HEIGHT + CAPTION_HEIGHT + 2 * GAP
    columns = max(1, min(COLUMNS if with_model else COLUMNS_WITHOUT_MODEL, len(samples)))
    rows = max(1, math.ceil(len(samples) / columns))
    width = 2 * PADDING + columns * card_width + (columns - 1) * GAP
    height = HEADER_HEIGHT + PADDING + rows * card_height + (rows - 1) * GAP
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    large, small = ImageFont.load_default(size=22), ImageFont.load_default(size=13)
    pen.text((PADDING, 16), fitting_text(title, large, width - 2 * PADDING), fill=INK, font=large)
    pen.text((PADDING, 46), fitting_text(subtitle, small, width - 2 * PADDING), fill=QUIET, font=small)
    for place, sample in enumerate(samples):
        left = PADDING + place % columns * (card_width + GAP)
        top = HEADER_HEIGHT + place // columns * (card_height + GAP)
        pen.rounded_rectangle((left, top, left + card_width - 1, top + card_height - 1), radius=6, fill=CARD)
        _draw_card(sheet, pen, sample, left + GAP, top + GAP, room, small)
    return sheet


def save_contact_sheet(sheet: Image.Image, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file, format="PNG", optimize=True)


def _draw_card(
    sheet: Image.Image, pen: ImageDraw.ImageDraw, sample: StagedSample, left: int, top: int, room: int, font: Font
) -> None:
    frame = _picture(sample.file_frame)
    thumb, scale = _fit(frame, THUMB_WIDTH, THUMB_HEIGHT)
    thumb_left = left + (THUMB_WIDTH - thumb.width) // 2
    thumb_top = top + (THUMB_HEIGHT - thumb.height) // 2
    sheet.paste(thumb, (thumb_left, thumb_top))
    if sample.window is not None:
        window = sample.window
        box = (
            thumb_left + window.left * scale,
            thumb_top + window.top * scale,
            thumb_left + (window.left + window.width) * scale - 1,
            thumb_top + (window.top + window.height) * scale - 1,
        )
        # A dark line on both sides of the bright one, so that it shows on any picture.
        pen.rectangle((box[0] - 1, box[1] - 1, box[2] + 1, box[3] + 1), outline=PAPER)
        pen.rectangle((box[0] + 1, box[1] + 1, box[2] - 1, box[3] - 1), outline=PAPER)
        pen.rectangle(box, outline=ACCENT)
    if sample.model_frame is not None:
        right = left + THUMB_WIDTH + GAP
        seen, _ = _fit(_picture(sample.model_frame.mul(255).round().clamp(0, 255).byte()), MODEL_WIDTH, THUMB_HEIGHT)
        sheet.paste(seen, (right + (MODEL_WIDTH - seen.width) // 2, top + (THUMB_HEIGHT - seen.height) // 2))
    row = sample.row
    rate = f"{row.fps:.4g} fps" if row.fps > 0 else "unknown rate"
    facts = f"{row.width}x{row.height}   {rate}   {row.frames} frames   {row.codec}"
    pen.text((left, top + THUMB_HEIGHT + 6), fitting_text(row.path, font, room, keep_end=True), fill=INK, font=font)
    pen.text((left, top + THUMB_HEIGHT + 23), fitting_text(facts, font, room), fill=QUIET, font=font)
    if sample.flip:
        note = "mirrored"
        pen.text((left + room - font.getlength(note), top + THUMB_HEIGHT + 23), note, fill=QUIET, font=font)


def _picture(frame_CHW: Tensor) -> Image.Image:
    return Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy())


def _fit(picture: Image.Image, width: int, height: int) -> tuple[Image.Image, float]:
    """The picture scaled into the box, small ones by whole pixels so that they stay sharp; and the scale."""
    scale = min(width / picture.width, height / picture.height)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    sampling = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    return picture.resize(size, sampling), scale


def fitting_text(text: str, font: Font, room: float, keep_end: bool = False) -> str:
    """The text, cut with an ellipsis where it is longer than ``room`` pixels."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[1:] if keep_end else text[:-1]
    return f"...{text}" if keep_end else f"{text}..."
