"""``tinyvae eval``: files, exit codes, one sentence for each mistake."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tinyvae import TAEHV, save_model
from tinyvae.cli.main import run
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError
from tinyvae.evaluation import evaluate


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    write_sample_clips(folder, count=5, height=32, width=48, frames=9)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as the trainer leaves it: best model and curves."""
    folder = tmp_path_factory.mktemp("my_run")
    torch.manual_seed(0)
    save_model(TAEHV("taehv", width=0.125), folder / "best_model")
    lines = [json.dumps({"step": step, "train/loss": 1 / (1 + step), "val/psnr": 10 + step / 10}) for step in range(20)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_eval_writes_results_and_report(
    clips: Path, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--data", str(clips), "--output", str(tmp_path), str(run_folder), "--lpips", "off"]
    code = run([*words, "--films", "2"])
    printed = capsys.readouterr().out
    assert code == 0 and "PSNR dB" in printed and "decode frames/s" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    (evaluation,) = results["evaluations"]
    assert results["format"] == "tinyvae-results" and len(evaluation["clips"]) == 5
    assert evaluation["summary"]["psnr"]["count"] == 5 and evaluation["summary"]["lpips"] is None
    page = (tmp_path / "report.html").read_text()
    assert 'id="training"' in page and "val/psnr" in page and page.count('data-training="') == 2


def test_one_bad_video_among_many_gives_exit_code_1(
    clips: Path, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.mp4").write_bytes(next(clips.rglob("*.mp4")).read_bytes())
    (tmp_path / "broken.mp4").write_bytes(b"nothing like a video")
    assert run(["eval", str(run_folder), "--data", str(tmp_path), "--lpips", "none"]) == 1  # as settings say it
    errors = capsys.readouterr().err
    assert errors.count("broken.mp4") == 1 and "1 of 2 videos could not be measured" in errors


def test_a_name_that_is_no_utf8_is_shown_with_escapes(clips: Path, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "films").mkdir()
    shutil.copy(next(clips.rglob("*.mp4")), os.path.join(os.fsencode(tmp_path / "films"), b"b\xffd.mp4"))
    words = ["eval", str(run_folder), "--data", str(tmp_path / "films"), "--lpips", "off"]
    assert run([*words, "--output", str(tmp_path / "report")]) == 0
    assert "b\\udcffd.mp4" in (tmp_path / "report" / "report.html").read_text()


def test_of_data_with_splits_val_is_taken_and_said(
    clips: Path, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A score on training videos says little; so of 4 train and 1 val the one, from annotations and index alike."""
    assert run(["data", "index", str(clips / "annotations.json"), "--output", str(tmp_path / "clips.tvi")]) == 0
    listed, indexed = clips / "annotations.json", tmp_path / "clips.tvi"
    for data, split, count in ((listed, None, 1), (listed, "all", 5), (indexed, None, 1), (indexed, "train", 4)):
        capsys.readouterr()
        words = ["eval", str(run_folder), "--data", str(data), "--lpips", "off", "--output", str(tmp_path)]
        assert run([*words, "--films", "0", *(["--split", split] if split else [])]) == 0
        shown = capsys.readouterr()
        assert f"clips / frames        {count} / " in shown.out and "films for the report" not in shown.err
        assert shown.err.count(f"note: the videos that {data} annotates as val are taken") == (split is None)
        (evaluation,) = json.loads((tmp_path / "results.json").read_text())["evaluations"]
        assert evaluation["settings"]["split"] == (split or "val")
    result = evaluate(run_folder, clips / "annotations.json", lpips=None)
    assert len(result.clips) == 1 and "annotates as val" in result.notes[0]
    with pytest.raises(UserError, match=r"is annotated as 'test' \(4 as train, 1 as val\); choose with --split"):
        run(["eval", str(run_folder), "--data", str(clips / "annotations.json"), "--split", "test"])
    only_train = [{"path": str(clip), "split": "train"} for clip in sorted(clips.rglob("*.mp4"))]
    (tmp_path / "train.json").write_text(json.dumps(only_train))
    words = ["eval", str(run_folder), "--data", str(tmp_path / "train.json"), "--data_root", str(clips)]
    assert run([*words, "--lpips", "off"]) == 0
    shown = capsys.readouterr()
    assert "clips / frames        5 / " in shown.out and shown.err.count("annotates all its videos as train") == 1
    with pytest.raises(UserError, match="it has no splits; leave --split out"):
        run(["eval", str(run_folder), "--data", str(clips), "--split", "val"])


def test_mistakes_are_one_sentence_and_exit_code_2(clips: Path, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    unknown = tmp_path / "unknown.safetensors"
    save_file({"some.weight": torch.zeros(3, 3)}, unknown)
    model, data = str(run_folder), str(clips)
    for arguments, words in (
        ([model, "--data", str(tmp_path / "empty")], "there is no video in"),
        ([str(tmp_path / "no_model"), "--data", data], "there is no model at"),
        ([str(unknown), "--data", data], "model of this family"),
        ([model, "--data", data, "--size", "big"], "is not a size: write HEIGHTxWIDTH"),
        ([model, "--data", data, "--dtype", "float61"], "Did you mean 'float16'"),
        ([model, "--data", data, "--split", "trian"], "the split 'trian' is unknown"),
        ([model, "--data", data, "--lpips", str(tmp_path / "x.safetensors")], "no LPIPS weights at"),
        ([model, "--data", data, "--films", "-1"], "--films: '-1' is not a whole number, at least 0"),
    ):
        with pytest.raises(UserError, match=words) as mistake:
            run(["eval", *arguments])
        assert "\n" not in str(mistake.value)
