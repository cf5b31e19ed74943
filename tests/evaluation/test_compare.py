"""Comparison on the same frames, with a reference VAE in any place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.evaluation.copy_codec import CopyCodec
from tinyvae import TAEHV
from tinyvae.convert.reconstruct import Outputs, decode_to_video, reconstruct_video
from tinyvae.errors import UserError
from tinyvae.evaluation import evaluate
from tinyvae.evaluation.compare import compare
from tinyvae.evaluation.open_model import open_model
from tinyvae.evaluation.round_trip import StreamedCodec
from tinyvae.evaluation.teacher_codec import is_reference_vae

WriteVideo = Callable[..., Path]


def test_the_better_model_wins_and_is_sure_of_it(write_video: WriteVideo, tmp_path: Path) -> None:
    for seed in range(4):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=9 + seed)
    comparison = compare([CopyCodec(offset=0.1), CopyCodec(flicker=0.05)], tmp_path / "clips", lpips=None)
    psnr = comparison.candidates[0].difference("psnr")
    flicker = comparison.candidates[0].difference("flicker_error")
    assert psnr is not None and psnr.verdict == "better" and psnr.difference.mean == pytest.approx(6.0, abs=0.2)
    assert flicker is not None and flicker.verdict == "worse" and flicker.losses == 4
    assert flicker.difference.mean == pytest.approx(0.1, rel=0.05)
    assert comparison.winners["psnr"] == "CopyCodec (2)" and comparison.winners["flicker_error"] == "CopyCodec"
    assert [e.model.label for e in comparison.evaluations] == ["CopyCodec", "CopyCodec (2)"]


def test_models_with_different_frame_rules_are_compared_on_shared_frames(write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=15)  # causal 4x gives back 13, 8x gives back 9
    comparison = compare([CopyCodec("taehv"), CopyCodec("taeltx_2")], video, lpips=None)
    assert [e.clips[0].metrics.num_frames for e in comparison.evaluations] == [9, 9]


def test_clips_that_one_model_cannot_do_are_left_out_of_the_pairing(write_video: WriteVideo, tmp_path: Path) -> None:
    write_video("clips/long.mp4", frames=17)
    write_video("clips/short.mp4", frames=5)  # too short for one latent of eight frames
    comparison = compare([CopyCodec("taehv"), CopyCodec("taeltx_2")], tmp_path / "clips", lpips=None)
    psnr = comparison.candidates[0].difference("psnr")
    assert psnr is not None and psnr.difference.count == 1 and not comparison.is_complete


def test_one_model_is_not_a_comparison(write_video: WriteVideo) -> None:
    with pytest.raises(UserError, match="at least two models"):
        compare([CopyCodec()], write_video("clip.mp4"), lpips=None)


@pytest.fixture
def cogvideox_folder(tmp_path: Path) -> Path:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(3)
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=16
    )
    folder = tmp_path / "CogVideoX-tiny" / "vae"
    vae.save_pretrained(folder)
    return folder


def test_a_reference_vae_can_stand_in_any_place(cogvideox_folder: Path, write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=14, height=40, width=48)  # 8k+1 and 8k: nine frames agree
    assert is_reference_vae(cogvideox_folder) and is_reference_vae(cogvideox_folder.parent)
    for wrong in ({"variant": "taecvx"}, {"fused": True}):
        with pytest.raises(UserError, match="is a reference VAE; leave it out"):
            open_model(cogvideox_folder, **wrong)  # type: ignore[arg-type]
    (clip,) = evaluate(cogvideox_folder, video, lpips=None).clips
    assert clip.metrics.num_frames == 9 and clip.metrics.is_finite
    comparison = compare([TAEHV("taecvx", width=0.125), cogvideox_folder.parent], video, lpips=None)
    first, second = comparison.evaluations
    assert (first.model.kind, second.model.kind) == ("tinyvae", "reference VAE")
    assert first.clips[0].metrics.num_frames == second.clips[0].metrics.num_frames == 9
    assert second.clips[0].metrics == clip.metrics
    assert second.model.parameters > 1000 and second.model.variant == "AutoencoderKLCogVideoX"
    assert any("reference VAE holds a whole clip" in note for note in first.notes)


def test_a_reference_vae_alone_sees_49_frames_unless_told(cogvideox_folder: Path, write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=60, height=16, width=16)
    alone = evaluate(cogvideox_folder, video, lpips=None)
    assert alone.clips[0].metrics.num_frames == 49 and "first 49 frames" in alone.notes[0]
    assert evaluate(cogvideox_folder, video, lpips=None, max_frames=57).clips[0].metrics.num_frames == 57


def test_a_student_decodes_the_latents_of_its_reference_vae(
    cogvideox_folder: Path, write_video: WriteVideo, tmp_path: Path
) -> None:
    video = write_video("clip.mp4", frames=9, height=32, width=48)
    latents = tmp_path / "latents.safetensors"
    reconstruct_video(open_model(cogvideox_folder), video, Outputs(latents=latents))
    student = open_model(TAEHV("taecvx", width=0.125))
    assert isinstance(student, StreamedCodec)
    assert decode_to_video(student, latents, tmp_path / "out.mp4") == 9


def test_the_reference_output_is_diffusers_own(cogvideox_folder: Path, write_video: WriteVideo) -> None:
    import diffusers

    from tinyvae.evaluation import clip_metrics
    from tinyvae.video.decode import read_frames

    video = write_video("clip.mp4", frames=9, height=32, width=48)
    (clip,) = evaluate(cogvideox_folder, video, lpips=None).clips
    vae = diffusers.AutoencoderKLCogVideoX.from_pretrained(cogvideox_folder).eval()
    frames = read_frames(video, range(9))[None].float() / 255
    with torch.no_grad():
        latents = vae.encode((frames * 2 - 1).transpose(1, 2)).latent_dist.mode()
        decoded = vae.decode(latents).sample.transpose(1, 2) / 2 + 0.5
    (expected,) = clip_metrics(decoded, frames)
    assert clip.metrics.psnr == pytest.approx(expected.psnr, abs=1e-3)
    assert clip.metrics.flicker_error == pytest.approx(expected.flicker_error, abs=1e-5)


def test_means_are_of_the_clips_that_every_model_could_do(write_video: WriteVideo, tmp_path: Path) -> None:
    write_video("clips/long.mp4", frames=17)
    write_video("clips/short.mp4", frames=5, seed=9)  # too short for one latent of eight frames
    models = [CopyCodec("taehv", offset=0.1), CopyCodec("taeltx_2", offset=0.1)]
    comparison = compare(models, tmp_path / "clips", lpips=None)
    for evaluation in comparison.evaluations:
        assert evaluation.summary.num_clips == 1 and evaluation.summary.psnr is not None
        assert evaluation.summary.psnr.mean == evaluation.by_name()["long.mp4"].psnr
        assert any("1 are left out of the means" in note and "short.mp4" in note for note in evaluation.notes)
    assert len(comparison.evaluations[0].clips) == 2  # what was measured is still there


def test_equal_models_tie(write_video: WriteVideo) -> None:
    comparison = compare([CopyCodec(offset=0.1), CopyCodec(offset=0.1)], write_video("clip.mp4"), lpips=None)
    assert set(comparison.winners) >= {"psnr", "ssim", "flicker_error"} and set(comparison.winners.values()) == {None}
