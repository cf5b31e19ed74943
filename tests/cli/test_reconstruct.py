"""``tinyvae reconstruct``, ``encode`` and ``decode``: names of files, exit codes, mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import run
from tinyvae.cli.reconstruct import distinct_names
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError
from tinyvae.video.decode import probe_video


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reconstruct")
    write_sample_clips(folder / "clips", count=2, height=36, width=50, frames=10)
    torch.manual_seed(0)
    save_model(TAEHV("taehv", width=0.125), folder / "model.safetensors")
    return folder


def videos_of(setting: Path) -> list[Path]:
    return sorted((setting / "clips").rglob("*.mp4"))


def test_reconstruct_writes_what_was_asked_for(
    setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, (first, second) = str(setting / "model.safetensors"), videos_of(setting)
    code = run(["reconstruct", model, str(setting / "clips"), "--output", str(tmp_path), "--side_by_side", "--latents"])
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{video.stem}_{word}"
        for video in (first, second)
        for word in ("reconstructed.mp4", "side_by_side.mp4", "latents.safetensors")
    }
    info = probe_video(tmp_path / f"{first.stem}_reconstructed.mp4")
    assert (info.frames, info.height, info.width, info.fps) == (10, 36, 50, 24)
    assert "10 frames, PSNR" in capsys.readouterr().out
    with pytest.raises(UserError, match="exists already"):
        run(["reconstruct", model, str(first), "--output", str(tmp_path)])
    assert run(["reconstruct", model, str(first), "--output", str(tmp_path), "--overwrite", "--frames", "5"]) == 0
    assert probe_video(tmp_path / f"{first.stem}_reconstructed.mp4").frames == 5


def test_encode_then_decode(setting: Path, tmp_path: Path) -> None:
    model, video = str(setting / "model.safetensors"), videos_of(setting)[0]
    assert run(["encode", model, str(video), "--output", str(tmp_path)]) == 0
    latents = tmp_path / f"{video.stem}_latents.safetensors"
    assert load_file(latents)["latents"].shape == (1, 4, 16, 5, 7)
    assert run(["decode", model, str(tmp_path), "--output", str(tmp_path)]) == 0  # of the folder
    info = probe_video(tmp_path / f"{video.stem}_decoded.mp4")
    assert (info.frames, info.height, info.width, info.fps) == (10, 36, 50, 24)
    save_file({"latents": torch.randn(1, 3, 16, 4, 6)}, tmp_path / "foreign.safetensors")
    assert run(["decode", model, str(tmp_path / "foreign.safetensors"), "--output", str(tmp_path), "--fps", "8"]) == 0
    info = probe_video(tmp_path / "foreign_decoded.mp4")
    assert (info.frames, info.height, info.width, info.fps) == (9, 32, 48, 8)


def test_a_bad_video_among_others_gives_exit_code_1(
    setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, video = str(setting / "model.safetensors"), videos_of(setting)[0]
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"\0" * 100)
    assert run(["reconstruct", model, str(bad), str(video), "--output", str(tmp_path / "out")]) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{video.stem}_reconstructed.mp4"]
    errors = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert any(line.startswith("skipped: ") and "bad.mp4" in line for line in errors)  # on a line of its own
    with pytest.raises(UserError, match=r"bad\.mp4"):
        run(["reconstruct", model, str(bad), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("verb", ["encode", "decode", "reconstruct"])
def test_a_bar_ends_at_its_end(setting: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """7 frames are 2 latents, which would give 5 back: the frames repeated for that are no progress."""
    model, video = str(setting / "model.safetensors"), videos_of(setting)[0]
    arguments = [str(video), "--output", str(tmp_path), "--frames", "7"]
    if verb == "decode":
        assert run(["encode", model, *arguments]) == 0
        capsys.readouterr()
        arguments = [str(next(tmp_path.iterdir())), "--output", str(tmp_path)]
    assert run([verb, model, *arguments]) == 0
    drawn = [line for line in capsys.readouterr().err.split("\r") if "%" in line]
    assert "100%" in drawn[-1] and " 7/7 " in drawn[-1]


def test_files_of_the_same_name_do_not_meet(setting: Path, tmp_path: Path) -> None:
    model, video = str(setting / "model.safetensors"), videos_of(setting)[0]
    copies = [tmp_path / folder / "same.mp4" for folder in ("a", "b")]
    for copy in copies:
        copy.parent.mkdir()
        copy.write_bytes(video.read_bytes())
    assert run(["encode", model, *map(str, copies), "--output", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_mistakes(setting: Path, tmp_path: Path) -> None:
    model, video = str(setting / "model.safetensors"), str(videos_of(setting)[0])
    save_file({"latents": torch.randn(1, 3, 32, 4, 6)}, tmp_path / "wrong.safetensors")
    small, stated = torch.randn(1, 3, 16, 4, 6), '{"height": 36, "width": 48}'
    save_file({"latents": small}, tmp_path / "cropped.safetensors", {"tinyvae_latents": stated})
    for arguments, words in (
        (["reconstruct", model, str(tmp_path / "none.mp4")], "there is no video at"),
        (["reconstruct", video, model], r"\.mp4 is a video and no model; name the model first"),
        (["reconstruct", model, video, "--frames", "0"], "--frames: '0' is not a whole number, at least 1"),
        (["reconstruct", model, video, "--crf", "99"], "--crf: .* is not a number from 0 to 51"),
        (["decode", model, video, "--crf", "nan"], "--crf: .* is not a number from 0 to 51"),
        (["decode", model, video, "--fps", "-1"], "--fps: .* is not a number from 0.001"),
        (["decode", model, video, "--audio_from", "none.mp4"], "no video at --audio_from none.mp4"),
        (["reconstruct", model, video, "--device", "tpu9"], "there is no device 'tpu9'"),
        (["decode", model, str(tmp_path / "none.safetensors")], "there is no latents file at"),
        (["decode", model, str(tmp_path), str(setting)], "there is no safetensors file in .*; give latents of"),
        (["decode", model, str(tmp_path / "wrong.safetensors")], "latents of 32 channels and taehv has 16"),
        (["decode", model, str(tmp_path / "cropped.safetensors")], "states 36x48 pixels, and .* make only 32x48"),
        (["decode", model, video], "is a video, and decode takes latents"),
        (["decode", model, "a", "b", "--audio_from", video], "goes with one LATENTS file"),
    ):
        with pytest.raises(UserError, match=words):
            run([*arguments, "--output", str(tmp_path / "out")])
    assert list((tmp_path / "out").iterdir()) == [] if (tmp_path / "out").exists() else True


def test_encode_and_decode_beside_the_film(setting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the documents: both in the folder of the film, which must not be in the way."""
    film = tmp_path / "film.mp4"
    film.write_bytes(videos_of(setting)[0].read_bytes())
    monkeypatch.chdir(tmp_path)
    assert run(["encode", str(setting / "model.safetensors"), "film.mp4"]) == 0
    assert run(["decode", str(setting / "model.safetensors"), "film_latents.safetensors"]) == 0
    assert film.read_bytes() == videos_of(setting)[0].read_bytes() and (tmp_path / "film_decoded.mp4").is_file()
    (tmp_path / "model.safetensors").write_bytes((setting / "model.safetensors").read_bytes())
    assert run(["decode", "model.safetensors", ".", "--overwrite"]) == 0, "of the folder: the model in it is no latents"


def test_names_never_collide() -> None:
    assert distinct_names(["a", "a_2", "a", "b", "a"]) == ["a", "a_2", "a_3", "b", "a_4"]


@pytest.mark.filterwarnings("ignore:.*holds values that are not finite")
def test_nan_gives_exit_code_1_and_is_named(setting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(setting / "model.safetensors")
    with torch.no_grad():
        model.decoder[-1].bias.fill_(float("nan"))
    save_model(model, tmp_path / "nan.safetensors")
    video = str(videos_of(setting)[0])
    assert run(["reconstruct", str(tmp_path / "nan.safetensors"), video, "--output", str(tmp_path)]) == 1
    assert "no numbers (NaN)" in capsys.readouterr().err
