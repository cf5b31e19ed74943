"""Which presentation time belongs to which frame number.

Frame numbers count the frames of a full decode in the order they are shown, with the edit list honoured: packets
that the container marks as discarded have no number. A timeline turns a number into a time to seek to, and the
time of a decoded frame back into its number, so that a reader can prove which frame it holds.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# How far (in frame steps) a time may lie from an even grid. Below 0.5 the nearest grid point is unambiguous; the
# grid of a 1/1000 s time base at 60 fps is off by 0.03.
EVEN_TOLERANCE = 0.3


# Of the pace of a film: a longer wait for the next frame means that one between is missing. Half a step is what even
# the coarse times of Matroska (1 ms) and the jitter of telephones never reach.
MAX_STEP = 1.5


class Timing(enum.IntEnum):
    """How frame numbers are found in a file. The values are stored in indexes: do not renumber."""

    EVEN = 0
    """Times lie on an even grid (``first_pts``, ``pts_step``): no scan is needed before a seek."""
    VARIABLE = 1
    """Times are known but uneven: a reader scans the packets (without decoding) once."""
    COUNTED = 2
    """Times are missing, repeated, or not one per frame: a reader decodes from the start and counts."""


@dataclass(frozen=True, kw_only=True)
class EvenTimeline:
    """Frame i is shown at ``first_pts + i * pts_step``, within EVEN_TOLERANCE steps (units: stream time base)."""

    first_pts: int
    pts_step: float

    def may_hold(self, index: int) -> bool:
        """Whether there can be a frame ``index``; an even grid goes on for ever."""
        return True

    def seek_pts(self, index: int) -> int:
        """A time at or after frame ``index`` and before frame ``index + 1``."""
        return math.floor(self.first_pts + (index + EVEN_TOLERANCE) * self.pts_step)

    def earliest_pts(self, index: int) -> int:
        """No frame before ``index`` is shown at or after this time."""
        return math.ceil(self.first_pts + (index - EVEN_TOLERANCE) * self.pts_step)

    def index_of(self, pts: int) -> int | None:
        """The number of the frame shown at ``pts``; None when no frame is."""
        position = (pts - self.first_pts) / self.pts_step
        index = round(position)
        return index if index >= 0 and abs(position - index) <= EVEN_TOLERANCE else None

    def is_after(self, pts: int, index: int) -> bool:
        """Whether ``pts`` lies after frame ``index``."""
        return pts > self.seek_pts(index)


@dataclass(frozen=True, kw_only=True)
class VariableTimeline:
    """Frame i is shown at ``pts[i]`` (strictly rising, stream time base)."""

    pts: npt.NDArray[np.int64]

    def may_hold(self, index: int) -> bool:
        return index < len(self.pts)

    def seek_pts(self, index: int) -> int:
        return int(self.pts[index])

    def earliest_pts(self, index: int) -> int:
        return int(self.pts[index])

    def index_of(self, pts: int) -> int | None:
        index = int(np.searchsorted(self.pts, pts))
        return index if index < len(self.pts) and self.pts[index] == pts else None

    def is_after(self, pts: int, index: int) -> bool:
        return bool(pts > self.pts[index])


Timeline = EvenTimeline | VariableTimeline


class EndProof:
    """Says whether the last pictures of a file can be all that there were.

    Pictures are stored before those that are shown earlier and refer to them, so a file cut off behind one of them
    still gives it, without the ones between. A decoder hands it out like any other, at the end, when it is emptied.
    Where all frames so far came at one pace, the gap in time tells. Where they did not, nothing can: there a gap
    may be what was filmed.
    """

    def __init__(self, *, rate: float, time_base: float) -> None:
        """``rate``: frames per second; ``time_base``: seconds per unit of time; 0 where the file does not tell."""
        # The pace until two frames have shown one.
        self._first_step = 1 / (rate * time_base) if rate and time_base else None
        self._first: int | None = None
        self._last: int | None = None
        self._steps = 0
        self._longest = 0

    def follows(self, pts: int | None, *, at_end: bool) -> bool:
        """Whether a frame at ``pts`` (stream time base) may come next; ``at_end``: the decoder is being emptied."""
        if pts is None:
            return True
        previous, self._last = self._last, pts
        if self._first is None or previous is None:
            self._first = pts
            return True
        step, pace = pts - previous, self._pace(previous)
        if at_end and pace is not None and self._longest <= MAX_STEP * pace < step:
            return False
        self._steps += 1
        self._longest = max(self._longest, step)
        return True

    def _pace(self, last: int) -> float | None:
        """Time per frame so far."""
        assert self._first is not None
        return (last - self._first) / self._steps if self._steps >= 2 else self._first_step


def even_step(pts: Sequence[int]) -> float | None:
    """The step of the even grid that all of ``pts`` (strictly rising) lie on; None when there is none.

    >>> even_step([0, 33, 67, 100])
    33.333333333333336
    >>> even_step([0, 20, 40, 80]) is None
    True
    """
    if len(pts) == 1:
        return 1.0
    times = np.asarray(pts, dtype=np.float64)
    step = float(times[-1] - times[0]) / (len(pts) - 1)
    offsets = (times - times[0]) / step - np.arange(len(pts))
    # Half of the tolerance: what is stored as a grid must still be recognised after rounding.
    return step if float(np.abs(offsets).max()) <= EVEN_TOLERANCE / 2 else None


def rising_times(pts: Sequence[int | None]) -> list[int] | None:
    """``pts`` if every time is known and later than the one before, else None."""
    times = [t for t in pts if t is not None]
    complete = len(times) == len(pts)
    return times if complete and all(a < b for a, b in pairwise(times)) else None


def reorder_depth(stored: Sequence[int], *, limit: int = 16) -> int:
    """How many pictures at most are stored before one that is shown earlier (``stored``: times in storage order).

    >>> reorder_depth([0, 3, 1, 2, 6, 4, 5])
    1
    >>> reorder_depth([0, 4, 2, 1, 3])
    2
    """
    times = np.asarray(stored, dtype=np.int64)
    later_first = np.zeros(len(times), dtype=np.int64)
    for back in range(1, min(limit, len(times) - 1) + 1):
        later_first[back:] += times[:-back] > times[back:]
    return int(later_first.max(initial=0))
