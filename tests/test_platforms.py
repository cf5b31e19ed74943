"""What exists on Linux alone is taken away, and tinyvae still imports, trains, checks data and evaluates.

Each process runs with a ``sitecustomize`` that removes the calls, modules and files before anything is imported, in
the workers too. Both lists are run on Linux: they show that nothing is missed, not that macOS or Windows work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.tiny_runs import arguments_for, write_clips

NOT_ON_MACOS = """
import ctypes, io, multiprocessing, os, signal, sys

for module, names in {
    os: ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "fdatasync", "sendfile",
         "memfd_create", "pipe2", "getrandom", "copy_file_range", "pidfd_open"),
    signal: ("sigwaitinfo", "sigtimedwait"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

def libraries_name(library, name, found=ctypes.CDLL.__getattr__):
    if name in ("prctl", "malloc_trim"):
        raise AttributeError(name)
    return found(library, name)
ctypes.CDLL.__getattr__ = libraries_name

# psutil, which knows every system by itself, keeps the rest of /proc.
HIDDEN = ("/proc/cpuinfo", "/proc/self/status", "/proc/self/clear_refs", "/proc/driver")
def without_proc(call):
    def checked(path, *args, **named):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(HIDDEN):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *args, **named)
    return checked
io.open, os.stat = without_proc(io.open), without_proc(os.stat)

multiprocessing.set_start_method("spawn", force=True)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
"""

NOT_ON_WINDOWS = (
    NOT_ON_MACOS
    + """
for name in ("pthread_sigmask", "sigwait", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGPIPE", "SIGQUIT"):
    delattr(signal, name)

import psutil, torch  # they go by sys.platform, and take for granted what Linux has

for name in ("fork", "forkpty", "register_at_fork", "getuid", "geteuid", "getpgid", "killpg", "setsid", "O_DIRECTORY"):
    delattr(os, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
"""
)

IMPORT_ALL = """
import importlib, pkgutil, signal, tinyvae
assert not hasattr(signal, "SIGUSR1")
names = [module.name for module in pkgutil.walk_packages(tinyvae.__path__, "tinyvae.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


class Machine:
    """Runs Python where a list of things is missing."""

    def __init__(self, folder: Path, missing: str) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(missing)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def python(self, *words: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout[-4000:]
        return done.stdout


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", NOT_ON_WINDOWS)
    assert int(machine.python("-W", "ignore", "-c", IMPORT_ALL)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("missing", [NOT_ON_MACOS, NOT_ON_WINDOWS], ids=["macos", "windows"])
def test_training_data_and_evaluation(tmp_path: Path, missing: str) -> None:
    machine = Machine(tmp_path / "machine", missing)
    clips, run = write_clips(tmp_path / "clips", num_clips=6), tmp_path / "run"
    changes = {"dataloader_num_workers": 1, "max_train_steps": 4, "checkpointing_steps": 2, "report": True}
    machine.python("-m", "tinyvae", "train", *arguments_for(clips, run, **changes))
    assert (run / "checkpoint-4").is_dir() and (run / "report.html").is_file()
    small = ("--height", 32, "--width", 32, "--n_frames", 4, "--contact_sheet", tmp_path / "sheet.png")
    assert "6 good, 0 bad" in machine.python("-m", "tinyvae", "data", "check", clips, *small)
    words = machine.python("-m", "tinyvae", "eval", run, "--data", clips, "--output", tmp_path / "eval")
    assert "PSNR" in words and (tmp_path / "eval" / "report.html").is_file()
