"""`tinyvae` as processes of their own, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TIMEOUT_S = 400
STEPS = 6
EXACT = {
    "deterministic": True,
    "max_train_steps": STEPS,
    "validation_steps": STEPS,
    "checkpointing_steps": STEPS,
}


def text_of(settings: dict[str, object]) -> list[str]:
    """``--key value`` words."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def start(words: list[str], *, log: Path, launcher: list[str] | None = None) -> subprocess.Popen[bytes]:
    """``tinyvae WORDS`` as a process of its own; everything it says goes to ``log``."""
    command = [*(launcher or [sys.executable]), "-m", "tinyvae", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


class Runs:
    """Training runs that go on beside each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, words: Callable[..., list[str]], *, launcher: list[str] | None = None, **settings: object
    ) -> None:
        log = self._folder / f"{name}.log"
        self._started[name] = start(words(self._folder / name, **settings), log=log, launcher=launcher)

    def finished(self, name: str) -> tuple[Path, str]:
        """The run's folder and what it said, once it has ended; skips where it could not be started here."""
        if name not in self._started:
            pytest.skip(f"{name} is not installed")
        return self._folder / name, said_in_the_end(self._started[name], self._folder / f"{name}.log")

    def kill(self) -> None:
        for process in self._started.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def said_in_the_end(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the end of a process, which must be a success; what it said."""
    code = process.wait(TIMEOUT_S)
    said = log.read_text(errors="replace")
    assert code == 0, f"exit code {code}\n{said[-4000:]}"
    return said
