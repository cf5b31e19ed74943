"""Which videos an evaluation reads, and their frames in chunks.

A source is a video file, a folder (searched to the bottom), an annotation file (JSON, JSONL) or an index of
``tinyvae data index``; a path or a URL. Names of clips are their paths relative to the data root, so that two
evaluations of the same data can be compared clip by clip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.data.annotations import SPLIT_NAMES, VIDEO_SUFFIXES, default_data_root, iterate_entries
from tinyvae.data.index import is_index, open_index
from tinyvae.errors import MissingFileError, UnreadableVideoError, UserError
from tinyvae.storage import Place, local_file
from tinyvae.video.decode import VideoInfo, iterate_frames, probe_video, uneven_times_s

PROBE_TIMEOUT_S = 600.0  # probing reads all packets: minutes for a film of hours on a slow disk
FALLBACK_FPS = 24.0  # for files that state no frame rate


@dataclass(frozen=True, kw_only=True)
class ClipSource:
    """One video to evaluate; ``known_bad`` is the reason why its index calls it bad."""

    name: str
    path: Place
    known_bad: str = ""
    info: VideoInfo | None = None  # of a probe that was made before; None: the file is probed
    # The frames of the part that will be evaluated, where they are in memory already: uint8 TCHW.
    frames: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Middle:
    """The part of each video that a run validates on: the middle frames, instead of the first ones."""

    frame_step: int = 1  # frames of the file from one frame of the clip to the next
    scaled: bool = True  # the largest window of the clip's shape is scaled to its size; else it has that size already


@dataclass(frozen=True, kw_only=True)
class ClipPart:
    """The part of a video that is evaluated: ``num_frames`` frames, at ``height`` x ``width`` pixels."""

    path: Place
    num_frames: int
    fps: float  # of the part: a file of 30 frames per second with a frame_step of 2 has 15
    height: int
    width: int
    resized: bool  # whether frames are cropped and scaled to this size, or the file has it
    first_frame: int = 0
    frame_step: int = 1
    scaled: bool = True  # as in `Middle`
    pixel_aspect: float = 1.0  # width / height of one pixel as it should be shown
    # When each frame is shown, in seconds after the first; None where frames follow each other evenly.
    times_s: npt.NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    frames: Tensor | None = field(default=None, compare=False, repr=False)  # as in `ClipSource`

    def first(self, num_frames: int) -> ClipPart:
        """The first ``num_frames`` of its frames."""
        times_s = self.times_s[:num_frames] if self.times_s is not None else None
        frames = self.frames[:num_frames] if self.frames is not None else None
        return replace(self, num_frames=num_frames, times_s=times_s, frames=frames)


def choose_split(data: Place, *, data_root: Place | None, wanted: str | None) -> tuple[str | None, str]:
    """(split, note): which videos of a source to take, as `find_clips` wants it, and a note for the user or "".

    Without ``wanted`` it is val where the source has splits other than train: a model was trained on that one.
    """
    _refuse_missing(data)
    # A folder has no splits, and a walk through it takes time.
    if wanted is not None or data.is_dir():
        return wanted, ""
    if is_index(data) and not open_index(data, data_root).has_splits:
        return None, ""
    has_train = False
    for _, split in _annotated_clips(data, data_root):
        if split not in ("", "train"):
            return "val", f"the videos that {data} annotates as val are taken; --split all takes every one."
        has_train = has_train or split == "train"
    note = f"{data} annotates all its videos as train, so they are taken; a model may have been trained on them."
    return None, note if has_train else ""


def find_clips(
    data: Place, *, data_root: Place | None = None, split: str | None = None, max_clips: int | None = None
) -> list[ClipSource]:
    """The videos of a source, sorted by name. ``split`` keeps those annotated as train, val or test; None or all: all.

    ``max_clips`` takes that many, evenly spread over the sorted list, so that the same call always gives the same.
    """
    _refuse_missing(data)
    if split not in (None, "all", *SPLIT_NAMES):
        raise UserError(f"the split {split!r} is unknown; use one of train, val, test, all.")
    meaning = None if split in (None, "all") else SPLIT_NAMES[str(split)]
    found = dict.fromkeys(("train", "val", "test", ""), 0)
    clips: list[ClipSource] = []
    for clip, annotated in _annotated_clips(data, data_root):
        found[annotated] += 1
        if meaning is None or annotated == meaning:
            clips.append(clip)
    if not clips:
        counts = ", ".join(f"{count} as {name}" for name, count in found.items() if count and name)
        if counts:
            why = f"({counts}); choose with --split train, val, test or all."
            raise UserError(f"no video of {data} is annotated as {split!r} {why}")
        if any(found.values()):
            raise UserError(f"no video of {data} is annotated as {split!r}, it has no splits; leave --split out.")
        suffixes = ", ".join(VIDEO_SUFFIXES[:5])
        raise UserError(f"there is no video in {data}; give a folder that holds files such as {suffixes}.")
    clips.sort(key=lambda clip: clip.name)
    if max_clips is not None and max_clips < len(clips):
        clips = [clips[index * len(clips) // max_clips] for index in range(max_clips)]
    return clips


def _refuse_missing(data: Place) -> None:
    if not data.exists():
        kinds = "a folder of videos, a video, an annotation file or an index"
        raise MissingFileError(f"there is no data at {data} (looked from {Path.cwd()}); give {kinds}.")


def _annotated_clips(data: Place, data_root: Place | None) -> Iterator[tuple[ClipSource, str]]:
    """Every video of a source with its split, "" where the source gives none."""
    if data.is_file() and is_index(data):
        index = open_index(data, data_root)
        for row in map(index.row, range(len(index))):
            bad = "" if row.ok else row.reason or "bad"
            yield ClipSource(name=row.path, path=index.full_path(row), known_bad=bad), row.split
    elif data.is_file() and data.suffix.lower() not in (".json", ".jsonl", ".ndjson"):
        # One video, whatever its suffix: the reader goes by content and says why if it is none.
        yield ClipSource(name=data.name, path=data), ""
    else:
        root = data_root if data_root is not None else default_data_root(data)
        for entry in iterate_entries(data, data_root):
            yield ClipSource(name=entry.path, path=root / entry.path), entry.split


def measure_clip(
    clip: ClipSource,
    *,
    max_frames: int | None,
    size: tuple[int, int] | None,
    with_times: bool = False,
    middle: Middle | None = None,
) -> ClipPart:
    """What of a video will be evaluated; ``UnreadableVideoError`` for one that cannot be.

    ``size`` is (height, width): a centered window of that shape, scaled. None keeps every pixel of the file.
    ``with_times`` also looks up uneven frame times. ``middle`` takes the middle frames instead of the first.
    """
    if clip.known_bad:
        raise UnreadableVideoError(clip.path, f"{clip.known_bad} (as its index says)")
    info, times_s = clip.info, None
    if info is None or with_times:
        with _local_copy(clip.path) as path:
            info = info or probe_video(path, thorough=False, timeout_s=PROBE_TIMEOUT_S)
            times_s = uneven_times_s(path, info, timeout_s=PROBE_TIMEOUT_S) if with_times else None
    height, width = size if size is not None else (info.height, info.width)
    step = middle.frame_step if middle is not None else 1
    available = (info.frames - 1) // step + 1
    num_frames = available if max_frames is None else min(available, max_frames)
    assert clip.frames is None or clip.frames.shape == (num_frames, 3, height, width), "other frames than asked for"
    return ClipPart(
        path=clip.path,
        num_frames=num_frames,
        fps=info.fps / step,
        height=height,
        width=width,
        resized=(height, width) != (info.height, info.width),
        first_frame=0 if middle is None else (info.frames - ((num_frames - 1) * step + 1)) // 2,
        frame_step=step,
        scaled=middle is None or middle.scaled,
        pixel_aspect=info.pixel_aspect,
        times_s=times_s[:num_frames] if times_s is not None else None,
        frames=clip.frames,
    )


def frame_chunks(part: ClipPart, *, chunk_frames: int) -> Iterator[Tensor]:
    """The frames of a part, ``chunk_frames`` at a time: uint8 TCHW. Holds one chunk in memory."""
    if part.frames is not None:
        yield from part.frames.split(chunk_frames)
        return
    stop = part.first_frame + (part.num_frames - 1) * part.frame_step + 1
    with _local_copy(part.path) as path:
        frames = islice(iterate_frames(path, start=part.first_frame, stop=stop), 0, None, part.frame_step)
        while waiting := list(islice(frames, chunk_frames)):
            frames_TCHW = torch.stack(waiting)
            if part.resized:
                frames_TCHW = resize_and_crop(frames_TCHW, part.height, part.width, scaled=part.scaled)
            yield frames_TCHW


@contextmanager
def _local_copy(video: Place) -> Iterator[Path]:
    """The file to open. What is wrong with the copy of a file behind a URL is said of the URL."""
    try:
        yield local_file(video)
    except UnreadableVideoError as bad:
        raise UnreadableVideoError(video, bad.reason) from None
    except OSError as fault:
        if isinstance(video, Path):
            raise
        raise UnreadableVideoError(video, f"cannot be read: {fault.strerror or fault}") from None


def resize_and_crop(frames_TCHW: Tensor, height: int, width: int, *, scaled: bool = True) -> Tensor:
    """The largest centered window of the shape height x width, scaled to it (bilinear, antialiased): uint8 TCHW. Not
    ``scaled``: a window of just this size, where the picture is large enough."""
    in_height, in_width = frames_TCHW.shape[-2:]
    scale = min(in_height / height, in_width / width, math.inf if scaled else 1.0)
    window_h, window_w = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (in_height - window_h) // 2, (in_width - window_w) // 2
    window = frames_TCHW[..., top : top + window_h, left : left + window_w]
    return F.interpolate(window.contiguous(), size=(height, width), mode="bilinear", antialias=True)
