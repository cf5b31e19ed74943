"""``inference.py`` at the root: numbers per sample and in total, videos, pictures, latents, a teacher."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tinyvae import TAEHV, save_model
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.evaluation import evaluate
from tinyvae.video.decode import probe_video, read_frames

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inference_script", ROOT / "inference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    write_sample_clips(folder / "clips", count=5, height=32, width=48, frames=17)
    torch.manual_seed(0)
    save_model(TAEHV("taecvx", width=0.125), folder / "student.safetensors")
    return folder


def test_samples_totals_and_files(
    script: ModuleType, setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clips = setting / "clips"
    options = ["--model_path", str(setting / "student.safetensors"), "--num_samples", "2"]
    options += ["--output_dir", str(tmp_path)]
    options += ["--data_root", str(clips), "--annotation_file", str(clips / "annotations.json")]
    assert script.main([*options, "--split", "all", "--save_latents", "--benchmark"]) == 0
    printed = capsys.readouterr().out
    measured = evaluate(
        setting / "student.safetensors", clips / "annotations.json", lpips=None, max_clips=2, split="all"
    )
    said = re.findall(r"sample \d of 2  (\S+): MSE ([\d.]+), PSNR ([\d.]+) dB", printed)
    assert [name for name, _, _ in said] == [clip.name for clip in measured.clips]
    for (_, mse, psnr), clip in zip(said, measured.clips, strict=True):
        assert float(mse) == pytest.approx(clip.metrics.mse, abs=1e-6)
        assert float(psnr) == pytest.approx(clip.metrics.psnr, abs=0.006)
    total = re.search(r"total over 2 samples: MSE ([\d.]+), PSNR ([\d.]+) dB", printed)
    assert total is not None and measured.summary.psnr is not None
    assert float(total.group(2)) == pytest.approx(measured.summary.psnr.mean, abs=0.006)
    assert re.search(r"benchmark of student on cpu.* encode [\d.]+ frames/s, decode [\d.]+ frames/s", printed)
    (video, _), (picture, _) = sorted(tmp_path.glob("*.mp4")), sorted(tmp_path.glob("*.png"))
    info = probe_video(video)
    strip = 16  # the labels above the panels
    assert (info.frames, info.height, info.width) == (17, 32 + strip, 3 * 48 + 16)
    assert Image.open(picture).size == (3 * 48 + 16, 32 + strip)
    left = read_frames(video, [8])[0, :, strip:, :48].float()
    source = read_frames(Path(measured.clips[0].path), [8])[0].float()
    assert (left - source).abs().mean() < 4
    content = json.loads((tmp_path / "results.json").read_text())
    (results,) = content["evaluations"]
    assert content["format"] == "tinyvae-results" and results["settings"]["split"] == "all"
    assert results["model"]["label"] == "student" and results["skipped"] == [] and results["cost"]["encode_fps"] > 0
    assert results["summary"]["psnr"]["mean"] == pytest.approx(measured.summary.psnr.mean, abs=1e-4)
    assert results["clips"][0]["metrics"]["mse"] == pytest.approx(measured.clips[0].metrics.mse, rel=1e-4)
    assert load_file(sorted(tmp_path.glob("*_latents.safetensors"))[0])["latents"].shape == (1, 5, 16, 4, 6)


def test_with_a_teacher_of_the_hub(
    script: ModuleType,
    setting: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A name that is no folder is asked of the hub, as in training; here its cache has it."""
    diffusers = pytest.importorskip("diffusers")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository, revision = tmp_path / "hub" / "models--some--tiny-vae", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=16
    )
    vae.save_pretrained(repository / "snapshots" / revision / "vae")
    model = ["--model_path", str(setting / "student.safetensors"), "--num_samples", "1", "--num_frames", "9"]
    options = [*model, "--data_root", str(setting / "clips"), "--output_dir", str(tmp_path / "out")]
    teacher = ["--use_ref_vae", "--cogvideox_model_path", "some/tiny-vae"]
    assert script.main([*options, *teacher]) == 0
    assert re.search(r"total over 1 sample: student MSE .*; tiny-vae MSE .* dB", capsys.readouterr().out)
    (video,) = (tmp_path / "out").glob("*.mp4")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [e["model"]["label"] for e in results["evaluations"]] == ["student", "tiny-vae"]
    assert results["comparison"]["baseline"] == "student"
    assert probe_video(video).width == 5 * 48 + 4 * 8
    assert script.main([*options, *teacher, "--save_latents"]) == 0
    shapes = [load_file(file)["latents"].shape for file in sorted((tmp_path / "out").glob("*_latents.safetensors"))]
    assert shapes == [(1, 3, 16, 4, 6)] * 2, "the student's and the teacher's"
    assert script.main([*options, "--use_ref_vae"]) == 2
    assert script.main([*options, "--cogvideox_model_path", "some/tiny-vae"]) == 2
    capsys.readouterr()
    assert script.main([*options, "--use_ref_vae", "--cogvideox_model_path", "some/unknown-vae"]) == 2
    error = capsys.readouterr().err
    assert "no teacher folder some/unknown-vae" in error and "the hub gives nothing of that name" in error


def test_samples_of_an_earlier_run_go_and_no_other_file(
    script: ModuleType,
    setting: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*words: object, command: str = "inference.py") -> set[str]:
        monkeypatch.setattr(sys, "argv", [command, "--words"])
        options = ["--model_path", setting / "student.safetensors", "--num_frames", 5, "--output_dir", tmp_path]
        assert script.main([str(word) for word in (*options, *words)]) == 0
        return {file.name for file in tmp_path.iterdir()}

    data = ("--data_root", setting / "clips")
    first = run(*data, "--num_samples", 2, "--save_latents")
    assert len(first) == 7 and {name[:10] for name in first} == {"sample_01_", "sample_02_", "results.js"}
    mine = ["sample_02_mine.mp4", "sample_01_notes.txt", "notes.txt"]
    for name in mine:
        (tmp_path / name).touch()
    capsys.readouterr()
    second = run(*data, "--num_samples", 1)
    assert "removed 6 files that the earlier run of inference.py left in" in capsys.readouterr().out
    assert second == {name for name in first if name.startswith("sample_01") and "latents" not in name} | {
        "results.json",
        *mine,
    }
    (film,) = (tmp_path / name for name in second if name.startswith("sample_01") and name.endswith(".mp4"))
    # A sample that is the input of the next run stays, and so does what other results.json list.
    assert film.name in run("--data_root", tmp_path, "--annotation_file", listed(film), command="tinyvae eval")
    assert f"sample_01_{film.stem}.png" in run(*data, "--num_samples", 1)


def listed(video: Path) -> Path:
    file = video.with_name("listed.json")
    file.write_text(json.dumps({"total": 1, "list": [{"path": video.name}]}))
    return file


def test_of_annotations_with_splits_val_is_taken_and_said(
    script: ModuleType, setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model_path", str(setting / "student.safetensors"), "--num_frames", "5", "--output_dir", str(tmp_path)]
    options += ["--annotation_file", str(setting / "clips" / "annotations.json")]
    assert script.main(options) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("note: the videos that ") and "sample 1 of 1  val/004" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["evaluations"][0]["settings"]["split"] == "val"
    assert script.main([*options, "--split", "train"]) == 0
    printed = capsys.readouterr().out
    assert "note:" not in printed and "sample 4 of 4  train/" in printed and "val/" not in printed


def test_without_data_the_sample_clips_are_used(
    script: ModuleType, setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model_path", str(setting / "student.safetensors"), "--output_dir", str(tmp_path)]
    assert script.main([*model, "--num_samples", "1", "--num_frames", "5", "--size", "32x48"]) == 0
    assert "procedural sample clips" in capsys.readouterr().out


def test_mistakes_and_bad_videos(
    script: ModuleType, setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--model_path", str(tmp_path / "none.pth"), "--output_dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("inference.py: error: there is no model at")
    assert script.main(["--model_path", str(setting / "student.safetensors"), "--output_dir", "/proc/out"]) == 2
    assert "--output_dir /proc/out cannot be written" in capsys.readouterr().err
    entries = [{"path": "train/000.mp4"}, {"path": "gone.mp4"}]
    entries[0]["path"] = next(p for p in (setting / "clips").rglob("*.mp4")).relative_to(setting / "clips").as_posix()
    (setting / "clips" / "some.json").write_text(json.dumps({"total": 2, "list": entries}))
    options = ["--model_path", str(setting / "student.safetensors"), "--output_dir", str(tmp_path / "out")]
    options += ["--annotation_file", str(setting / "clips" / "some.json"), "--num_frames", "5"]
    assert script.main(options) == 1
    assert "skipped:" in capsys.readouterr().out
