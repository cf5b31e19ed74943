"""300 damaged copies of a clip: every read gives true frames or a named error, and never a crash, hang or other error.

What "true" can mean: H.264 has no checksums, so a flipped bit inside the coded pictures can change pixels in a way that
no decoder notices. What can be promised, and is tested here:

- a frame is never taken for another one: read with the index of the sound file, each frame shows its own number;
- read without an index, the frames are bit for bit those of a plain FFmpeg decode of the damaged file;
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
from pathlib import Path

import av
import torch
from numbered_video import frame_number, numbered_frames, write_video

from tinyvae.data.decode import VideoInfo, probe_video, read_frames
from tinyvae.data.pixels import Orientation, RgbConverter
from tinyvae.errors import UnreadableVideoError

FLIPPED_COPIES = 300
FRAMES = 36
CLIP_FRAMES = 6


def damaged_copy(sound: bytes, chance: random.Random) -> bytes:
    """A copy with 1, 2 or 8 bytes changed anywhere: headers, index tables, coded pictures."""
    copy = bytearray(sound)
    for _ in range(chance.choice([1, 1, 2, 8])):
        copy[chance.randrange(len(copy))] ^= chance.randrange(1, 256)
    return bytes(copy)


def plain_decode(path: Path, stop: int) -> list[torch.Tensor]:
    """The first ``stop`` frames as FFmpeg gives them, with no check of ours."""
    converter, frames = RgbConverter(), []
    with av.open(str(path)) as container:
        container.streams.video[0].thread_count = 1
        for frame in container.decode(video=0):
            out = torch.empty((3, frame.height, frame.width), dtype=torch.uint8)
            converter.write(frame, Orientation(), out.numpy())
            frames.append(out)
            if len(frames) == stop:
                break
    return frames


def read_damaged(path: Path, wanted: range, info: VideoInfo, sound_frames: torch.Tensor, *, indexed: bool) -> str:
    try:
        frames = read_frames(path, wanted, info=info if indexed else None, timeout_s=10)
    except UnreadableVideoError as error:
        assert str(error).startswith(f"{path}: ") and len(str(error)) > len(f"{path}: "), error
        return "named error"
    if torch.equal(frames, sound_frames[list(wanted)]):
        return "true frames"
    if indexed:
        numbers = [frame_number(frame) for frame in frames]
        assert all(found in (None, number) for found, number in zip(numbers, wanted, strict=True)), (numbers, wanted)
    else:
        assert torch.equal(frames, torch.stack(plain_decode(path, wanted.stop)[wanted.start :]))
    return "pixels changed unnoticed"


def fuzz(folder: Path) -> Counter[str]:
    source = write_video(folder / "sound.mp4", numbered_frames(FRAMES), options={"g": "12", "bf": "2", "crf": "22"})
    sound, info = source.read_bytes(), probe_video(source)
    sound_frames = read_frames(source, range(FRAMES))
    assert [frame_number(frame) for frame in sound_frames] == list(range(FRAMES))
    outcomes: Counter[str] = Counter()
    for copy in range(FLIPPED_COPIES):
        chance = random.Random(copy)
        path = folder / f"damaged_{copy}.mp4"
        path.write_bytes(damaged_copy(sound, chance))
        start = chance.randrange(FRAMES - CLIP_FRAMES)
        outcomes[read_damaged(path, range(start, start + CLIP_FRAMES), info, sound_frames, indexed=copy % 2 == 0)] += 1
        path.unlink()
    return outcomes


def test_flipped_bytes(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"the reading process ended with {done.returncode}:\n{done.stderr[-3000:]}"
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == FLIPPED_COPIES
    assert outcomes["named error"] > 100 and outcomes["true frames"] > 50
    assert outcomes.get("pixels changed unnoticed", 0) <= FLIPPED_COPIES // 10


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]))))
