"""What an evaluation ran on and what it cost: devices, peak memory, versions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from tinyvae.errors import UserError
from tinyvae.version import __version__


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
    return device


def describe_device(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor's with its thread count."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"{_processor_name()}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def _processor_name() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        for line in facts.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment_facts(devices: Sequence[torch.device]) -> dict[str, str]:
    """Versions and machine, as the report prints them."""
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
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def command_line() -> str:
    """The command of this process, as one could type it again."""
    import shlex

    words = list(sys.argv)
    words[0] = "tinyvae" if Path(words[0]).name in ("tinyvae", "cli.py", "__main__.py") else Path(words[0]).name
    return shlex.join(words)


class PeakMemory:
    """The highest memory use between two points: GPU allocations, or the resident memory of this process on a CPU."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = [device for device in devices if device.type == "cuda"]
        self.kind = "GPU memory" if self._cuda else "process memory"

    def start(self) -> None:
        for device in self._cuda:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._cuda:
            self._can_reset = _reset_resident_peak()

    def read_bytes(self) -> int | None:
        """Bytes since `start`, the largest of the devices; None where the system does not tell."""
        if self._cuda:
            return max(torch.cuda.max_memory_allocated(device) for device in self._cuda)
        return _resident_peak_bytes() if self._can_reset else None


def _reset_resident_peak() -> bool:
    """Set the kernel's high-water mark of this process back to what it uses now (Linux)."""
    mark = Path(f"/proc/{os.getpid()}/clear_refs")
    try:
        mark.write_text("5")
    except OSError:  # other systems, or a kernel without it: the peak is then reported as not measured
        return False
    return True


def _resident_peak_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
