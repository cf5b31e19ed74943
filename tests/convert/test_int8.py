"""The int8 decoder: near the float one on frames that it has not seen, at every size, in the same loop; or refused."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import WriteVideo
from tests.convert.test_onnx import load_example
from tests.engines.small_models import small
from tinyvae import TAEHV, load_model
from tinyvae.cli.main import main, run
from tinyvae.convert.export import export
from tinyvae.convert.int8 import MAX_PARTS, psnr_between, read_videos
from tinyvae.convert.onnx import FILES, build_graph, stream_decode
from tinyvae.errors import UserError
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.models.variants import get_spec

onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
FAMILIES = ("taehv", "taew2_2_super", "taeltx2_3_wide", "taeh3")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate and check on a ninth of the pixels."""
    monkeypatch.setattr("tinyvae.convert.int8.PART_SIZE", (64, 64))


def write_float_decoder(folder: Path, model: TAEHV) -> Path:
    file = folder / "float.onnx"
    file.write_bytes(build_graph(model, "decoder", torch.float32).SerializeToString())
    return file


@pytest.mark.usefixtures("small_parts")
def test_an_int8_decoder_from_the_command_line(
    small_model_file: Path, tmp_path: Path, write_video: WriteVideo, capsys: pytest.CaptureFixture[str]
) -> None:
    video, folder = write_video("a.mp4", frames=40), tmp_path / "graphs"
    words = ["--to", "onnx", "--dtype", "int8", "--data", str(video), "--output", str(folder)]
    assert run(["export", str(small_model_file), *words]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1 and said.err == ""
    assert " dB from float32 on frames that it was not calibrated on, " in said.out and "float32 encoder" in said.out
    assert sorted(file.name for file in folder.iterdir()) == sorted(FILES.values())
    decoder = onnx.load(folder / "decoder.onnx")
    assert "QuantizeLinear" in {node.op_type for node in decoder.graph.node}
    assert "QuantizeLinear" not in {node.op_type for node in onnx.load(folder / "encoder.onnx").graph.node}
    assert [prop.key for prop in decoder.metadata_props] == ["tinyvae"]
    model = load_model(small_model_file)
    plain = write_float_decoder(tmp_path, model)
    for height, width in ((2, 3), (5, 4)):
        latents = torch.randn(1, 4, 16, height, width)
        assert psnr_between(plain, folder / "decoder.onnx", latents, model.spec) > 35
    example = load_example()
    stream = example.OnnxDecoder(folder / "decoder.onnx")
    made = np.stack([frame for latent in latents[0].numpy() for frame in stream.push(latent)])
    expected = stream_decode(folder / "decoder.onnx", latents, model.spec)
    torch.testing.assert_close(torch.from_numpy(made)[None], expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("small_parts")
def test_a_network_far_from_its_float_form_is_refused(tmp_path: Path, write_video: WriteVideo) -> None:
    torch.manual_seed(1)
    model = small("taehv")
    with torch.no_grad():
        model.decoder[-1].weight.mul_(10)  # ten times the contrast, and ten times the rounding
        model.decoder[-1].bias.fill_(0.5)
    with pytest.raises(UserError, match=r"as int8 this decoder is \d+\.\d dB from its float32 form .*--dtype float16"):
        export(model, to="onnx", output=tmp_path / "out", dtype="int8", data=write_video("a.mp4", frames=40))
    assert list((tmp_path / "out").iterdir()) == []


MISTAKES = {
    "no videos": (["--to", "onnx", "--dtype", "int8"], "name some with --data"),
    "nothing there": (["--to", "onnx", "--dtype", "int8", "--data", "absent"], "there is no data at absent"),
    "no video in it": (["--to", "onnx", "--dtype", "int8", "--data", "EMPTY"], "there is no video in"),
    "no video": (["--to", "onnx", "--dtype", "int8", "--data", "TEXT"], "name other videos with --data"),
    "one short video": (["--to", "onnx", "--dtype", "int8", "--data", "SHORT"], "has 20 frames, and int8 needs 32"),
    "videos for nothing": (["--to", "onnx", "--data", "SHORT"], "--data is for --dtype int8 alone, and float32"),
    "videos for float16": (["--to", "onnx", "--dtype", "fp16", "--data", "SHORT"], "and float16 is written"),
    "another program": (["--to", "diffusers", "--dtype", "int8", "--data", "SHORT"], "does not read taehv as int8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(
    small_model_file: Path,
    tmp_path: Path,
    write_video: WriteVideo,
    capsys: pytest.CaptureFixture[str],
    mistake: str,
) -> None:
    words, expected = MISTAKES[mistake]
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("no video")
    short = write_video("short.mp4", frames=20)
    places = {"EMPTY": str(tmp_path / "empty"), "TEXT": str(tmp_path / "text.mp4"), "SHORT": str(short)}
    with pytest.raises(SystemExit) as ended:
        output = ["--output", str(tmp_path / "out")]
        main(["export", str(small_model_file), *(places.get(word, word) for word in words), *output])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and expected in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_without_the_package_it_says_how_to_get_it(
    small_model_file: Path, tmp_path: Path, write_video: WriteVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"needs the package 'onnxruntime'.*pip install 'tinyvae\[onnx\]'"):
        export(small_model_file, to="onnx", output=tmp_path / "out", dtype="int8", data=write_video("a.mp4", frames=40))


def test_other_videos_are_checked_with_than_calibrated_on(tmp_path: Path, video_folder: Path) -> None:
    videos = read_videos(video_folder, get_spec("taehv"))
    assert (len(videos.calibration), len(videos.check)) == (6, 3)
    assert MAX_PARTS == 9 and {video.shape[0:1] + video.shape[2:] for video in videos.check} == {(1, 3, 192, 192)}
    for video in videos.check:
        assert all(not torch.equal(video, other) for other in videos.calibration)
        assert 0 <= video.min() < video.max() <= 1


def test_videos_that_cannot_be_read_are_left_out(write_video: WriteVideo, tmp_path: Path, shared: Path) -> None:
    """One broken file of a folder does not stop an export, whether it is no video or is damaged in the middle."""
    for name in ("b.mp4", "d.mp4"):
        write_video(f"videos/{name}", frames=20)
    (tmp_path / "videos" / "a.mp4").write_text("no video")
    shutil.copy(shared / "data" / "hostile" / "corrupt_middle.mp4", tmp_path / "videos" / "c.mp4")
    with pytest.warns(UserWarning) as said:
        videos = read_videos(tmp_path / "videos", get_spec("taehv"))
    assert [re.search(r"left out: .*/(.)\.mp4", str(each.message))[1] for each in said] == ["a", "c"]
    assert (len(videos.calibration), len(videos.check)) == (1, 1)


def test_other_frames_of_a_single_video(write_video: WriteVideo) -> None:
    videos = read_videos(write_video("a.mp4", frames=60), get_spec("taehv"))
    assert [video.shape[1] for video in (*videos.calibration, *videos.check)] == [16, 16, 16]
    assert not torch.equal(videos.calibration[0], videos.check[0])


@pytest.mark.filterwarnings("ignore:left out")
def test_a_single_video_among_files_that_cannot_be_read(write_video: WriteVideo, tmp_path: Path) -> None:
    alone = read_videos(write_video("videos/a.mp4", frames=60), get_spec("taehv"))
    for name in "bcde":
        (tmp_path / "videos" / f"{name}.mp4").write_text("no video")
    videos = read_videos(tmp_path / "videos", get_spec("taehv"))
    assert torch.equal(torch.cat(videos.check), torch.cat(alone.check))
    assert torch.equal(torch.cat(videos.calibration), torch.cat(alone.calibration))


@pytest.mark.slow
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_kind_of_network(tmp_path: Path, write_video: WriteVideo, variant: str) -> None:
    torch.manual_seed(2)
    model = TAEHV(variant, width=0.25).eval()
    done = export(model, to="onnx", output=tmp_path / "out", dtype="int8", data=write_video("a.mp4", frames=80))
    assert done.dtype == "int8" and done.rounding_db >= 40 and done.speedup is not None
    latents = torch.randn(1, 3, model.spec.latent_channels, 3, 2)
    plain = write_float_decoder(tmp_path, model)
    assert psnr_between(plain, tmp_path / "out" / "decoder.onnx", latents, model.spec) > 30


@pytest.mark.slow
def test_trained_weights(tmp_path: Path, write_video: WriteVideo) -> None:
    """Trained frames have contrast, so that a rounding error shows. It must cost little against the video."""
    for number in range(8):
        write_video(f"videos/{number}.mp4", frames=32, height=64, width=64, seed=number)
    settings = {"data_root": tmp_path / "videos", "output_dir": tmp_path / "run", "max_train_steps": 60}
    settings |= {"use_sample_clips": False, "model_width": 0.125, "validation_steps": 60, "dataloader_num_workers": 0}
    assert (
        run(["train", "quickstart", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))])
        == 0
    )
    model = load_model(tmp_path / "run").requires_grad_(False)
    done = export(model, to="onnx", output=tmp_path / "out", dtype="int8", data=tmp_path / "videos")
    video = read_videos(tmp_path / "videos", model.spec).check[0]
    graphs = (write_float_decoder(tmp_path, model), tmp_path / "out" / "decoder.onnx")
    made = [stream_decode(graph, model.encode_video(video), model.spec) for graph in graphs]
    quality = [psnr_from_mse((frames - video[:, : frames.shape[1]]).square().mean().item()) for frames in made]
    assert quality[0] > 18, "it has learned something"
    assert done.rounding_db >= 40 and abs(quality[0] - quality[1]) < 0.3, (done.rounding_db, quality)
