"""Comparison of models on the same frames of the same clips."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import WriteVideo
from tests.evaluation.copy_codec import CopyCodec
from tinyvae.evaluation.compare import compare


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


def test_means_and_pairs_are_of_the_clips_that_every_model_could_do(write_video: WriteVideo, tmp_path: Path) -> None:
    write_video("clips/long.mp4", frames=17)
    write_video("clips/short.mp4", frames=5, seed=9)  # too short for one latent of eight frames
    models = [CopyCodec("taehv", offset=0.1), CopyCodec("taeltx_2", offset=0.1)]
    comparison = compare(models, tmp_path / "clips", lpips=None)
    psnr = comparison.candidates[0].difference("psnr")
    assert psnr is not None and psnr.difference.count == 1 and not comparison.is_complete
    for evaluation in comparison.evaluations:
        assert evaluation.summary.num_clips == 1 and evaluation.summary.psnr is not None
        assert evaluation.summary.psnr.mean == evaluation.by_name()["long.mp4"].psnr
        assert any("1 are left out of the means" in note and "short.mp4" in note for note in evaluation.notes)
    assert len(comparison.evaluations[0].clips) == 2  # what was measured is still there


def test_equal_models_tie(write_video: WriteVideo) -> None:
    comparison = compare([CopyCodec(offset=0.1), CopyCodec(offset=0.1)], write_video("clip.mp4"), lpips=None)
    assert set(comparison.winners) >= {"psnr", "ssim", "flicker_error"} and set(comparison.winners.values()) == {None}
