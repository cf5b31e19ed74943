"""What an evaluation ran on and what it cost: devices, peak memory, versions."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from tinyvae import __version__
from tinyvae.errors import UserError
from tinyvae.heap import trim_heap


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
    except (RuntimeError, NotImplementedError, AssertionError):
        raise UserError(f"torch cannot compute on {str(device)!r} here; give cpu, cuda or cuda:0.") from None
    return device


@contextmanager
def without_cudnn_trials() -> Iterator[None]:
    """cuDNN takes the algorithm that it thinks best instead of timing several for each new shape.

    The trials pay in a training step. In a validation they took 10 s and 16 GB of workspace on an H200, for shapes that
    come a few times in a run.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def describe_device(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor's with its thread count."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"{_processor_name()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _processor_name() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment_facts(devices: Sequence[torch.device]) -> dict[str, str]:
    """Versions, machine and the folder that relative paths start from, as the report prints them."""
    import av
    import torchmetrics

    return {
        "tinyvae": __version__,
        "torch": torch.__version__,
        "torchmetrics": torchmetrics.__version__,
        "av": av.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": "; ".join(dict.fromkeys(describe_device(device) for device in devices)),
        "folder": os.getcwd(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one of this thread: kernels that are compiled at run time go to the current one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def fitting_in_memory(what: object) -> Iterator[None]:
    """Around the work on one video: memory that does not suffice is told in one sentence."""
    try:
        yield
    except RuntimeError as fault:
        on_gpu = isinstance(fault, torch.OutOfMemoryError)
        if not on_gpu and "DefaultCPUAllocator" not in str(fault):
            raise
        raise UserError(
            f"{what} does not fit into the memory {'of the GPU' if on_gpu else 'here'}; take smaller frames, fewer of "
            "them or half precision (--dtype)."
        ) from fault


def command_line() -> str:
    """The command of this process, as one could type it again."""
    import shlex

    words = list(sys.argv)
    words[0] = "tinyvae" if Path(words[0]).name in ("tinyvae", "cli.py", "__main__.py") else Path(words[0]).name
    return shlex.join(words)


@dataclass(kw_only=True)
class StageTimes:
    """Seconds inside encoder and decoder, the frames they were for, and the memory; filled while a clip runs."""

    with_memory: bool = False
    """Whether memory is watched; that sets back marks of the whole process or GPU, so it must be asked for."""
    encode_s: float = 0.0
    decode_s: float = 0.0
    frames: int = 0
    pixels: int = 0
    peak_bytes: int | None = None
    """The most memory while a stage ran: allocated on the GPU, or resident in this process; None: not known."""

    def watch(self, device: torch.device) -> Stopwatch:
        """A watch for one stage; hand it to `add_encoding` or `add_decoding` afterwards."""
        return Stopwatch(device, with_memory=self.with_memory)

    def add_encoding(self, watch: Stopwatch) -> None:
        self.encode_s += watch.seconds
        self._add_peak(watch)

    def add_decoding(self, watch: Stopwatch) -> None:
        self.decode_s += watch.seconds
        self._add_peak(watch)

    def _add_peak(self, watch: Stopwatch) -> None:
        if watch.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, watch.peak_bytes)


class Stopwatch:
    """Seconds and, if asked for, peak memory of a block, with the device's queue empty at both ends."""

    def __init__(self, device: torch.device, *, with_memory: bool = False) -> None:
        self._device, self._with_memory = device, with_memory
        self.seconds = 0.0
        self.peak_bytes: int | None = None

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._can_tell = self._with_memory and reset_peak_memory(self._device)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._start
        self.peak_bytes = peak_memory_bytes(self._device) if self._can_tell else None

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def memory_kind(device: torch.device) -> str:
    """What `peak_memory_bytes` counts, in words."""
    return "GPU memory" if device.type == "cuda" else "process memory"


def idle_bytes(device: torch.device) -> int:
    """GPU memory that is allocated now; 0 on a CPU, where the whole process is counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def give_back_freed_memory() -> None:
    """Hand memory that was freed back to the system, so that what one model used does not count for the next."""
    gc.collect()
    trim_heap()


def reset_peak_memory(device: torch.device) -> bool:
    """Set the high-water mark back to what is used now; False where the system keeps none that can be set."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # other systems, or a kernel without it: the peak is then reported as not measured
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int | None:
    """The high-water mark: allocated on the GPU, or resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
