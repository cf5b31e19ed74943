"""300 damaged copies of a clip: every read gives true frames or a named error, and never a crash, hang or other error.

What "true" can mean: H.264 has no checksums, so a flipped bit inside the coded pictures can change pixels in a way that
no decoder notices. What can be promised, and is tested here:

- a frame is never taken for another one: read with the index of the sound file, each frame shows its own number;
- read without an index, each frame shows the number that a plain FFmpeg decode of the damaged file has there (its
  edit list may be gone, say, and its numbers with it);
- nothing that the decoder noticed is handed out, which leaves few changed pictures (5 % of the copies when this was
  written, with PyAV 18.1).

The reads run in a process of their own, so that a crash or a hang is seen for what it is.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import av
import av.error
import torch

from tests.processes import HANGS_S
from tests.video.numbered_video import frame_number, numbered_frames, write_video
from tinyvae.errors import UnreadableVideoError
from tinyvae.video.decode import VideoInfo, probe_video, read_frames
from tinyvae.video.pixels import RgbConverter, frame_orientation

FLIPPED_COPIES = 300
CLIP_FRAMES = 6


def damaged_copy(sound: bytes, chance: random.Random) -> tuple[bytes, list[int]]:
    """A copy with 1, 2 or 8 bytes changed anywhere (headers, index tables, coded pictures), and where they are."""
    copy = bytearray(sound)
    places = [chance.randrange(len(copy)) for _ in range(chance.choice([1, 1, 2, 8]))]
    for place in places:
        copy[place] ^= chance.randrange(1, 256)
    return bytes(copy), places


def coded_pictures(mp4: bytes) -> range:
    """Where the pictures lie in a sound MP4 file: the body of its mdat box."""
    name = mp4.index(b"mdat")
    return range(name + 4, name - 4 + int.from_bytes(mp4[name - 4 : name], "big"))


def plain_numbers(path: Path) -> list[int | None]:
    """The numbers in the pictures that FFmpeg gives with no check of ours, at their places by time; None: no number."""
    converter, numbers, times = RgbConverter(), {}, []
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = 1
        for packet in container.demux(video=0):
            if packet.pts is not None and not packet.is_discard:
                times.append(packet.pts)
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                continue
            for frame in frames:
                orientation = frame_orientation(frame, path)
                width, height = orientation.size(frame.width, frame.height)
                out = torch.empty((3, height, width), dtype=torch.uint8)
                converter.write(frame, orientation, out.numpy())
                numbers[frame.pts] = frame_number(out)
    return [numbers.get(time) for time in sorted(times)]


def read_damaged(path: Path, wanted: range, info: VideoInfo | None, sound_frames: torch.Tensor) -> str:
    try:
        frames = read_frames(path, wanted, info=info, timeout_s=10)
    except UnreadableVideoError as error:
        assert str(error).startswith(f"{path}: ") and len(str(error)) > len(f"{path}: "), error
        return "named error"
    if torch.equal(frames, sound_frames[list(wanted)]):
        return "true frames"
    numbers = [frame_number(frame) for frame in frames]
    if any(found not in (None, number) for found, number in zip(numbers, wanted, strict=True)):
        assert info is None, (numbers, wanted)
        assert numbers == plain_numbers(path)[wanted.start : wanted.stop], (numbers, wanted)
    return "pixels changed unnoticed"


def fuzz(source: Path, folder: Path) -> Counter[str]:
    sound, info = source.read_bytes(), probe_video(source)
    sound_frames = read_frames(source, range(info.frames))
    assert [frame_number(frame) for frame in sound_frames] == list(range(info.frames))
    pictures, without_checksum = coded_pictures(sound), replace(info, ends_crc=None)
    outcomes: Counter[str] = Counter()
    for copy in range(FLIPPED_COPIES):
        chance = random.Random(copy)
        path = folder / f"damaged_{copy}.mp4"
        damaged, places = damaged_copy(sound, chance)
        path.write_bytes(damaged)
        start = chance.randrange(info.frames - CLIP_FRAMES)
        # The checksum of an index guards the tables at a file's ends. These files are hardly more than ends, so it
        # would refuse them all; the pictures of a longer one are outside of it.
        known = without_checksum if all(place in pictures for place in places) else info
        outcome = read_damaged(path, range(start, start + CLIP_FRAMES), known if copy % 2 == 0 else None, sound_frames)
        outcomes[outcome] += 1
        path.unlink()
    return outcomes


def check_outcomes(source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", __name__, str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, f"the reading process ended with {done.returncode}:\n{done.stderr[-3000:]}"
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == FLIPPED_COPIES
    assert outcomes["named error"] > 60 and outcomes["true frames"] > 50, outcomes
    assert outcomes.get("pixels changed unnoticed", 0) <= FLIPPED_COPIES // 10, outcomes


def test_flipped_bytes(tmp_path: Path) -> None:
    options = {"g": "12", "bf": "2", "crf": "22"}
    check_outcomes(write_video(tmp_path / "sound.mp4", numbered_frames(36), options=options), tmp_path)


def test_flipped_bytes_in_real_footage(tmp_path: Path, shared: Path) -> None:
    check_outcomes(shared / "data" / "hostile" / "bframes_open_gop.mp4", tmp_path)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in `conftest`, which this process does not load
    print(json.dumps(fuzz(Path(sys.argv[1]), Path(sys.argv[2]))))
