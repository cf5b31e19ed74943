"""Whole films through a model: every frame comes back, with size, rate and sound, in memory that does not grow."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import WriteVideo
from tests.evaluation.copy_codec import CopyCodec
from tinyvae import TAEHV
from tinyvae.convert.reconstruct import (
    GAP_LEVEL,
    GAP_PIXELS,
    Outputs,
    decode_to_video,
    encode_to_file,
    label_strip,
    panel_labels,
    reconstruct_video,
    side_by_side,
    side_by_side_width,
)
from tinyvae.errors import UserError
from tinyvae.evaluation.pictures import heat_map, to_bytes_range
from tinyvae.evaluation.round_trip import FAMILY_KIND, TEACHER_KIND, ModelFacts, StreamedCodec, open_model
from tinyvae.video.decode import probe_video, read_frames, uneven_times_s
from tinyvae.video.write import VideoWriter


def opened(codec: CopyCodec | TAEHV) -> StreamedCodec:
    round_trip = open_model(codec)
    assert isinstance(round_trip, StreamedCodec)
    return round_trip


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 48, 64), (3, 48, 64), (16, 50, 70), (21, 35, 45)])
def test_every_frame_comes_back_at_its_size(
    write_video: WriteVideo, tmp_path: Path, frames: int, height: int, width: int
) -> None:
    source = write_video("in.mp4", frames=frames, height=height, width=width, fps=30000 / 1001)
    outputs = Outputs(video=tmp_path / "out.mp4", side_by_side=tmp_path / "beside.mp4", crf=4)
    done = reconstruct_video(opened(CopyCodec()), source, outputs)
    before, after = probe_video(source), probe_video(tmp_path / "out.mp4")
    assert (after.frames, after.height, after.width) == (frames, height, width)
    assert after.fps == pytest.approx(before.fps, rel=1e-4)
    assert done.num_frames == frames and done.psnr == 100 and done.mse == 0
    original, written = read_frames(source, range(frames)), read_frames(tmp_path / "out.mp4", range(frames))
    error = (original.float() - written.float()).square().mean().item() / 255**2
    assert -10 * np.log10(error) > 38  # what H.264 itself costs
    assert probe_video(tmp_path / "beside.mp4").frames == frames
    assert bool(done.note) == (frames < 4)


@pytest.mark.parametrize("variant", ["taecvx", "taeh3", "taeltx_2", "taew2_2_super"])
def test_every_variant_gives_every_frame_back(write_video: WriteVideo, tmp_path: Path, variant: str) -> None:
    source = write_video("in.mp4", frames=19, height=40, width=56)
    model = TAEHV(variant, width=0.125)
    done = reconstruct_video(opened(model), source, Outputs(video=tmp_path / "out.mp4"))
    assert done.num_frames == probe_video(tmp_path / "out.mp4").frames == 19


def test_encode_and_decode_are_the_halves(write_video: WriteVideo, tmp_path: Path) -> None:
    source = write_video("in.mp4", frames=18, height=44, width=52, fps=12)
    model = TAEHV("taehv", width=0.125)
    with torch.no_grad():
        model.decoder[-1].bias.fill_(0.5)
    round_trip = opened(model)
    whole = Outputs(video=tmp_path / "whole.mp4", latents=tmp_path / "whole.safetensors")
    reconstruct_video(round_trip, source, whole)
    encode_to_file(round_trip, source, tmp_path / "half.safetensors")
    num_frames = decode_to_video(round_trip, tmp_path / "half.safetensors", tmp_path / "halves.mp4")
    latents = load_file(tmp_path / "half.safetensors")["latents"]
    assert torch.allclose(latents, load_file(tmp_path / "whole.safetensors")["latents"], atol=1e-5)
    # The model's own call makes the same latents; the film's last frames have one more of their own.
    padded = torch.nn.functional.pad(read_frames(source, range(18)).float() / 255, (0, 4, 0, 4), mode="replicate")
    with torch.no_grad():
        own = model.encode_video(padded[None])
    assert torch.allclose(latents[:, :4], own[:, :4], atol=1e-5)
    assert num_frames == 18 and probe_video(tmp_path / "halves.mp4").fps == 12
    first, second = (read_frames(tmp_path / name, range(18)).float() for name in ("whole.mp4", "halves.mp4"))
    assert first.shape == second.shape and (first - second).abs().max() <= 2


def test_several_models_stand_side_by_side_in_step(write_video: WriteVideo, tmp_path: Path) -> None:
    """Models of different frame rules give pieces of different lengths; the film has every frame of each once."""
    source = write_video("in.mp4", frames=21, height=64, width=96)
    outputs = Outputs(side_by_side=tmp_path / "film.mp4", picture=tmp_path / "middle.png", labels=True, crf=4)
    done = reconstruct_video(
        opened(CopyCodec("taehv")), source, outputs, beside=[opened(CopyCodec("taeltx_2", offset=0.2))], size=(32, 48)
    )
    info = probe_video(tmp_path / "film.mp4")
    strip = info.height - 32
    assert done.psnr == 100 and strip > 0
    assert (info.frames, info.width) == (21, side_by_side_width(48, 2))
    film = read_frames(tmp_path / "film.mp4", range(21))[..., strip:, :].float()
    first, same, brighter = (film[..., start : start + 48] for start in (0, 56, 112))
    assert (first - same).abs().mean() < 2
    assert (brighter - first).mean(dim=(1, 2, 3)).min() > 25, "frame j of one stands beside frame j of the other"
    with Image.open(tmp_path / "middle.png") as picture:
        middle = torch.from_numpy(np.asarray(picture).copy()).movedim(-1, 0)
    assert middle.shape[1:] == (info.height, info.width)
    assert (middle[:, strip:, :48].float() - first[10]).abs().mean() < 4


def test_latents_of_another_variant_are_refused(write_video: WriteVideo, tmp_path: Path) -> None:
    source = write_video("in.mp4", frames=9)
    encode_to_file(opened(TAEHV("taehv", width=0.125)), source, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="holds taehv latents and the model is taew2_1"):
        decode_to_video(opened(TAEHV("taew2_1", width=0.125)), tmp_path / "x.safetensors", tmp_path / "x.mp4")
    save_file({"z": torch.randn(1, 16, 3, 4, 6)}, tmp_path / "diffusers.safetensors")
    with pytest.raises(UserError, match=r"holds latents of 3 channels and taehv has 16; .*diffusers has N C T H W"):
        decode_to_video(opened(TAEHV("taehv", width=0.125)), tmp_path / "diffusers.safetensors", tmp_path / "x.mp4")
    assert not (tmp_path / "x.mp4").exists()


def test_latents_of_one_teacher_are_for_all_its_students(write_video: WriteVideo, tmp_path: Path) -> None:
    """Latents of a teacher with two students state the first; those of one student are near those of the other."""
    encode_to_file(opened(TAEHV("taew2_2", width=0.125)), write_video("in.mp4", frames=9), tmp_path / "x.safetensors")
    student = opened(TAEHV("taew2_2_super", width=0.125))
    assert decode_to_video(student, tmp_path / "x.safetensors", tmp_path / "x.mp4") == 9


def test_latents_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """As a diffusion model in float16 makes them; the frames would be black, without a word."""
    latents = torch.randn(1, 12, 16, 4, 6)
    latents[0, 11, 3, 2, 1] = torch.nan
    save_file({"latents": latents}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"x\.safetensors holds values that are NaN or infinite; look at what made"):
        decode_to_video(opened(TAEHV("taehv", width=0.125)), tmp_path / "x.safetensors", tmp_path / "x.mp4")
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_latents_of_eight_bits_are_decoded(tmp_path: Path) -> None:
    save_file({"latents": torch.randn(1, 3, 16, 4, 6).to(torch.float8_e4m3fn)}, tmp_path / "x.safetensors")
    assert decode_to_video(opened(TAEHV("taehv", width=0.125)), tmp_path / "x.safetensors", tmp_path / "x.mp4") == 9


def add_tone(source: Path, target: Path, seconds: float, *, codec: str = "aac", delay_s: float = 0) -> None:
    """``source`` with a 440 Hz tone that begins after ``delay_s``."""
    with av.open(str(source)) as video, av.open(str(target), "w") as out:
        stream = out.add_stream_from_template(video.streams.video[0])
        sound = out.add_stream(codec, rate=44100, layout="mono")
        convert = av.AudioResampler(format=sound.codec_context.format.name, layout="mono", rate=44100)
        for packet in video.demux(video.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
        wave = np.sin(2 * np.pi * 440 * np.arange(int(44100 * seconds)) / 44100).astype(np.float32)[None]
        for start in range(0, wave.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(wave[:, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 44100, start + round(44100 * delay_s), Fraction(1, 44100)
            for converted in convert.resample(frame):
                out.mux(sound.encode(converted))
        out.mux(sound.encode(None))


def test_sound_is_carried_over(write_video: WriteVideo, tmp_path: Path) -> None:
    add_tone(write_video("silent.mp4", frames=24, fps=24), tmp_path / "in.mp4", seconds=1.0)
    reconstruct_video(opened(CopyCodec()), tmp_path / "in.mp4", Outputs(video=tmp_path / "out.mp4"))
    with av.open(str(tmp_path / "out.mp4")) as written:
        samples = np.concatenate([f.to_ndarray() for f in written.decode(written.streams.audio[0])], axis=1)[0]
    assert 0.9 < len(samples) / 44100 < 1.1
    spectrum = np.abs(np.fft.rfft(samples[4096:36864]))
    assert np.argmax(spectrum) * 44100 / 32768 == pytest.approx(440, abs=3)


@pytest.mark.parametrize(("codec", "suffix"), [("aac", ".mp4"), ("flac", ".mkv")])
def test_sound_that_sets_in_late_stays_late(write_video: WriteVideo, tmp_path: Path, codec: str, suffix: str) -> None:
    """Copied (AAC) or encoded again (FLAC): lips and voice stay together."""
    source = tmp_path / f"in{suffix}"
    add_tone(write_video("silent.mp4", frames=24, fps=24), source, seconds=0.5, codec=codec, delay_s=0.4)
    reconstruct_video(opened(CopyCodec()), source, Outputs(video=tmp_path / "out.mp4"))
    assert tone_start_s(source) == pytest.approx(0.4, abs=0.03)
    assert tone_start_s(tmp_path / "out.mp4") == pytest.approx(0.4, abs=0.03)


def tone_start_s(path: Path) -> float:
    """When the sound of a file is first heard, counted from its first frame."""
    with av.open(str(path)) as container:
        for frame in container.decode(container.streams.audio[0]):
            samples = np.abs(frame.to_ndarray().astype(np.float64)).reshape(-1)
            loud = samples > 0.1 * (2 ** (15 if samples.max() > 2 else 0))
            if loud.any():
                return float(frame.time) + float(np.argmax(loud)) / frame.sample_rate
    raise AssertionError(f"{path} is silent")


def test_files_of_all_kinds(shared: Path, tmp_path: Path) -> None:
    hostile = shared / "data" / "hostile"
    for name, size in (("odd_dims_vp9.webm", (243, 321)), ("rotated_90.mp4", (320, 240))):
        outputs = Outputs(video=tmp_path / "out.mp4", overwrite=True)
        reconstruct_video(opened(CopyCodec()), hostile / name, outputs, max_frames=9)
        info = probe_video(tmp_path / "out.mp4")
        assert (info.frames, (info.height, info.width)) == (9, size)
    source, target = hostile / "frame_index_vfr.mp4", tmp_path / "vfr.mp4"
    reconstruct_video(opened(CopyCodec()), source, Outputs(video=target), max_frames=40)
    before, after = (uneven_times_s(path, probe_video(path)) for path in (source, target))
    assert before is not None and after is not None and np.abs(before[:40] - after).max() < 1e-3


def test_uneven_times_are_kept(write_video: WriteVideo, tmp_path: Path) -> None:
    """A telephone's film of variable rate: a second without frames must not move the voice after it."""
    times = [0, 0.04, 0.08, 0.1, 0.12, 0.15, 0.9, 0.95, 1.0, 1.1, 1.2, 1.3]
    even, source = write_video("even.mp4", frames=12), tmp_path / "in.mp4"
    with VideoWriter(source, fps=10, width=64, height=48, times_s=times) as writer:
        writer.write(read_frames(even, range(12)))
    assert uneven_times_s(even, probe_video(even)) is None
    round_trip = opened(CopyCodec())
    outputs = Outputs(video=tmp_path / "out.mp4", side_by_side=tmp_path / "beside.mp4")
    reconstruct_video(round_trip, source, outputs)
    encode_to_file(round_trip, source, tmp_path / "x.safetensors")
    decode_to_video(round_trip, tmp_path / "x.safetensors", tmp_path / "decoded.mp4", audio_from=source)
    for name in ("in.mp4", "out.mp4", "beside.mp4", "decoded.mp4"):
        found = uneven_times_s(tmp_path / name, probe_video(tmp_path / name))
        assert found is not None and found == pytest.approx(times, abs=1e-4), name
    reconstruct_video(round_trip, source, Outputs(video=tmp_path / "short.mp4"), max_frames=7)
    cut = uneven_times_s(tmp_path / "short.mp4", probe_video(tmp_path / "short.mp4"))
    assert cut is not None and cut == pytest.approx(times[:7], abs=1e-4)


def test_side_by_side_holds_input_output_and_error() -> None:
    target = torch.rand(2, 3, 8, 10)
    joined = side_by_side(target, [target, target + 1])
    width = side_by_side_width(10, 2)
    assert joined.shape == (2, 3, 8, width)
    assert torch.equal(joined[..., :10], to_bytes_range(target))
    start = 10 + GAP_PIXELS
    assert torch.equal(joined[..., start : start + 10], to_bytes_range(target))
    assert torch.equal(joined[0, :, 0, -1].float(), heat_map(target + 1, target)[0, :, 0, -1].float())


def facts(label: str, kind: str) -> ModelFacts:
    return ModelFacts(
        label=label,
        path=None,
        kind=kind,
        variant="taecvx",
        width=1.0,
        parameters=1,
        encoder_parameters=None,
        decoder_parameters=None,
        dtype="float32",
        sha256=None,
    )


def test_every_panel_has_a_label_of_its_own() -> None:
    labels = panel_labels([facts("student", FAMILY_KIND), facts("CogVideoX", TEACHER_KIND)])
    assert [forms[0] for forms in labels] == [
        "input",
        "output: student",
        "teacher: CogVideoX",
        "error of student, 0 to 64 of 255",
        "error of CogVideoX, 0 to 64 of 255",
    ]
    for width in (32, 96, 400):
        target = torch.zeros(2, 3, 16, width)
        joined = side_by_side(target, [target, target])
        strip = label_strip(labels, panel_width=width)
        assert strip.shape[-2] % 2 == 0 and strip.shape[-1] == joined.shape[-1] == side_by_side_width(width, 2)
        panels = [strip[0, :, n * (width + GAP_PIXELS) :][:, :width] for n in range(5)]
        assert all((panel > GAP_LEVEL + 100).sum() > 20 for panel in panels), "there is text above every panel"
        gap = strip[0, :, width : width + GAP_PIXELS]
        assert (gap == GAP_LEVEL).all(), "no label runs into its neighbour"
        different = {panel.numpy().tobytes() for panel in panels}
        assert len(different) == 5 or width == 32


def test_labels_beyond_ascii_are_told_apart() -> None:
    strips = {label_strip([[name]], panel_width=200).numpy().tobytes() for name in ("中", "文", "ü", "ø")}
    assert len(strips) == 4


# Prints the peak resident memory after each video, MiB.
PEAK_SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tinyvae import TAEHV
from tinyvae.convert.reconstruct import Outputs, reconstruct_video
from tinyvae.evaluation.round_trip import open_model
model = open_model(TAEHV("taehv", width=0.125))
out = Path(sys.argv[1])
outputs = Outputs(video=out / "o.mp4", latents=out / "o.safetensors", overwrite=True)
for video in sys.argv[2:]:
    reconstruct_video(model, Path(video), outputs)
    # not getrusage: its maximum survives exec, so the memory of the test run itself would hide the child's
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024)
"""


@pytest.mark.slow
def test_two_minutes_need_no_more_memory_than_two_seconds(write_video: WriteVideo, tmp_path: Path) -> None:
    """Seen: 308 MiB for 48 frames, 344 for 1200, 348 for 2880 and 5760."""
    short = write_video("short.mp4", frames=48, height=64, width=96)
    long = write_video("long.mp4", frames=2880, height=64, width=96)  # as floats these frames alone are 202 MiB
    command = [sys.executable, "-c", PEAK_SCRIPT, *map(str, (tmp_path, short, long))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak_of_short, peak_of_long = map(float, done.stdout.split())
    assert peak_of_long < peak_of_short + 120
