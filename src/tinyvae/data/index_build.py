"""Building or updating an index: list the source, probe what is new, and keep what is known.

The source is read twice: once to check and count its entries (a wrong path ends the build in seconds), once to probe.
A second build probes only files that are new, changed or were bad. A killed build continues where it was.

Files are probed in parallel processes. When a process dies or never answers, each file of its batch is probed again in
a process of its own, and the one at fault becomes a bad file.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tinyvae.data.annotations import VideoEntry, default_data_root, iterate_entries
from tinyvae.data.index import IndexJournal, IndexRow, VideoIndex, hash_of_path, is_index, open_index
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.terminal import progress_bar
from tinyvae.video.decode import VideoInfo, probe_video

log = logging.getLogger(__name__)

CACHED_INDEX = "data_index.tvi"
BATCH, BATCHES_AHEAD = 8, 4
GRACE_S = 30.0
"""How much longer than the deadlines of its files together a batch may take before its process is killed."""

Probe = Callable[..., VideoInfo]
"""Called with a path and the options ``timeout_s`` and ``thorough``; it keeps the deadline itself."""


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    index: VideoIndex
    num_probed: int
    num_reused: int
    num_duplicates: int
    seconds: float

    def sentence(self) -> str:
        return (
            f"{len(self.index)} files in {self.index.file}: {len(self.index) - self.index.num_bad} good, "
            f"{self.index.num_bad} bad; {self.num_probed} probed, {self.num_reused} known from before, "
            f"{self.num_duplicates} listed more than once; {self.seconds:.1f} s"
        )


def build_index(
    source: Path,
    output: Path,
    *,
    data_root: Path | None = None,
    num_workers: int | None = None,
    timeout_s: float = 30.0,
    thorough: bool = False,
    show_progress_bar: bool = True,
    probe: Probe = probe_video,
) -> BuildReport:
    """Make or update the index ``output`` of the videos that ``source`` lists.

    >>> print(build_index(Path("videos/"), Path("videos.tvi")).sentence())  # doctest: +SKIP

    Args:
        source: folder tree, JSONL file or annotation JSON.
        output: the index file; an index already there is updated and replaced at once at the end.
        data_root: folder that relative paths start from; default: the tree itself, or the annotation file's folder.
        num_workers: probing processes; default: one per CPU core, 0 probes in this process.
        timeout_s: deadline for each file.
        thorough: decode every frame, so that damage in the middle of a file is found now and not when it is read.
        probe: what looks at one file.
    """
    started = time.monotonic()
    source, output = Path(source), Path(output)
    _check_output(source, output)
    facts = _survey(source, data_root)
    num_entries, root = facts["num_entries"], facts["data_root"]
    if num_entries == 0:
        raise UserError(f"{source} lists no video file; give a folder or an annotation file with at least one")
    journal = IndexJournal(output)
    known = [index for index in (journal.resumed, _open_usable(output)) if index is not None]
    tasks = (
        ProbeTask(entry, os.path.join(root, entry.path), _known_row(entry.path, known, thorough))
        for entry in iterate_entries(source, data_root)
    )
    look = functools.partial(_row_of, probe=probe, timeout_s=timeout_s, thorough=thorough)
    rows = _probe_all(tasks, look, usable_cores() if num_workers is None else num_workers, timeout_s)
    counts: Counter[bool] = Counter()
    bar = progress_bar(rows, total=num_entries, unit="file", desc="indexing", disable=not show_progress_bar)
    try:
        for row, is_new in bar:
            journal.append(row)
            counts[is_new] += 1
        num_duplicates = journal.finish(facts)
    finally:
        bar.close()
        journal.close()
    return BuildReport(
        index=open_index(output),
        num_probed=counts[True],
        num_reused=counts[False],
        num_duplicates=num_duplicates,
        seconds=time.monotonic() - started,
    )


def open_or_build_index(source: Path, *, data_root: Path | None = None, cache_dir: Path, **options: Any) -> VideoIndex:
    """The index of ``source``: itself when it is an index, else ``cache_dir/data_index.tvi``, built where needed.

    >>> index = open_or_build_index(Path("videos/"), cache_dir=Path("output"))  # doctest: +SKIP

    ``options`` are those of `build_index`. Of several ranks, one must call it before the others.
    """
    source = Path(source)
    if is_index(source):
        return open_index(source, data_root)
    output = Path(cache_dir) / CACHED_INDEX
    bring_up_to_date(source, output, data_root=data_root, **options)
    return open_index(output)


def bring_up_to_date(source: Path, output: Path, *, data_root: Path | None = None, **options: Any) -> None:
    """Make the index ``output`` of ``source`` (options as in `build_index`), unless it lists the same files already."""
    if not _is_current(source, output, data_root):
        report = build_index(source, output, data_root=data_root, **options)
        log.info("indexed %s: %s", source, report.sentence())


def _place(source: Path, data_root: Path | None) -> dict[str, Any]:
    """What the header of an index says of its source, as far as no list must be read for it."""
    found = source.stat()
    return {
        "data_root": os.path.abspath(data_root if data_root is not None else default_data_root(source)),
        "source": os.path.abspath(source),
        "source_state": [] if source.is_dir() else [found.st_size, found.st_mtime_ns],
    }


def _survey(source: Path, data_root: Path | None) -> dict[str, Any]:
    """All that the header says of its source: equal where it lists the same files. Constant memory."""
    num_entries = paths_sum = 0
    for entry in iterate_entries(source, data_root):
        num_entries += 1
        paths_sum = (paths_sum + hash_of_path(entry.path)) % (1 << 64)
    return _place(source, data_root) | {"num_entries": num_entries, "paths_sum": paths_sum}


def _is_current(source: Path, output: Path, data_root: Path | None) -> bool:
    """Whether the index ``output`` still lists the files of ``source``. No video and no unchanged list is read."""
    index = _open_usable(output)
    if index is None or not source.exists() or not _place(source, data_root).items() <= index.header.items():
        return False
    return not source.is_dir() or _survey(source, data_root).items() <= index.header.items()


def _open_usable(file: Path) -> VideoIndex | None:
    """The index at ``file``; None where there is none, or one that this version cannot read."""
    if not is_index(file):
        return None
    try:
        return open_index(file)
    except UserError:
        return None


def _check_output(source: Path, output: Path) -> None:
    if output.is_dir():
        raise UserError(f"the output {output} is a folder; give the name of the index file to write")
    if output.exists() and not is_index(output):
        raise UserError(f"{output} exists and is not an index; it is not overwritten: give another name with -o")
    if source.exists() and output.exists() and source.samefile(output):
        raise UserError(f"{source} is itself an index; give the folder or annotation file it was made from")
    if output.exists() and _open_usable(output) is None:
        log.warning("the index %s is broken or of another version of tinyvae; it is made again", output)


def _known_row(path: str, known: list[VideoIndex], thorough: bool) -> IndexRow | None:
    """The newest good row of this path. Bad files are always probed again: storage has bad days."""
    for index in known:
        number = index.find(path)
        if number is not None and (row := index.row(number)).ok and row.thorough >= thorough:
            return row
    return None


class ProbeTask(NamedTuple):
    """One file to look at, and what an earlier index says of it if it was good then."""

    entry: VideoEntry
    full_path: str
    known: IndexRow | None


def _row_of(task: ProbeTask, *, probe: Probe, timeout_s: float, thorough: bool) -> tuple[IndexRow, bool]:
    """The row of one file, and whether it was probed. A file as it was when it was last found good is not opened."""
    row = IndexRow(path=task.entry.path, split=task.entry.split)
    try:
        found = os.stat(task.full_path)
        row = replace(row, file_bytes=found.st_size, mtime_ns=found.st_mtime_ns)
        known = task.known
        if known is not None and (known.file_bytes, known.mtime_ns) == (row.file_bytes, row.mtime_ns):
            return replace(known, split=row.split), False
        info = vars(probe(Path(task.full_path), timeout_s=timeout_s, thorough=thorough)).copy()
        info |= {"path": row.path, "ends_crc": info["ends_crc"] or 0}
        return replace(row, thorough=thorough, **info), True
    except FileNotFoundError:
        reason = "the file is not there"
    except UnreadableVideoError as refused:
        reason = refused.reason
    except OSError as failed:
        reason = f"cannot be read: {failed.strerror or failed}"
    return replace(row, reason=reason), True


Look = Callable[[ProbeTask], tuple[IndexRow, bool]]


def _probe_all(
    tasks: Iterable[ProbeTask], look: Look, num_workers: int, timeout_s: float
) -> Iterator[tuple[IndexRow, bool]]:
    """What ``look`` finds for every task, in whatever order. A process that is far behind its deadline is killed."""
    if num_workers == 0:
        yield from map(look, tasks)
        return
    stream = iter(tasks)
    pool = _new_pool(num_workers)
    pending: dict[concurrent.futures.Future[list[tuple[IndexRow, bool]]], list[ProbeTask]] = {}
    try:
        while True:
            while len(pending) < num_workers * BATCHES_AHEAD and (batch := list(islice(stream, BATCH))):
                pending[pool.submit(_look_at_batch, look, batch)] = batch
            if not pending:
                return
            done, _ = concurrent.futures.wait(
                pending, timeout=BATCH * timeout_s + GRACE_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            broken = not done
            for future in done:
                try:
                    yield from future.result()
                    del pending[future]
                except BrokenProcessPool:
                    broken = True
            if broken:
                _kill(pool)
                for batch in pending.values():
                    yield from (_probe_alone(task, look, timeout_s + GRACE_S) for task in batch)
                pending.clear()
                pool = _new_pool(num_workers)
    finally:
        _kill(pool)


def _look_at_batch(look: Look, batch: Sequence[ProbeTask]) -> list[tuple[IndexRow, bool]]:
    return [look(task) for task in batch]


def _probe_alone(task: ProbeTask, look: Look, limit_s: float) -> tuple[IndexRow, bool]:
    """In a process of its own, so that the file at fault is known."""
    pool = _new_pool(1)
    try:
        return pool.submit(look, task).result(timeout=limit_s)
    except BrokenProcessPool:
        reason = "the decoder crashed on this file"
    except concurrent.futures.TimeoutError:
        reason = f"probing did not end within {limit_s:.0f} s"
    finally:
        _kill(pool)
    return IndexRow(path=task.entry.path, split=task.entry.split, reason=reason), True


def _new_pool(num_workers: int) -> concurrent.futures.ProcessPoolExecutor:
    """Fork is quick and needs no importable main module. Where CUDA is in use, a fork may not use it; these do not, as
    loader workers do not. (A fresh process would import torch again: 35 s instead of 2 for 110 files on two cores.)"""
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    return concurrent.futures.ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_prober)


def _start_prober() -> None:
    gc.freeze()  # a fork frees nothing that it inherited: see `workers.start_worker`
    import torch

    torch.set_num_threads(1)


def _kill(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Stop the pool without waiting for a process that may never answer."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def usable_cores() -> int:
    """The cores that this process may run on; all of the machine's where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
