"""The whole teacher recipe at its real size on a GPU, and every verb on what it leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.gpu_runs import Runs, said_in_the_end, start
from tinyvae.cli.main import run as run_verb


@pytest.fixture(scope="session")
def run_folder(runs: Runs) -> Path:
    folder, said = runs.finished("recipe")
    assert "could not be made" not in said, said[-4000:]
    return folder


def test_it_trains_validates_and_reports_at_480x720(run_folder: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    terms = ("reconstruction", "encoder", "decoder", "perceptual", "seraena")
    for term in terms:
        assert math.isfinite(steps[-1][f"train/{term}_loss"]), term
    scores = json.loads((run_folder / "validation_history.json").read_text())
    assert [entry["step"] for entry in scores] == [2, 4]
    assert all(math.isfinite(entry[name]) for entry in scores for name in ("psnr", "ssim", "lpips"))
    results = json.loads((run_folder / "results.json").read_text())
    assert results, "no results"
    page = (run_folder / "report.html").read_text()
    assert "<video" in page or "data:image" in page
    for name in ("final_model.pth", "final_model.safetensors", "best_model/model.safetensors", "checkpoint-4"):
        assert (run_folder / name).exists(), name


@pytest.mark.parametrize("options", [[], ["--dtype", "float16", "--fused"]], ids=["plain", "fused"])
def test_eval(run_folder: Path, clips: Path, lpips_file: Path, tmp_path: Path, options: list[str]) -> None:
    words = ["eval", str(run_folder), "--data", str(clips / "val"), "--frames", "17", "--lpips", str(lpips_file)]
    assert run_verb([*words, "--output_dir", str(tmp_path), *options]) == 0
    assert (tmp_path / "report.html").stat().st_size > 50_000, "frames of 720 are wider than the report's pictures"


def test_compare_with_the_teacher(run_folder: Path, teacher: Path, clips: Path, tmp_path: Path) -> None:
    words = ["compare", str(run_folder), str(teacher), "--data", str(clips / "val"), "--frames", "9"]
    assert run_verb([*words, "--lpips", "off", "--output_dir", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_reconstruct_encode_decode(run_folder: Path, clips: Path, tmp_path: Path) -> None:
    film = next((clips / "val").glob("*.mp4"))
    out = ["--output_dir", str(tmp_path), "--fused"]
    assert run_verb(["reconstruct", str(run_folder), str(film), "--side_by_side", *out]) == 0
    assert run_verb(["encode", str(run_folder), str(film), *out]) == 0
    latents = tmp_path / f"{film.stem}_latents.safetensors"
    assert load_file(latents)["latents"].isfinite().all()
    assert run_verb(["decode", str(run_folder), str(latents), *out]) == 0
    assert len(list(tmp_path.glob("*.mp4"))) == 3


def test_several_sizes_in_one_run(small_recipe: Callable[..., list[str]], tmp_path: Path) -> None:
    """Compiled, with teacher, LPIPS and Seraena; each size has its own graphs and its own part of the buffer."""
    sizes = {"resolutions": "8x128x128,8x64x96@2,1x128x128@2", "seraena_start": 0, "max_train_steps": 8}
    words, log = small_recipe(tmp_path / "run", n_seraena_frames=4, **sizes), tmp_path / "run.log"
    said = said_in_the_end(start(words, log=log), log)
    assert "from step 2 on the clips are 8x64x96 (0.5), 1x128x128 (0.5)" in said and "recompile_limit" not in said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {key: value for line in lines for key, value in line.items() if key.startswith("train/loss_")}
    assert set(losses) == {f"train/loss_{size}" for size in ("8x128x128", "8x64x96", "1x128x128")}
    assert all(map(math.isfinite, losses.values()))


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
def test_bench(variant: str, tmp_path: Path) -> None:
    words = ["bench", variant, "--size", "240x352", "--frames", "17", "--repeats", "3"]
    torch.manual_seed(0)
    assert run_verb([*words, "--output", str(tmp_path / "bench.json")]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["engines"]
