"""Reading the clips of a batch inside a loader worker, and what happens to files that cannot be read.

A worker does not raise for a bad file. The reason travels to the main process with the batch, so that the user sees one
sentence and not the traceback of a worker.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.cache_folder import CacheNote, default_cache_folder
from tinyvae.data.augment import to_model_input
from tinyvae.data.clip import (
    AS_IT_IS,
    ClipChoice,
    ClipSettings,
    CropWindow,
    Turn,
    choose_clip,
    choose_validation_clip,
    file_of,
)
from tinyvae.data.decoded_cache import DecodedCache
from tinyvae.data.index import IndexRow, VideoIndex
from tinyvae.data.latent_store import LatentStore, StoredLatents
from tinyvae.data.sizes import SizesOfPositions
from tinyvae.data.splits import DEFAULT_BAD_FILE_LIMIT, ClipSet
from tinyvae.data.workers import Loan, WorkerBuffers, free_clip_memory, make_board
from tinyvae.errors import UnreadableVideoError, UserError, why_unreadable
from tinyvae.files import lock_file
from tinyvae.storage import Url, file_cache, local_file, version_of
from tinyvae.video.decode import read_frames

log = logging.getLogger(__name__)

MIN_ATTEMPTS, MAX_ATTEMPTS = 8, 64
"""Files tried for one position, by the limit of bad files (`attempts_for`)."""
TRIES_BEFORE_JUDGEMENT = 64
"""A share means little over fewer reads than this."""

TakenClip = tuple[int, IndexRow, ClipChoice]
"""A position, and the clip that was read for it."""


@dataclass(frozen=True, kw_only=True)
class BadFile:
    """A file (relative to the data root) and why it could not be used."""

    path: str
    reason: str


class BadFileLog:
    """``bad_files.jsonl``: one line for each bad file. Several ranks, and a resumed run, may write to the same file."""

    def __init__(self, file: Path) -> None:
        self.file = Path(file)
        self._known: set[str] = set()

    def add(self, *bad_files: BadFile) -> None:
        fresh = [bad for bad in bad_files if bad.path not in self._known]
        if not fresh:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a+b") as stream:
            lock_file(stream, wait=True)
            stream.seek(0)
            *lines, cut_off = stream.read().split(b"\n")
            stream.truncate(stream.tell() - len(cut_off))  # by a kill; its file will be named again
            known = set()
            for line in lines:
                with suppress(ValueError, TypeError, KeyError):  # a line that a user changed
                    known.add(json.loads(line)["path"])
            new = {bad.path: bad for bad in fresh if bad.path not in known}
            stream.write(b"".join(json.dumps(asdict(bad)).encode() + b"\n" for bad in new.values()))
        self._known = known | new.keys()

    def add_index(self, index: VideoIndex) -> int:
        """Add every file that is bad in the index; returns how many there are."""
        self.add(*(BadFile(path=row.path, reason=row.reason) for row in index.bad_rows()))
        return index.num_bad


@dataclass(kw_only=True)
class BadFileWatch:
    """Follows one loader: names each bad file once in the log, and stops the run when too many reads were bad."""

    limit: float = DEFAULT_BAD_FILE_LIMIT
    written_to: BadFileLog | None = None
    num_tries: int = 0
    num_bad_tries: int = 0
    named: dict[str, str] = field(default_factory=dict)
    """Path -> reason of every bad file so far."""

    def see(self, bad_files: tuple[BadFile, ...], num_tries: int) -> None:
        self.num_tries += num_tries
        self.num_bad_tries += len(bad_files)
        for bad in bad_files:
            if bad.path not in self.named:
                self.named[bad.path] = bad.reason
                log.warning("bad file %s skipped: %s", bad.path, bad.reason)
        if self.written_to is not None:
            try:
                self.written_to.add(*bad_files)
            except OSError as fault:  # a full disk: the checkpoints decide whether the run can go on
                log.warning("%s cannot be written (%s)", self.written_to.file, fault.strerror or fault)

    def judge(self) -> None:
        """Raise ``UserError`` where the share of bad reads is above the limit."""
        share = self.num_bad_tries / max(1, self.num_tries)
        if self.num_tries >= TRIES_BEFORE_JUDGEMENT and share > self.limit:
            path, reason = next(iter(self.named.items()))
            raise UserError(
                f"{self.num_bad_tries} of {self.num_tries} clips read so far ({share:.1%}) were bad, above the limit "
                f"of {self.limit:.1%}; the first was {path!r}: {reason}; fix the data (all bad files are named in "
                f"{self.written_to.file if self.written_to else 'the log'}) or raise bad_file_limit"
            )


@dataclass(frozen=True, kw_only=True)
class ClipBatch:
    """A batch as the trainer gets it. Its tensors are on the CPU."""

    frames: Tensor
    """uint8 RGB, NTCHW, 0..255; without color jitter and blur, which ``model_input`` applies."""
    color_and_blur: Tensor
    """float32 (N, 5): brightness, contrast, saturation, hue, blur sigma of each sample."""
    names: list[str]
    """The file of each sample, relative to the data root."""
    positions: list[int]
    epoch: int
    """Of the first sample; a batch may run on into the next epoch."""
    latents: StoredLatents | None = None
    """The teacher's latents of the samples, where the run has a store of them."""

    def __len__(self) -> int:
        return len(self.names)

    def model_input(self, device: torch.device | str | None = None) -> Tensor:
        """float32 NTCHW in [0, 1] on ``device``, with color jitter and blur: the input of the model."""
        # Without waiting only from pinned memory, which is a copy: a worker writes over its own memory later.
        frames = self.frames if device is None else self.frames.to(device, non_blocking=self.frames.is_pinned())
        return to_model_input(frames, self.color_and_blur)

    def pin_memory(self) -> ClipBatch:
        """Called by the loader's pinning thread."""
        latents = None if self.latents is None else self.latents.pin_memory()
        return replace(self, frames=self.frames.pin_memory(), latents=latents)


@dataclass(frozen=True, kw_only=True)
class ReadBatch:
    """What a worker hands over: the batch (None where it has no clip), and what happened on the way."""

    batch: ClipBatch | None = None
    bad_files: tuple[BadFile, ...] = ()
    num_tries: int = 0
    failure: str = ""
    """Why the run cannot continue."""
    loan: Loan | None = None
    cache_notes: tuple[CacheNote, ...] = ()

    def pin_memory(self) -> ReadBatch:
        return replace(self, batch=None if self.batch is None else self.batch.pin_memory())

    def copied(self) -> ReadBatch:
        """The same in memory of its own, which no worker writes over."""
        if self.batch is None:
            return self
        # Each tensor in shared memory holds a file open.
        own = {key: getattr(self.batch, key) for key in ("frames", "color_and_blur")}
        own = {key: value.clone() if value.is_shared() else value for key, value in own.items()}
        return replace(self, batch=replace(self.batch, **own), loan=None)


def attempts_for(bad_file_limit: float) -> int:
    """How many files are tried for one clip: enough that bad ones within the limit do not end a run by chance."""
    by_chance = math.log(1e-12) / math.log(bad_file_limit) if 0 < bad_file_limit < 1 else 0.0
    return MAX_ATTEMPTS if bad_file_limit == 1 else max(MIN_ATTEMPTS, min(MAX_ATTEMPTS, math.ceil(by_chance)))


class Clips(torch.utils.data.Dataset[ReadBatch]):
    """Batches by position: global positions in training, the numbers of the files in validation.

    With a store (``latents``), position p gets clip ``latents.clip_of(p)``, as it was when its latents were made.
    ``sizes``: where clips have several sizes; else all have that of ``settings``.
    """

    def __init__(
        self,
        clips: ClipSet,
        settings: ClipSettings,
        *,
        training: bool,
        num_workers: int = 0,
        latents: LatentStore | None = None,
        sizes: SizesOfPositions | None = None,
        bad_file_limit: float = DEFAULT_BAD_FILE_LIMIT,
    ) -> None:
        assert training or latents is None, "latents are stored by training position"
        self.clips, self.settings, self.training, self.latents = clips, settings, training, latents
        self._sizes, self._attempts = sizes, attempts_for(bad_file_limit)
        self.cache: DecodedCache | None = None
        if settings.decoded_cache_gb > 0:  # what is used from now on stays there for this loader
            folder = settings.decoded_cache_dir or default_cache_folder("decoded")
            self.cache = DecodedCache(folder, max_gb=settings.decoded_cache_gb, run_start=time.time())
        self.board = make_board(num_workers)
        self._buffers = WorkerBuffers(self.board)
        self._num_read = 0

    def _candidates(self, position: int, settings: ClipSettings) -> Iterator[tuple[IndexRow, ClipChoice]]:
        """The clips for a position: the first one that can be read is taken. Validation has no second choice."""
        if not self.training:
            row = self.clips.row(position)
            yield row, choose_validation_clip(row, settings)
            return
        position = self._clip_of(position)
        num_files = len(self.clips)
        for attempt in range(self._attempts):
            row = self.clips.row(file_of(position, num_files, settings.seed, attempt))
            yield row, choose_clip(row, settings, position, num_files, attempt)

    def _clip_of(self, position: int) -> int:
        return position if self.latents is None else self.latents.clip_of(position)

    def _settings_of(self, positions: list[int]) -> ClipSettings:
        """The settings of a batch: it is of one step, so its clips have one size."""
        if self._sizes is None:
            return self.settings
        first, last = (self._sizes.settings_at(self._clip_of(positions[i]), self.settings) for i in (0, -1))
        assert first == last, "a batch of two steps"
        return first

    def __getitems__(self, positions: list[int]) -> ReadBatch:
        batch, loan, failure = None, None, ""
        taken: list[TakenClip] = []
        bad: list[BadFile] = []
        try:
            settings = self._settings_of(positions)
            shape = (len(positions), settings.n_frames, 3, settings.height, settings.width)
            frames, loan = self._buffers.take(shape)
            for position in positions:
                clip = self._read_one(position, settings, frames[len(taken)], bad)
                if clip is not None:
                    taken.append(clip)
            if taken:
                batch = ClipBatch(
                    frames=frames[: len(taken)],
                    color_and_blur=torch.tensor([choice.color_and_blur for _, _, choice in taken]),
                    names=[row.path for _, row, _ in taken],
                    positions=[position for position, _, _ in taken],
                    epoch=positions[0] // len(self.clips),
                    latents=self._latents_of(taken),
                )
        except UserError as mistake:
            failure = str(mistake)
        return ReadBatch(
            batch=batch,
            bad_files=tuple(bad),
            num_tries=len(taken) + len(bad),
            failure=failure,
            loan=loan,
            cache_notes=(*file_cache().notes(), *(self.cache.notes() if self.cache is not None else ())),
        )

    def _read_one(self, position: int, settings: ClipSettings, out: Tensor, bad: list[BadFile]) -> TakenClip | None:
        """Read the clip of a position into ``out``; add to ``bad`` the files that could not be read before it."""
        for row, choice in self._candidates(position, settings):
            try:
                read_clip(self.clips.index, row, choice, settings, self.cache, out=out)
            except (UnreadableVideoError, OSError) as fault:
                bad.append(BadFile(path=row.path, reason=why_unreadable(fault)))
                continue
            self._num_read += 1
            free_clip_memory(self._num_read)
            return position, row, choice
        if self.training:
            raise UserError(
                f"{self._attempts} files in a row could not be read at position {position}; the last was "
                f"{bad[-1].path!r}: {bad[-1].reason}; look whether the storage is still mounted, or run "
                "`tinyvae data check`"
            )
        return None

    def _latents_of(self, taken: list[TakenClip]) -> StoredLatents | None:
        """The stored latents of the clips that were read; ``UserError`` where they are those of another file."""
        if self.latents is None:
            return None
        for position, row, _ in taken:
            stored = self.latents.file_of(position)
            if stored != row.path:
                raise UserError(
                    f"the latents of clip {self.latents.clip_of(position)} in {self.latents.folder} are those of "
                    f"{stored!r}, and the run read {row.path!r} in its place, because not the same files can be read "
                    "as when the store was made; restore the files, or make the store again with tinyvae latents"
                )
        return self.latents.read([position for position, _, _ in taken])


def read_clip(
    index: VideoIndex,
    row: IndexRow,
    choice: ClipChoice,
    settings: ClipSettings,
    cache: DecodedCache | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One clip (uint8 RGB, TCHW, clip size), written to ``out`` if given; an error when the file cannot give it."""
    video = index.full_path(row)
    # Of a file behind a URL just this version is fetched, if it is not here; a local file is looked at.
    version = index.version(row) if isinstance(video, Url) else version_of(video)
    if version.size != row.file_bytes:
        was = f"but had {row.file_bytes} when it was indexed; run `tinyvae data index` again"
        raise UnreadableVideoError(video, f"it has {version.size} bytes {was}")
    if out is None:
        out = torch.empty((settings.n_frames, 3, settings.height, settings.width), dtype=torch.uint8)
    indices, info, timeout_s = choice.frame_indices, index.info(row), settings.decode_timeout_s
    middle, frames = len(indices) // 2, None
    if cache is not None:
        cached = partial(cache.clip, video, info, timeout_s=timeout_s, version=version)
        if choice.more_windows and (looked_at := cached(indices[middle : middle + 1], choice.area)) is not None:
            choice = settle_window(choice, looked_at[0], settings, choice.area)
        if not choice.more_windows:
            frames = cached(indices, choice.window)
    area = choice.area
    if frames is None:
        is_native = (area.height, area.width) == (settings.height, settings.width)
        is_native = is_native and not choice.more_windows and not choice.turn.backwards
        path, place = local_file(video, version), out if is_native else None
        frames = read_frames(path, indices, info=info, timeout_s=timeout_s, window=area, out=place)
    if choice.more_windows:  # the cache has not shown the middle frame before
        choice = settle_window(choice, frames[middle], settings, area)
        frames = cut(frames, choice.window, area)
    return finish_clip(frames, out, choice.turn)


def settle_window(choice: ClipChoice, middle_CHW: Tensor, settings: ClipSettings, area: CropWindow) -> ClipChoice:
    """The choice with the drawn window that has the most detail as its only one; of equal ones the first.

    ``middle_CHW``: the part ``area`` of the clip's middle frame (uint8). Detail is measured at clip size, as the model
    sees it: a large window that is scaled down has no more pixels than a small one.
    """
    pixels = torch.empty((1, 3, settings.height, settings.width), dtype=torch.uint8)

    def detail(window: CropWindow) -> float:
        return detail_of(finish_clip(cut(middle_CHW[None], window, area), pixels)[0])

    return replace(choice, window=max((choice.window, *choice.more_windows), key=detail), more_windows=())


def detail_of(frame_CHW: Tensor) -> float:
    """Steps to the next pixel, down plus right, of the mean of R, G and B (uint8): their mean over the pixels."""
    light = frame_CHW.sum(dim=0, dtype=torch.int32)  # whole numbers: their sum does not depend on the order
    steps = light.diff(dim=0).abs().sum() + light.diff(dim=1).abs().sum()
    return int(steps) / (3 * light.numel())


def cut(frames_TCHW: Tensor, window: CropWindow, area: CropWindow) -> Tensor:
    """A window of frames of which just ``area`` is here: a view."""
    top, left = window.top - area.top, window.left - area.left
    return frames_TCHW[..., top : top + window.height, left : left + window.width]


def finish_clip(window_TCHW: Tensor, out_TCHW: Tensor, turn: Turn = AS_IT_IS) -> Tensor:
    """Scale the pixels of a window to the size of ``out_TCHW`` and turn them; both uint8.

    Both may be the same tensor, if the clip is not played backwards.
    """
    assert window_TCHW.dtype == out_TCHW.dtype == torch.uint8, "frames stay bytes until they are on the device"
    size = out_TCHW.shape[-2:]
    mirrored_dims = [dim for dim, is_so in ((-1, turn.mirrored), (-2, turn.upside_down)) if is_so]
    # Frame by frame: what is made in between then fits into the processor's cache.
    outs = out_TCHW.unbind()
    for frame, out in zip(window_TCHW, outs[::-1] if turn.backwards else outs, strict=True):
        if frame.shape[-2:] != size:
            frame = F.interpolate(frame[None].contiguous(), size=size, mode="bilinear", antialias=True)[0]
        if turn.on_side:
            frame = frame.mT
        if mirrored_dims or turn.on_side:
            frame = frame.flip(mirrored_dims)  # a copy, also without a dimension
        if frame.data_ptr() != out.data_ptr():
            out.copy_(frame)
    return out_TCHW
