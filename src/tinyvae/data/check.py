"""What ``tinyvae data check`` shows: what is in a data set, what training would use of it, and a contact sheet."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tinyvae.data.augment import to_model_input
from tinyvae.data.clip import ClipChoice, ClipSettings, CropWindow, choose_clip, file_of, frames_needed
from tinyvae.data.clip_reading import BadFile, read_clip, settle_window
from tinyvae.data.index import SPLITS, IndexRow, VideoIndex, is_bad
from tinyvae.data.splits import ClipSet, SplitBy, refuse_bad_index, split
from tinyvae.errors import UnreadableVideoError, UserError, why_unreadable
from tinyvae.models.variants import VARIANTS, get_spec
from tinyvae.storage import local_file
from tinyvae.terminal import bytes_in_words, duration_in_words
from tinyvae.video.decode import read_frames

ROWS_SHOWN, BAD_FILES_SHOWN, BAR_CELLS = 8, 12, 24


@dataclass(frozen=True, kw_only=True)
class PlannedUse:
    """What a preset asks of the data."""

    name: str
    settings: ClipSettings
    validation: ClipSettings | None
    train_split: float
    split_by: SplitBy
    bad_file_limit: float
    samples_per_step: int
    variant: str | None


def print_check(index: VideoIndex, use: PlannedUse, *, title: str, num_samples: int, sheet: Path) -> bool:
    """Print the tables and draw the sheet. False when the data cannot be trained on as planned; the reason is last."""
    print(f"data set {title}, {index.data_root} as its root\n")
    print("\n".join(summary_lines(index)))
    if index.num_bad:
        print("\n" + "\n".join(bad_file_lines(index)))
    stages, failure = Stages(), ""
    try:
        # The limit is judged after the table, so that data above it still shows what it would give.
        train, val = split(
            index,
            use.settings,
            validation=use.validation,
            train_split=use.train_split,
            split_by=use.split_by,
            bad_file_limit=1.0,
        )
        print("\n" + "\n".join(use_lines(use, train, val)))
        stages = stage_training_samples(train, use.settings, num_samples)
        print(length_line(use))
        refuse_bad_index(index, use.bad_file_limit)
    except UserError as refused:
        failure = str(refused)
    if stages.samples:
        print("\n" + "\n".join(stages.lines()))
        subtitle = (
            f"{len(index) - index.num_bad} good files, {index.num_bad} bad. Left: a frame as stored, with the window "
            f"of its first training clip. Right: what the model sees ({use.name})."
        )
        sheet.parent.mkdir(parents=True, exist_ok=True)
        draw_contact_sheet(stages.samples, title=title, subtitle=subtitle).save(sheet, "PNG", optimize=True)
        print(f"\ncontact sheet: {sheet}")
    for bad in stages.bad_files:
        print(f"  could not be read now: {bad.path}: {bad.reason}")
    if failure:
        print(f"\nNOT USABLE as asked: {failure}")
    return not failure and bool(stages.samples)


def summary_lines(index: VideoIndex) -> Iterator[str]:
    """Counts over the good files, in one pass over the index; no video is opened."""
    sizes: Counter[tuple[int, int]] = Counter()
    rates: Counter[float] = Counter()
    codecs: Counter[bytes] = Counter()
    splits: Counter[int] = Counter()
    frames: list[npt.NDArray[Any]] = [np.zeros(0, np.int32)]
    seconds: list[npt.NDArray[Any]] = [np.zeros(0, np.float32)]
    num_bytes = num_not_square = 0
    for _, rows in index.chunks():
        good = rows[~is_bad(rows)]
        sizes.update(zip(good["width"].tolist(), good["height"].tolist(), strict=True))
        rates.update(np.round(good["fps"], 2).tolist())
        codecs.update(good["codec"].tolist())
        splits.update(good["split"].tolist())
        num_bytes += int(good["file_bytes"].sum())
        num_not_square += int((np.abs(good["pixel_aspect"] - 1.0) > 0.005).sum())
        frames.append(good["frames"].astype(np.int32))
        timed = good[good["fps"] > 0]
        seconds.append((timed["frames"] / timed["fps"]).astype(np.float32))
    all_frames, all_seconds = np.concatenate(frames), np.concatenate(seconds)
    num_good, num_frames = len(all_frames), int(all_frames.sum(dtype=np.int64))
    duration = duration_in_words(float(all_seconds.sum(dtype=np.float64)))
    yield heading("files")
    yield f"  {num_good} good, {index.num_bad} bad; {num_frames:,} frames, {duration}, {bytes_in_words(num_bytes)}"
    if num_not_square:
        yield f"  {num_not_square} with pixels that are not square (used as stored)"
    if num_good == 0:
        return
    yield "\n" + heading("lengths", "shortest", "5 %", "middle", "95 %", "longest")
    for name, values, places in (("frames", all_frames, 0), ("seconds", all_seconds, 1)):
        # No file may have a known rate, and so no seconds.
        spread = np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0), method="nearest") if len(values) else np.zeros(5)
        yield f"  {name}".ljust(20) + "".join(f"{value:>10,.{places}f}" for value in spread.tolist())
    yield from count_lines("sizes", sizes, lambda size: f"{size[0]}x{size[1]}")
    yield from count_lines("frame rates", rates, lambda fps: f"{fps:g} fps" if fps > 0 else "unknown")
    yield from count_lines("codecs", codecs, bytes.decode)
    yield from count_lines("splits", splits, lambda code: SPLITS[code] or "not told")


def heading(name: str, *columns: str) -> str:
    return name.upper().ljust(20) + "".join(f"{column:>10}" for column in columns)


def count_lines(title: str, counts: Counter[Any], name_of: Callable[[Any], str]) -> Iterator[str]:
    """Most frequent first, with a bar; what does not fit is added up."""
    ordered = [(name_of(value), count) for value, count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))]
    if len(ordered) > ROWS_SHOWN:
        rest = sum(count for _, count in ordered[ROWS_SHOWN:])
        ordered[ROWS_SHOWN:] = [(f"{len(ordered) - ROWS_SHOWN} others", rest)]
    yield "\n" + heading(title, "files")
    cell = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    for name, count in ordered:
        yield f"  {name}".ljust(20) + f"{count:>10,}  " + cell * max(1, round(BAR_CELLS * count / counts.total()))


def bad_file_lines(index: VideoIndex) -> Iterator[str]:
    """Counts of each kind of fault, then the first few files with their reason."""
    kinds: Counter[str] = Counter()
    examples: list[str] = []
    for row in index.bad_rows():
        kinds[re.sub(r"\d+", "N", row.reason)] += 1  # "damaged at frame 15" and "damaged at frame 7" are one kind
        if len(examples) < BAD_FILES_SHOWN:
            examples.append(f"    {row.path}: {row.reason}")
    yield heading("bad files")
    yield from (f"  {count:>8,} x {kind[:100]}" for kind, count in kinds.most_common(ROWS_SHOWN))
    yield from examples
    if index.num_bad > len(examples):
        yield f"    ... and {index.num_bad - len(examples)} more"


def use_lines(use: PlannedUse, train: ClipSet, val: ClipSet) -> Iterator[str]:
    settings = use.settings
    delta = " to ".join(map(str, sorted({settings.min_frame_delta, settings.max_frame_delta})))
    yield heading(f"use by {use.name}")
    yield (
        f"  clips of {settings.n_frames} frames, step {delta}, {settings.width}x{settings.height} (width x height); "
        f"files need {frames_needed(settings.n_frames, settings.min_frame_delta)} frames"
    )
    yield f"  {len(train):,} files train (one epoch), {len(val):,} validate, {train.excluded.total:,} are left out"
    if train.excluded.total:
        yield f"  left out: {train.excluded.sentence()}"
    steps = len(train) / use.samples_per_step
    yield f"  with one process: {use.samples_per_step} clips in a step, {steps:,.1f} steps in an epoch"


def length_line(use: PlannedUse) -> str:
    """Which variants train at this clip length; `UserError`, as in training, where the one named does not."""
    n_frames = use.settings.n_frames
    if use.variant is not None:
        get_spec(use.variant).check_training_length(n_frames)
        return f"  {n_frames} frames suit {use.variant}"
    others = [name for name, spec in VARIANTS.items() if not spec.is_training_length(n_frames)]
    if len(others) == len(VARIANTS):
        raise UserError(f"n_frames={n_frames} suits no variant; --variant NAME says the nearest lengths of a variant.")
    if len(others) <= len(VARIANTS) // 2:
        return f"  {n_frames} frames suit every variant" + (f" but {', '.join(others)}" if others else "")
    return f"  {n_frames} frames suit only {', '.join(name for name in VARIANTS if name not in others)}"


@dataclass(frozen=True, kw_only=True)
class StagedSample:
    """One file: a frame as stored (uint8 CHW), and the same frame as model input (float32 CHW in [0, 1])."""

    row: IndexRow
    choice: ClipChoice
    file_frame: Tensor
    model_frame: Tensor


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Samples on their way from the file to the model."""

    samples: list[StagedSample] = field(default_factory=list)
    bad_files: list[BadFile] = field(default_factory=list)
    values: dict[str, list[tuple[str, float, float, float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Stage -> type, lowest, highest, sum and count of the values of each sample."""

    def add_values(self, stage: str, values: Tensor) -> None:
        dtype, total = str(values.dtype).removeprefix("torch."), float(values.sum(dtype=torch.float64))
        self.values[stage].append((dtype, float(values.min()), float(values.max()), total, values.numel()))

    def lines(self) -> Iterator[str]:
        yield heading("values", "type", "lowest", "highest", "mean")
        for stage, of_samples in self.values.items():
            dtypes, lows, highs, totals, counts = zip(*of_samples, strict=True)
            places = 3 if dtypes[0] == "float32" else 0
            mean = f"{sum(totals) / sum(counts):.{max(1, places)}f}"
            cells = (dtypes[0], f"{min(lows):.{places}f}", f"{max(highs):.{places}f}", mean)
            yield f"  {stage}".ljust(20) + "".join(f"{cell:>10}" for cell in cells)


def stage_training_samples(clips: ClipSet, settings: ClipSettings, count: int) -> Stages:
    """The first ``count`` samples of training, read by the loader's own ``read_clip``."""
    stages, index = Stages(), clips.index
    for position in range(min(count, len(clips))):
        row = clips.row(file_of(position, len(clips), settings.seed))
        choice = choose_clip(row, settings, position, len(clips))
        try:
            clip = read_clip(index, row, choice, settings)
            info, timeout_s = index.info(row), settings.decode_timeout_s
            path = local_file(index.full_path(row), index.version(row))
            frames = read_frames(path, choice.frame_indices, info=info, timeout_s=timeout_s)
        except (UnreadableVideoError, OSError) as fault:
            stages.bad_files.append(BadFile(path=row.path, reason=why_unreadable(fault)))
            continue
        picture, middle = CropWindow(top=0, left=0, height=row.height, width=row.width), len(frames) // 2
        choice = settle_window(choice, frames[middle], settings, picture)
        model_input = to_model_input(clip[None], torch.tensor([choice.color_and_blur]))[0]
        for stage, values in (("file (RGB)", frames), ("batch", clip), ("model input", model_input)):
            stages.add_values(stage, values)
        file_frame, model_frame = frames[-1 - middle if choice.turn.backwards else middle], model_input[middle]
        sample = StagedSample(row=row, choice=choice, file_frame=file_frame, model_frame=model_frame)
        stages.samples.append(sample)
    return stages


COLUMNS, THUMB_WIDTH, THUMB_HEIGHT, MODEL_WIDTH = 3, 288, 162, 216
GAP, PADDING, CAPTION_HEIGHT, HEADER_HEIGHT, FONT_SIZE = 8, 20, 40, 76, 13
CARD_ROOM = THUMB_WIDTH + GAP + MODEL_WIDTH
PAPER, CARD, INK, QUIET, ACCENT = (24, 26, 30), (36, 39, 45), (236, 238, 242), (152, 158, 170), (255, 196, 61)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
OTHER_FONTS = ("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc", "arial.ttf")
"""Of Linux, macOS and Windows. Tried for letters that Pillow's own font lacks, after the one that fontconfig names."""


def draw_contact_sheet(samples: Sequence[StagedSample], *, title: str, subtitle: str) -> Image.Image:
    """A sheet of cards; each card names its file."""
    card_width, card_height = CARD_ROOM + 2 * GAP, THUMB_HEIGHT + CAPTION_HEIGHT + 2 * GAP
    columns = min(COLUMNS, len(samples))
    rows = math.ceil(len(samples) / columns)
    width = 2 * PADDING + columns * card_width + (columns - 1) * GAP
    height = HEADER_HEIGHT + PADDING + rows * card_height + (rows - 1) * GAP
    sheet = Image.new("RGB", (width, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    draw_text(pen, (PADDING, 16), title, size=22, room=width - 2 * PADDING, fill=INK)
    draw_text(pen, (PADDING, 46), subtitle, size=FONT_SIZE, room=width - 2 * PADDING, fill=QUIET)
    for place, sample in enumerate(samples):
        left = PADDING + place % columns * (card_width + GAP)
        top = HEADER_HEIGHT + place // columns * (card_height + GAP)
        pen.rounded_rectangle((left, top, left + card_width - 1, top + card_height - 1), radius=6, fill=CARD)
        _draw_card(sheet, pen, sample, left + GAP, top + GAP)
    return sheet


def _draw_card(sheet: Image.Image, pen: ImageDraw.ImageDraw, sample: StagedSample, left: int, top: int) -> None:
    x, y, scale = _paste(sheet, sample.file_frame, left, top, THUMB_WIDTH)
    window = sample.choice.window
    left_top = np.array([window.left, window.top]) * scale + (x, y)
    right_bottom = left_top + np.array([window.width, window.height]) * scale - 1
    # A dark line on both sides of the bright one, so that it shows on any picture.
    for grow, color in ((1, PAPER), (-1, PAPER), (0, ACCENT)):
        pen.rectangle((*(left_top - grow), *(right_bottom + grow)), outline=color)
    seen = sample.model_frame.mul(255).round().clamp(0, 255).byte()
    _paste(sheet, seen, left + THUMB_WIDTH + GAP, top, MODEL_WIDTH)
    row, below = sample.row, top + THUMB_HEIGHT
    rate = f"{row.fps:.4g} fps" if row.fps > 0 else "unknown rate"
    turned = f"   {turn}" if (turn := sample.choice.turn.in_words()) else ""
    facts = f"{row.width}x{row.height}   {rate}   {row.frames} frames   {row.codec}{turned}"
    draw_text(pen, (left, below + 6), row.path, size=FONT_SIZE, room=CARD_ROOM, fill=INK, keep_end=True)
    draw_text(pen, (left, below + 23), facts, size=FONT_SIZE, room=CARD_ROOM, fill=QUIET)


def _paste(sheet: Image.Image, frame_CHW: Tensor, left: int, top: int, width: int) -> tuple[int, int, float]:
    """Put a picture into a box, small ones enlarged without smoothing. Returns its place (x, y) and scale."""
    picture = Image.fromarray(frame_CHW.permute(1, 2, 0).contiguous().numpy())
    scale = min(width / picture.width, THUMB_HEIGHT / picture.height)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    picture = picture.resize(size, Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST)
    x, y = left + (width - picture.width) // 2, top + (THUMB_HEIGHT - picture.height) // 2
    sheet.paste(picture, (x, y))
    return x, y, scale


def draw_text(
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    *,
    size: int,
    room: float,
    fill: tuple[int, ...],
    keep_end: bool = False,
) -> None:
    """One line of text, cut with an ellipsis where it is longer than ``room`` pixels."""
    text, font = drawable(text, size)
    shown = text
    while text and font.getlength(shown) > room:
        text = text[1:] if keep_end else text[:-1]
        shown = f"...{text}" if keep_end else f"{text}..."
    pen.text(place, shown, fill=fill, font=font)


def drawable(text: str, size: int) -> tuple[str, Font]:
    """The text and the font for it: Pillow's own, else the one of the system that has most of its letters.

    The letters that this font lacks are escapes such as ``\\u4e2d``, so that names can be told apart.
    """
    text = unicodedata.normalize("NFC", text)  # macOS keeps the dots of ü as a letter of their own
    font: Font = ImageFont.load_default(size=size)
    lacking = _lacking(font, text)
    for file in _fonts_with(lacking) if lacking else ():
        with suppress(OSError):  # there is no such font, or none of this size
            other = ImageFont.truetype(file, size)
            if len(fewer := _lacking(other, text)) < len(lacking):
                font, lacking = other, fewer
    return "".join(c.encode("unicode_escape").decode() if c in lacking else c for c in text), font


def _fonts_with(letters: set[str]) -> Iterator[str]:
    words = ["fc-match", "--format=%{file}", f":charset={' '.join(f'{ord(c):x}' for c in sorted(letters))}"]
    with suppress(OSError, subprocess.SubprocessError):  # there is no fontconfig
        yield os.fsdecode(subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10).stdout)
    yield from OTHER_FONTS


def _lacking(font: Font, text: str) -> set[str]:
    """The letters of a text that a font draws as the box of a letter that no font has, or that nobody sees."""

    def drawn(letter: str) -> tuple[tuple[int, int], bytes]:
        mask = font.getmask(letter)
        return mask.size, bytes(mask)

    box = drawn("\U0010ffff")
    return {letter for letter in set(text) - {" "} if not letter.isprintable() or drawn(letter) == box}
