"""What an index of five million files costs: to write, to open and to hold in a worker.

Writes an annotation JSON of that many entries and reads it as a stream, then writes an index of as many rows through
the same code as `tinyvae data index` (only the probing of videos that do not exist is left out), and opens it in
fresh processes: one with nothing but the index code, and loader workers that also hold torch.

  python benchmarks/data_index.py
  python benchmarks/data_index.py --rows 100000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def opening_script() -> str:
    """Runs in a fresh process: what opening, splitting and 20,000 random rows take and leave resident."""
    return (
        "import sys, time, random, psutil, numpy\n"
        "from pathlib import Path\n"
        "from tinyvae.data.index import open_index\n"
        "from tinyvae.data.splits import split\n"
        "from tinyvae.data.clip import ClipSettings, shuffled\n"
        "assert 'torch' not in sys.modules\n"
        "me = psutil.Process(); mb = lambda: me.memory_info().rss / 1e6\n"
        "before = mb(); started = time.perf_counter()\n"
        "index = open_index(Path(sys.argv[1])); opened = time.perf_counter()\n"
        "print(f'  open: {1e3 * (opened - started):.1f} ms, {mb():.0f} MB resident (before: {before:.0f} MB)')\n"
        "settings = ClipSettings(height=480, width=720, n_frames=16)\n"
        "train, val = split(index, settings, train_split=0.95); done = time.perf_counter()\n"
        "print(f'  open and split: {done - started:.2f} s, {mb():.0f} MB resident; {len(train):,} train, '\n"
        "      f'{len(val):,} validate')\n"
        "started = time.perf_counter()\n"
        "for position in range(20000): train.row(shuffled(position, len(train), 1, 0))\n"
        "each = (time.perf_counter() - started) / 20000\n"
        "print(f'  after 20,000 random rows: {mb():.0f} MB resident, {1e6 * each:.0f} us for each')\n"
    )


def write_annotations(file: Path, rows: int) -> None:
    with open(file, "w", encoding="utf-8") as out:
        out.write(f'{{"total": {rows}, "list": [\n')
        for number in range(rows):
            record = {"path": path_of(number), "duration": 4.0, "frames": 96, "width": 854, "height": 480}
            out.write((",\n" if number else "") + json.dumps(record))
        out.write("]}")


def path_of(number: int) -> str:
    return f"shard_{number // 10_000:05}/video_{number:09}_clip.mp4"


def measure_stream(file: Path, rows: int) -> None:
    from tinyvae.data.annotations import iterate_entries

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    started = time.perf_counter()
    count = sum(1 for _ in iterate_entries(file))
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    assert count == rows
    print(f"annotation JSON of {file.stat().st_size / 1e6:,.0f} MB read as a stream: {seconds:.1f} s, "
          f"peak memory {before:.0f} -> {peak:.0f} MB")  # fmt: skip


def write_index_of(rows: int, output: Path) -> None:
    from tinyvae.data.index import IndexJournal, IndexRow

    rng = np.random.default_rng(0)
    frames = rng.integers(8, 400, rows)
    started = time.perf_counter()
    journal = IndexJournal(output)
    for number in range(rows):
        bad = number % 100 == 0
        journal.append(
            IndexRow(
                path=path_of(number),
                reason="not a readable video file" if bad else "",
                frames=int(frames[number]),
                fps=24.0,
                width=854,
                height=480,
                codec="h264",
                file_bytes=1_000_000,
                mtime_ns=1,
                pts_step=512.0,
            )
        )
    written = time.perf_counter()
    journal.finish({"data_root": "/videos", "source": ""})
    finished = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"index of {rows:,} rows, {output.stat().st_size / 1e6:,.0f} MB: journal {written - started:.1f} s, "
          f"sorting and writing {finished - written:.1f} s, peak memory {peak:.0f} MB")  # fmt: skip


def measure_in_loader_worker(output: Path) -> None:
    """Memory that the index and its split add to worker processes that hold torch anyway."""
    script = (
        "import sys, psutil, torch\n"
        "from pathlib import Path\n"
        "from tinyvae.data import ClipSettings, open_index, split\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __init__(self, train): self.train = train\n"
        "    def __len__(self): return 4000\n"
        "    def __getitem__(self, place):\n"
        "        if self.train is not None: self.train.row(place * 997 % len(self.train))\n"
        "        return psutil.Process().memory_info().rss / 1e6\n"
        "settings = ClipSettings(height=480, width=720, n_frames=16)\n"
        "def resident(train):\n"
        "    loader = torch.utils.data.DataLoader(Rows(train), num_workers=2, multiprocessing_context=sys.argv[2])\n"
        "    return max(float(value) for value in loader)\n"
        "if __name__ == '__main__':\n"
        "    without = resident(None)\n"
        "    train, _ = split(open_index(Path(sys.argv[1])), settings, bad_file_limit=1.0)\n"
        "    print(f'  worker started by {sys.argv[2]}: {without:.0f} MB without the index, '\n"
        "          f'{resident(train):.0f} MB with it')\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(script)
        program.flush()
        for method in ("fork", "spawn"):
            subprocess.run([sys.executable, program.name, str(output), method], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, "
          f"python {platform.python_version()}, numpy {np.__version__}")  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        annotations, output = Path(scratch) / "annotations.json", Path(scratch) / "five_million.tvi"
        write_annotations(annotations, arguments.rows)
        measure_stream(annotations, arguments.rows)
        annotations.unlink()
        write_index_of(arguments.rows, output)
        print("a fresh process without torch")
        subprocess.run([sys.executable, "-c", opening_script(), str(output)], check=True)
        print("loader workers, which hold torch")
        measure_in_loader_worker(output)


if __name__ == "__main__":
    main()
