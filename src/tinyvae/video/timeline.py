"""Which presentation time belongs to which frame number.

Frame numbers count the frames of a full decode in the order in which they are shown. A timeline turns a number into a
time to seek to, and the time of a decoded frame back into its number, so that a reader can prove which frame it holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# How far (in frame steps) a time may lie from an even grid. Below 0.5 the nearest grid point is unambiguous.
EVEN_TOLERANCE = 0.3

# A longer wait than this many usual steps means that a frame between is missing. The jitter of telephones is below it.
MAX_STEP = 1.5


@dataclass(frozen=True, kw_only=True)
class EvenTimeline:
    """Frame i is shown at ``first_pts + i * pts_step``, within EVEN_TOLERANCE steps (units: stream time base)."""

    first_pts: int
    pts_step: float

    def seek_pts(self, index: int) -> int:
        """A time at or after frame ``index`` and before frame ``index + 1``."""
        return math.floor(self.first_pts + (index + EVEN_TOLERANCE) * self.pts_step)

    def earliest_pts(self, index: int) -> int:
        """No frame before ``index`` is shown at or after this time."""
        return math.ceil(self.first_pts + (index - EVEN_TOLERANCE) * self.pts_step)

    def index_of(self, pts: int) -> int | None:
        """The number of the frame shown at ``pts``, or None."""
        position = (pts - self.first_pts) / self.pts_step
        index = round(position)
        return index if index >= 0 and abs(position - index) <= EVEN_TOLERANCE else None


@dataclass(frozen=True, kw_only=True)
class VariableTimeline:
    """Frame i is shown at ``pts[i]`` (strictly rising, stream time base)."""

    pts: npt.NDArray[np.int64]

    def seek_pts(self, index: int) -> int:
        return int(self.pts[index])

    def earliest_pts(self, index: int) -> int:
        return int(self.pts[index])

    def index_of(self, pts: int) -> int | None:
        index = int(np.searchsorted(self.pts, pts))
        return index if index < len(self.pts) and self.pts[index] == pts else None


Timeline = EvenTimeline | VariableTimeline


class EndProof:
    """Says whether the last pictures of a file are all that there were.

    A picture is stored before those that are shown earlier and refer to it. A file that is cut off right after it still
    gives this picture. Where all frames so far came at one pace, the gap in time shows that the others are missing.
    """

    def __init__(self, *, rate: float, time_base: float) -> None:
        """``rate``: frames per second; ``time_base``: seconds per unit of time; 0 where the file does not say."""
        self._nominal_step = 1 / (rate * time_base) if rate and time_base else None
        self._first: int | None = None
        self._last = self._steps = self._longest = 0

    def follows(self, pts: int | None, *, at_end: bool) -> bool:
        """Whether a frame at ``pts`` (stream time base) may come next; ``at_end``: the decoder is being emptied."""
        if pts is None:
            return True
        previous, self._last = self._last, pts
        if self._first is None:
            self._first = pts
            return True
        step = pts - previous
        pace = (previous - self._first) / self._steps if self._steps >= 2 else self._nominal_step
        if at_end and pace is not None and self._longest <= MAX_STEP * pace < step:
            return False
        self._steps += 1
        self._longest = max(self._longest, step)
        return True


def even_step(pts: Sequence[int]) -> float | None:
    """The step of the even grid that all of ``pts`` (strictly rising) lie on; None when there is none.

    >>> even_step([0, 33, 67, 100])
    33.333333333333336
    """
    if len(pts) == 1:
        return 1.0
    times = np.asarray(pts, dtype=np.float64)
    step = float(times[-1] - times[0]) / (len(pts) - 1)
    offsets = (times - times[0]) / step - np.arange(len(pts))
    # Half of the tolerance: what is stored as a grid must still be recognized after rounding.
    return step if float(np.abs(offsets).max()) <= EVEN_TOLERANCE / 2 else None


def rising_times(pts: Sequence[int | None]) -> list[int] | None:
    """``pts`` if every time is known and later than the one before, else None."""
    times = [t for t in pts if t is not None]
    return times if len(times) == len(pts) and all(a < b for a, b in pairwise(times)) else None


def reorder_depth(stored: Sequence[int], *, limit: int = 16) -> int:
    """How many pictures at most are stored before one that is shown earlier (``stored``: times in storage order).

    >>> reorder_depth([0, 4, 2, 1, 3])
    2
    """
    times = np.asarray(stored, dtype=np.int64)
    later_first = np.zeros(len(times), dtype=np.int64)
    for back in range(1, min(limit, len(times) - 1) + 1):
        later_first[back:] += times[:-back] > times[back:]
    return int(later_first.max(initial=0))
