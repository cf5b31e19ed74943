"""Building or updating an index: list the source, probe what is new, and keep what is known.

The source is read twice: once to check every entry and to count (so that a wrong path ends the build in seconds, and
the progress bar knows its end), once to probe. A second build over the same output probes only files that are new,
have another size or time, or were bad before. A killed build goes on where it was.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyvae.data.annotations import RootGuard, VideoEntry, default_data_root, iterate_entries
from tinyvae.data.index import STATUS_BAD, STATUS_OK, IndexRow, VideoIndex, hash_of_path, is_index, open_index
from tinyvae.data.index_writer import IndexJournal, IndexRecord
from tinyvae.data.probe_pool import Probe, ProbeOutcome, ProbeTask, probe_all, usable_cores
from tinyvae.errors import MissingFileError, UserError
from tinyvae.terminal import progress_bar
from tinyvae.video.decode import probe_video

log = logging.getLogger(__name__)

HASH_SPACE = 1 << 64
CACHED_INDEX = "data_index.tvi"


@dataclass(frozen=True, kw_only=True)
class SourceSurvey:
    """What tells whether a source still lists the same files: how many, and the sum of their path hashes."""

    num_entries: int
    paths_sum: int


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What a build did."""

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


def survey_source(source: Path, data_root: Path | None) -> SourceSurvey:
    """Read the whole source once, in constant memory; a wrong entry raises here."""
    count = 0
    paths_sum = 0
    for entry in iterate_entries(source, data_root):
        count += 1
        paths_sum = (paths_sum + hash_of_path(entry.path)) % HASH_SPACE
    return SourceSurvey(num_entries=count, paths_sum=paths_sum)


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

    Args:
        source: folder tree, JSONL file or annotation JSON.
        output: the index file; an index already there is updated and replaced at once at the end.
        data_root: folder that relative paths start from; default: the tree itself, or the annotation file's folder.
        num_workers: probing processes; default: one per CPU core, 0 probes in this process.
        timeout_s: deadline for each file.
        thorough: decode every frame of every file, so that damage is found now; else packets are read and one frame
            is decoded, and damage in the middle of a file is found (and counted) when it is read.
        probe: what looks at one file.
    """
    started = time.monotonic()
    source, output = Path(source), Path(output)
    _refuse_useless_output(source, output)
    survey = survey_source(source, data_root)
    if survey.num_entries == 0:
        raise UserError(f"{source} lists no video file; give a folder or an annotation file with at least one")
    root = RootGuard(data_root if data_root is not None else default_data_root(source)).root
    journal = IndexJournal(output)
    known = [index for index in (journal.resumed, open_index(output) if is_index(output) else None) if index]
    workers = usable_cores() if num_workers is None else num_workers
    counts = {"probed": 0, "reused": 0}
    try:
        waiting: dict[int, tuple[VideoEntry, IndexRow | None]] = {}
        tasks = _tasks(iterate_entries(source, data_root), root, known, thorough, waiting)
        look = functools.partial(probe, timeout_s=timeout_s, thorough=thorough)
        outcomes = probe_all(tasks, num_workers=workers, timeout_s=timeout_s, probe=look)
        with progress_bar(
            total=survey.num_entries, unit="file", desc="indexing", disable=not show_progress_bar, smoothing=0.05
        ) as bar:
            for outcome in outcomes:
                entry, row = waiting.pop(outcome.number)
                journal.append(_record(entry, row, outcome, thorough))
                counts["reused" if outcome.unchanged else "probed"] += 1
                bar.update()
    except BaseException:
        journal.close()
        raise
    written = journal.finish(_header(source, root, survey))
    return BuildReport(
        index=open_index(output),
        num_probed=counts["probed"],
        num_reused=counts["reused"],
        num_duplicates=written.num_duplicates,
        seconds=time.monotonic() - started,
    )


def open_or_build_index(
    source: Path,
    *,
    data_root: Path | None = None,
    cache_dir: Path,
    is_main: bool = True,
    barrier: Callable[[], None] = lambda: None,
    num_workers: int | None = None,
    timeout_s: float = 30.0,
    show_progress_bar: bool = True,
) -> VideoIndex:
    """The index of ``source``: itself when it is an index, else ``cache_dir/data_index.tvi``, built where needed.

    The main rank alone lists and probes; all ranks then meet at ``barrier`` and open the file. The index is built
    again when the source lists other files than before (an annotation file that has not changed is not read again).
    For large data run ``tinyvae data index`` first: ranks wait at the barrier no longer than the process group's
    timeout.
    """
    source = Path(source)
    if is_index(source):
        return open_index(source, data_root)
    output = Path(cache_dir) / CACHED_INDEX
    if is_main:
        try:
            bring_up_to_date(
                source,
                output,
                data_root=data_root,
                num_workers=num_workers,
                timeout_s=timeout_s,
                show_progress_bar=show_progress_bar,
            )
        except BaseException:
            # The others wait at the barrier; without this call they would wait until the group's timeout.
            # They must not go on with an index that is not the one asked for.
            _mark_failed(output)
            barrier()
            raise
        _failed_mark(output).unlink(missing_ok=True)
    barrier()
    if _failed_mark(output).exists():
        raise UserError(f"the main process could not index {source}; its own message says why")
    try:
        return open_index(output)
    except MissingFileError:
        raise UserError(
            f"the index {output} that the main process wrote is not visible here; "
            "the folder for it must be on storage that all machines share"
        ) from None


def bring_up_to_date(
    source: Path,
    output: Path,
    *,
    data_root: Path | None = None,
    num_workers: int | None = None,
    timeout_s: float = 30.0,
    show_progress_bar: bool = True,
) -> None:
    """Make the index ``output`` of ``source``, where it is not there or lists other files."""
    if _is_current(source, output, data_root):
        return
    report = build_index(
        source,
        output,
        data_root=data_root,
        num_workers=num_workers,
        timeout_s=timeout_s,
        show_progress_bar=show_progress_bar,
    )
    log.info("indexed %s: %s", source, report.sentence())


def _tasks(
    entries: Iterator[VideoEntry],
    root: str,
    known: list[VideoIndex],
    thorough: bool,
    waiting: dict[int, tuple[VideoEntry, IndexRow | None]],
) -> Iterator[ProbeTask]:
    for number, entry in enumerate(entries):
        row = _known_row(entry.path, known, thorough)
        waiting[number] = (entry, row)
        yield ProbeTask(
            number=number,
            full_path=os.path.join(root, entry.path),
            known_bytes=-1 if row is None else row.file_bytes,
            known_mtime_ns=-1 if row is None else row.mtime_ns,
        )


def _known_row(path: str, known: list[VideoIndex], thorough: bool) -> IndexRow | None:
    """The newest good row of this path. Bad files are always probed again: storage has bad days."""
    for index in known:
        number = index.find(path)
        if number is not None and (row := index.row(number)).ok and row.thorough >= thorough:
            return row
    return None


def _record(entry: VideoEntry, row: IndexRow | None, outcome: ProbeOutcome, thorough: bool) -> IndexRecord:
    if outcome.unchanged:
        assert row is not None, "only a known file can be unchanged"
        fields = {name: getattr(row, name) for name in IndexRecord.__dataclass_fields__}
        return replace(IndexRecord(**fields), split=entry.split)
    bad = IndexRecord(
        path=entry.path,
        split=entry.split,
        status=STATUS_BAD,
        reason=outcome.reason,
        file_bytes=outcome.file_bytes,
        mtime_ns=outcome.mtime_ns,
    )
    if outcome.info is None:
        return bad
    info = outcome.info
    return replace(
        bad,
        status=STATUS_OK,
        frames=info.frames,
        fps=info.fps,
        width=info.width,
        height=info.height,
        codec=info.codec,
        interlaced=info.interlaced,
        ends_crc=info.ends_crc or 0,
        first_pts=info.first_pts,
        pts_step=info.pts_step,
        pixel_aspect=info.pixel_aspect,
        thorough=thorough,
    )


def _header(source: Path, root: str, survey: SourceSurvey) -> dict[str, Any]:
    found = source.stat()
    return {
        "data_root": root,
        "source": os.path.abspath(source),
        "source_bytes": -1 if source.is_dir() else found.st_size,
        "source_mtime_ns": -1 if source.is_dir() else found.st_mtime_ns,
        "num_entries": survey.num_entries,
        "paths_sum": survey.paths_sum,
    }


def _is_current(source: Path, output: Path, data_root: Path | None) -> bool:
    """Whether the index at ``output`` still stands for ``source``, without looking at any video."""
    if not is_index(output):
        return False
    header = open_index(output).header
    root = RootGuard(data_root if data_root is not None else default_data_root(source)).root
    if not source.exists() or header["source"] != os.path.abspath(source) or header["data_root"] != root:
        return False
    if not source.is_dir():
        found = source.stat()
        return bool((header["source_bytes"], header["source_mtime_ns"]) == (found.st_size, found.st_mtime_ns))
    survey = survey_source(source, data_root)
    return bool((header["num_entries"], header["paths_sum"]) == (survey.num_entries, survey.paths_sum))


def _refuse_useless_output(source: Path, output: Path) -> None:
    if output.is_dir():
        raise UserError(f"the output {output} is a folder; give the name of the index file to write")
    if output.exists() and not is_index(output):
        raise UserError(f"{output} exists and is not an index; it is not overwritten: give another name with -o")
    if source.exists() and output.exists() and source.samefile(output):
        raise UserError(f"{source} is itself an index; give the folder or annotation file it was made from")


def _failed_mark(output: Path) -> Path:
    return output.with_name(output.name + ".failed")


def _mark_failed(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    _failed_mark(output).touch()
