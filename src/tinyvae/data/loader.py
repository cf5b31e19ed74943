"""Endless training batches that any number of workers and ranks agree on, and validation batches that never change.

Batch b of rank r, with B samples per rank and N ranks, takes the global positions
``start_sample + b·N·B + r·B .. + B - 1``. So N ranks together see what one rank with N·B sees, and a run that continues
after k samples passes ``start_sample=k``. Epochs follow each other without a gap.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tinyvae.cache_folder import CacheNote
from tinyvae.data.clip import ClipSettings
from tinyvae.data.clip_reading import BadFile, BadFileLog, BadFileWatch, ClipBatch, Clips, ReadBatch
from tinyvae.data.latent_store import LatentStore
from tinyvae.data.sizes import SizesOfPositions
from tinyvae.data.splits import DEFAULT_BAD_FILE_LIMIT, ClipSet
from tinyvae.data.workers import BorrowedBatches, start_worker, starting_workers
from tinyvae.errors import UserError
from tinyvae.terminal import bytes_in_words

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 2**31
"""Of the validation clips that a process keeps in main memory. More are decoded again for each validation."""

MAX_LOST_IN_A_ROW = 3
"""How often workers may be lost without a batch between before the loader gives up."""


class _Loader:
    """What training and validation share: workers that signals do not reach and that are replaced when one is killed,
    bad files that are counted, and buffers that go back to their worker."""

    training = True

    def __init__(
        self,
        clips: ClipSet,
        settings: ClipSettings,
        positions_of: Callable[[int], range],
        num_batches: int | None = None,
        *,
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        bad_file_limit: float,
        bad_file_log: BadFileLog | None,
        sizes: SizesOfPositions | None = None,
        latents: LatentStore | None = None,
    ) -> None:
        """``positions_of``: the positions of a batch of this rank; ``num_batches``: None for batches without end."""
        self._clips = Clips(
            clips,
            settings,
            training=self.training,
            num_workers=num_workers,
            latents=latents,
            sizes=sizes,
            bad_file_limit=bad_file_limit,
        )
        self.bad_files = BadFileWatch(limit=bad_file_limit, written_to=bad_file_log)
        self._positions_of, self._num_batches, self._num_workers = positions_of, num_batches, num_workers
        self._started: Iterator[ReadBatch] | None = None
        self._make_loader = partial(
            DataLoader,
            self._clips,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory and torch.cuda.is_available(),
            worker_init_fn=start_worker,
            # A generator of its own: else every start of the loader would draw from torch's global one, and a resumed
            # run would not continue with the random state that it had saved.
            generator=torch.Generator().manual_seed(0),
        )

    def start(self) -> None:
        """Start the workers of the next iteration, which decode while the caller does other things."""
        if self._num_workers:
            self._started = self._start_workers(0)

    def close(self) -> None:
        """End workers that `start` started and that no iteration has used."""
        self._started = None

    def _start_workers(self, first: int) -> Iterator[ReadBatch]:
        """Workers that read from batch ``first`` on, as far ahead as ``prefetch_factor`` says, from now on."""
        numbers = count(first) if self._num_batches is None else range(first, self._num_batches)
        loader = self._make_loader(batch_sampler=(list(self._positions_of(number)) for number in numbers))
        with starting_workers(loader.num_workers):
            return iter(loader)

    def _reads(self) -> Iterator[ReadBatch]:
        """Every batch. A clip depends on its position alone, so new workers continue exactly where lost ones were."""
        started, self._started = self._started, None
        num_done = num_lost = 0
        while True:
            try:
                for read in self._checked(self._start_workers(num_done) if started is None else started):
                    num_lost = 0
                    num_done += 1
                    yield read
                return
            except RuntimeError as fault:
                reason = str(fault).splitlines()[0]
                if not reason.startswith(("DataLoader worker (pid", "Pin memory thread exited")):
                    raise
            started = None  # nothing holds the lost ones now: those still alive end before others take as much memory
            num_lost += 1
            if num_lost == MAX_LOST_IN_A_ROW:
                raise UserError(
                    f"processes that load clips were killed {num_lost} times in a row (the last: {reason}), most often "
                    "because the machine's main memory is full; use fewer --dataloader_num_workers, then --resume "
                    "latest. See docs/troubleshooting.md#a-killed-loader-process"
                )
            log.warning(
                f"a process that loads clips was killed ({reason}), most often because the machine's main memory is "
                "full; going on with fresh ones. If it happens often, use fewer --dataloader_num_workers."
            )

    def _checked(self, reads: Iterator[ReadBatch]) -> Iterator[ReadBatch]:
        """What workers read. Bad files are counted, and buffers go back when their batch is gone."""
        borrowed = BorrowedBatches(self._clips.board)
        for read in reads:
            self.bad_files.see(read.bad_files, read.num_tries)
            if self.training:
                self.bad_files.judge()
            if read.failure:
                raise UserError(read.failure)
            if read.batch is not None:
                borrowed.see(read.batch.frames, read.loan)
            yield read
            borrowed.give_back()


class TrainLoader(_Loader):
    """Iterate for batches without end. Each iteration starts at ``start_sample``."""

    def __iter__(self) -> Generator[ClipBatch, None, None]:
        told: set[CacheNote] = set()
        for read in self._reads():
            assert read.batch is not None, "a training batch without failure is whole"
            for note in read.cache_notes:
                if note not in told:  # said once, whichever worker is first
                    told.add(note)
                    log.log(note.level, note.text)
            yield read.batch


@dataclass(frozen=True, kw_only=True)
class ValidationReads:
    """Clips and first bad file of one rank's newest validation, and the tries of all its validations so far."""

    num_clips: int = 0
    first_bad: BadFile | None = None
    num_tries: int = 0
    num_bad_tries: int = 0


class ValidationLoader(_Loader):
    """Iterate for this rank's share of the validation clips: the same tensors every time.

    The first iteration reads the clips, with workers that end after it. They stay in main memory as bytes, up to
    `MAX_KEPT_BYTES`, and later iterations give the same batches again: files that were bad then stay left out.

    A single process (``is_alone``) judges the bad files itself at the end of each iteration. Several ranks exchange
    their ``reads`` after an iteration instead, and each gives all of them to `check`.
    """

    training = False

    def __init__(self, *parts: Any, is_alone: bool, num_bytes: int, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.reads = ValidationReads()
        self._is_alone = is_alone
        self._num_bytes = num_bytes  # of this rank's clips
        self._kept: list[ReadBatch] | None = None

    @property
    def kept_clips(self) -> dict[str, Tensor]:
        """The clips in memory by the name of their file: uint8 RGB, TCHW. Empty before the first iteration."""
        batches = [read.batch for read in self._kept or () if read.batch is not None]
        return {name: frames for batch in batches for name, frames in zip(batch.names, batch.frames, strict=True)}

    def __iter__(self) -> Iterator[ClipBatch]:
        num_clips, first_bad = 0, None
        for read in self._reads_or_kept():
            first_bad = first_bad or next(iter(read.bad_files), None)
            if read.batch is not None:
                num_clips += len(read.batch)
                yield read.batch
        self.reads = ValidationReads(
            num_clips=num_clips,
            first_bad=first_bad,
            num_tries=self.bad_files.num_tries,
            num_bad_tries=self.bad_files.num_bad_tries,
        )
        if self._is_alone:
            self.check([self.reads])

    def _reads_or_kept(self) -> Iterator[ReadBatch]:
        if self._kept is not None:
            for read in self._kept:
                self.bad_files.see(read.bad_files, read.num_tries)
                yield read
            return
        if self._num_bytes > MAX_KEPT_BYTES:
            if not self.bad_files.num_tries:  # said at the first iteration
                log.info(
                    "the validation clips take %s, more than the %s that are kept in memory: they are decoded again "
                    "for each validation",
                    bytes_in_words(self._num_bytes),
                    bytes_in_words(MAX_KEPT_BYTES),
                )
            yield from self._reads()
            return
        kept = []
        for read in self._reads():
            kept.append(read.copied())
            yield kept[-1]
        self._kept = kept

    def check(self, reads: Sequence[ValidationReads]) -> None:
        """Raise ``UserError`` where all ranks together (``reads``, in rank order) got no clip, or too many bad ones."""
        first = next((of_rank.first_bad for of_rank in reads if of_rank.first_bad is not None), None)
        if first is None:
            return
        if not any(of_rank.num_clips for of_rank in reads):
            raise UserError(f"not one validation clip could be read; the first was {first.path!r}: {first.reason}")
        replace(
            self.bad_files,
            num_tries=sum(of_rank.num_tries for of_rank in reads),
            num_bad_tries=sum(of_rank.num_bad_tries for of_rank in reads),
            named={first.path: first.reason},
        ).judge()


def make_train_loader(
    clips: ClipSet,
    settings: ClipSettings,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
    start_sample: int = 0,
    sizes: SizesOfPositions | None = None,
    bad_file_limit: float = DEFAULT_BAD_FILE_LIMIT,
    bad_file_log: BadFileLog | None = None,
    latents: LatentStore | None = None,
) -> TrainLoader:
    """Training batches of this rank.

    >>> for batch in make_train_loader(train, settings, batch_size=4, num_workers=2):  # doctest: +SKIP
    ...     frames_NTCHW = batch.model_input("cuda")

    Args:
        batch_size: samples of one batch of this rank.
        start_sample: samples that all ranks together have consumed before.
        sizes: the size of the clip at each position, where they differ; ``clips`` must fit all of them.
        bad_file_limit: share of bad reads above which iterating raises ``UserError``.
        latents: the store whose latents come with the frames.
    """
    _check_counts(batch_size, rank, world_size, num_workers)
    if len(clips) == 0:
        raise UserError(f"the {clips.name} set of {clips.index.source} is empty; there is nothing to load")
    if start_sample < 0:
        raise UserError(f"start_sample is {start_sample}; it counts samples and must be at least 0")

    def positions_of(batch: int) -> range:
        first = start_sample + (batch * world_size + rank) * batch_size
        return range(first, first + batch_size)

    return TrainLoader(
        clips,
        settings,
        positions_of,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        bad_file_limit=bad_file_limit,
        bad_file_log=bad_file_log,
        sizes=sizes,
        latents=latents,
    )


def make_position_loader(
    clips: ClipSet, settings: ClipSettings, batches: Sequence[range], **options: Any
) -> TrainLoader:
    """The training clips at chosen positions, one batch for each range; ``options``: all those of a loader."""
    return TrainLoader(clips, settings, batches.__getitem__, len(batches), **options)


def make_validation_loader(
    clips: ClipSet,
    settings: ClipSettings,
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_samples: int | None = None,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
    bad_file_limit: float = DEFAULT_BAD_FILE_LIMIT,
    bad_file_log: BadFileLog | None = None,
) -> ValidationLoader:
    """Validation batches of this rank: one clip from the middle of each file, center crop, nothing random.

    The first ``num_samples`` files of the set (None: all) in the order of the index, which is that of a hash and so a
    fair sample. Rank r takes samples r, r + N, r + 2N, ... A bad file is left out, and named.
    """
    _check_counts(batch_size, rank, world_size, num_workers)
    if num_samples is not None and num_samples < 1:
        raise UserError(f"num_samples is {num_samples}; validation needs at least 1")
    total = len(clips) if num_samples is None else min(num_samples, len(clips))
    if total == 0:
        raise UserError(f"the {clips.name} set of {clips.index.source} is empty; there is nothing to validate on")
    own = range(rank, total, world_size)
    num_batches = math.ceil(len(own) / batch_size)
    num_workers = min(num_workers, num_batches)
    return ValidationLoader(
        clips,
        settings,
        lambda batch: own[batch * batch_size : (batch + 1) * batch_size],
        num_batches,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        bad_file_limit=bad_file_limit,
        bad_file_log=bad_file_log,
        is_alone=world_size == 1,
        num_bytes=len(own) * settings.clip_bytes,
    )


def _as_it_is(read: Any) -> Any:
    return read


def _check_counts(batch_size: int, rank: int, world_size: int, num_workers: int) -> None:
    if batch_size < 1:
        raise UserError(f"the batch size is {batch_size}; it must be at least 1")
    if num_workers < 0:
        raise UserError(f"num_workers is {num_workers}; it must be at least 0 (0 loads in the main process)")
    assert 0 <= rank < world_size, "a rank outside the group"
