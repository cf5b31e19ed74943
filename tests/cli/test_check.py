"""``tinyvae check`` as a user meets it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import torch

from tinyvae.cli.main import run
from tinyvae.config.schema import TrainConfig, to_json
from tinyvae.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_quickstart_is_ready_on_any_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(["check", "quickstart", "--gpus", "1"])
    shown = capsys.readouterr().out
    assert code == 0 and "ready to train" in shown, shown
    for name in ("frames", "packages", "data", "disk", "memory", "one step"):
        assert f" {name} " in shown
    assert not list(tmp_path.iterdir())


def test_what_is_missing_fails_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = ROOT / "accelerate_configs" / "deepspeed_8gpu.yaml"
    words = ["check", "scratch", "--gpus", "8", "--port", "0", "--no_step", "--launch", str(launch)]
    code = run(words)
    shown = capsys.readouterr().out
    assert code == 1 and "fix: no data is named" in shown and "need a fix" in shown
    assert "DeepSpeed ZeRO-2" in shown and "use --optimizer adamw" in shown
    if not torch.cuda.is_available():
        assert "fix: 8 wanted: try it on the machine that has them" in shown
        monkeypatch.setenv("USE_CPU", "1")
        run(words)
        assert "8 wanted" not in capsys.readouterr().out


def test_a_checkpoint_that_is_not_there_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["check", "quickstart", "--no_step", "--resume", "latest"]) == 1
    shown = capsys.readouterr().out
    assert " resume " in shown and "there is no intact checkpoint" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstart", "--gpus", "0"], "--gpus: '0' is not a whole number, at least 1"),
        (["--port", "99999", "quickstart"], "--port: '99999' is not a whole number from 0 to 65535"),
        ([], "say what to check: a preset's name"),
        (["quickstart", "h100"], "'quickstart' and 'h100' were given: name one preset"),
        (["quickstart", "--learning_rat", "1"], "there is no setting 'learning_rat'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(["check", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "1", "quickstart", "--quick"],
        ["--quick", "--random_flip", "quickstart", "--seed", "3"],
        ["--random_flip", "false", "--gaussian_blur_sigma", "0.1", "1.0", "quickstart", "--quick", "--gpus=1"],
        ["--no-random_flip", "quickstart", "--quick"],
    ],
)
def test_words_come_in_any_order(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["check", *words]) == 0


def test_a_port_in_the_environment_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "abc")
    with pytest.raises(UserError, match="MASTER_PORT must be a number"):
        run(["check", "quickstart", "--gpus", "2", "--no_step"])


def test_quick_says_only_what_the_run_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["check", "quickstart", "--quick"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="data_root"):
        run(["check", "scratch", "--quick"])
    with pytest.raises(UserError, match="no intact checkpoint"):
        run(["check", "quickstart", "--quick", "--resume", "latest"])
    launch = tmp_path / "launch.yaml"
    launch.write_text("distributed_type: MULTI_GPU\nmixed_precision: fp16\n")
    with pytest.raises(UserError, match="mixed_precision: fp16"):
        run(["check", "quickstart", "--quick", "--launch", str(launch)])


def test_a_folder_that_holds_a_run_is_refused_as_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    words = ["check", "quickstart", "--output_dir", "mine", "--no_step"]
    assert run(words) == 0
    (tmp_path / "mine" / "config.json").write_text(to_json(TrainConfig(output_dir=tmp_path / "mine")))
    assert run(words) == 1 and run(["check", "mine", "--no_step"]) == 1
    assert "mine already holds a run; choose another --output_dir" in capsys.readouterr().out
    with pytest.raises(UserError, match="mine already holds a run; choose another --output_dir"):
        run([*words, "--quick"])
    assert run(["check", "quickstart", "--output_dir", "mine/%Y", "--quick"]) == 0
    (tmp_path / "mine").rename(tmp_path / f"of_{datetime.now():%Y}")
    with pytest.raises(UserError, match=r"of_\d+ already holds a run"):
        run(["check", "quickstart", "--output_dir", "of_%Y", "--quick"])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"other holds a config\.json that is not of a run"):
        run(["check", "quickstart", "--output_dir", "other", "--quick"])
