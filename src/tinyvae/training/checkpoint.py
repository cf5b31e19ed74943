"""Checkpoints that are complete or not there.

The run writes the folder under another name and syncs every file. The manifest with sizes and hashes comes last, then
one rename gives the folder its name. Readers check every file against the manifest first.

  checkpoint-STEP/  model.safetensors, config.json  the model to use (averaged weights where there are any)
                    training_state.pt               what all ranks share: weights, optimizer, progress, ...
                    rank_00000.pt ...               what each rank has of its own: random numbers, replay buffer
                    manifest.json                   sizes and hashes of all of it
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from safetensors import SafetensorError

from tinyvae import __version__
from tinyvae.config.schema import TrainConfig
from tinyvae.errors import UserError
from tinyvae.files import atomic_write, sha256_of, why_not_written
from tinyvae.training.engine import Engine

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SHARED_STATE = "training_state.pt"
REPLACED = ".replaced"
NAME = re.compile(r"(emergency_)?checkpoint-(\d+)(\.replaced)?")
UNFINISHED = ".unfinished-"
MAX_FAILED_SAVES = 3

WRITE_FAULTS = (OSError, RuntimeError, SafetensorError)  # torch.save and safetensors have errors of their own


class CheckpointInfo(NamedTuple):
    """One folder that looks like a checkpoint; sorts from oldest to newest."""

    written_at: str  # ISO time of the manifest; of the folder if the manifest is damaged
    step: int
    is_emergency: bool
    folder: Path


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def state_bytes(config: TrainConfig) -> tuple[int, int]:
    """float32 bytes of the student's weights, and of Seraena's discriminator (0 without one). Allocates nothing."""
    from tinyvae.losses.seraena.discriminator import SeraenaDiscriminator
    from tinyvae.models.taehv import TAEHV

    with torch.device("meta"):
        student = TAEHV.of(config.spec)
        judge = SeraenaDiscriminator(3 * config.n_seraena_frames, config.spec.latent_channels)
    weights, discriminator = (4 * sum(p.numel() for p in network.parameters()) for network in (student, judge))
    return weights, discriminator if config.use_seraena else 0


def checkpoint_bytes(config: TrainConfig, processes: int) -> int:
    """Bytes of one checkpoint at most: weights, moments, average, the model to use, Seraena with its buffers."""
    weights, discriminator = state_bytes(config)
    total = weights * (2 + 2 + (1 if config.ema_decay > 0 else 0))  # both models, both moments, the average
    if config.use_seraena:
        total += 3 * discriminator + processes * config.seraena_buffer_mb * 2**20
    return total


class _SaveFailed(Exception):  # noqa: N818 (all ranks raise it together)
    """Why a checkpoint could not be written."""


class CheckpointWriter:
    """Writes the checkpoints of one run. The run survives failed saves, except three in a row.

    ``keep``: how many ordinary checkpoints stay; None keeps all. ``needed_bytes``: size of one, for the message.
    """

    def __init__(self, run_folder: Path, engine: Engine, *, keep: int | None, needed_bytes: int | None = None) -> None:
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
        facts: Callable[[], Mapping[str, Any]],
        best_step: int | None,
    ) -> Path | None:
        """Write one checkpoint, all ranks together; return its folder, or None if the save failed.

        Only the main process calls ``shared_state``, ``write_model`` and ``facts`` (what the manifest says of the run).
        """
        engine = self._engine
        name = f"{'emergency_' if emergency else ''}checkpoint-{step}"
        folder, unfinished = self.run_folder / name, self.run_folder / f"{UNFINISHED}{name}"

        def begin() -> None:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

        def finish() -> None:
            hashed = {rank_file(rank): entry for rank, entry in enumerate(of_ranks)}
            hashed[SHARED_STATE] = _write_state(unfinished / SHARED_STATE, shared_state())
            write_model(unfinished)
            _write_manifest(unfinished, facts(), hashed)
            _publish(unfinished, folder)

        try:
            self._attempt(lambda: begin() if engine.is_main else None)
            of_ranks = self._attempt(lambda: _write_state(unfinished / rank_file(engine.rank), rank_state))
            engine.save_collective()
            self._attempt(lambda: finish() if engine.is_main else None)
        except _SaveFailed as fault:
            self._count_failure(name, unfinished, fault)
            return None
        self._failed_in_a_row = 0
        if engine.is_main:
            log.info("saved %s", folder)
            try:
                remove_old(self.run_folder, keep=self._keep, best_step=best_step)
            except OSError as reason:
                log.warning("could not remove an old checkpoint: %s", reason)
        return folder

    def _attempt(self, write: Callable[[], Any]) -> list[Any]:
        """Run a local write on every rank; return what each write returned. One that fails makes all ranks raise."""
        fault, result = None, None
        try:
            result = write()
        except WRITE_FAULTS as reason:
            told = why_not_written(reason, self.run_folder, needed_bytes=self._needed_bytes)
            fault = f"process {self._engine.rank}: {told}" if self._engine.many else told
        everybody = self._engine.gather((fault, result))
        for why, _ in everybody:
            if why is not None:
                raise _SaveFailed(why)
        return [result for _, result in everybody]

    def _count_failure(self, name: str, unfinished: Path, fault: _SaveFailed) -> None:
        self._failed_in_a_row += 1
        is_last = self._failed_in_a_row >= MAX_FAILED_SAVES
        if self._engine.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            then = "run stops" if is_last else "next save will try again"
            then += f" ({self._failed_in_a_row} of {MAX_FAILED_SAVES})"
            log.error("COULD NOT SAVE %s (%s). Earlier checkpoints are untouched; the %s.", name, fault, then)
        if is_last:
            failed = f"{MAX_FAILED_SAVES} saves in a row failed, the last because of: {fault}"
            raise UserError(f"{failed}; free space in {self.run_folder} and go on with --resume latest.")


class _HashingStream:
    """Hashes what is written through it, so that a file need not be read again and a bad write is seen."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.sha256.update(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()


def _write_state(file: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state file; return its manifest entry (``bytes`` and ``sha256``)."""
    file.parent.mkdir(exist_ok=True)  # on another machine the main process's folder may not show yet
    with file.open("wb") as stream:
        hashing = _HashingStream(stream)
        torch.save(dict(state), cast(IO[bytes], hashing))
        stream.flush()
        os.fsync(stream.fileno())
        return {"bytes": stream.tell(), "sha256": hashing.sha256.hexdigest()}


def _write_manifest(folder: Path, facts: Mapping[str, Any], hashed: Mapping[str, dict[str, Any]]) -> None:
    """``hashed``: the entries that the writers of these files know. All other files are synced and hashed here."""
    files = dict(hashed)
    for name, entry in hashed.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise OSError(f"{file} is not as its process wrote it; all machines must share the storage of the run")
    for file in (file for file in folder.rglob("*") if file.is_file()):
        name = str(file.relative_to(folder))
        if name not in files:
            with file.open("rb") as stream:  # the library that wrote it may not have synced it
                os.fsync(stream.fileno())
            files[name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    written = {"tinyvae_version": __version__, "written_at": _next_time(folder.parent)}
    manifest = {**facts, **written, "files": dict(sorted(files.items()))}
    with atomic_write(folder / MANIFEST, "w") as stream:
        json.dump({**manifest, "own_sha256": _hash_of_json(manifest)}, stream, indent=1)
    _sync_folder(folder)


def _next_time(run_folder: Path) -> str:
    """Now; or just after the newest checkpoint, if another machine with a faster clock wrote that."""
    written = (datetime.fromisoformat(info.written_at) for info in list_checkpoints(run_folder))
    times = [datetime.now(UTC), *(time + timedelta(microseconds=1) for time in written)]
    return max(times).isoformat(timespec="microseconds")


def _publish(unfinished: Path, folder: Path) -> None:
    """Give a complete checkpoint its name. An older one of the same step stays until the new one is there."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        _remove(replaced)
        folder.rename(replaced)
    unfinished.rename(folder)
    _sync_folder(folder.parent)
    _remove(replaced)


def _hash_of_json(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(*run_folders: Path) -> list[CheckpointInfo]:
    """The checkpoints of run folders, oldest first. Their files are not checked."""
    found = []
    try:
        entries = [entry for run in run_folders if run.is_dir() for entry in run.iterdir() if entry.is_dir()]
    except PermissionError as refused:
        text = f"{refused.filename} cannot be looked into ({refused.strerror}); check its permissions."
        raise UserError(text) from None
    for folder in entries:
        if (match := NAME.fullmatch(folder.name)) is None:
            continue
        with suppress(FileNotFoundError):  # the run that owns it has removed it just now
            changed = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(timespec="microseconds")
            manifest = read_manifest(folder)
            written_at = changed if manifest is None else manifest["written_at"]
            found.append(CheckpointInfo(written_at, int(match[2]), match[1] is not None, folder))
    return sorted(found)


def broken_reason(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact. Reads and hashes every file."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"{folder} has no readable {MANIFEST}"
    for name, facts in manifest["files"].items():
        file = folder / name
        try:
            num_bytes = file.stat().st_size
            if num_bytes != facts["bytes"]:
                return f"{file} has {num_bytes} bytes instead of {facts['bytes']}"
            sha256 = sha256_of(file)
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as fault:  # a bad disk, or a file of another user
            return f"{file} cannot be read: {fault.strerror or fault}"
        if sha256 != facts["sha256"]:
            return f"{file} has other contents than were saved"
    return None


def newest_intact(run_folders: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of several run folders, and what is wrong with each newer one."""
    faults: list[str] = []
    for info in reversed(list_checkpoints(*run_folders)):
        fault = broken_reason(info.folder)
        if fault is None:
            return info.folder, faults
        faults.append(fault)
    return None, faults


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest; None if it is missing or damaged."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        return None
    own_hash = manifest.pop("own_sha256", None)
    return manifest if own_hash == _hash_of_json(manifest) else None


def read_json(file: Path) -> Any:
    """What a JSON file holds; None if it is missing or damaged."""
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def read_state(file: Path) -> dict[str, Any]:
    """The contents of a state file, on the CPU. Only tensors and plain values are read: no code can run."""
    return torch.load(file, map_location="cpu", weights_only=True)


def remove_old(run_folder: Path, *, keep: int | None, best_step: int | None) -> None:
    """Keep the newest ``keep`` ordinary checkpoints, the one of the best score, and the last emergency one."""
    infos = list_checkpoints(run_folder)
    ordinary = [info for info in infos if not info.is_emergency]
    emergency = [info for info in infos if info.is_emergency]
    too_many = [] if keep is None else ordinary[: max(0, len(ordinary) - keep)]
    for info in emergency[:-1] + [info for info in too_many if info.step != best_step]:
        _remove(info.folder)


def _remove(folder: Path) -> None:
    """Rename, then remove: a kill in between must not leave a folder that looks like a checkpoint."""
    doomed = folder.with_name(f"{UNFINISHED}removing-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    if folder.exists():
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_unfinished(run_folder: Path) -> None:
    """Remove what killed saves left. A checkpoint that was to be replaced, and was not, gets its name back."""
    for replaced in run_folder.glob(f"*{REPLACED}"):
        named = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if named.exists():
            _remove(replaced)
        else:
            replaced.rename(named)
    for folder in run_folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)
