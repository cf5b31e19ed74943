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
