"""The GPU suite: `pytest -m gpu`. What its tests share: real clips of 480x720, a small real teacher, a student, a run.

Everything is made here, so the suite needs no shared data. Runs of `tinyvae train` are processes of their own, as a
user starts them; the other verbs run in this process, because every new one would load CUDA again.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.gpu.gpu_runs import EXACT, Runs, text_of
from tinyvae import TAEHV, save_model
from tinyvae.data.sample_clips import render_clip
from tinyvae.losses.perceptual import LPIPS
from tinyvae.training.first_weights import initialize_he
from tinyvae.video.write import VideoWriter

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is marked ``gpu``; without CUDA it says why it did not run."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here"))


@pytest.fixture(autouse=True)
def free_memory() -> None:
    """What a test left behind is not in the way of the next one."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six films of 480x720, one of them for validation; drawn at half the size, which takes a quarter of the time."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(6):
        small = render_clip(number, height=240, width=360, frames=33, seed=0)
        frames = F.interpolate(small.float(), scale_factor=2, mode="bilinear").round().to(torch.uint8)
        file = folder / ("val" if number % 5 == 4 else "train") / f"clip_{number}.mp4"
        file.parent.mkdir(exist_ok=True)
        with VideoWriter(file, fps=24, width=720, height=480) as writer:
            writer.write(frames)
    files = [file.relative_to(folder) for file in sorted(folder.glob("*/*.mp4"))]
    entries = [{"path": file.as_posix(), "split": file.parts[0]} for file in files]
    (folder / "annotations.json").write_text(json.dumps({"total": len(entries), "list": entries}))
    return folder


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CogVideoX's real architecture, narrow."""
    diffusers = pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("CogVideoX-small")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLCogVideoX(block_out_channels=(32, 32, 64, 64), layers_per_block=1, norm_num_groups=16)
    vae.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole-width taecvx weights with a signal in every layer."""
    model = TAEHV("taecvx")
    initialize_he(model, seed=0)
    file = tmp_path_factory.mktemp("student") / "student.safetensors"
    save_model(model, file)
    return file


@pytest.fixture(scope="session")
def lpips_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LPIPS's real weights where there are any, else the same network with random ones."""
    named = os.environ.get("TINYVAE_SHARED")
    shared = (Path(named) if named else HERE.parents[2] / "shared") / "lpips" / "alex.safetensors"
    if shared.is_file():
        return shared
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("lpips") / "random.safetensors"
    weights = {name: value.abs() if name.startswith("lin") else value for name, value in LPIPS().state_dict().items()}
    save_file(weights, file)
    return file


@pytest.fixture(scope="session")
def recipe(clips: Path, teacher: Path, student: Path, lpips_file: Path) -> Callable[..., list[str]]:
    """The words of the ``h100`` preset with teacher, LPIPS, Seraena and bf16 in a few steps; settings may change."""

    def words(output_dir: Path, **changes: object) -> list[str]:
        settings: dict[str, object] = {
            "data_root": clips,
            "annotation_file": clips / "annotations.json",
            "cogvideox_model_path": teacher,
            "pretrained_model_path": student,
            "lpips_weights": lpips_file,
            "output_dir": output_dir,
            "n_frames": 8,
            "max_train_steps": 4,
            "lr_warmup_steps": 1,
            "seraena_start": 1,
            "seraena_buffer_mb": 64,
            "gradient_accumulation_steps": 1,
            "validation_steps": 2,
            "num_validation_samples": 2,
            "checkpointing_steps": 2,
            "log_every": 1,
            "dataloader_num_workers": 4,
            **changes,
        }
        return ["train", "h100", *text_of(settings)]

    return words


@pytest.fixture(scope="session")
def small_recipe(recipe: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The same recipe on clips of 128x128: for tests that run it several times."""

    def words(output_dir: Path, **changes: object) -> list[str]:
        small: dict[str, object] = {"height": 128, "width": 128, "report": False}
        small |= {"save_validation_videos": False, "report_to": "none"}
        return recipe(output_dir, **{**small, **changes})

    return words


@pytest.fixture(scope="session")
def runs(
    recipe: Callable[..., list[str]], small_recipe: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Runs that several tests look at, started together: one GPU holds them all, and each waits for the host a lot."""
    folder = tmp_path_factory.mktemp("runs")
    started = Runs(folder)
    started.start("recipe", recipe)
    one_size = {"n_frames": None, "height": None, "width": None}
    started.start("sizes", small_recipe, resolutions="8x128x128,8x64x96@2", n_seraena_frames=4, **one_size)
    started.start("whole", small_recipe, **EXACT)
    started.start("torchrun", small_recipe, launcher=["torchrun", "--standalone", "--nproc_per_node", "1"], **EXACT)
    if importlib.util.find_spec("deepspeed") is not None:
        config = HERE.parents[1] / "accelerate_configs" / "deepspeed_1gpu.yaml"
        started.start(
            "deepspeed", small_recipe, launcher=["accelerate", "launch", "--config_file", str(config)], **EXACT
        )
    yield started
    started.kill()
