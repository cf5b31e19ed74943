"""``notify_command`` hears of every end and of a stall, by its environment; what goes wrong with it is a warning."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.processes import HANGS_S, wait_until
from tests.training.faults import Both, HeldStep, NanLoss, SignalInStep, _around_losses
from tests.training.tiny_runs import arguments_for, launch, train_here
from tinyvae.errors import UserError
from tinyvae.training import notify
from tinyvae.training.checkpoint import CheckpointWriter
from tinyvae.training.task import TrainingTask

ONE_STEP: dict[str, object] = {"max_train_steps": 1, "validation_steps": 0}


class Listener:
    """A shell script that adds its environment to a file, one line a call."""

    def __init__(self, folder: Path) -> None:
        self.heard = folder / "heard"
        script = folder / "tell me.sh"
        script.write_text(
            "#!/bin/sh\n"
            'printf "%s|" "$TINYVAE_EVENT" "$TINYVAE_STEP" "$TINYVAE_MAX_STEPS" "$TINYVAE_RUN" "$TINYVAE_METRIC" '
            f'"$TINYVAE_BEST" "$TINYVAE_BEST_STEP" "$TINYVAE_REASON" >> "{self.heard}"\n'
            f'echo >> "{self.heard}"\n'
        )
        script.chmod(0o755)
        self.command = f"'{script}'"

    def calls(self) -> list[list[str]]:
        lines = self.heard.read_text().splitlines() if self.heard.exists() else []
        return [line.split("|")[:-1] for line in lines]


@pytest.fixture
def listener(tmp_path: Path) -> Listener:
    return Listener(tmp_path)


def test_a_finished_run(clips: Path, tmp_path: Path, listener: Listener) -> None:
    run = tmp_path / "run"
    train_here(arguments_for(clips, run, notify_command=listener.command))
    ((event, step, max_steps, folder, metric, best, best_step, reason),) = listener.calls()
    assert (event, step, max_steps, folder, metric) == ("finished", "6", "6", str(run), "psnr")
    assert float(best) > 5 and best_step in ("2", "4", "6") and reason == "all 6 steps are done"
    assert "notify_command" not in (run / "train.log").read_text()


def test_an_early_stop(clips: Path, tmp_path: Path, listener: Listener) -> None:
    changes = {"learning_rate": 1e-30, "ema_decay": 0.0, "early_stopping_patience": 1, "max_train_steps": 50}
    train_here(arguments_for(clips, tmp_path / "run", **changes, notify_command=listener.command))
    ((event, step, *_, reason),) = listener.calls()
    assert (event, step, reason) == ("early_stop", "4", "no better psnr in 1 validations")


@pytest.mark.parametrize("bug", [False, True])
def test_a_failure(clips: Path, tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, bug: bool) -> None:
    def fail(self: TrainingTask, *arguments: object, **options: object) -> None:
        raise IndexError("list index out of range") if bug else UserError("the teacher fell silent.")

    monkeypatch.setattr(TrainingTask, "losses", fail)
    with pytest.raises(IndexError if bug else UserError):
        train_here(arguments_for(clips, tmp_path / "run", notify_command=listener.command))
    ((event, step, *_, reason),) = listener.calls()
    assert (event, step) == ("failed", "0")
    assert reason == ("IndexError: list index out of range" if bug else "the teacher fell silent.")


def test_a_signal(clips: Path, tmp_path: Path, listener: Listener) -> None:
    arguments = arguments_for(clips, tmp_path / "run", notify_command=listener.command)
    launch(arguments, tmp_path, prepare=SignalInStep(rank=0, call=3)).ends_with(143)
    ((event, step, *_, reason),) = listener.calls()
    assert (event, step, reason) == ("stopped", "3", "stopped by SIGTERM at step 3; the run is saved")


class NoSave:
    """A checkpoint that is not written."""

    def __call__(self, rank: int) -> None:
        CheckpointWriter.save = lambda self, **facts: None  # type: ignore[method-assign]


def test_a_signal_whose_save_fails(clips: Path, tmp_path: Path, listener: Listener) -> None:
    arguments = arguments_for(clips, tmp_path / "run", notify_command=listener.command, checkpointing_steps=0)
    launch(arguments, tmp_path, prepare=Both(NoSave(), SignalInStep(rank=0, call=2))).ends_with(143)
    assert listener.calls()[0][-1] == "stopped by SIGTERM at step 2; its state could not be saved, see train.log"


class OneLongStep:
    """The third step ends when the stall was told, and some more looks of the watch later."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def __call__(self, rank: int) -> None:
        def change(number: int, compute: object, num_clips: int) -> object:
            if number == 3:
                wait_until(lambda: any(call[:2] == ["stalled", "2"] for call in self.listener.calls()))
                time.sleep(1.5)
            return compute()  # type: ignore[operator]

        _around_losses(change)


def test_a_stall_is_told_once_and_the_run_goes_on(clips: Path, tmp_path: Path, listener: Listener) -> None:
    changes = {"validation_steps": 0, "notify_command": listener.command, "notify_stall_s": 1}
    launch(arguments_for(clips, tmp_path / "run", **changes), tmp_path, prepare=OneLongStep(listener)).ends_with(0)
    (stalled,) = [call for call in listener.calls() if call[:2] == ["stalled", "2"]]
    assert stalled[-1] == "no step has finished for 1 s after step 2"
    assert listener.calls()[-1][0] == "finished"


def test_a_command_that_fails_is_one_warning(clips: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(arguments_for(clips, run, **ONE_STEP, notify_command="echo no route >&2; exit 7"))
    (line,) = [line for line in (run / "train.log").read_text().splitlines() if "notify_command" in line]
    assert "WARNING" in line and line.endswith("notify_command (finished) failed with exit code 7: no route")


def test_no_room_for_temporary_files_is_one_warning(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(notify.tempfile, "TemporaryFile", full)
    train_here(arguments_for(clips, tmp_path / "run", **ONE_STEP, notify_command="true"))
    expected = "notify_command (finished) could not be run: [Errno 28] No space left on device"
    assert expected in (tmp_path / "run" / "train.log").read_text()


def test_a_command_that_hangs_is_ended(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "COMMAND_LIMIT_S", 0.3)
    run, began = tmp_path / "run", time.monotonic()
    train_here(arguments_for(clips, run, **ONE_STEP, notify_command=f"sleep {2 * HANGS_S:g} & wait"))
    assert time.monotonic() - began < HANGS_S
    assert "notify_command (finished) was ended: it took longer than 0.3 s" in (run / "train.log").read_text()


@pytest.mark.slow
def test_the_main_process_alone_tells(clips: Path, tmp_path: Path, listener: Listener) -> None:
    """Also of a process that was lost."""
    changes = {"train_batch_size": 1, "notify_command": listener.command}
    held = HeldStep(tmp_path / "never", call=3, rank=1)
    running = launch(arguments_for(clips, tmp_path / "run", **changes), tmp_path, ranks=2, prepare=held)
    running.wait_for("call 3", rank=1)
    running.signal(signal.SIGKILL, 1)
    running.ends_with(1, -9)
    ((event, *_, reason),) = listener.calls()
    assert event == "failed" and "another process of this run has stopped" in reason and "within" not in reason


@pytest.mark.slow
def test_both_processes_fail_and_one_tells(clips: Path, tmp_path: Path, listener: Listener) -> None:
    changes = {"max_skipped_steps": 2, "validation_steps": 0, "notify_command": listener.command}
    faults = Both(NanLoss(rank=0, calls=range(2, 99)), NanLoss(rank=1, calls=range(2, 99)))
    launch(arguments_for(clips, tmp_path / "run", **changes), tmp_path, ranks=2, prepare=faults).ends_with(2, 2)
    ((event, step, *_, reason),) = listener.calls()
    assert (event, step) == ("failed", "3") and reason.startswith("2 steps in a row")
