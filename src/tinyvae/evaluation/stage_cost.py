"""What encoder and decoder cost, apart from everything around them: seconds and memory.

Reading files, SSIM and LPIPS often take longer and need more memory than a tiny network, so clocks and memory marks are
set around the two stages alone.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tinyvae.heap import trim_heap


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
