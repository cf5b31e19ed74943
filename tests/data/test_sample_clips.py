"""The sample set: the same on every run, real H.264, varied and moving."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tinyvae.data.sample_clips import clip_name, render_clip, write_sample_clips
from tinyvae.data.sample_scenes import SCENES
from tinyvae.errors import UserError
from tinyvae.video.decode import probe_video, read_frames

SMALL = {"height": 64, "width": 96, "frames": 9, "seed": 0}


@pytest.fixture(scope="module")
def clips() -> dict[str, torch.Tensor]:
    return {kind: render_clip(number, **SMALL) for number, kind in enumerate(SCENES)}


@pytest.mark.parametrize("kind", SCENES)
def test_scenes_show_something_that_moves(clips: dict[str, torch.Tensor], kind: str) -> None:
    frames = clips[kind].float()
    assert clips[kind].shape == (9, 3, 64, 96) and clips[kind].dtype == torch.uint8
    assert frames.std() > 15, "a picture has contrast"
    assert (frames[-1] - frames[0]).abs().mean() > 1.5, "a clip moves"
    step = (frames[1:] - frames[:-1]).abs().mean((1, 2, 3))
    assert (step < 40).all(), "a clip has no cuts"


def test_a_small_network_has_something_to_learn() -> None:
    """At an eighth of the resolution the validation clips keep their large forms: 22 dB are within easy reach."""
    scores = []
    for number in (n for n in range(40) if clip_name(n).startswith("val/")):
        frames = render_clip(number, height=128, width=192, frames=3, seed=0).float() / 255
        small = torch.nn.functional.avg_pool2d(frames, 8)
        again = torch.nn.functional.interpolate(small, scale_factor=8, mode="bicubic", align_corners=False)
        scores.append(-10 * torch.log10((frames - again).square().mean()).item())
    assert sum(scores) / len(scores) > 23
    assert max(scores) < 40, "flat pictures teach nothing"


def test_clips_depend_on_seed_and_number_alone() -> None:
    assert torch.equal(render_clip(3, **SMALL), render_clip(3, **SMALL))
    assert not torch.equal(render_clip(3, **SMALL), render_clip(13, **SMALL))
    assert not torch.equal(render_clip(3, **SMALL), render_clip(3, **{**SMALL, "seed": 1}))


def test_the_whole_set(tmp_path: Path) -> None:
    """All 40 clips are real H.264 at their size; both splits hold many kinds of scene."""
    threads = torch.get_num_threads()
    size = {"height": 64, "width": 96, "frames": 5}
    write_sample_clips(tmp_path / "set", **size)
    assert torch.get_num_threads() == threads
    annotations = json.loads((tmp_path / "set" / "annotations.json").read_text())
    assert annotations["total"] == len(annotations["list"]) == 40
    kinds: dict[str, set[str]] = {"train": set(), "val": set()}
    for entry in annotations["list"]:
        kinds[entry["split"]].add(Path(entry["path"]).stem.split("_", 1)[1])
    assert kinds["train"] == set(SCENES) and len(kinds["val"]) == 8
    assert sum(e["split"] == "val" for e in annotations["list"]) == 8
    for entry in annotations["list"][::7]:
        info = probe_video(tmp_path / "set" / entry["path"])
        assert (info.codec, info.frames, info.width, info.height) == ("h264", 5, 96, 64)
        number = int(Path(entry["path"]).name[:3])
        error = render_clip(number, **size, seed=0).float() - read_frames(tmp_path / "set" / entry["path"], range(5))
        assert error.square().mean() < 255**2 / 10**2.7, entry  # 27 dB: colored text loses chroma


def test_written_twice_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_sample_clips(tmp_path / name, count=4, height=32, width=48, frames=5)
    for number in range(4):
        assert (tmp_path / "a" / clip_name(number)).read_bytes() == (tmp_path / "b" / clip_name(number)).read_bytes()


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    small = {"count": 2, "height": 32, "width": 32, "frames": 2}
    write_sample_clips(tmp_path, **small)
    before = 10**18
    os.utime(tmp_path / clip_name(0), ns=(before, before))
    with pytest.raises(UserError, match="exists already"):
        write_sample_clips(tmp_path, **small)
    assert (tmp_path / clip_name(0)).stat().st_mtime_ns == before
    write_sample_clips(tmp_path, **small, overwrite=True)
    assert (tmp_path / clip_name(0)).stat().st_mtime_ns > before


@pytest.mark.parametrize("wrong", [{"count": 0}, {"frames": 0}, {"width": 33}, {"height": 16}])
def test_wrong_sizes(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        write_sample_clips(tmp_path / "set", **wrong)
    assert not (tmp_path / "set").exists()
