"""Probing many files in parallel processes, such that no file can stop or hang the rest.

Each task looks at the file's size and time first: a file that is as it was when it was last found good is not opened.
A file that kills its process, or that outlasts every deadline, is found by probing its batch again one file at a time
in a process of its own, and becomes a bad file like any other.
"""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import BaseContext
from pathlib import Path

from tinyvae.errors import UserError
from tinyvae.video.decode import VideoInfo

BATCH = 8
BATCHES_AHEAD = 4
GRACE_S = 30.0
"""How much longer than its files' deadlines together a batch may take before its process is killed."""

Probe = Callable[..., VideoInfo]
"""Called with the file's path alone."""


@dataclass(frozen=True, kw_only=True)
class ProbeTask:
    """One file to look at. ``known_*`` is what an earlier index says of a good file, -1 where nothing is known."""

    number: int
    full_path: str
    known_bytes: int = -1
    known_mtime_ns: int = -1


@dataclass(frozen=True, kw_only=True)
class ProbeOutcome:
    """Exactly one of: ``unchanged``, ``info``, ``reason``."""

    number: int
    unchanged: bool = False
    info: VideoInfo | None = None
    reason: str = ""
    file_bytes: int = -1
    mtime_ns: int = -1


def probe_all(
    tasks: Iterable[ProbeTask],
    *,
    num_workers: int,
    timeout_s: float,
    probe: Probe,
    grace_s: float = GRACE_S,
) -> Iterator[ProbeOutcome]:
    """Every task's outcome, in whatever order they come. ``num_workers=0`` probes in this process.

    ``probe`` shall keep the deadline ``timeout_s`` itself; a process that passes it by far is killed.
    """
    if num_workers == 0:
        for task in tasks:
            yield probe_one(task, probe)
        return
    stream = iter(tasks)
    pool = _new_pool(num_workers)
    pending: dict[concurrent.futures.Future[list[ProbeOutcome]], list[ProbeTask]] = {}
    try:
        while True:
            while len(pending) < num_workers * BATCHES_AHEAD and (batch := list(islice(stream, BATCH))):
                pending[pool.submit(_probe_batch, batch, probe)] = batch
            if not pending:
                return
            done, _ = concurrent.futures.wait(
                pending, timeout=BATCH * timeout_s + grace_s, return_when=concurrent.futures.FIRST_COMPLETED
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
                    yield from _probe_apart(batch, timeout_s, probe, grace_s)
                pending.clear()
                pool = _new_pool(num_workers)
    finally:
        _kill(pool)


def probe_one(task: ProbeTask, probe: Probe) -> ProbeOutcome:
    """Look at one file. Only errors of the file become a reason; our own bugs pass through."""
    number, path = task.number, task.full_path
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ProbeOutcome(number=number, reason="the file is not there")
    except OSError as failed:
        return ProbeOutcome(number=number, reason=f"cannot be read: {failed.strerror or failed}")
    size, mtime_ns = found.st_size, found.st_mtime_ns
    if (size, mtime_ns) == (task.known_bytes, task.known_mtime_ns):
        return ProbeOutcome(number=number, unchanged=True)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise UserError("not a file")
        return ProbeOutcome(number=number, info=probe(Path(path)), file_bytes=size, mtime_ns=mtime_ns)
    except UserError as refused:
        reason = str(refused).removeprefix(f"{path}: ")
    except OSError as failed:
        reason = f"cannot be read: {failed.strerror or failed}"
    return ProbeOutcome(number=number, reason=reason, file_bytes=size, mtime_ns=mtime_ns)


def _probe_batch(batch: Sequence[ProbeTask], probe: Probe) -> list[ProbeOutcome]:
    return [probe_one(task, probe) for task in batch]


def _probe_apart(batch: Sequence[ProbeTask], timeout_s: float, probe: Probe, grace_s: float) -> Iterator[ProbeOutcome]:
    """Each file in a process of its own, so that the one at fault is known."""
    for task in batch:
        pool = _new_pool(1)
        try:
            yield from pool.submit(_probe_batch, [task], probe).result(timeout=timeout_s + grace_s)
        except BrokenProcessPool:
            yield ProbeOutcome(number=task.number, reason="the decoder crashed on this file")
        except concurrent.futures.TimeoutError:
            yield ProbeOutcome(number=task.number, reason=f"probing did not end within {timeout_s + grace_s:.0f} s")
        finally:
            _kill(pool)


def _new_pool(num_workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(num_workers, mp_context=start_context(), initializer=_one_thread)


def start_context() -> BaseContext:
    """Fork is quick and needs no importable main module; with CUDA already in use it is not allowed."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")


def usable_cores() -> int:
    """The cores that this process may run on; all of the machine's where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_thread() -> None:
    gc.freeze()  # a fork frees nothing that it inherited: see `worker_process.start_worker`
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
