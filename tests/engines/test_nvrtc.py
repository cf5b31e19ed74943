"""A prepared launch that several threads share passes on the tensors of its own caller, always."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from tinyvae.engines import nvrtc


class SlowDriver:
    """Stands for the CUDA driver: waits, then reads the arguments as the driver does, through their addresses."""

    def __init__(self, num_pointers: int) -> None:
        self.num_pointers = num_pointers
        self.read: dict[str, list[tuple[int, ...]]] = {}

    def cuLaunchKernel(self, *words: object) -> int:  # noqa: N802 (the driver's own name)
        addresses = words[-2]
        time.sleep(0.0005)  # another thread runs meanwhile, as it does while ctypes is outside of Python
        values = tuple(ctypes.c_uint64.from_address(addresses[i]).value for i in range(self.num_pointers))  # type: ignore[index]
        number = ctypes.c_int.from_address(addresses[self.num_pointers]).value  # type: ignore[index]
        self.read.setdefault(threading.current_thread().name, []).append((*values, number))
        return 0


def test_two_threads_share_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SlowDriver(num_pointers=2)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kernel = nvrtc.Kernel(function=ctypes.c_void_p(), threads=1, device_index=0)
    launch = nvrtc.Launch(kernel, 2, [7], blocks=1, shared_bytes=0)
    own = {f"thread {i}": torch.zeros(i + 1) for i in range(2)}

    def work() -> None:
        tensor = own[threading.current_thread().name]
        for _ in range(100):
            launch(tensor, None)

    threads = [threading.Thread(target=work, name=name) for name in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, tensor in own.items():
        assert set(driver.read[name]) == {(tensor.data_ptr(), 0, 7)}
        assert len(driver.read[name]) == 100
