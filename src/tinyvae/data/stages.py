"""A few training samples at every stage of their way: as in the file, as in the batch, as the model sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyvae.data.augment import to_model_input
from tinyvae.data.bad_files import BadFile
from tinyvae.data.clip_choice import ClipChoice, choose_clip, file_of
from tinyvae.data.clip_settings import ClipSettings
from tinyvae.data.decode import read_frames
from tinyvae.data.geometry import CropWindow, cut_clip
from tinyvae.data.index import STATUS_OK, IndexRow, VideoIndex
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UnreadableVideoError


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
