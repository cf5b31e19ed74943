"""Which files train and which validate, and which of them can give a clip at all.

A file belongs to exactly one side: the annotation's ``split`` says which, or else a hash of its path, which does not
change when other files come or go. Bad, too short and too small files are left out and counted.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tinyvae.data.clip import ClipSettings, fractions_of_hashes, frames_needed
from tinyvae.data.index import SPLITS, IndexRow, VideoIndex, is_bad
from tinyvae.errors import UserError

log = logging.getLogger(__name__)

SPLIT_SALT = 0x5350_4C49
DEFAULT_BAD_FILE_LIMIT = 0.05

SplitBy = Literal["auto", "annotation", "hash"]


@dataclass(frozen=True, kw_only=True)
class Exclusions:
    """How many files are left out, and why."""

    bad: int = 0
    too_short: int = 0
    too_small: int = 0
    test: int = 0

    @property
    def total(self) -> int:
        return self.bad + self.too_short + self.too_small + self.test

    @property
    def unusable(self) -> int:
        """Files that cannot give a clip. Those of a test split can, but must not."""
        return self.bad + self.too_short + self.too_small

    def is_most_of(self, num_files: int) -> bool:
        """Whether more than half of this many files cannot be used."""
        return 2 * self.unusable > num_files - self.test

    def sentence(self) -> str:
        return (
            f"{self.bad} bad, {self.too_short} too short, {self.too_small} smaller than the clip size, "
            f"{self.test} of a test split"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipSet:
    """The files of one side: four bytes for each."""

    name: str
    index: VideoIndex
    rows: npt.NDArray[np.uint32]
    """Row numbers in the index, in rising order."""
    excluded: Exclusions
    """Counted over the whole index, and so the same on both sides if their clips are."""

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> IndexRow:
        """The index row of file ``number`` of this side."""
        return self.index.row(int(self.rows[number]))

    @property
    def fingerprint(self) -> str:
        """Equal for two sets that give the same clips for the same positions; a resumed run can compare it."""
        digest = hashlib.blake2b(self.index.fingerprint.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.rows).tobytes())
        return digest.hexdigest()


def split(
    index: VideoIndex,
    settings: ClipSettings,
    *,
    validation: ClipSettings | None = None,
    train_split: float = 0.95,
    split_by: SplitBy = "auto",
    bad_file_limit: float = DEFAULT_BAD_FILE_LIMIT,
) -> tuple[ClipSet, ClipSet]:
    """Training and validation files of an index; no file is in both.

    >>> train, val = split(index, settings, train_split=0.95)  # doctest: +SKIP

    Args:
        validation: what a validation clip is, where that is not ``settings``; it decides over the validation files.
        train_split: share of the files that train, by hash. Files with an annotated split stay where it puts them.
        split_by: ``annotation`` insists on annotated splits, ``hash`` ignores them, ``auto`` uses them where given.
        bad_file_limit: share of bad files in the index above which this raises.
    """
    if not 0.0 < train_split <= 1.0:
        raise UserError(f"train_split is {train_split}; it must be above 0 and at most 1")
    refuse_bad_index(index, bad_file_limit)
    if split_by == "annotation" and not index.has_splits:
        raise UserError(f"the index {index.source} holds no annotated split; use split_by=hash, or annotate the files")
    use_annotation = split_by != "hash" and index.has_splits
    train, val = _sides(index, settings, train_split, use_annotation)
    if validation is None:
        return train, val
    _, val = _sides(index, validation, train_split, use_annotation, validates=True)
    # Of a small set one file may have changed sides, and for clips of another size it may have been another file.
    rows = np.setdiff1d(train.rows, val.rows, assume_unique=True)
    if len(rows) == 0:
        raise UserError(f"no file of {index.source} is left for training beside those that validate; add files")
    return replace(train, rows=rows), val


def _sides(
    index: VideoIndex, settings: ClipSettings, train_split: float, use_annotation: bool, *, validates: bool = False
) -> tuple[ClipSet, ClipSet]:
    """The files that can give clips of one kind, by annotation or by hash."""
    numbers, trains = [np.zeros(0, np.uint32)], [np.zeros(0, np.bool_)]
    left_out: Counter[str] = Counter()
    for start, rows in index.chunks():
        usable, unusable = _usable_rows(rows, settings, without_test=use_annotation)
        left_out.update(unusable)
        by_hash = fractions_of_hashes(rows["path_hash"][usable], SPLIT_SALT) < train_split
        told = rows["split"][usable] if use_annotation else np.zeros(len(usable))
        trains.append(np.where(told == 0, by_hash, told == SPLITS.index("train")))
        numbers.append((start + usable).astype(np.uint32))
    all_numbers, all_trains = np.concatenate(numbers), np.concatenate(trains)
    excluded = Exclusions(**left_out)
    if len(all_numbers) == 0:
        asked = ("validation clip", "one (validation_height, validation_width, validation_n_frames)")
        what, smaller = asked if validates else ("clip", "clip")
        raise UserError(
            f"no file of {index.source} can give a {what} of {settings.n_frames} frames at "
            f"{settings.width}x{settings.height} (width x height): {excluded.sentence()}; "
            f"ask for a smaller or shorter {smaller}, or add files"
        )
    train, val = all_numbers[all_trains], all_numbers[~all_trains]
    if not use_annotation and train_split < 1.0:
        train, val = _fill_empty_side(index, train, val)
    _refuse_empty_side(index, train, val, train_split, use_annotation)
    return (
        ClipSet(name="train", index=index, rows=train, excluded=excluded),
        ClipSet(name="val", index=index, rows=val, excluded=excluded),
    )


def _usable_rows(
    rows: npt.NDArray[Any], settings: ClipSettings, *, without_test: bool
) -> tuple[npt.NDArray[Any], dict[str, int]]:
    """(numbers of the rows that can give a clip, how many cannot and why)."""
    good = ~is_bad(rows)
    test = good & (rows["split"] == SPLITS.index("test")) & without_test
    candidate = good & ~test
    long_enough = rows["frames"] >= frames_needed(settings.n_frames, settings.min_frame_delta)
    large_enough = (rows["width"] >= settings.width) & (rows["height"] >= settings.height)
    large_enough |= settings.allow_upscale
    unusable = {
        "bad": ~good,
        "test": test,
        "too_short": candidate & ~long_enough,
        "too_small": candidate & long_enough & ~large_enough,
    }
    counts = {reason: int(which.sum()) for reason, which in unusable.items()}
    return np.flatnonzero(candidate & long_enough & large_enough), counts


def refuse_bad_index(index: VideoIndex, bad_file_limit: float) -> None:
    """Stop before training on what remains of a broken download or a wrong mount."""
    first = next(index.bad_rows(), None)
    if first is None:
        return
    example = f"the first is {first.path!r}: {first.reason}"
    if index.num_bad == len(index):
        fix = "copy the files again, or name another folder"
        raise UserError(f"all {len(index)} files of {index.source} are bad; {example}; {fix}")
    share = index.num_bad / len(index)
    if share > bad_file_limit:
        raise UserError(
            f"{index.num_bad} of {len(index)} files ({share:.1%}) of {index.source} are bad, above the limit of "
            f"{bad_file_limit:.1%}; {example}; fix or remove them (`tinyvae data index` writes a list of all), "
            "or raise bad_file_limit"
        )


def _fill_empty_side(
    index: VideoIndex, train: npt.NDArray[Any], val: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Where the hash put all files on one side, the one nearest to the border changes sides."""
    if len(train) + len(val) < 2 or (len(train) and len(val)):
        return train, val
    numbers = train if len(train) else val
    hashes = np.concatenate([rows["path_hash"] for _, rows in index.chunks()])[numbers]
    fractions = fractions_of_hashes(hashes, SPLIT_SALT)
    place = int(np.argmax(fractions) if len(train) else np.argmin(fractions))
    moved, others = numbers[place : place + 1], np.delete(numbers, place)
    sides = ("training", "validates") if len(train) else ("validation", "trains")
    log.info("the hash put all %d files into %s; row %d %s instead", len(numbers), sides[0], moved[0], sides[1])
    return (others, moved) if len(train) else (moved, others)


def _refuse_empty_side(
    index: VideoIndex, train: npt.NDArray[Any], val: npt.NDArray[Any], train_split: float, use_annotation: bool
) -> None:
    if len(train) == 0:
        remedy = "annotate some or use split_by=hash" if use_annotation else "add files, or raise train_split"
        raise UserError(f"no usable file of {index.source} is in the training split; {remedy}")
    if len(val) == 0 and train_split < 1.0:
        remedy = "annotate some as val, use split_by=hash" if use_annotation else "add files"
        without = "set train_split=1 and validation_steps=0 to train without"
        raise UserError(f"no usable file of {index.source} is left for validation; {remedy}, or {without}")
