"""What is in a data set, as numbers and as a table to read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tinyvae.data.augment import to_model_input
from tinyvae.data.clip import ClipSettings, CropWindow, cut_clip
from tinyvae.data.clip_choice import ClipChoice, choose_clip, file_of
from tinyvae.data.clip_reading import BadFile
from tinyvae.data.index import SPLIT_OF_CODE, STATUS_OK, IndexRow, VideoIndex
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UnreadableVideoError
from tinyvae.video.decode import read_frames

SHOWN = 8
"""Rows of a table before the rest is added up."""
BAR_CELLS = 24


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Counts over the good files, and the bad files' reasons."""

    num_files: int
    num_bad: int
    num_frames: int
    num_bytes: int
    hours: float
    """Of all good files whose frame rate is known."""
    sizes: Counter[tuple[int, int]]
    """(width, height) -> files."""
    rates: Counter[str]
    codecs: Counter[str]
    splits: Counter[str]
    lengths: tuple[int, int, int, int, int]
    """Frames of the shortest, 5 %, middle, 95 % and longest file."""
    seconds: tuple[float, float, float, float, float]
    not_square: int
    """Files whose pixels are not square; they are used as stored."""
    bad_kinds: Counter[str]
    """Reason with its numbers taken out -> files."""

    @property
    def num_good(self) -> int:
        return self.num_files - self.num_bad


def summarise(index: VideoIndex) -> DataSummary:
    """One pass over the index, in chunks; no video is opened."""
    sizes: Counter[tuple[int, int]] = Counter()
    rates: Counter[str] = Counter()
    codecs: Counter[str] = Counter()
    splits: Counter[str] = Counter()
    frames: list[npt.NDArray[Any]] = [np.zeros(0, np.int32)]
    seconds: list[npt.NDArray[Any]] = [np.zeros(0, np.float32)]
    num_bytes = not_square = 0
    for _, rows in index.chunks():
        good = rows[rows["status"] == STATUS_OK]
        pairs, counts = np.unique(np.stack([good["width"], good["height"]], 1), axis=0, return_counts=True)
        sizes.update({(int(w), int(h)): int(n) for (w, h), n in zip(pairs, counts, strict=True)})
        rates.update(_counted(np.round(good["fps"], 2), lambda fps: f"{fps:g} fps" if fps > 0 else "unknown"))
        codecs.update(_counted(good["codec"], index.codec_name))
        splits.update(_counted(good["split"], lambda code: SPLIT_OF_CODE[code] or "not told"))
        num_bytes += int(good["file_bytes"].sum())
        not_square += int((np.abs(good["pixel_aspect"] - 1.0) > 0.005).sum())
        frames.append(good["frames"].astype(np.int32))
        timed = good[good["fps"] > 0]
        seconds.append((timed["frames"] / timed["fps"]).astype(np.float32))
    all_frames, all_seconds = np.concatenate(frames), np.concatenate(seconds)
    lengths = [int(value) for value in _spread(all_frames)]
    return DataSummary(
        num_files=len(index),
        num_bad=index.num_bad,
        num_frames=int(all_frames.sum(dtype=np.int64)),
        num_bytes=num_bytes,
        hours=float(all_seconds.sum(dtype=np.float64)) / 3600,
        sizes=sizes,
        rates=rates,
        codecs=codecs,
        splits=splits,
        lengths=(lengths[0], lengths[1], lengths[2], lengths[3], lengths[4]),
        seconds=_spread(all_seconds),
        not_square=not_square,
        bad_kinds=Counter(kind_of_reason(row.reason) for row in index.bad_rows()),
    )


def kind_of_reason(reason: str) -> str:
    """``damaged at frame 15`` and ``damaged at frame 7`` are one kind."""
    return re.sub(r"\d+", "N", reason)


def summary_lines(summary: DataSummary) -> list[str]:
    """The table, without bad files' names."""
    lines = [
        *heading("files"),
        f"  {summary.num_good} good, {summary.num_bad} bad; {summary.num_frames:,} frames, "
        f"{_duration(summary.hours)}, {_bytes(summary.num_bytes)}",
    ]
    if summary.not_square:
        lines.append(f"  {summary.not_square} with pixels that are not square (used as stored)")
    if summary.num_good:
        lines += ["", *heading("lengths", "shortest", "5 %", "middle", "95 %", "longest")]
        lines.append("  frames".ljust(20) + "".join(f"{value:>10,}" for value in summary.lengths))
        lines.append("  seconds".ljust(20) + "".join(f"{value:>10,.1f}" for value in summary.seconds))
        sizes = Counter({f"{width}x{height}": count for (width, height), count in summary.sizes.items()})
        for name, counts in (
            ("sizes", sizes),
            ("frame rates", summary.rates),
            ("codecs", summary.codecs),
            ("splits", summary.splits),
        ):
            lines += ["", *heading(name, "files"), *count_lines(counts, summary.num_good)]
    return lines


def heading(name: str, *columns: str) -> list[str]:
    return [name.upper().ljust(20) + "".join(f"{column:>10}" for column in columns)]


def count_lines(counts: Counter[str], total: int) -> list[str]:
    """Most frequent first, with a bar; what does not fit is added up."""
    most = counts.most_common(SHOWN)
    rest = sum(counts.values()) - sum(count for _, count in most)
    if rest:
        most.append((f"{len(counts) - SHOWN} others", rest))
    return [
        f"  {name}".ljust(20) + f"{count:>10,}  " + "█" * max(1, round(BAR_CELLS * count / total))
        for name, count in most
    ]


def bad_file_lines(bad: Iterable[tuple[str, str]], kinds: Counter[str], shown: int = 12) -> list[str]:
    """Counts of each kind of fault, then the first few files with their reason."""
    lines = [*heading("bad files")]
    lines += [f"  {count:>8,} x {kind[:100]}" for kind, count in kinds.most_common(SHOWN)]
    examples = [f"    {path}: {reason}" for path, reason in _first(bad, shown)]
    left = sum(kinds.values()) - len(examples)
    return lines + examples + ([f"    ... and {left} more"] if left > 0 else [])


def _first(pairs: Iterable[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    return [pair for _, pair in zip(range(count), pairs, strict=False)]


def _counted(values: npt.NDArray[Any], name: Any) -> Counter[str]:
    found, counts = np.unique(values, return_counts=True)
    total: Counter[str] = Counter()
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        total[name(value)] += count
    return total


def _spread(values: Sequence[float] | npt.NDArray[Any]) -> tuple[float, float, float, float, float]:
    if len(values) == 0:
        return (0.0, 0.0, 0.0, 0.0, 0.0)
    low, five, middle, ninety_five, high = np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0), method="nearest")
    return (float(low), float(five), float(middle), float(ninety_five), float(high))


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.1f} seconds"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop ends at the last unit")


@dataclass(kw_only=True)
class ValueRange:
    """Smallest, largest and mean value met so far."""

    dtype: str = "none"
    low: float = float("inf")
    high: float = float("-inf")
    total: float = 0.0
    count: int = 0

    def add(self, values: Tensor) -> None:
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self.total += float(values.sum(dtype=torch.float64))
        self.count += values.numel()

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


@dataclass(frozen=True, kw_only=True)
class StagedSample:
    """One file: a frame as stored (uint8 CHW), and where it can be a training sample, its window and model input."""

    row: IndexRow
    file_frame: Tensor
    window: CropWindow | None = None
    flip: bool = False
    model_frame: Tensor | None = None
    """float32 CHW in [0, 1], the same frame as the model sees it."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The samples, and the values of all their frames at each stage."""

    samples: list[StagedSample] = field(default_factory=list)
    bad_files: list[BadFile] = field(default_factory=list)
    file: ValueRange = field(default_factory=ValueRange)
    batch: ValueRange = field(default_factory=ValueRange)
    model_input: ValueRange = field(default_factory=ValueRange)


def stage_training_samples(clips: ClipSet, settings: ClipSettings, count: int) -> Stages:
    """The first ``count`` samples of training, read as the loader would read them."""
    stages = Stages()
    for position in range(min(count, len(clips))):
        row = clips.index.row(int(clips.rows[file_of(position, len(clips), settings.seed)]))
        choice = choose_clip(row, settings, position, len(clips))
        frames = _frames(clips.index, row, choice.frame_indices, settings.decode_timeout_s, stages)
        if frames is not None:
            stages.samples.append(_staged(row, frames, choice, settings, stages))
    return stages


def stage_files(index: VideoIndex, count: int, timeout_s: float = 30.0) -> Stages:
    """The middle frame of the first ``count`` good files, where no clip can be cut from them."""
    stages = Stages()
    for start, rows in index.chunks():
        for offset in (rows["status"] == STATUS_OK).nonzero()[0][:count]:
            row = index.row(start + int(offset))
            frames = _frames(index, row, (row.frames // 2,), timeout_s, stages)
            if frames is not None:
                stages.samples.append(StagedSample(row=row, file_frame=frames[0]))
            if len(stages.samples) + len(stages.bad_files) >= count:
                return stages
    return stages


def _staged(row: IndexRow, frames: Tensor, choice: ClipChoice, settings: ClipSettings, stages: Stages) -> StagedSample:
    clip = cut_clip(frames, choice.window, settings.height, settings.width, choice.flip)
    stages.batch.add(clip)
    model_input = to_model_input(clip[None], torch.tensor([choice.color_and_blur.as_tuple()]))[0]
    stages.model_input.add(model_input)
    middle = len(frames) // 2
    return StagedSample(
        row=row,
        file_frame=frames[middle],
        window=choice.window,
        flip=choice.flip,
        model_frame=model_input[middle],
    )


def _frames(
    index: VideoIndex, row: IndexRow, numbers: tuple[int, ...], timeout_s: float, stages: Stages
) -> Tensor | None:
    try:
        frames = read_frames(index.full_path(row), numbers, info=index.info(row), timeout_s=timeout_s)
    except UnreadableVideoError as refused:
        reason = str(refused).removeprefix(f"{index.full_path(row)}: ")
        stages.bad_files.append(BadFile(path=row.path, reason=reason))
        return None
    except OSError as failed:
        stages.bad_files.append(BadFile(path=row.path, reason=f"cannot be read: {failed.strerror or failed}"))
        return None
    stages.file.add(frames)
    return frames


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
