"""What an evaluation ran on and what it cost: devices, peak memory, versions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
