"""A report that cannot be made does not end a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.tiny_runs import arguments_for, write_clips
from tinyvae.cli.main import run as run_verb
from tinyvae.errors import UserError
from tinyvae.training import finish as run_report


@pytest.mark.parametrize("fault", [RuntimeError('"upsample" not implemented for Byte'), UserError("no room for it")])
def test_a_report_that_fails_is_a_warning_with_the_command(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(run_report, "publish", broken)
    clips = write_clips(tmp_path / "clips", num_clips=4)
    words = arguments_for(clips, tmp_path / "run", report=True, max_train_steps=2)
    assert run_verb(["train", *words]) == 0
    said = capfd.readouterr().err
    assert "the run is complete, but its report could not be made" in said and str(fault) in said
    again = said.split("make it again with: ")[1].splitlines()[0]
    monkeypatch.undo()
    assert run_verb(again.split()[1:]) == 0, again
    assert (tmp_path / "run" / "report.html").is_file()
