"""Checkpoints that nobody can half-write.

A checkpoint is a folder. It is written under another name, every file is synced, a manifest with sizes and hashes is
written last, and one rename makes it appear. Whoever reads one checks it against its manifest first; a folder that
fails is never chosen.

  checkpoint-STEP/  model.safetensors, config.json  the model to use (averaged weights where there are any)
                    training_state.pt               what all ranks share: weights, optimiser, progress, ...
                    rank_00000.pt ...               what each rank has of its own: random numbers, replay buffer
                    manifest.json                   sizes and hashes of all of it
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
from safetensors import SafetensorError

from tinyvae import __version__
from tinyvae.errors import MissingFileError, UserError
from tinyvae.terminal import bytes_in_words
from tinyvae.training.engine import Engine

log = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "manifest.json"
SHARED_STATE = "training_state.pt"
REPLACED = ".replaced"
NAME = re.compile(r"(emergency_)?checkpoint-(\d+)(\.replaced)?")
UNFINISHED = ".unfinished-"
MAX_FAILED_SAVES = 3

WRITE_FAULTS = (OSError, RuntimeError, SafetensorError)
"""How a full or read-only disk shows: torch.save and safetensors report it in ways of their own."""

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
LITTLE_ROOM = 1 << 20
"""Bytes of free space below which a write that failed for no stated reason failed for want of space."""

FileFacts = dict[str, Any]
"""``bytes`` and ``sha256`` of one file."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """One folder that looks like a checkpoint."""

    folder: Path
    step: int
    is_emergency: bool
    written_at: str  # ISO time from the manifest; the folder's own where that is damaged

    @property
    def age_key(self) -> tuple[str, int, bool]:
        """Sorts from oldest to newest."""
        return (self.written_at, self.step, self.is_emergency)


def why_not_written(fault: BaseException, folder: Path, *, needed_bytes: int | None = None) -> str:
    """Why a write into ``folder`` failed, in the system's words. Of a full disk: how much is free, and needed.

    Ask at once, while what was written so far is still there: torch.save says of a full disk only that it is at an
    "unexpected pos", and then the free space tells.
    """
    found: BaseException | None = fault
    while found is not None and not (isinstance(found, OSError) and found.errno):
        found = found.__cause__ or found.__context__
    said = (str(fault) or type(fault).__name__).splitlines()[0]
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return said
    number = found.errno if isinstance(found, OSError) else None
    if number is None and (free < LITTLE_ROOM or "os error 28" in said or "No space left" in said):
        number = errno.ENOSPC
    if number not in FULL_DISK_ERRORS:
        return said if number is None else os.strerror(number)
    needed = "" if needed_bytes is None else f", about {bytes_in_words(needed_bytes)} needed"
    return f"{os.strerror(number)}: {bytes_in_words(free)} free in {folder}{needed}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


class CheckpointWriter:
    """Writes the checkpoints of one run; a failed save is survived, three in a row are not."""

    def __init__(self, run_folder: Path, engine: Engine, *, keep: int | None, needed_bytes: int | None = None) -> None:
        """``needed_bytes``: about how large one checkpoint is, for the words about a full disk."""
        self.run_folder = run_folder
        self._engine = engine
        self._keep = keep
        self._needed_bytes = needed_bytes
        self._failed_in_a_row = 0

    def save(
        self,
        *,
        step: int,
        emergency: bool,
        shared_state: Callable[[], Mapping[str, Any]],
        rank_state: Mapping[str, Any],
        write_model: Callable[[Path], None],
        facts: Mapping[str, Any],
        best_step: int | None,
    ) -> Path | None:
        """Write one checkpoint, all ranks together; its folder, or None where the save failed.

        ``shared_state`` and ``write_model`` are called on the main process only.
        """
        engine = self._engine
        name = f"{'emergency_' if emergency else ''}checkpoint-{step}"
        folder, unfinished = self.run_folder / name, self.run_folder / f"{UNFINISHED}{name}"
        fault, _ = self._attempt(lambda: _make_empty(unfinished) if engine.is_main else None)
        if fault is None:
            fault, written = self._attempt(lambda: _write_state(unfinished / rank_file(engine.rank), rank_state))
        if fault is None:
            engine.save_collective(unfinished)
            hashed = {rank_file(rank): facts for rank, facts in enumerate(written) if facts is not None}

            def finish() -> None:
                hashed[SHARED_STATE] = _write_state(unfinished / SHARED_STATE, shared_state())
                write_model(unfinished)
                _write_manifest(unfinished, facts, hashed)
                _appear(unfinished, folder)

            fault, _ = self._attempt(lambda: finish() if engine.is_main else None)
        if fault is not None:
            self._failed(name, unfinished, fault)
            return None
        self._failed_in_a_row = 0
        if engine.is_main:
            log.info("saved %s", folder)
            try:
                remove_old(self.run_folder, keep=self._keep, best_step=best_step)
            except OSError as reason:
                log.warning("could not remove an old checkpoint: %s", reason)
        return folder

    def _attempt(self, write: Callable[[], T]) -> tuple[str | None, list[T | None]]:
        """Run a local write: the first reason that any rank gives for failing, and what each rank's write returned.

        The same on all ranks.
        """
        fault, result = None, None
        try:
            result = write()
        except WRITE_FAULTS as reason:
            told = why_not_written(reason, self.run_folder, needed_bytes=self._needed_bytes)
            fault = f"process {self._engine.rank}: {told}" if self._engine.many else told
        everybody = self._engine.gather((fault, result))
        return next((reason for reason, _ in everybody if reason), None), [result for _, result in everybody]

    def _failed(self, name: str, unfinished: Path, fault: str) -> None:
        self._failed_in_a_row += 1
        if self._engine.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            is_last = self._failed_in_a_row >= MAX_FAILED_SAVES
            log.error(
                "COULD NOT SAVE %s (%s). Earlier checkpoints are untouched; the %s (%d of %d).",
                name,
                fault,
                "run stops" if is_last else "next save will try again",
                self._failed_in_a_row,
                MAX_FAILED_SAVES,
            )
        if self._failed_in_a_row >= MAX_FAILED_SAVES:
            raise UserError(
                f"{MAX_FAILED_SAVES} saves in a row failed, the last because of: {fault}. The run stops rather than "
                f"compute what cannot be kept; free space in {self.run_folder} and go on with --resume latest."
            )


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


class _HashingStream:
    """A file open for writing that hashes what goes through: the hash is of what was meant, not of what arrived."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()


def _write_state(file: Path, state: Mapping[str, Any]) -> FileFacts:
    file.parent.mkdir(exist_ok=True)  # on another machine the main process's folder may not show yet
    with file.open("wb") as stream:
        hashing = _HashingStream(stream)
        torch.save(dict(state), cast(IO[bytes], hashing))
        stream.flush()
        os.fsync(stream.fileno())
        return {"bytes": stream.tell(), "sha256": hashing.sha256.hexdigest()}


def _write_manifest(folder: Path, facts: Mapping[str, Any], hashed: Mapping[str, FileFacts]) -> None:
    """``hashed``: files whose facts their writers know. All others in the folder are synced and hashed here."""
    listed = dict(hashed)
    for name, known in hashed.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != known["bytes"]:
            raise OSError(
                f"{file} is not as its process wrote it; the folder must be on storage that all machines share"
            )
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        name = str(file.relative_to(folder))
        if name not in listed:
            with file.open("rb") as stream:  # what a library wrote may still be in the page cache only
                os.fsync(stream.fileno())
            listed[name] = {"bytes": file.stat().st_size, "sha256": _hash(file)}
    written = {"tinyvae_version": __version__, "written_at": _next_time(folder.parent)}
    manifest = {**facts, **written, "files": dict(sorted(listed.items()))}
    with (folder / MANIFEST).open("w") as stream:
        json.dump({**manifest, "own_sha256": _hash_of_json(manifest)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(folder)


def _next_time(run_folder: Path) -> str:
    """Now, or just after the newest checkpoint where this machine's clock is behind the one that wrote it."""
    now = datetime.now(UTC)
    newest = max((info.written_at for info in list_checkpoints(run_folder)), default="")
    if newest:
        now = max(now, datetime.fromisoformat(newest) + timedelta(microseconds=1))
    return now.isoformat(timespec="microseconds")


def _appear(unfinished: Path, folder: Path) -> None:
    """Give a whole checkpoint its name. One of the same step (a signal after a resume) stays until this is there."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        if replaced.exists():
            _remove(replaced)
        folder.rename(replaced)
    unfinished.rename(folder)
    _sync_folder(folder.parent)
    if replaced.exists():
        _remove(replaced)


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_of_json(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# reading


def list_checkpoints(run_folder: Path) -> list[CheckpointInfo]:
    """The checkpoints of a run folder, oldest first; whether they are intact is not looked at."""
    if not run_folder.is_dir():
        return []
    found = []
    for folder in run_folder.iterdir():
        match = NAME.fullmatch(folder.name)
        if match and folder.is_dir():
            manifest = _manifest_or_none(folder)
            changed = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(timespec="microseconds")
            info = CheckpointInfo(
                folder=folder,
                step=int(match.group(2)),
                is_emergency=match.group(1) is not None,
                written_at=changed if manifest is None else manifest["written_at"],
            )
            found.append(info)
    return sorted(found, key=lambda info: info.age_key)


def what_is_broken(folder: Path) -> str | None:
    """None for an intact checkpoint, else what is wrong with it. Reads and hashes every file."""
    manifest = _manifest_or_none(folder)
    if manifest is None:
        return f"{folder} has no readable {MANIFEST}"
    for name, facts in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != facts["bytes"]:
            return f"{file} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        if _hash(file) != facts["sha256"]:
            return f"{file} has other contents than were saved"
    return None


def newest_intact(run_folders: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of several run folders, and what is wrong with each newer one."""
    infos = sorted((info for run in run_folders for info in list_checkpoints(run)), key=lambda info: info.age_key)
    faults: list[str] = []
    for info in reversed(infos):
        fault = what_is_broken(info.folder)
        if fault is None:
            return info.folder, faults
        faults.append(fault)
    return None, faults


def read_manifest(folder: Path) -> dict[str, Any]:
    manifest = _manifest_or_none(folder)
    if manifest is None:
        raise MissingFileError(f"{folder} is not a checkpoint: it has no readable {MANIFEST}.")
    return manifest


def _manifest_or_none(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    own_hash = manifest.pop("own_sha256", None)
    return manifest if own_hash == _hash_of_json(manifest) else None


def read_state(file: Path) -> dict[str, Any]:
    """A state file's contents, on the CPU. Tensors and plain values only: nothing in it can run code."""
    return torch.load(file, map_location="cpu", weights_only=True)


# retention


def remove_old(run_folder: Path, *, keep: int | None, best_step: int | None) -> None:
    """Keep the newest ``keep`` ordinary checkpoints, the one of the best score, and the last emergency one."""
    infos = list_checkpoints(run_folder)
    ordinary = [info for info in infos if not info.is_emergency]
    emergency = [info for info in infos if info.is_emergency]
    surplus = emergency[:-1] + ([] if keep is None else ordinary[: max(0, len(ordinary) - keep)])
    for info in surplus:
        if info.step != best_step or info.is_emergency:
            _remove(info.folder)


def _remove(folder: Path) -> None:
    """Renamed first: a removal that is cut short must not leave a folder that looks like a checkpoint."""
    doomed = folder.with_name(f"{UNFINISHED}removing-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(run_folder: Path) -> None:
    """Clear what killed saves left behind."""
    for replaced in run_folder.glob(f"*{REPLACED}"):
        in_its_place = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if in_its_place.exists():  # by a rename, so it is whole
            _remove(replaced)
        else:
            replaced.rename(in_its_place)
    for folder in run_folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)
