"""A container's small /dev/shm ends in one sentence, not in a worker's traceback."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.video.numbered_video import numbered_frames, write_video

SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tinyvae.data import ClipSettings, build_index, make_train_loader, make_validation_loader, split
    from tinyvae.errors import UserError

    folder, kind = Path(sys.argv[1]), sys.argv[2]
    settings = ClipSettings(height=96, width=160, n_frames=8)
    index = build_index(folder, folder / "i.tvi", num_workers=0, show_progress_bar=False).index
    train, val = split(index, settings, train_split=1.0 if kind == "train" else 0.2)
    loader = (
        make_train_loader(train, settings, batch_size=8, num_workers=1)
        if kind == "train"
        else make_validation_loader(val, settings, batch_size=8, num_workers=1)
    )
    try:
        for _ in loader:
            pass
    except UserError as error:
        print("SENTENCE", error)
    """
)


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_shared_memory_that_is_too_small(tmp_path: Path, kind: str) -> None:
    for number in range(8):
        write_video(tmp_path / f"{number}.mp4", numbered_frames(10, scene=number))
    in_small_memory = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    setup = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    try:
        possible = subprocess.run([*in_small_memory, setup], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("this machine lets nobody mount a small /dev/shm")
    command = f'{setup} && exec "$0" -c "$1" "$2" "$3"'
    run = [*in_small_memory, command, sys.executable, SCRIPT, str(tmp_path), kind]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert "SENTENCE a loader's worker found no 3 MB for a batch in shared memory" in done.stdout, done.stderr[-2000:]
    assert "--shm-size" in done.stdout and "Traceback" not in done.stderr
