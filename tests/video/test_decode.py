"""Exactly the frames asked for, or a named error: on the hostile files, and on files made here in many shapes."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from tests.video.numbered_video import frame_number, numbered_frames, write_video
from tests.video.small_videos import write_video as small_video
from tinyvae.errors import UnreadableVideoError
from tinyvae.video import frame_stream
from tinyvae.video.decode import VideoInfo, iterate_frames, probe_video, read_frames

# name: (frames, number in the first picture or None where there is no code, width, height)
SOUND = {
    "anamorphic_sar_4_3.mp4": (48, None, 240, 240),
    "attached_pic_and_audio.mp4": (60, 0, 320, 240),
    "av1.mp4": (48, 0, 320, 240),
    "bframes_open_gop.mp4": (120, 0, 320, 240),
    "edit_list_trim.mp4": (39, 21, 320, 240),
    "frame_index.mp4": (200, 0, 320, 240),
    "frame_index_vfr.mp4": (200, 0, 320, 240),
    "gray.mp4": (48, 0, 320, 240),
    "hevc_10bit.mp4": (48, 0, 320, 240),
    "mjpeg_fullrange.avi": (40, 0, 320, 240),
    "odd_dims_vp9.webm": (40, None, 321, 243),
    "odd_dims_yuv444.mp4": (40, None, 321, 243),
    "one_frame.mp4": (1, 0, 320, 240),
    "range_full.mp4": (48, None, 320, 180),
    "range_limited.mp4": (48, None, 320, 180),
    "rotated_90.mp4": (48, None, 240, 320),
    "spaces and ünïcødé.mp4": (3, 0, 320, 240),
    "start_offset.mkv": (60, 0, 320, 240),
    "start_offset.ts": (60, 0, 320, 240),
    "three_frames.mp4": (3, 0, 320, 240),
    "tiny_16x16.mp4": (48, None, 16, 16),
    "vfr_gap.mp4": (60, 0, 320, 240),
    "vp9.webm": (48, 0, 320, 240),
    "webm_named.mp4": (48, 0, 320, 240),
    "zero_duration.mp4": (60, 0, 320, 240),
}
REFUSED = {
    "audio_only.mp4": "no video stream",
    "corrupt_middle.mp4": "damaged at frame 15",
    "interlaced_tff.mp4": "interlaced",
    "moov_missing.mp4": "not a readable video file",
    "random_bytes.mp4": "not a readable video file",
    "resolution_change.ts": r"resolution changes inside the file \(320x240 to 160x120 at frame 24\)",
    "text_named.mp4": "not a readable video file",
    "truncated_mdat.mp4": "damaged at frame 22",
    "zero_bytes.mp4": "the file is empty",
    "zero_duration_edit.mp4": "no frames",
}


def check_random_ranges(path: Path, infos: list[VideoInfo | None], *, tries: int = 6) -> torch.Tensor:
    """Random ranges and steps give bit for bit what decoding from the start gives; returns all frames."""
    whole = torch.stack(list(iterate_frames(path)))
    chance = random.Random(path.name)
    for info in infos:
        for _ in range(tries):
            start, step = chance.randrange(len(whole)), chance.randint(1, 3)
            wanted = range(start, min(len(whole), start + 12), step)
            assert torch.equal(read_frames(path, wanted, info=info), whole[list(wanted)]), (info, wanted)
    return whole


def test_every_hostile_file_has_an_expected_outcome(shared: Path) -> None:
    present = {p.name for p in (shared / "data" / "hostile").iterdir() if p.suffix not in (".md", ".json")}
    assert present == SOUND.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", SOUND)
def test_hostile_sound(shared: Path, name: str) -> None:
    path = shared / "data" / "hostile" / name
    frames, first_number, width, height = SOUND[name]
    info, quick = probe_video(path), probe_video(path, thorough=False)
    assert (info.frames, info.width, info.height) == (frames, width, height)
    assert info == quick
    whole = check_random_ranges(path, [None, info])
    assert whole.shape == (frames, 3, height, width) and whole.dtype == torch.uint8
    if first_number is not None:
        assert [frame_number(f) for f in whole] == list(range(first_number, first_number + frames))
    with pytest.raises(UnreadableVideoError, match=f"frame {frames} was asked for|ends before frame {frames}"):
        read_frames(path, [frames], info=info)
    with pytest.raises(UnreadableVideoError, match=f"ends before frame {frames}"):
        read_frames(path, [frames])


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_refused(shared: Path, name: str) -> None:
    path = shared / "data" / "hostile" / name
    with pytest.raises(UnreadableVideoError, match=re.escape(str(path)) + ": .*" + REFUSED[name]):
        probe_video(path)
    with pytest.raises(UnreadableVideoError, match=REFUSED[name]):
        list(iterate_frames(path))
    with pytest.raises(UnreadableVideoError, match=re.escape(str(path))):
        read_frames(path, range(40))


def test_hostile_damage_spares_the_sound_part(shared: Path) -> None:
    """Frames before the damage, and those from the next sound key frame on, are true; those between are refused."""
    path = shared / "data" / "hostile" / "corrupt_middle.mp4"
    info = probe_video(path, thorough=False)
    assert info.frames == 60
    for wanted in (range(12), range(50, 60)):
        assert [frame_number(f) for f in read_frames(path, wanted, info=info)] == list(wanted)
    for start in range(13, 44, 5):
        with pytest.raises(UnreadableVideoError, match="damaged at frame"):
            read_frames(path, range(start, start + 4), info=info)


def test_hostile_second_resolution_is_not_the_indexed_one(shared: Path) -> None:
    path = shared / "data" / "hostile" / "resolution_change.ts"
    info = probe_video(path, thorough=False)
    with pytest.raises(UnreadableVideoError, match="160x120, not 320x240"):
        read_frames(path, range(30, 34), info=info)


def test_hostile_pictures(shared: Path) -> None:
    folder = shared / "data" / "hostile"
    turned = read_frames(folder / "rotated_90.mp4", range(5))
    assert [frame_number(torch.rot90(f, -1, (1, 2))) for f in turned] == list(range(5))
    full, limited = (read_frames(folder / f"range_{kind}.mp4", range(48)).float() for kind in ("full", "limited"))
    assert (full - limited).abs().mean() < 1.7
    grey = read_frames(folder / "gray.mp4", range(4))
    assert torch.equal(grey[:, 0], grey[:, 1]) and torch.equal(grey[:, 1], grey[:, 2])
    for name in ("mjpeg_fullrange.avi", "hevc_10bit.mp4", "gray.mp4", "frame_index.mp4"):
        blocks = read_frames(folder / name, [1]).float()[0, :, 12:20].mean((0, 1))
        assert blocks[12:20].mean() < 3 and blocks[300:308].mean() > 252, name
    assert probe_video(folder / "anamorphic_sar_4_3.mp4").pixel_aspect == pytest.approx(4 / 3)


def test_real_clips_are_as_annotated(shared: Path) -> None:
    folder = shared / "data" / "clips"
    for clip in json.loads((folder / "annotations.json").read_text())["list"][::18]:
        info = probe_video(folder / clip["path"])
        assert (info.frames, info.width, info.height) == (clip["frames"], clip["width"], clip["height"])
        assert info.fps == pytest.approx(clip["fps"], abs=0.01)
        assert info.pts_step > 0


MADE = {
    "closed_gop.mp4": {"options": {"g": "12", "bf": "3"}},
    "open_gop.mp4": {"options": {"g": "12", "bf": "3", "x264-params": "open-gop=1:b-adapt=0"}},
    "intra_refresh.mkv": {"options": {"g": "12", "bf": "0", "x264-params": "intra-refresh=1"}},
    "offset.mkv": {"options": {"g": "12"}, "pts": [300 + n for n in range(50)]},
    "offset.ts": {"options": {"g": "12"}, "pts": [300 + n for n in range(50)]},
    "uneven.mp4": {
        "options": {"g": "12", "bf": "2"},
        "pts": [n * 40 + 17 * (n % 3) + 500 * (n > 20) for n in range(50)],
        "time_base": Fraction(1, 1000),
    },
    "ntsc.mkv": {"pts": list(range(50)), "time_base": Fraction(1001, 30000), "options": {"g": "12"}},
    "hevc.mp4": {"codec": "libx265", "options": {"g": "12", "x265-params": "log-level=none:open-gop=1:pools=1"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "12", "cpu-used": "8", "deadline": "realtime"}},
    "vp8_hidden.webm": {"codec": "libvpx", "options": {"g": "12", "auto-alt-ref": "1", "lag-in-frames": "16"}},
    "mpeg4_bframes.avi": {"codec": "mpeg4", "options": {"g": "12", "bf": "2", "q:v": "2", "b": "4M"}},
    "h264_bframes.avi": {"options": {"g": "12", "bf": "3"}},
    "mpeg2.ts": {"codec": "mpeg2video", "options": {"g": "12", "bf": "2", "b": "4M"}},
    # MP4 files are opened without trial decoding: their tables alone must tell how far pictures are reordered.
    "mpeg4_bframes.mp4": {"codec": "mpeg4", "options": {"g": "12", "bf": "2", "q:v": "2", "b": "3M"}},
    "mpeg2_bframes.mp4": {"codec": "mpeg2video", "options": {"g": "12", "bf": "2", "q:v": "2", "b": "3M"}},
    "hevc_bframes.mp4": {"codec": "libx265", "options": {"g": "12", "bf": "2", "x265-params": "log-level=none"}},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "lossless.mkv": {"codec": "ffv1", "pix_fmt": "yuv444p10le"},
}
STEPS = {"closed_gop.mp4": 512, "uneven.mp4": 0, "ntsc.mkv": 1001 / 30}
"""The step of the times of some; milliseconds cannot hold the grid of the last one."""


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    return numbered_frames(50)


@pytest.mark.parametrize("name", MADE)
def test_made_files_give_their_numbers(tmp_path: Path, source: torch.Tensor, name: str) -> None:
    path = write_video(tmp_path / name, source, **MADE[name])
    info = probe_video(path)
    assert info.frames == 50 and info.pts_step == pytest.approx(STEPS.get(name, info.pts_step), abs=0.05)
    whole = check_random_ranges(path, [None, info, probe_video(path, thorough=False)])
    assert [frame_number(f) for f in whole] == list(range(50))


def test_reading_forward_seeks_only_once(tmp_path: Path, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index in hand neither the packets are scanned nor the frames before the key frame decoded."""
    path = write_video(tmp_path / "a.mp4", source, options={"g": "12"})
    info = probe_video(path)
    decoded = []
    original = frame_stream._Run.decode
    monkeypatch.setattr(
        frame_stream._Run, "decode", lambda self, packet: decoded.append(packet) or original(self, packet)
    )
    read_frames(path, range(30, 34), info=info)
    assert len(decoded) <= 34 - 24 + 4  # from key frame 24, plus the decoder's delay


@pytest.mark.parametrize("degrees", [0, 90, 180, -90])
@pytest.mark.parametrize("flip", [False, True])
def test_display_matrix(tmp_path: Path, source: torch.Tensor, degrees: int, flip: bool) -> None:
    """What players show: turned counterclockwise by the angle, then mirrored left-right."""
    path = tmp_path / "turned.mp4"
    plain = write_video(tmp_path / "plain.mp4", source[:4])
    with av.open(str(plain)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        stream.set_display_rotation(degrees, hflip=flip)
        for packet in reader.demux(video=0):
            if packet.size:
                packet.stream = stream
                writer.mux(packet)
    stored, shown = read_frames(plain, [2])[0], read_frames(path, [2])[0]
    turned = torch.rot90(stored, degrees // 90, (1, 2))
    assert torch.equal(shown, turned.flip(2) if flip else turned)
    info = probe_video(path)
    assert (info.height, info.width) == tuple(shown.shape[1:])


def test_interlaced_is_refused(tmp_path: Path, source: torch.Tensor) -> None:
    path = write_video(tmp_path / "a.mp4", source[:6], options={"x264-params": "tff=1"})
    with pytest.raises(UnreadableVideoError, match=r"interlaced.*deinterlace"):
        probe_video(path)


@pytest.mark.parametrize("suffix", ["mkv", "ts", "flv"])
def test_cut_anywhere(tmp_path: Path, source: torch.Tensor, suffix: str) -> None:
    """A file cut off at any byte gives true frames or an error, read on or by a seek; also where the cut parts a
    picture from those that are shown before it. (Of two or three pictures nobody can tell the pace.)"""
    whole = write_video(tmp_path / f"a.{suffix}", source[:30], options={"g": "12"}).read_bytes()
    path = tmp_path / f"cut.{suffix}"
    reasons: list[str] = []
    for cut in range(1, 72):
        path.write_bytes(whole[: len(whole) * cut // 72])
        numbers, reason = numbers_until_damage(path)
        if len(numbers) > 3:
            assert numbers == list(range(len(numbers)))
            with pytest.raises(UnreadableVideoError):
                read_frames(path, [len(numbers)])
            reasons.append(reason)
    cut_off = sum("frames before its last one are missing" in reason for reason in reasons)
    assert cut_off >= 3 and len(reasons) - cut_off >= 3, reasons


def numbers_until_damage(path: Path) -> tuple[list[int | None], str]:
    """The numbers in the pictures that come before the end or the error, and the error's text."""
    numbers: list[int | None] = []
    try:
        for frame in iterate_frames(path):
            numbers.append(frame_number(frame))
    except UnreadableVideoError as refused:
        return numbers, str(refused)
    return numbers, ""


def test_a_late_last_frame_is_no_cut(tmp_path: Path, source: torch.Tensor) -> None:
    """Uneven times before it make a gap at the end a part of the film; so does a container with a table."""
    late = [*range(49), 60]
    uneven = [*range(20), *range(25, 54), 60]
    assert probe_video(write_video(tmp_path / "late.mp4", source, pts=late)).frames == 50
    assert probe_video(write_video(tmp_path / "uneven.mkv", source, pts=uneven)).frames == 50
    with pytest.raises(UnreadableVideoError, match="frames before its last one are missing"):
        probe_video(write_video(tmp_path / "late.mkv", source, pts=late))


def test_a_recording_that_begins_between_key_frames(tmp_path: Path, source: torch.Tensor) -> None:
    """MPEG-TS cut in the middle of a GOP: frame 0 is the first that can be decoded, as in a full FFmpeg decode."""
    whole = write_video(tmp_path / "a.ts", source, options={"g": "12", "bf": "2"}).read_bytes()
    packets = len(whole) // 188
    path = tmp_path / "cut.ts"
    path.write_bytes(whole[: 188 * 3] + whole[188 * (packets // 4) :])  # keeps the tables at the front
    try:
        whole_frames = check_random_ranges(path, [None, probe_video(path)])
    except UnreadableVideoError as refused:
        assert "damaged" in str(refused)
        return
    numbers = [frame_number(f) for f in whole_frames]
    assert numbers == list(range(numbers[0], 50)) and numbers[0] % 12 == 0


def test_a_stale_index_never_gives_another_frame(tmp_path: Path, source: torch.Tensor) -> None:
    """The file was replaced by one with other times, or a shorter one: an error. Should its ends be the same, then
    true frames (by counting) or an error."""
    even = probe_video(write_video(tmp_path / "even.mp4", source))
    path = write_video(tmp_path / "uneven.mp4", source, **MADE["uneven.mp4"])
    with pytest.raises(UnreadableVideoError, match="changed since it was indexed"):
        read_frames(path, range(10, 30), info=even)
    even = replace(even, ends_crc=None)
    assert [frame_number(f) for f in read_frames(path, range(10, 30), info=even)] == list(range(10, 30))
    shorter = write_video(tmp_path / "shorter.mp4", source[:20])
    with pytest.raises(UnreadableVideoError, match="ends before frame 29"):
        read_frames(shorter, range(10, 30), info=even)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    reasons = {"missing.mp4": "no such file", "pipe.mp4": "not a regular file", ".": "not a regular file"}
    for name, reason in reasons.items():
        with pytest.raises(UnreadableVideoError, match=reason):
            probe_video(tmp_path / name)


def test_an_error_carries_its_path_and_reason_also_between_processes(tmp_path: Path) -> None:
    with pytest.raises(UnreadableVideoError) as caught:
        probe_video(tmp_path / "missing.mp4")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.path, error.reason) == (tmp_path / "missing.mp4", "no such file or directory")
        assert str(error) == f"{error.path}: {error.reason}"


def test_deadline(tmp_path: Path, source: torch.Tensor) -> None:
    path = write_video(tmp_path / "a.mp4", source)
    for call in (
        lambda: probe_video(path, timeout_s=1e-6),
        lambda: read_frames(path, [3], timeout_s=1e-6),
        lambda: next(iterate_frames(path, timeout_s=1e-6)),
    ):
        with pytest.raises(UnreadableVideoError, match="took longer than 1e-06 s"):
            call()


def test_iterate_parts(tmp_path: Path, source: torch.Tensor) -> None:
    path = write_video(tmp_path / "a.mp4", source, options={"g": "12"})
    assert [frame_number(f) for f in iterate_frames(path, start=17, stop=31)] == list(range(17, 31))
    assert list(iterate_frames(path, start=5, stop=5)) == []
    assert [frame_number(f) for f in iterate_frames(path, start=45)] == list(range(45, 50))
    with pytest.raises(UnreadableVideoError, match="it ends after frame 49, frames up to 59 were asked for"):
        list(iterate_frames(path, start=40, stop=60))
    with pytest.raises(UnreadableVideoError, match="ends before frame 50"):
        list(iterate_frames(path, start=50))


def test_wrong_requests_are_our_own_bugs(tmp_path: Path, source: torch.Tensor) -> None:
    path = write_video(tmp_path / "a.mp4", source[:4])
    for wanted in ([], [-1, 2], [2, 1], [1, 1]):
        with pytest.raises(AssertionError):
            read_frames(path, wanted)


def test_frames_are_those_of_a_bare_decode(tmp_path: Path, source: torch.Tensor) -> None:
    """Against PyAV alone: same pictures up to the rounding of its default colour conversion."""
    path = write_video(tmp_path / "a.mp4", source, options={"g": "12"})
    with av.open(str(path)) as container:
        bare = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
    ours = torch.stack(list(iterate_frames(path))).permute(0, 2, 3, 1).numpy()
    assert np.abs(ours.astype(int) - bare.astype(int)).mean() < 2.5


FORMATS = [
    "frame_index.mp4", "hevc_10bit.mp4", "gray.mp4", "odd_dims_yuv444.mp4", "odd_dims_vp9.webm", "rotated_90.mp4",
    "range_full.mp4", "range_limited.mp4", "mjpeg_fullrange.avi", "av1.mp4",
]  # fmt: skip


def assert_windows_are_exact(path: Path) -> None:
    info = probe_video(path, thorough=False)
    numbers = (3, 5, 8)
    whole = read_frames(path, numbers, info=info)
    draw = random.Random(0)
    for _ in range(12):
        height, width = draw.randint(1, info.height), draw.randint(1, info.width)
        top, left = draw.randint(0, info.height - height), draw.randint(0, info.width - width)
        part = read_frames(path, numbers, info=info, window=(top, left, height, width))
        assert torch.equal(part, whole[..., top : top + height, left : left + width])


def test_a_window_is_exactly_that_part_of_the_picture(tmp_path: Path) -> None:
    assert_windows_are_exact(small_video(tmp_path / "a.mp4", frames=10, width=322, height=182))


@pytest.mark.parametrize("name", FORMATS)
def test_windows_of_every_format(shared: Path, name: str) -> None:
    assert_windows_are_exact(shared / "data" / "hostile" / name)


def test_frames_are_written_where_the_caller_wants_them(tmp_path: Path) -> None:
    path = small_video(tmp_path / "a.mp4", frames=10)
    batch = torch.zeros((2, 3, 3, 32, 48), dtype=torch.uint8)
    frames = read_frames(path, (1, 2, 3), window=(8, 16, 32, 48), out=batch[1])
    assert frames.data_ptr() == batch[1].data_ptr() and batch[0].sum() == 0
    assert torch.equal(batch[1], read_frames(path, (1, 2, 3))[..., 8:40, 16:64])
    with pytest.raises(AssertionError, match="out does not fit"):
        read_frames(path, (1, 2), window=(8, 16, 32, 48), out=batch[1])
