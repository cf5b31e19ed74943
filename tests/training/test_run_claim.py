"""One run folder, one run: also with several starts at once, killed ones and other machines."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import time
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tests.processes import HANGS_S, still_alive, wait_until
from tinyvae.errors import UserError
from tinyvae.training import run_folder as run_claim
from tinyvae.training.run_folder import MARKER, RunClaim

FORK = multiprocessing.get_context("fork")


def hold(folder: Path) -> None:
    RunClaim(folder)
    time.sleep(2 * HANGS_S)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def change_marker(folder: Path, **changes: object) -> None:
    (folder / MARKER).write_text(json.dumps(json.loads((folder / MARKER).read_text()) | changes))


def test_the_second_is_refused_and_a_killed_one_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = FORK.Process(target=hold, args=(tmp_path,), daemon=True)
    holder.start()
    wait_until(lambda: (tmp_path / MARKER).exists() and (tmp_path / MARKER).read_text().endswith("}"))
    try:
        with (
            monkeypatch.context() as patched,
            pytest.raises(
                UserError, match=rf"another run writes to .* \(process {holder.pid}, since .*kill {holder.pid}"
            ),
        ):
            patched.delattr(run_claim.time, "sleep")  # it is refused at once
            RunClaim(tmp_path)
    finally:
        holder.kill()
    assert holder.pid is not None
    assert still_alive([holder.pid]) == []  # but a zombie until its parent (this test) asks for it
    claim = RunClaim(tmp_path)
    assert json.loads((tmp_path / MARKER).read_text())["pid"] == os.getpid()
    holder.join()
    claim.release()
    assert names(tmp_path) == [], "the marker goes at the end, and nothing else is left of taking it over"


def test_a_release_leaves_the_folder_as_it_was_unless_it_was_used(tmp_path: Path) -> None:
    os.utime(tmp_path, ns=(10**18, 10**18))
    RunClaim(tmp_path).release()
    assert tmp_path.stat().st_mtime_ns == 10**18
    used = RunClaim(tmp_path)
    used.is_used = True
    used.release()
    assert tmp_path.stat().st_mtime_ns > 10**18


def test_another_process_with_the_number_of_a_dead_one_is_not_mistaken(tmp_path: Path) -> None:
    RunClaim(tmp_path)
    with pytest.raises(UserError, match="another run writes"):
        RunClaim(tmp_path)
    change_marker(tmp_path, process_started=1.0)
    RunClaim(tmp_path).release()


def test_another_machine_is_told_with_the_way_out_and_followed_when_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunClaim(tmp_path)
    change_marker(tmp_path, host="node-7", pid=1)
    now = time.time()
    monkeypatch.setattr(run_claim.time, "time", lambda: now)
    os.utime(tmp_path / MARKER, (now - 200,) * 2)
    with pytest.raises(
        UserError, match=rf"on node-7, since .* 3\.3 min ago; .*in 5\.0 min, or remove {tmp_path}/{MARKER}"
    ):
        RunClaim(tmp_path)
    os.utime(tmp_path / MARKER, (now - 400,) * 2)
    RunClaim(tmp_path).release()
    assert names(tmp_path) == []


def test_a_run_touches_its_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_claim, "BEAT_S", 0.05)
    claim = RunClaim(tmp_path)
    os.utime(tmp_path / MARKER, (1.0, 1.0))
    wait_until(lambda: (tmp_path / MARKER).stat().st_mtime > 2)
    claim.release()
    assert names(tmp_path) == []


def test_a_slurm_job_that_starts_again_elsewhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    RunClaim(tmp_path)
    change_marker(tmp_path, host="node-that-died")
    with pytest.raises(UserError, match="on node-that-died"):
        RunClaim(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    RunClaim(tmp_path).release()
    assert names(tmp_path) == []


def test_a_marker_that_a_kill_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_claim, "HALF_WRITTEN_S", 0.1)
    (tmp_path / MARKER).touch()
    with pytest.raises(UserError, match="remove the file and start again"):
        RunClaim(tmp_path)


def test_storage_that_is_gone_at_the_end_does_not_hide_why_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = RunClaim(tmp_path)

    def gone(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", gone)
        claim.release()
        patched.setattr(Path, "read_bytes", gone)
        claim.release()
    assert names(tmp_path) == [MARKER]


def test_a_marker_that_is_no_longer_ours_stays(tmp_path: Path) -> None:
    """Somebody removed the marker by hand, and has the folder now."""
    ours = RunClaim(tmp_path)
    (tmp_path / MARKER).unlink()
    theirs = RunClaim(tmp_path)
    ours.release()
    assert names(tmp_path) == [MARKER]
    theirs.release()


def race(folders: list[Path], together: Barrier) -> None:
    """Claim one folder after the other; between a look at a marker and what follows from it others can act."""
    read = run_claim._read

    def read_and_wait(marker: Path) -> run_claim.Holder:
        found = read(marker)
        time.sleep(0.001)
        return found

    run_claim._read = read_and_wait
    for folder in folders:
        together.wait(HANGS_S)
        with suppress(UserError):
            RunClaim(folder)
            folder.with_name(f"{folder.name} won by {os.getpid()}").touch()
    together.wait(HANGS_S)  # nobody ends before all have tried


@pytest.mark.parametrize("stale", [False, True])
def test_of_eight_at_the_same_moment_one_gets_it(tmp_path: Path, stale: bool) -> None:
    """``stale``: all of them find the marker of a process that was killed."""
    folders = [tmp_path / f"run_{number}" for number in range(10)]
    for folder in folders:
        folder.mkdir()
        if stale:
            RunClaim(folder)
            change_marker(folder, process_started=1.0)
    together = FORK.Barrier(8)
    racers = [FORK.Process(target=race, args=(folders, together)) for _ in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * 8
    for folder in folders:
        assert len(list(tmp_path.glob(f"{folder.name} won by *"))) == 1, folder
        assert names(folder) == [MARKER]
