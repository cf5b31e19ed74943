"""Wan's encoder on whole clips is diffusers' own, at every length that diffusers takes whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tinyvae.models.variants import get_spec
from tinyvae.teachers import Teacher, load_teacher, whole_clips
from tinyvae.teachers.whole_clips import encode_whole, takes_whole

diffusers = pytest.importorskip("diffusers")

WAN_22 = {"z_dim": 48, "in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True}
WAN_22 |= {"decoder_base_dim": 8, "scale_factor_spatial": 16, "latents_mean": [0.1] * 48, "latents_std": [1.5] * 48}
NETWORKS: dict[str, dict[str, Any]] = {"taew2_1": {}, "taew2_2": WAN_22}


@pytest.fixture(scope="module", params=NETWORKS)
def teacher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1, **NETWORKS[request.param]).save_pretrained(folder)
    return load_teacher("wan", folder, dtype=torch.float32, device="cpu", spec=get_spec(request.param))


def frames_of(num_frames: int) -> Tensor:
    return torch.rand(2, num_frames, 3, 32, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_frames", [1, 5, 9, 17, 21])
def test_a_whole_clip_has_the_latents_of_its_parts(
    teacher: Teacher, num_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = frames_of(num_frames)
    with torch.no_grad():
        own = [teacher._vae.encode(2 * clip[None].transpose(1, 2) - 1).latent_dist for clip in frames]
    as_diffusers = teacher.encode(frames)
    monkeypatch.setattr(teacher._vae, "encode", None)
    mean, std = teacher.distribution(frames, with_std=True)
    assert std is not None
    torch.testing.assert_close(mean, torch.cat([each.mean for each in own]).transpose(1, 2), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(std, torch.cat([each.std for each in own]).transpose(1, 2), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(teacher.space.normalize(mean), as_diffusers, atol=1e-5, rtol=1e-5)
    with pytest.raises(TypeError):  # evaluations time diffusers' own way
        teacher.encode(frames)


def test_a_clip_that_fills_a_gpu_runs_in_parts(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = frames_of(9)
    assert takes_whole(17, 128, 128) and takes_whole(21, 256, 256) and not takes_whole(17, 480, 720)
    assert not takes_whole(16, 128, 128), "diffusers drops the last three"
    monkeypatch.setattr(whole_clips, "WHOLE_PIXELS", frames[0, :, 0].numel() - 1)
    monkeypatch.setattr(teacher, "_encode_whole", _never)
    assert torch.equal(teacher.space.normalize(teacher.distribution(frames)[0]), teacher.encode(frames))


def _never(vae: Any, video_NCTHW: Tensor) -> Tensor:
    raise AssertionError(f"{tuple(video_NCTHW.shape)} is too large to run at once")


def test_a_compiler_sees_one_graph(teacher: Teacher) -> None:
    video = 2 * frames_of(9).transpose(1, 2) - 1
    compiled = torch.compile(encode_whole, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(teacher._vae, video), encode_whole(teacher._vae, video))


def test_as_many_clips_at_once_as_fit(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = torch.cat([frames_of(5), frames_of(5), frames_of(5)])
    sizes: list[int] = []

    def count(vae: Any, video_NCTHW: Tensor) -> Tensor:
        sizes.append(len(video_NCTHW))
        return encode_whole(vae, video_NCTHW)

    monkeypatch.setattr(teacher, "_one_at_a_time", False)  # as on a GPU
    monkeypatch.setattr(teacher, "_encode_whole", count)
    monkeypatch.setattr("tinyvae.teachers.teacher.WHOLE_PIXELS", 4 * frames[0, :, 0].numel())
    mean, _ = teacher.distribution(frames)
    assert sizes == [4, 2] and mean.shape[0] == 6


def test_where_one_clip_does_not_fit_it_runs_in_parts_from_then_on(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def fail(vae: Any, video_NCTHW: Tensor) -> Tensor:
        sizes.append(len(video_NCTHW))
        raise torch.OutOfMemoryError("CUDA out of memory")

    frames = frames_of(9)
    monkeypatch.setattr(teacher, "_one_at_a_time", False)  # as on a GPU
    monkeypatch.setattr(teacher, "_pixels_per_call", teacher._pixels_per_call)
    monkeypatch.setattr(teacher, "_encode_whole", fail)
    caplog.set_level("INFO")
    for _ in range(2):
        mean, _ = teacher.distribution(frames)
        torch.testing.assert_close(teacher.space.normalize(mean), teacher.encode(frames), atol=1e-5, rtol=1e-5)
    assert sizes == [2, 1] and caplog.text.count("in parts from now on") == 1
