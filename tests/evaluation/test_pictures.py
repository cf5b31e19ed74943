"""Heat maps, patches, latent pictures and films of known content."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from tests.conftest import WriteVideo
from tests.evaluation.copy_codec import CopyCodec
from tinyvae.evaluation import evaluate
from tinyvae.evaluation.clip_sources import ClipSource, Middle
from tinyvae.evaluation.compare import compare
from tinyvae.evaluation.evaluating import EvaluationSettings, evaluate_round_trip
from tinyvae.evaluation.pictures import (
    HEAT_FULL_SCALE,
    HEAT_STOPS,
    PLAYER_FRAMES,
    PLAYER_WIDTH,
    choose_clips,
    gather_evidence,
    heat_map,
    latents_as_color,
    picture_uri,
    shrink,
    to_bytes_range,
    worst_patch,
)
from tinyvae.evaluation.round_trip import open_model
from tinyvae.video.decode import probe_video


def test_heat_map_goes_from_the_first_color_to_the_last() -> None:
    target = torch.full((3, 3, 4, 4), 0.2)
    decoded = target.clone()
    decoded[1] += HEAT_FULL_SCALE / 4  # the square root of a quarter: the middle of the scale
    decoded[2] += 2 * HEAT_FULL_SCALE
    colors = heat_map(decoded, target)[:, :, 0, 0].float()
    assert torch.equal(colors[0], HEAT_STOPS[0]) and torch.equal(colors[2], HEAT_STOPS[-1])
    assert torch.allclose(colors[1], HEAT_STOPS[len(HEAT_STOPS) // 2], atol=1)
    assert colors.sum(dim=1).diff().min() > 0  # more error is brighter


def test_worst_patch_is_found() -> None:
    target = torch.zeros(3, 96, 160)
    decoded = target.clone()
    decoded[:, 60:76, 100:116] = 1
    top, left, height, width = worst_patch(decoded, target, side=32)
    assert (height, width) == (32, 32)
    assert top <= 60 and top + height >= 76 and left <= 100 and left + width >= 116
    assert worst_patch(decoded[:, :16, :20], target[:, :16, :20], side=32)[2:] == (16, 20)


def test_latents_become_the_same_colors_whatever_their_sign_and_order() -> None:
    latents = torch.randn(3, 16, 6, 8)
    latents[:, 4] *= 10
    pictures = latents_as_color(latents)
    assert pictures.shape == (3, 3, 6, 8) and pictures.dtype == torch.uint8
    assert torch.equal(pictures, latents_as_color(latents.clone()))
    # Red is the strongest direction: here channel 4, up to sign and scale.
    red, strongest = pictures[:, 0].float().flatten(), latents[:, 4].flatten()
    assert torch.corrcoef(torch.stack([red, strongest]))[0, 1].abs() > 0.97
    assert latents_as_color(torch.zeros(1, 16, 4, 4)).shape == (1, 3, 4, 4)


def test_what_is_no_number_is_painted_magenta() -> None:
    frames = torch.full((1, 3, 2, 2), 0.5)
    frames[0, 1, 0, 0] = float("nan")
    shown = to_bytes_range(frames)
    assert shown[0, :, 0, 0].tolist() == [255, 0, 255] and shown[0, :, 1, 1].tolist() == [128, 128, 128]


def test_shrink_keeps_even_sizes_and_never_enlarges() -> None:
    frames = torch.zeros(2, 3, 101, 301, dtype=torch.uint8)
    assert shrink(frames, width=150).shape == (2, 3, 50, 150)
    assert shrink(frames, width=900).shape == (2, 3, 100, 300)


def test_pictures_as_addresses() -> None:
    image = torch.randint(0, 255, (3, 10, 12), dtype=torch.uint8)
    stored = Image.open(io.BytesIO(base64.b64decode(picture_uri(image).split(",")[1])))
    assert torch.equal(torch.tensor(list(stored.tobytes())).view(10, 12, 3).movedim(-1, 0), image.long())
    assert picture_uri(image, "JPEG", quality=85).startswith("data:image/jpeg;base64,")


def test_films_hold_input_output_and_error_in_step(write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=PLAYER_FRAMES + 25, height=40, width=56)
    round_trip = open_model(CopyCodec(offset=0.2))
    result = evaluate(round_trip, video, lpips=None)
    (shown,) = gather_evidence([round_trip], [result], limit=4)
    film = shown.film
    assert film.num_frames == PLAYER_FRAMES and film.panels == ("input", "output", "error")
    with av.open(io.BytesIO(base64.b64decode(film.src.split(",")[1]))) as container:
        frames = [torch.from_numpy(f.to_ndarray(format="rgb24")).float() for f in container.decode(video=0)]
    assert len(frames) == PLAYER_FRAMES and frames[0].shape == (40, 3 * 56, 3)
    for frame in (frames[0], frames[-1]):
        left, middle = frame[:, :56], frame[:, 56:112]
        assert (middle - left).mean().item() == pytest.approx(0.2 * 255, abs=6)
    assert film.first_frame <= shown.worst_frames[0].frame < film.first_frame + film.num_frames
    assert [len(pictures) for pictures in shown.latents.values()] == [4]


def test_a_film_of_every_second_frame_takes_as_long_as_the_video(write_video: WriteVideo) -> None:
    source = ClipSource(name="clip", path=write_video("clip.mp4", frames=20))
    settings = EvaluationSettings(data="clip", max_frames=9, middle=Middle(frame_step=2))
    round_trip = open_model(CopyCodec())
    result = evaluate_round_trip(round_trip, [source], settings, devices=[torch.device("cpu")])
    (shown,) = gather_evidence([round_trip], [result], limit=1, clips=[source])
    assert shown.film.fps == result.clips[0].fps == probe_video(source.path).fps / 2


def test_films_of_many_models_stay_within_what_browsers_decode(write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=5, height=32, width=400)
    trips = [open_model(CopyCodec(offset=0.01 * number), label=f"model {number}") for number in range(6)]
    evaluations = [evaluate(trip, video, lpips=None) for trip in trips]
    (shown,) = gather_evidence(trips, evaluations, limit=1)
    assert len(shown.film.panels) == 13 and shown.film.panel_width * 13 <= 4096 and shown.film.panel_width > 300
    (alone,) = gather_evidence(trips[:1], evaluations[:1], limit=1)
    assert alone.film.panel_width == PLAYER_WIDTH


def test_the_clips_shown_are_the_telling_ones(write_video: WriteVideo, tmp_path: Path) -> None:
    for seed in range(6):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=9)
    comparison = compare([CopyCodec(offset=0.2), CopyCodec(flicker=0.1)], tmp_path / "clips", lpips=None)
    chosen = choose_clips(comparison.evaluations, limit=4)
    scores = {clip.name: clip.metrics.psnr for clip in comparison.evaluations[0].clips}
    assert len(chosen) == len({name for name, _ in chosen}) == 4
    assert {"worst", "best"} <= {why for _, why in chosen} and {name for name, _ in chosen} <= scores.keys()
