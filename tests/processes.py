"""Other processes: wait until something is true of them, and find a port for them.

Machines differ in load. So a test waits for what has to happen, and its limit only tells "hangs" from "works".
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterable

import psutil

HANGS_S = 300.0
"""Who has not answered by then hangs: far more seconds than a starved machine needs."""

PORTS = range(11_000, 16_000)
"""Below those that systems hand out by themselves (from 16,000 on in sandboxes, from 32,768 on Linux)."""


def wait_until(
    condition: Callable[[], object], *, timeout_s: float = HANGS_S, shows: Callable[[], object] = lambda: ""
) -> None:
    """Return as soon as ``condition()`` is true; fail after ``timeout_s`` seconds with what ``shows()`` returns."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it never happened within {timeout_s:g} s; {shows()}"
        time.sleep(0.02)


def still_alive(processes: Iterable[psutil.Process | int], *, timeout_s: float = HANGS_S) -> list[psutil.Process]:
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


def free_port() -> int:
    """A port for a server that starts a while later: nobody gets it by chance meanwhile, see `PORTS`."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"100 ports of {PORTS} are all in use")
