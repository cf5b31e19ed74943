"""A GPU that is too small (torch may take a part of it only): each end is a sentence, and nothing is lost."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tinyvae.cli.main import run as run_verb
from tinyvae.errors import UserError


@pytest.fixture
def small_gpu() -> Iterator[Callable[[float], None]]:
    """Call it with the GiB that torch may take from now on."""

    def limit(gib: float) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + gib * 2**30) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def words_for(clips: Path, output_dir: Path, *more: str) -> list[str]:
    words = ["train", "scratch", "--data_root", str(clips), "--output_dir", str(output_dir), "--compile_model", "false"]
    words += ["--max_train_steps", "2", "--report", "false", "--report_to", "none", "--lpips_weights", "none"]
    return [*words, "--dataloader_num_workers", "2", "--num_validation_samples", "1", *more]


def test_in_training_the_step_is_cut(
    clips: Path, tmp_path: Path, small_gpu: Callable[[float], None], capfd: pytest.CaptureFixture[str]
) -> None:
    size = ["--height", "128", "--width", "128", "--n_frames", "8", "--train_batch_size", "16"]
    small_gpu(1.4)
    assert run_verb(words_for(clips, tmp_path / "run", *size, "--validation_steps", "0")) == 0
    said = capfd.readouterr().err
    assert "ran out of memory" in said and "the same math in less memory" in said
    assert (tmp_path / "run" / "final_model.safetensors").is_file()


def test_in_training_not_even_one_clip_fits(clips: Path, tmp_path: Path, small_gpu: Callable[[float], None]) -> None:
    size = ["--height", "480", "--width", "720", "--n_frames", "16", "--train_batch_size", "2"]
    small_gpu(1.0)
    with pytest.raises(UserError, match="out of memory with a single clip"):
        run_verb(words_for(clips, tmp_path / "run", *size, "--validation_steps", "0"))
    assert (tmp_path / "run" / "emergency_checkpoint-0").is_dir()


def test_in_validation_the_run_is_saved(clips: Path, tmp_path: Path, small_gpu: Callable[[float], None]) -> None:
    size = ["--height", "64", "--width", "64", "--n_frames", "8", "--train_batch_size", "2"]
    large = ["--validation_height", "480", "--validation_width", "720", "--validation_n_frames", "17"]
    small_gpu(1.2)
    with pytest.raises(UserError, match="out of memory in validation"):
        run_verb(words_for(clips, tmp_path / "run", *size, *large, "--validation_steps", "1"))
    assert (tmp_path / "run" / "emergency_checkpoint-1").is_dir()


@pytest.mark.parametrize("verb", ["eval", "reconstruct"])
def test_in_evaluation(
    verb: str, clips: Path, student: Path, tmp_path: Path, small_gpu: Callable[[float], None]
) -> None:
    film = str(next((clips / "val").glob("*.mp4")))
    words = {
        "eval": ["eval", str(student), "--data", film, "--lpips", "off", "--variant", "taecvx"],
        "reconstruct": ["reconstruct", str(student), film, "--variant", "taecvx"],
    }[verb]
    small_gpu(0.1)
    with pytest.raises(UserError, match="does not fit into the memory of the GPU"):
        run_verb([*words, "--output", str(tmp_path)])
    assert torch.cuda.memory_allocated() < 2**30


def test_eval_goes_on_in_smaller_chunks(
    clips: Path, student: Path, tmp_path: Path, small_gpu: Callable[[float], None]
) -> None:
    """The state of both streams and one latent take about 0.7 GiB at 480x720, the metrics of a whole chunk 1.1 GiB."""
    film = str(next((clips / "val").glob("*.mp4")))
    words = ["eval", str(student), "--data", film, "--lpips", "off", "--fused", "--dtype", "float16"]
    results = []
    for folder in ("large", "small"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        assert run_verb([*words, "--output", str(tmp_path / folder)]) == 0
        results.append(json.loads((tmp_path / folder / "results.json").read_text())["evaluations"][0])
        gc.collect()
        small_gpu(0.9 * (torch.cuda.max_memory_allocated() - before) / 2**30)  # for the second time
    large, small = (result["clips"][0]["metrics"]["psnr_by_frame"] for result in results)
    assert small == pytest.approx(large, abs=0.01)
