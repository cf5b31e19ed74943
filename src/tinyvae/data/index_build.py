"""Building or updating an index: list the source, probe what is new, and keep what is known.

The source is read twice: once to check its entries (a wrong path or split ends the build in seconds), once to probe,
each file once, however often it is listed. A second build probes only files that are new, changed or were bad. A killed
build continues where it was.

Files are probed in parallel processes, here or on the machines of a Ray cluster. When a process dies or never answers,
each file of its batch is probed again in a process of its own, and the one at fault becomes a bad file.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyvae.data.annotations import VideoEntry, default_data_root, iterate_entries
from tinyvae.data.index import SPLITS, IndexJournal, IndexRow, VideoIndex, hash_of_path, is_index, open_index
from tinyvae.data.ray_cluster import ray_cluster
from tinyvae.errors import UnreadableVideoError, UserError, why_unreadable
from tinyvae.storage import Place, Url, absolute_text, local_file, place_of, version_of
from tinyvae.terminal import count_of, progress_bar
from tinyvae.video.decode import VideoInfo, probe_video

log = logging.getLogger(__name__)

CACHED_INDEX = "data_index.tvi"
BATCH, BATCHES_AHEAD = 8, 4
NOT_THERE = "the file is not there"
GRACE_S = 30.0
"""How much longer than the deadlines of its files together a batch may take before its process is killed."""
START_S = 300.0  # a process that has not started by then never will
FETCH_S = 600.0
"""How much longer a file behind a URL may take: it is fetched first."""

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
        files, num_bad = count_of(len(self.index), "file"), self.index.num_bad
        repeats = f", {self.num_duplicates} listed again" if self.num_duplicates else ""
        return (
            f"{files} in {self.index.file}: {len(self.index) - num_bad} good, {num_bad} bad; {self.num_probed} probed, "
            f"{self.num_reused} known from before{repeats}; {self.seconds:.1f} s"
        )


def build_index(
    source: Place,
    output: Path,
    *,
    data_root: Place | None = None,
    num_workers: int | None = None,
    ray: str | None = None,
    timeout_s: float = 30.0,
    thorough: bool = False,
    show_progress_bar: bool = True,
    probe: Probe = probe_video,
) -> BuildReport:
    """Make or update the index ``output`` of the videos that ``source`` lists.

    >>> print(build_index(Path("videos/"), Path("videos.tvi")).sentence())  # doctest: +SKIP

    Args:
        source: folder tree, JSONL file or annotation JSON; a path or a URL, as is the data root.
        output: the index file; an index already there is updated and replaced at once at the end.
        data_root: folder that relative paths start from; default: the tree itself, or the annotation file's folder.
        num_workers: probing processes; default: one per CPU core, 0 probes in this process.
        ray: address of a Ray cluster that probes (see `ray_cluster`); all its machines must see the files.
        timeout_s: deadline for each file.
        thorough: decode every frame, so that damage in the middle of a file is found now and not when it is read.
        probe: what looks at one file.
    """
    started = time.monotonic()
    source, output = place_of(source), Path(output)
    _check_output(source, output)
    root = place_of(data_root) if data_root is not None else default_data_root(source)
    entries = _entries_of(source, root)
    listed = _read_list(entries())
    if len(listed) == 0:
        raise UserError(f"{source} lists no video file; give a folder or an annotation file with at least one")
    facts, repeats = _survey(source, root, listed), _find_repeats(listed, entries)
    limit_s = timeout_s + FETCH_S if isinstance(root, Url) else timeout_s
    look = functools.partial(_row_of, probe=probe, timeout_s=timeout_s, thorough=thorough)
    probe_all = _probe_all if ray is None else functools.partial(_probe_on_cluster, ray)
    counts: Counter[bool] = Counter()
    with closing(IndexJournal(output)) as journal:
        known = [index for index in (journal.resumed, _open_usable(output)) if index is not None]
        files, num_files = _each_once(entries(), repeats), len(listed) - repeats.total()
        tasks = (ProbeTask(entry, root / entry.path, _known_row(entry.path, known, thorough)) for entry in files)
        with (  # both end here whatever happens: else a failed command waits for all files that it has handed out
            closing(probe_all(tasks, look, num_workers, limit_s)) as rows,
            progress_bar(rows, total=num_files, unit="file", desc="indexing", disable=not show_progress_bar) as bar,
        ):
            for row, is_new in bar:
                journal.append(row)
                counts[is_new] += 1
        journal.finish(facts)
    return BuildReport(
        index=open_index(output),
        num_probed=counts[True],
        num_reused=counts[False],
        num_duplicates=repeats.total(),
        seconds=time.monotonic() - started,
    )


def open_or_build_index(
    source: Place, *, data_root: Place | None = None, cache_dir: Path, **options: Any
) -> VideoIndex:
    """The index of ``source``: itself when it is an index, else ``cache_dir/data_index.tvi``, built where needed.

    >>> index = open_or_build_index(Path("videos/"), cache_dir=Path("output"))  # doctest: +SKIP

    ``options`` are those of `build_index`. Of several ranks, one must call it before the others.
    """
    source = place_of(source)
    if is_index(source):
        return open_index(source, data_root)
    output = Path(cache_dir) / CACHED_INDEX
    bring_up_to_date(source, output, data_root=data_root, **options)
    return open_index(output)


def bring_up_to_date(
    source: Place, output: Path, *, data_root: Place | None = None, keeps_verdicts: bool = False, **options: Any
) -> None:
    """Make the index ``output`` of ``source`` (options as in `build_index`), unless it lists the same files already.

    A bad file that was replaced is looked at again. Not with ``keeps_verdicts``: a run that resumes goes on with the
    files that it began with.
    """
    root = place_of(data_root) if data_root is not None else default_data_root(source)
    if not _is_current(source, output, root, keeps_verdicts):
        report = build_index(source, output, data_root=root, **options)
        log.info("indexed %s: %s", source, report.sentence())


def _entries_of(source: Place, root: Place) -> Callable[[], Iterator[VideoEntry]]:
    """The entries of a source, as often as they are asked for. A folder behind a URL is listed once: that may take
    minutes, and its list is in memory anyway."""
    if isinstance(source, Url) and source.is_dir():
        listed = list(iterate_entries(source, root))
        return lambda: iter(listed)
    return lambda: iterate_entries(source, root)


def _header_place(source: Place, root: Place) -> dict[str, Any]:
    """What the header of an index says of its source, as far as no list must be read for it."""
    state = [] if source.is_dir() else list(version_of(source))
    return {"data_root": absolute_text(root), "source": absolute_text(source), "source_state": state}


def _read_list(entries: Iterator[VideoEntry]) -> npt.NDArray[Any]:
    """The hash of the path and the split of each entry, in 9 bytes."""
    columns = ((hash_of_path(entry.path), SPLITS.index(entry.split)) for entry in entries)
    return np.fromiter(columns, dtype=[("path_hash", "<u8"), ("split", "u1")])


def _survey(source: Place, root: Place, listed: npt.NDArray[Any]) -> dict[str, Any]:
    """All that the header says of its source: equal where it lists the same files."""
    paths_sum = int(listed["path_hash"].sum())  # of 64 bits
    return _header_place(source, root) | {"num_entries": len(listed), "paths_sum": paths_sum}


def _find_repeats(listed: npt.NDArray[Any], entries: Callable[[], Iterator[VideoEntry]]) -> Counter[int]:
    """Hash of the path of each file that is listed several times -> how many entries it has too many."""
    order = np.argsort(listed["path_hash"], kind="stable")
    hashes, splits = listed["path_hash"][order], listed["split"][order]
    is_repeat = hashes[1:] == hashes[:-1]
    for conflict in hashes[1:][is_repeat & (splits[1:] != splits[:-1])]:
        path = next(entry.path for entry in entries() if hash_of_path(entry.path) == conflict)
        raise UserError(
            f"the file {path!r} is listed twice with different splits; "
            "training and validation must not share a file: remove one of the two entries"
        )
    return Counter(hashes[1:][is_repeat].tolist())


def _each_once(entries: Iterator[VideoEntry], repeats: Counter[int]) -> Iterator[VideoEntry]:
    taken: set[int] = set()
    for entry in entries:
        key = hash_of_path(entry.path)
        if key not in taken:
            yield entry
        if key in repeats:
            taken.add(key)


def _is_current(source: Place, output: Path, root: Place, keeps_verdicts: bool) -> bool:
    """Whether the index ``output`` still lists the files of ``source``, and its bad files are still those of then. No
    video and no unchanged list is read."""
    index = _open_usable(output)
    if index is None or not source.exists():
        return False
    facts = _header_place(source, root)
    if source.is_dir():
        facts = _survey(source, root, _read_list(iterate_entries(source, root)))
    if not facts.items() <= index.header.items():
        return False
    return keeps_verdicts or isinstance(root, Url) or not any(_was_replaced(index, row) for row in index.bad_rows())


def _was_replaced(index: VideoIndex, row: IndexRow) -> bool:
    """Whether a bad file is another one now, or is there at last. One that killed its prober has no version: False."""
    if row.file_bytes < 0 and row.reason != NOT_THERE:
        return False
    try:
        return version_of(index.full_path(row)) != index.version(row)
    except OSError:
        return False


def _open_usable(file: Path) -> VideoIndex | None:
    """The index at ``file``; None where there is none, or one that this version cannot read."""
    if not is_index(file):
        return None
    try:
        return open_index(file)
    except UserError:
        return None


def _check_output(source: Place, output: Path) -> None:
    if output.exists() and not is_index(output):
        raise UserError(f"{output} exists and is not an index; it is not overwritten: name another --output")
    if isinstance(source, Path) and source.exists() and output.exists() and source.samefile(output):
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
    place: Place
    known: IndexRow | None


Found = tuple[IndexRow, bool]
"""The row of one file, and whether the file was probed."""
Look = Callable[[ProbeTask], Found]


def _row_of(task: ProbeTask, *, probe: Probe, timeout_s: float, thorough: bool) -> Found:
    """Look at one file. A file that is as it was when it was last found good is not opened."""
    row = IndexRow(path=task.entry.path, split=task.entry.split)
    try:
        version = task.entry.version or version_of(task.place)
        row = replace(row, file_bytes=version.size, mtime_ns=version.tag)
        known = task.known
        if known is not None and (known.file_bytes, known.mtime_ns) == (row.file_bytes, row.mtime_ns):
            return replace(known, split=row.split), False
        file = local_file(task.place, version)
        row = replace(row, file_bytes=file.stat().st_size)  # some storage does not tell it
        info = vars(probe(file, timeout_s=timeout_s, thorough=thorough)).copy()
        info |= {"path": row.path, "ends_crc": info["ends_crc"] or 0}
        return replace(row, thorough=thorough, **info), True
    except FileNotFoundError:
        reason = NOT_THERE
    except (UnreadableVideoError, OSError) as fault:
        reason = why_unreadable(fault)
    return replace(row, reason=reason), True


def _probe_all(
    tasks: Iterable[ProbeTask], look: Look, num_workers: int | None, timeout_s: float
) -> Generator[Found, None, None]:
    """What ``look`` finds for every task, in any order. A process that is far behind its deadline is killed."""
    num_workers = usable_cores() if num_workers is None else num_workers
    if num_workers == 0:
        yield from map(look, tasks)
        return
    stream = iter(tasks)
    pool = _new_pool(num_workers)
    pending: dict[Future[list[Found]], list[ProbeTask]] = {}
    try:
        while True:
            while len(pending) < num_workers * BATCHES_AHEAD and (batch := list(islice(stream, BATCH))):
                pending[_submit(pool, look, batch)] = batch
            if not pending:
                return
            done, _ = wait(pending, timeout=BATCH * timeout_s + GRACE_S, return_when=FIRST_COMPLETED)
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


def _submit(pool: ProcessPoolExecutor, look: Look, batch: list[ProbeTask]) -> Future[list[Found]]:
    """Hand a batch to the pool. If one of its processes has just died, the batch fails like those it had already."""
    try:
        return pool.submit(_look_at_batch, look, batch)
    except BrokenProcessPool as broken:
        failed: Future[list[Found]] = Future()
        failed.set_exception(broken)
        return failed


def _look_at_batch(look: Look, batch: list[ProbeTask]) -> list[Found]:
    return [look(task) for task in batch]


# on a Ray cluster

NumberedBatch = tuple[int, list[ProbeTask]]


def _probe_on_cluster(
    address: str, tasks: Iterable[ProbeTask], look: Look, num_workers: int | None, timeout_s: float
) -> Generator[Found, None, None]:
    """What ``look`` finds for every task, in their order. Batches are finished in any order and wait for their turn."""
    stream = iter(tasks)
    batches = enumerate(iter(lambda: list(islice(stream, BATCH)), []))
    waiting: dict[int, list[Found]] = {}
    due = 0
    with ray_cluster(address, num_workers=num_workers) as cluster:
        in_time = functools.partial(_look_in_time, look, limit_s=BATCH * timeout_s + GRACE_S)
        alone = functools.partial(_look_alone, look, limit_s=timeout_s + GRACE_S)
        for (number, batch), (machine, rows) in cluster.map(in_time, batches, again=alone):
            _check_same_storage(machine, batch, rows, look)
            waiting[number] = rows
            while due in waiting:
                yield from waiting.pop(due)
                due += 1


def _look_in_time(look: Look, numbered: NumberedBatch, *, limit_s: float) -> tuple[str, list[Found]]:
    """The rows of a batch, and which machine found them. A process that hangs ends itself."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        return socket.gethostname(), _look_at_batch(look, numbered[1])
    finally:
        faulthandler.cancel_dump_traceback_later()


def _look_alone(look: Look, numbered: NumberedBatch, *, limit_s: float) -> tuple[str, list[Found]]:
    """The same for a batch that was lost: each file in a process of its own, which is no fork of a process of Ray's."""
    return socket.gethostname(), [_probe_alone(task, look, limit_s, fork=False) for task in numbered[1]]


def _check_same_storage(machine: str, batch: list[ProbeTask], rows: list[Found], look: Look) -> None:
    """Refuse a machine that does not find a file which this one finds."""
    for task, (row, _) in zip(batch, rows, strict=True):
        if row.reason == NOT_THERE and look(task)[0].reason != NOT_THERE:
            raise UserError(
                f"machine {machine} of the Ray cluster does not see {task.place}, and this machine does; --ray "
                "needs the same storage under the same path on all machines"
            )


def _probe_alone(task: ProbeTask, look: Look, limit_s: float, *, fork: bool = True) -> Found:
    """In a process of its own, so that the file at fault is known."""
    pool = _new_pool(1, fork=fork)
    started = pool.submit(os.getpid)  # a fresh process imports torch first: that is not the file's time
    try:
        if not wait([started], START_S).done:
            raise UserError(f"a new process did not start within {START_S:g} s; see what keeps this machine busy.")
        return pool.submit(look, task).result(timeout=limit_s)
    except BrokenProcessPool:
        reason = "the decoder crashed on this file"
    except TimeoutError:
        reason = f"probing did not end within {limit_s:.0f} s"
    finally:
        _kill(pool)
    return IndexRow(path=task.entry.path, split=task.entry.split, reason=reason), True


def _new_pool(num_workers: int, *, fork: bool = True) -> ProcessPoolExecutor:
    """Fork is quick and needs no importable main module. Where CUDA is in use, a fork may not use it; these do not, as
    loader workers do not. (A fresh process would import torch again: 35 s instead of 2 for 110 files on two cores.)"""
    method = "fork" if fork and "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    return ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_prober)


def _start_prober() -> None:
    gc.freeze()  # a fork frees nothing that it inherited: see `workers.start_worker`
    import torch

    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a process of the pool"
    threading.Thread(target=_end_after, args=(parent.pid,), daemon=True).start()


def _end_after(parent: int | None) -> None:
    """End this process once its parent is gone: one that was killed could not stop it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _kill(pool: ProcessPoolExecutor) -> None:
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
