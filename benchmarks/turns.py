"""One GPU, several processes: they import, decode and compile side by side, and take turns to train.

Two processes that train at the same time make every comparison by the clock unfair. So a script takes its steps inside
`gpu_turn`, after it has compiled. Processes whose environment names the same file wait for each other there. Without
such a file the block changes nothing.

    export TINYVAE_TURN_FILE=/tmp/turn       # on a local disk
    python benchmarks/scratch_search.py --clips DIR --seconds 100 "" &
    python benchmarks/scratch_search.py --clips DIR --seconds 100 init=colors &
    wait

`make_teacher.py` with several families and `distill_search.py --at_once` make such a file where none is named.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

TURN_FILE = "TINYVAE_TURN_FILE"


@contextmanager
def gpu_turn(holder: str) -> Iterator[float]:
    """Inside the block this process alone trains, of all that name the same file. Gives the seconds that it waited,
    and prints them with ``holder``. All that the block has sent to the GPU is done before the next process begins."""
    file = os.environ.get(TURN_FILE)
    if not file:
        yield 0.0
        return
    began = time.perf_counter()
    with Path(file).open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waited_s = time.perf_counter() - began
        print(f"{holder} has its turn on the GPU after waiting {waited_s:.1f} s", flush=True)
        try:
            yield waited_s
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:  # said aloud: a process that was forked inside the block would hold the lock as long as it lives
            fcntl.flock(held, fcntl.LOCK_UN)


def side_by_side(processes: int, folder: Path) -> dict[str, str]:
    """The environment of this many processes that share GPU and cores. They take turns by the file that this process
    itself was given, or by one in ``folder``."""
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    named = os.environ.get(TURN_FILE) or str(folder / "turn")
    return os.environ | {TURN_FILE: named, "TORCHINDUCTOR_COMPILE_THREADS": threads}
