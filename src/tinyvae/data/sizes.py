"""Which size the clips of each optimizer step have, where a run has several (multi-scale training).

All clips of a step have one size: on every rank and in every micro-batch. The size of step s is a pure function of the
settings, the seed and s. So ranks agree without an exchange, and a resumed run needs no state.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinyvae.data.clip import SIZE, ClipSettings, uniform
from tinyvae.errors import UserError

ENTRY = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\d+\.?\d*|\.\d+))?(?:@(\d+))?", re.IGNORECASE)
RIGHT_ENTRY = (
    "FRAMESxHEIGHTxWIDTH, perhaps with :SHARE and @STEP or @1% to @99% of the run, such as 16x480x720:0.3, "
    "16x256x256@2000 or 20x128x128@70%"
)
PART_OF_RUN = re.compile(r"@([1-9]\d?)%$")


class ClipSize(NamedTuple):
    """Frames, height and width of a clip, in pixels; as text ``16x480x720``."""

    n_frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.n_frames}x{self.height}x{self.width}"

    @property
    def pixels(self) -> int:
        return self.n_frames * self.height * self.width


def in_steps(entry: str, num_steps: int) -> str:
    """An entry of ``resolutions`` as a run of so many steps reads it.

    >>> in_steps("20x128x128@70%", 1000)
    '20x128x128@700'
    """
    return PART_OF_RUN.sub(lambda found: f"@{max(1, int(found[1]) * num_steps // 100)}", entry)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The sizes that are drawn from one step on, each with its share of the steps; the shares add up to 1."""

    first_step: int
    sizes: tuple[ClipSize, ...]
    shares: tuple[float, ...]

    def draw(self, seed: int, step: int) -> ClipSize:
        number = uniform(seed, step, SIZE)
        ends = itertools.accumulate(self.shares[:-1])
        return self.sizes[sum(number >= end for end in ends)]

    def in_words(self) -> str:
        """``16x480x720 (0.3), 16x256x256 (0.7)``, or the one size."""
        if len(self.sizes) == 1:
            return str(self.sizes[0])
        return ", ".join(f"{size} ({share:.3g})" for size, share in zip(self.sizes, self.shares, strict=True))


@dataclass(frozen=True, kw_only=True)
class SizeSchedule:
    """The sizes of a run: stages that follow each other, the first from step 0.

    >>> schedule = SizeSchedule.parse(["16x480x720:0.3", "16x256x256:0.7"])
    >>> schedule.size_at(step=0, seed=42) in schedule.sizes
    True
    """

    stages: tuple[Stage, ...]

    @classmethod
    def of_one(cls, size: ClipSize) -> SizeSchedule:
        return cls(stages=(Stage(first_step=0, sizes=(size,), shares=(1.0,)),))

    @classmethod
    def parse(cls, entries: Sequence[str]) -> SizeSchedule:
        """The schedule that the setting ``resolutions`` describes, all its entries `in_steps`; ``UserError`` names an
        entry that is wrong."""
        by_step: dict[int, dict[ClipSize, float]] = {}
        for entry in entries:
            found = ENTRY.fullmatch(entry)
            if found is None or min(map(int, found.groups()[:3])) < 1:
                raise UserError(f"resolutions: {entry!r} is no size; write {RIGHT_ENTRY}.")
            *numbers, share, step = found.groups()
            size, stage = ClipSize(*map(int, numbers)), by_step.setdefault(int(step or 0), {})
            if size in stage:
                raise UserError(f"resolutions: {entry!r} names a size that this stage already has; write it once.")
            stage[size] = float(share or 1)
            if stage[size] == 0:
                raise UserError(f"resolutions: the share of {entry!r} is 0; write a share above 0, or leave it out.")
        if 0 not in by_step:
            step = min(by_step)
            first = f"{next(iter(by_step[step]))}@{step}"
            raise UserError(f"resolutions: the first stage, {first!r}, must begin at step 0; write it with @0.")
        return cls(
            stages=tuple(
                Stage(
                    first_step=step,
                    sizes=tuple(stage),
                    shares=tuple(share / sum(stage.values()) for share in stage.values()),
                )
                for step, stage in sorted(by_step.items())
            )
        )

    @property
    def sizes(self) -> tuple[ClipSize, ...]:
        """Each size once, in the order of its first stage."""
        return tuple(dict.fromkeys(size for stage in self.stages for size in stage.sizes))

    @property
    def largest(self) -> ClipSize:
        """The size with the most pixels."""
        return max(self.sizes, key=lambda size: size.pixels)

    @property
    def bounds(self) -> ClipSize:
        """The most frames, the largest height and the largest width: a file that holds this can give every size."""
        return ClipSize(*map(max, zip(*self.sizes, strict=True)))

    @property
    def pictures_at_once(self) -> int:
        """The most picture sizes (height x width) that one stage has."""
        return max(len({size[1:] for size in stage.sizes}) for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def size_at(self, *, step: int, seed: int) -> ClipSize:
        """The size of all clips of optimizer step ``step`` (the first is 0)."""
        return self.stage_at(step).draw(seed, step)

    def in_words(self) -> str:
        """``12x128x128, from step 2000 on 16x480x720 (0.3), 16x256x256 (0.7)``."""
        first, *later = self.stages
        return ", ".join(
            [first.in_words(), *(f"from step {stage.first_step} on {stage.in_words()}" for stage in later)]
        )


@dataclass(frozen=True, kw_only=True)
class SizesOfPositions:
    """The size of the clip at each global position, from ``start_sample`` on, which is the first of ``start_step``.

    ``clips_per_step``: of all ranks and micro-batches together. Small enough to travel to a loader's worker.
    """

    schedule: SizeSchedule
    clips_per_step: int
    start_sample: int = 0
    start_step: int = 0

    def size_at(self, position: int, *, seed: int) -> ClipSize:
        step = self.start_step + (position - self.start_sample) // self.clips_per_step
        return self.schedule.size_at(step=step, seed=seed)

    def settings_at(self, position: int, settings: ClipSettings) -> ClipSettings:
        """The settings of the clip at a position: ``settings`` with its size."""
        return with_size(settings, self.size_at(position, seed=settings.seed))


def with_size(settings: ClipSettings, size: ClipSize) -> ClipSettings:
    """The same settings for clips of another size."""
    return replace(settings, n_frames=size.n_frames, height=size.height, width=size.width)
