"""What is in a data set, as numbers and as a table to read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyvae.data.index import SPLIT_OF_CODE, STATUS_OK, VideoIndex

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
