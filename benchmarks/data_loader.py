"""How fast and how heavy the loader is: ratios against a bare PyAV loop, memory of a worker, a second worker's gain.

Random 16-frame clips of 854x480 H.264 with a key frame every 48 frames, cut to 720x480. Everything that is compared
runs in turn, several times over, in one process tree, so that other load on the machine falls on all of it.

  python benchmarks/data_loader.py
  python benchmarks/data_loader.py --rounds 9 --clips 40 --memory_clips 1000

The bare loop opens the file, seeks to the key frame before the clip and decodes, one thread, until the 16 frames are
there. `bare rgb` turns each of them into an rgb24 array, as anyone who wants pixels must; `bare decode` throws the
pixels away. The loader does the first and more: exact colors, proof of the frame numbers, crop, batch, transport.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import torch

from tinyvae.data import ClipSet, ClipSettings, build_index, make_train_loader, split
from tinyvae.data.clip import choose_clip, file_of
from tinyvae.data.clip_reading import ClipBatch

WIDTH, HEIGHT, GOP, FILE_FRAMES = 854, 480, 48, 192
SETTINGS = ClipSettings(height=480, width=720, n_frames=16, seed=1)
BATCH = 4
STALE = 3
"""Batches a worker can have made while nobody was timing: two waiting and one under way."""


def write_files(folder: Path, count: int) -> None:
    """Camera moves over a large texture, with moving boxes and grain: about as hard to decode as real footage."""
    for number in range(count):
        rng = np.random.default_rng(number)
        coarse = rng.integers(0, 256, (45, 80, 3), dtype=np.uint8)
        texture = np.asarray(torch.nn.functional.interpolate(
            torch.from_numpy(coarse).permute(2, 0, 1)[None].float(), size=(900, 1600), mode="bicubic"
        )[0].permute(1, 2, 0).clamp(0, 255))  # fmt: skip
        texture = np.clip(texture + rng.normal(0, 8, texture.shape), 0, 255).astype(np.uint8)
        options = {"crf": "23", "preset": "fast", "g": str(GOP), "keyint_min": str(GOP), "sc_threshold": "0"}
        with av.open(str(folder / f"{number:03}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=Fraction(24), options=options)
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for frame in range(FILE_FRAMES):
                left, top = 2 * frame % (1600 - WIDTH), frame % (900 - HEIGHT)
                picture = texture[top : top + HEIGHT, left : left + WIDTH].copy()
                for box in range(6):
                    x, y = (97 * box + 5 * frame) % (WIDTH - 90), (61 * box + 3 * frame) % (HEIGHT - 90)
                    picture[y : y + 80, x : x + 80] = (
                        rng.integers(0, 256, 3, dtype=np.uint8) if frame % 24 == 0 else 40 * box
                    )
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))


def bare_clip(path: Path, start: int, convert: bool) -> None:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        ticks = round(1 / 24 / stream.time_base)
        container.seek(start * ticks, stream=stream)
        frames = []
        for frame in container.decode(stream):
            if frame.pts >= start * ticks:
                frames.append(frame.to_ndarray(format="rgb24") if convert else frame)
                if len(frames) == SETTINGS.n_frames:
                    return
    raise AssertionError(f"{path} ended before its clip did")


def clips_of(train: ClipSet, first: int, count: int) -> Iterator[tuple[Path, int]]:
    """File and first frame of each training position: the same clips as the loader reads."""
    for position in range(first, first + count):
        row = train.row(file_of(position, len(train), SETTINGS.seed))
        yield train.index.full_path(row), choose_clip(row, SETTINGS, position, len(train)).frame_indices[0]


class RunningLoader:
    """A loader whose workers are warm; ``seconds_for`` times the next clips."""

    def __init__(self, train: ClipSet, num_workers: int) -> None:
        before = {child.pid for child in psutil.Process().children()}
        loader = make_train_loader(train, SETTINGS, batch_size=BATCH, num_workers=num_workers, prefetch_factor=2)
        self.batches: Iterator[ClipBatch] = iter(loader)
        next(self.batches)
        self.workers = [child for child in psutil.Process().children() if child.pid not in before]

    def seconds_for(self, clips: int) -> tuple[float, float]:
        """Wall seconds, and CPU seconds of the workers."""
        # Batches that were made while nobody was timing are thrown away first; from then on the main process waits
        # for the workers at both ends of the measurement, so that as many clips are made in it as are counted.
        for _ in range(STALE * len(self.workers)):
            next(self.batches)
        started, cpu_started = time.perf_counter(), self._cpu_seconds()
        for _ in range(clips // BATCH):
            next(self.batches)
        return time.perf_counter() - started, self._cpu_seconds() - cpu_started

    def _cpu_seconds(self) -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in self.workers)


def compare_with_bare(train: ClipSet, rounds: int, clips: int) -> None:
    """Wall time and CPU time: the second says what the work is when other programs hold the cores too."""
    loader = RunningLoader(train, 1)
    wall: dict[str, list[float]] = {"bare decode": [], "bare rgb": [], "loader": []}
    cpu: dict[str, list[float]] = {name: [] for name in wall}
    for number in range(rounds):
        for name, convert in (("bare decode", False), ("bare rgb", True)):
            started, cpu_started = time.perf_counter(), time.process_time()
            for path, start in clips_of(train, number * clips, clips):
                bare_clip(path, start, convert)
            wall[name].append((time.perf_counter() - started) / clips)
            cpu[name].append((time.process_time() - cpu_started) / clips)
        loader_wall, loader_cpu = loader.seconds_for(clips)
        wall["loader"].append(loader_wall / clips)
        cpu["loader"].append(loader_cpu / clips)
    print(f"\none worker, {rounds} rounds of {clips} clips in turn; ms a clip")
    for name in wall:
        print(
            f"  {name:<12} wall {1e3 * statistics.median(wall[name]):6.1f} (best {1e3 * min(wall[name]):.1f})   "
            f"cpu {1e3 * statistics.median(cpu[name]):6.1f} (best {1e3 * min(cpu[name]):.1f})"
        )
    for name in ("bare rgb", "bare decode"):
        for kind, seconds in (("wall", wall), ("cpu", cpu)):
            ratios = [bare / ours for bare, ours in zip(seconds[name], seconds["loader"], strict=True)]
            print(
                f"  loader speed / {name} speed, {kind} time: median {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )


def compare_workers(train: ClipSet, rounds: int, clips: int) -> None:
    one, two = RunningLoader(train, 1), RunningLoader(train, 2)
    ratios, rates = [], {1: [], 2: []}
    for _ in range(rounds):
        times = {1: one.seconds_for(clips)[0], 2: two.seconds_for(clips)[0]}
        ratios.append(times[1] / times[2])
        for workers, seconds in times.items():
            rates[workers].append(clips / seconds)
    print(f"\ntwo workers against one, {rounds} rounds of {clips} clips in turn")
    print(f"  clips a second: one {statistics.median(rates[1]):.1f}, two {statistics.median(rates[2]):.1f}")
    print(f"  gain: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measure_memory(train: ClipSet, clips: int) -> None:
    loader = RunningLoader(train, 1)
    worker, made = loader.workers[0], BATCH
    print("\nresident memory of one worker")
    for done in (BATCH, clips // 4, clips):
        while made < done:
            next(loader.batches)
            made += BATCH
        memory = worker.memory_full_info()
        print(
            f"  after {done:>5} clips: {memory.rss / 1e6:6.0f} MB resident, of it {memory.uss / 1e6:.0f} MB its own "
            f"(the main process: {psutil.Process().memory_info().rss / 1e6:.0f} MB)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clips", type=int, default=24, help="clips in each round")
    parser.add_argument("--memory_clips", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="keep the files here and use them again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, PyAV {av.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "videos"
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob("*.mp4"))) < arguments.files:
            write_files(folder, arguments.files)
        index = build_index(folder, Path(scratch) / "i.tvi", num_workers=0, show_progress_bar=False).index
        train, _ = split(index, SETTINGS, train_split=1.0)
        compare_with_bare(train, arguments.rounds, arguments.clips)
        compare_workers(train, arguments.rounds, arguments.clips)
        measure_memory(train, arguments.memory_clips)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
