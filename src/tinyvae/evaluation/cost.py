"""The devices that models run on: which ones, their names, and the time and memory that a model takes there."""

from __future__ import annotations

import gc
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from tinyvae import __version__
from tinyvae.engines.replay import idle_bytes
from tinyvae.errors import UserError
from tinyvae.heap import trim_heap
from tinyvae.terminal import count_of


def choose_devices(wanted: str | torch.device | Sequence[str | torch.device] | None) -> list[torch.device]:
    """The devices to run on: as named (``cuda:0,cuda:1``, a list), else every GPU there is, else the CPU."""
    if wanted is None:
        if torch.cuda.is_available():
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return [torch.device("cpu")]
    names = wanted.split(",") if isinstance(wanted, str) else [wanted] if isinstance(wanted, torch.device) else wanted
    devices = [_device(name) for name in names]
    if not devices:
        raise UserError("no device was named; give cpu, cuda, cuda:0 or cuda:0,cuda:1.")
    twice = next((device for device in devices if device.type == "cuda" and devices.count(device) > 1), None)
    if twice is not None:
        raise UserError(f"the device '{twice}' is named twice; one worker keeps a GPU busy, so name each once.")
    return devices


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name.strip() if isinstance(name, str) else name)
    except RuntimeError:
        raise UserError(f"there is no device {str(name)!r}; give cpu, cuda, cuda:0 or cuda:0,cuda:1.") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(f"the device {str(device)!r} is not here: this machine shows {count} CUDA devices.")
        return torch.device("cuda", device.index or 0)
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError):  # torch was built without it
        raise UserError(f"torch cannot compute on {str(device)!r} here; give cpu, cuda or cuda:0.") from None
    return device


def describe_device(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor's with its number of threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    if device.type != "cpu":
        return str(device)
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(errors="replace") if facts.is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {count_of(torch.get_num_threads(), 'thread')}"


def environment_facts(devices: Sequence[torch.device]) -> dict[str, str]:
    """Versions, machine and the folder that relative paths start from, as the report prints them."""
    return {
        "tinyvae": __version__,
        "torch": torch.__version__,
        "av": version("av"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": "; ".join(dict.fromkeys(describe_device(device) for device in devices)),
        "folder": os.getcwd(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def command_line() -> str:
    """The command of this process, as one can type it again."""
    words = list(sys.argv)
    words[0] = "tinyvae" if Path(words[0]).name in ("tinyvae", "cli.py", "__main__.py") else Path(words[0]).name
    return shlex.join(words)


@contextmanager
def without_cudnn_trials() -> Iterator[None]:
    """cuDNN takes the algorithm that it thinks best instead of timing several for each new shape. In a validation such
    trials took 10 s and 16 GB of workspace on an H200."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def fitting_in_memory(what: object) -> Iterator[None]:
    """Around the work on one video: memory that does not suffice is told in one sentence."""
    try:
        yield
    except RuntimeError as fault:
        on_gpu = isinstance(fault, torch.OutOfMemoryError)
        if not on_gpu and "DefaultCPUAllocator" not in str(fault):
            raise
        advice = "take smaller frames, fewer of them or half precision (--dtype)"
        where = "of the GPU" if on_gpu else "here"
        raise UserError(f"{what} does not fit into the memory {where}; {advice}.") from fault


@dataclass(kw_only=True)
class StageTimes:
    """Seconds inside encoder and decoder, and their memory; filled by ``with times.stage("encode", device): ...``."""

    with_memory: bool = False  # watch memory, which resets marks of the whole process or GPU
    encode_s: float = 0.0
    decode_s: float = 0.0
    peak_bytes: int | None = None  # allocated on the GPU, or resident in this process; None: not known

    @contextmanager
    def stage(self, name: Literal["encode", "decode"], device: torch.device) -> Iterator[None]:
        """Add the seconds and the memory of a block; the queue of the device is empty at both ends."""
        _wait_for(device)
        is_watched = self.with_memory and reset_peak_memory(device)
        started = time.perf_counter()
        yield
        _wait_for(device)
        seconds = time.perf_counter() - started
        if name == "encode":
            self.encode_s += seconds
        else:
            self.decode_s += seconds
        peak = peak_memory_bytes(device) if is_watched else None
        if peak is not None:
            self.peak_bytes = max(self.peak_bytes or 0, peak)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Give unused memory back to the system, so that what one model used does not count for the next."""
    gc.collect()
    trim_heap()


def reset_peak_memory(device: torch.device) -> bool:
    """Set the high-water mark to what is used now; False where the system has no mark that can be set."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # other systems, or a kernel without it: the peak is then reported as not measured
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int | None:
    """The high-water mark: allocated on the GPU and kept by CUDA graphs there, or resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) + idle_bytes(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
