"""What is written can be read back: the same pictures, properly tagged, with sound, whole or not at all."""

from __future__ import annotations

import os
import time
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from tests.processes import HANGS_S, wait_until
from tests.video.numbered_video import frame_number, numbered_frames
from tinyvae.errors import FileExistsAlreadyError, MissingFileError, UserError
from tinyvae.video.decode import iterate_frames, probe_video, read_frames
from tinyvae.video.write import VideoWriter, frame_rate


def write(path: Path, frames: torch.Tensor, **settings: Any) -> Path:
    settings.setdefault("fps", 25)
    with VideoWriter(path, width=frames.shape[3], height=frames.shape[2], **settings) as writer:
        writer.write(frames)
    return path


@pytest.mark.parametrize("ending", [".mp4", ".mkv", ".mov"])
def test_round_trip(tmp_path: Path, ending: str) -> None:
    frames = numbered_frames(20)
    path = write(tmp_path / f"a{ending}", frames, fps=Fraction(30000, 1001))
    info = probe_video(path)
    assert (info.frames, info.width, info.height, info.codec) == (20, 160, 96, "h264")
    assert info.fps == pytest.approx(30000 / 1001, rel=1e-3)
    back = read_frames(path, range(20))
    assert [frame_number(f) for f in back] == list(range(20))
    error = back.float() - frames.float()
    assert 10 * np.log10(255**2 / error.square().mean().item()) > 33
    assert error.mean().abs() < 0.5
    assert os.listdir(tmp_path) == [path.name]


def test_flat_colours_come_back_exactly(tmp_path: Path) -> None:
    colours = torch.randint(0, 256, (10, 3, 1, 1), dtype=torch.uint8)
    frames = colours.expand(10, 3, 32, 48).contiguous()
    back = read_frames(write(tmp_path / "a.mp4", frames, crf=1), range(10))
    # One level of YUV is up to two levels of blue.
    assert (back.int() - frames.int()).abs().max() <= 2


def test_tags(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", numbered_frames(3), pixel_aspect=4 / 3)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        assert stream.pix_fmt == "yuv420p"
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (1, 1, 1, 1)
        assert stream.sample_aspect_ratio == Fraction(4, 3)


def test_odd_sizes_repeat_the_last_row_and_column(tmp_path: Path) -> None:
    frames = numbered_frames(4)[:, :, :95, :159]
    path = write(tmp_path / "a.mp4", frames, crf=5)
    back = read_frames(path, range(4))
    assert back.shape == (4, 3, 96, 160)
    assert (back[:, :, :95, :159].float() - frames.float()).abs().mean() < 3
    assert (back[:, :, 95].float() - back[:, :, 94].float()).abs().mean() < 3


def test_single_frames_and_batches_are_the_same(tmp_path: Path) -> None:
    frames = numbered_frames(6)
    write(tmp_path / "a.mp4", frames)
    with VideoWriter(tmp_path / "b.mp4", fps=25, width=160, height=96) as writer:
        for frame in frames:
            writer.write(frame)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_text("precious")
    with pytest.raises(FileExistsAlreadyError, match="exists already"):
        write(path, numbered_frames(2))
    assert path.read_text() == "precious"
    write(path, numbered_frames(2), overwrite=True)
    assert probe_video(path).frames == 2
    with (
        pytest.raises(FileExistsAlreadyError, match="appeared while"),
        VideoWriter(tmp_path / "b.mp4", fps=25, width=160, height=96) as writer,
    ):
        writer.write(numbered_frames(1))
        (tmp_path / "b.mp4").write_text("made meanwhile")
    assert (tmp_path / "b.mp4").read_text() == "made meanwhile"
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "b.mp4"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), VideoWriter(tmp_path / "a.mp4", fps=25, width=160, height=96) as writer:
        writer.write(numbered_frames(3))
        raise RuntimeError("the caller fails")
    with pytest.raises(UserError, match="no frame"), VideoWriter(tmp_path / "a.mp4", fps=25, width=160, height=96):
        pass
    assert os.listdir(tmp_path) == []


def test_a_killed_write_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    written = tmp_path / "written"

    def write_and_wait() -> None:
        with VideoWriter(tmp_path / "a.mp4", fps=25, width=64, height=64) as writer:
            writer.write(torch.zeros((60, 3, 64, 64), dtype=torch.uint8))
            written.touch()
            time.sleep(600)

    child = get_context("fork").Process(target=write_and_wait)
    child.start()
    wait_until(lambda: written.exists() or not child.is_alive())
    child.kill()
    child.join(HANGS_S)
    assert written.exists() and not (tmp_path / "a.mp4").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"fps": 0}, "0 frames per second"), ({"width": 0}, "cannot be 0x96"), ({"name": "a.gif"}, "endings .mp4")],
)
def test_wrong_settings(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    given = {"fps": 25, "width": 160, "height": 96, "name": "a.mp4", **settings}
    with pytest.raises(UserError, match=words):
        VideoWriter(tmp_path / given.pop("name"), **given)
    assert os.listdir(tmp_path) == []


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="does not exist"):
        VideoWriter(tmp_path / "no" / "a.mp4", fps=25, width=160, height=96)


def test_frame_rates() -> None:
    assert frame_rate(23.976) == Fraction(24000, 1001)
    assert frame_rate(59.94) == Fraction(60000, 1001)
    assert frame_rate(24.0) == 24 and frame_rate(12.5) == Fraction(25, 2)
    assert frame_rate(Fraction(30000, 1001)) == Fraction(30000, 1001)


def video_with_sound(
    path: Path, codec: str, *, seconds: float = 1.2, rate: int = 24000, tag: str | None = None
) -> Path:
    """25 frames per second and a 440 Hz tone; ``tag`` becomes the title of the file and the name of its sound."""
    with av.open(str(path), "w") as container:
        video: Any = container.add_stream("libx264", rate=25)
        video.width, video.height, video.pix_fmt = 160, 96, "yuv420p"
        sound: Any = container.add_stream(codec, rate=rate, layout="mono")
        if tag is not None:
            container.metadata["title"] = tag
            sound.metadata["title" if path.suffix == ".mkv" else "handler_name"] = tag
        for number, frame_CHW in enumerate(numbered_frames(round(25 * seconds))):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_CHW.permute(1, 2, 0).numpy()))
            frame.pts = number
            container.mux(video.encode(frame))
        tone = np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate).astype(np.float32) * 0.5
        resampler = av.AudioResampler(format=sound.codec_context.format, layout="mono", rate=rate, frame_size=1024)
        whole = av.AudioFrame.from_ndarray(tone[None], format="flt", layout="mono")
        whole.rate, whole.pts = rate, 0
        for frame in [*resampler.resample(whole), *resampler.resample(None)]:
            container.mux(sound.encode(frame))
        container.mux(video.encode(None))
        container.mux(sound.encode(None))
    return path


def decoded_sound(path: Path) -> tuple[str, np.ndarray, int]:
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=stream.rate)
        parts = [f.to_ndarray()[0] for frame in container.decode(stream) for f in resampler.resample(frame)]
        return stream.codec_context.name, np.concatenate(parts), stream.rate


@pytest.mark.parametrize(
    ("name", "codec", "rate", "written"),
    [
        ("a.mp4", "aac", 24_000, ("aac", 24_000)),
        ("b.mkv", "pcm_s16le", 24_000, ("aac", 24_000)),
        ("c.mp4", "libmp3lame", 24_000, ("mp3float", 24_000)),
        ("c2.mkv", "libmp3lame", 11_025, ("aac", 11_025)),  # too slow for MP3 in an MP4 file
        ("d.mkv", "pcm_s16le", 192_000, ("aac", 96_000)),
        ("e.mkv", "pcm_s16le", 37_800, ("aac", 32_000)),
    ],
)
def test_sound_comes_along(tmp_path: Path, name: str, codec: str, rate: int, written: tuple[str, int]) -> None:
    """Sound that mp4 can hold is copied; other sound becomes AAC, at a rate that AAC has; a shorter film cuts it."""
    source = video_with_sound(tmp_path / name, codec, rate=rate)
    frames = torch.stack(list(iterate_frames(source)))
    for count in (30, 15):
        path = write(tmp_path / f"out_{count}.mp4", frames[:count], audio_from=source)
        assert probe_video(path).frames == count
        found, samples, rate = decoded_sound(path)
        assert (found, rate) == written
        assert len(samples) / rate == pytest.approx(count / 25, abs=0.15)
        spectrum = np.abs(np.fft.rfft(samples[1024:5120] * np.hanning(4096)))
        assert spectrum.argmax() * rate / 4096 == pytest.approx(440, abs=2 + rate / 4096)


def test_no_sound_is_no_error(tmp_path: Path) -> None:
    silent = write(tmp_path / "silent.mp4", numbered_frames(4))
    path = write(tmp_path / "out.mp4", numbered_frames(4), audio_from=silent)
    with av.open(str(path)) as container:
        assert len(container.streams.audio) == 0


def test_unreadable_sound_source_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "noise.mp4").write_bytes(os.urandom(4000))
    with pytest.raises(UserError, match=r"noise\.mp4"):
        VideoWriter(tmp_path / "out.mp4", fps=25, width=160, height=96, audio_from=tmp_path / "noise.mp4")
    assert os.listdir(tmp_path) == ["noise.mp4"]


@pytest.mark.parametrize("ending", [".mp4", ".mkv"])
def test_tags_in_another_encoding(tmp_path: Path, ending: str) -> None:
    """A title in Latin-1, of the file and of its sound: read, and carried over with the sound."""
    source = video_with_sound(tmp_path / f"a{ending}", "aac", tag="QQtag")
    raw = source.read_bytes()
    assert raw.count(b"QQtag") == 2
    source.write_bytes(raw.replace(b"QQtag", "\xe9t\xe9\xff!".encode("latin-1")))
    info = probe_video(source)
    frames = torch.stack(list(iterate_frames(source)))
    path = write(tmp_path / f"out{ending}", frames, audio_from=source)
    assert probe_video(path).frames == info.frames == 30
    assert decoded_sound(path)[0] == "aac"
