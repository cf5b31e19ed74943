"""What every test may ask for: the shared folder (golden data, real clips) and a seeded torch."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.video import small_videos
from tinyvae import TAEHV, save_model
from tinyvae.video.write import VideoWriter

DEFAULT_MARKS = "not slow and not gpu"  # of pyproject.toml

# A shell lets its background jobs ignore Ctrl-C, and nohup lets them ignore SIGHUP; so would every process that the
# tests start, and some tests are about these signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The tests' tensors are tiny: a second thread makes them up to twenty times slower when the other core is busy. The
# variable is for the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A plain ``pytest`` runs in two processes, file by file; ``-n 0`` is for a debugger.

    Named tests and the slow and GPU suites stay in one: many of those start processes of their own.
    """
    is_plain = config.args_source == pytest.Config.ArgsSource.TESTPATHS and config.option.markexpr == DEFAULT_MARKS
    is_worker = hasattr(config, "workerinput")
    if is_plain and not is_worker and config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"


def pytest_collection_finish() -> None:
    """Leave all imported modules out of garbage collection: it takes 0.3 s with them, and many tests start one."""
    gc.collect()
    gc.freeze()


def find_shared() -> Path | None:
    """``TINYVAE_SHARED`` or ``../shared`` beside the checkout; None where neither exists."""
    named = os.environ.get("TINYVAE_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if (folder / "golden" / "cases.json").exists() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = find_shared()
    if folder is None:
        pytest.skip("no shared data here (../shared or TINYVAE_SHARED)")
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


WriteVideo = Callable[..., Path]


@pytest.fixture
def write_video(tmp_path: Path) -> WriteVideo:
    """Writes a moving pattern as H.264: ``write_video("a.mp4", frames=17, height=48, width=64)``."""

    def write(
        name: str, *, frames: int = 17, height: int = 48, width: int = 64, fps: float = 24, seed: int = 0
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        t = torch.arange(frames).view(-1, 1, 1, 1)
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        waves = [torch.sin((x + 2 * t + 11 * seed) / 9 + c) + torch.cos((y - t) / (7 + c)) for c in range(3)]
        clip_TCHW = (120 + 45 * torch.cat(waves, dim=1)).clamp(0, 255).to(torch.uint8)
        pixel_format = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        with VideoWriter(path, fps=fps, height=height, width=width, crf=12, pixel_format=pixel_format) as writer:
            writer.write(clip_TCHW)
        return path

    return write


@pytest.fixture
def small_model_file(tmp_path: Path) -> Path:
    """A taehv of the smallest width, with fresh weights, in a file that states its variant."""
    torch.manual_seed(5)
    model = TAEHV("taehv", width=0.125)
    with torch.no_grad():
        model.decoder[-1].bias.fill_(0.5)
    path = tmp_path / "models" / "small.safetensors"
    save_model(model, path)
    return path


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve files: ten of 96x64 with 30 frames, one with 5 frames, one of 48x32. Treat as read-only."""
    folder = tmp_path_factory.mktemp("videos")
    for number in range(10):
        small_videos.write_video(folder / f"clip_{number:02}.mp4", seed=number)
    small_videos.write_video(folder / "sub" / "short.mp4", frames=5, seed=10)
    small_videos.write_video(folder / "sub" / "small.mp4", width=48, height=32, seed=11)
    return folder
