"""Who is still alive: a signal takes a moment to arrive, so the tests wait before they ask."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


def still_alive(processes: Iterable[psutil.Process | int], *, timeout_s: float = 30) -> list[psutil.Process]:
    """Those that have not ended within `timeout_s` seconds. Empty as soon as all have.

    A zombie has ended: nobody has asked for its exit code yet.
    """
    left = []
    for one in processes:
        try:
            left.append(psutil.Process(one) if isinstance(one, int) else one)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + timeout_s
    while (left := [one for one in left if _is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
