"""Functions for the processes of a Ray cluster: some are killed, some see no file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any


class KilledOnce:
    """A function whose process is killed at call number ``call``, counted over all processes from 1."""

    def __init__(self, function: Callable[..., Any], folder: Path, *, call: int) -> None:
        self.function, self.folder, self.call = function, folder, call
        folder.mkdir(parents=True)

    def __call__(self, *words: Any, **options: Any) -> Any:
        if self._number() == self.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(*words, **options)

    def _number(self) -> int:
        for number in count(1):
            try:
                (self.folder / str(number)).open("x").close()
                return number
            except FileExistsError:
                continue
        raise AssertionError

    @property
    def num_calls(self) -> int:
        return len(list(self.folder.iterdir()))


class GivesKilled:
    """A function that makes a worker, which is killed once."""

    def __init__(self, make: Callable[..., Callable[..., Any]], folder: Path, *, call: int) -> None:
        self.make, self.killed = make, KilledOnce(print, folder, call=call)

    def __call__(self, *words: Any) -> KilledOnce:
        self.killed.function = self.make(*words)
        return self.killed


class SeesNothing:
    """A probe that finds no file, except in the process that made it."""

    def __init__(self, probe: Callable[..., Any]) -> None:
        self.probe, self.process = probe, os.getpid()

    def __call__(self, path: Path, **options: Any) -> Any:
        if os.getpid() != self.process:
            raise FileNotFoundError(path)
        return self.probe(path, **options)
