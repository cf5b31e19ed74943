"""A prepared launch that several threads share passes on the tensors of its own caller, always; which kernels may start
while the one in front of them still runs."""

from __future__ import annotations

import ctypes
import re
import threading
import time
import types
from importlib import resources

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


class OrderDriver:
    """Stands for the CUDA driver: notes the kernel, and whether it may start early with what the driver then reads."""

    def __init__(self) -> None:
        self.launched: dict[str, list[tuple[int | None, object]]] = {}

    def note(self, function: ctypes.c_void_p, early: object) -> int:
        self.launched.setdefault(threading.current_thread().name, []).append((function.value, early))
        return 0

    def cuLaunchKernel(self, function: ctypes.c_void_p, *words: object) -> int:  # noqa: N802 (the driver's own name)
        assert words[:7] == (5, 1, 1, 96, 1, 1, 1024)
        return self.note(function, False)

    def cuLaunchKernelEx(self, config: object, function: ctypes.c_void_p, addresses: object, extra: None) -> int:  # noqa: N802
        given = config._obj  # type: ignore[attr-defined]
        numbers = (ctypes.c_uint * 7).from_buffer(given)
        assert tuple(numbers) == (5, 1, 1, 96, 1, 1, 1024) and given.stream == 77 and given.num_attributes == 1
        attribute = (ctypes.c_int * 3).from_address(ctypes.addressof(given.attributes.contents))
        return self.note(function, (attribute[0], attribute[2]))


EARLY = (6, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> OrderDriver:
    driver = OrderDriver()
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return driver


def small_launch(number: int, *, early: bool) -> nvrtc.Launch:
    kernel = nvrtc.Kernel(function=ctypes.c_void_p(number), threads=96, device_index=0, starts_early=early)
    return nvrtc.Launch(kernel, 1, [7], blocks=5, shared_bytes=1024)


def test_all_but_the_first_kernel_start_early(driver: OrderDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights made just before a run are complete when its first kernel starts. A kernel of an older card never
    starts early, and none does outside of a run."""
    waiting, other = small_launch(1, early=True), small_launch(2, early=False)
    x = torch.zeros(1)
    waiting(x)
    for launches in ((waiting, waiting, other, waiting), (other, waiting)):
        with nvrtc.early_launches():
            for launch in launches:
                launch(x)
        waiting(x)
    with pytest.raises(ZeroDivisionError), nvrtc.early_launches():
        waiting(x)
        raise ZeroDivisionError
    waiting(x)
    monkeypatch.setattr(nvrtc, "EARLY_LAUNCH", False)
    with nvrtc.early_launches():
        waiting(x), waiting(x)
    (made,) = driver.launched.values()
    runs = [[False], [False, EARLY, False, EARLY], [False], [False, EARLY], [False], [False], [False], [False, False]]
    assert [early for _, early in made] == [early for run in runs for early in run]


def test_threads_have_orders_of_their_own(driver: OrderDriver) -> None:
    launch, x = small_launch(1, early=True), torch.zeros(1)
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        with nvrtc.early_launches():
            launch(x)
            inside.set()
            done.wait()
            launch(x)

    thread = threading.Thread(target=work, name="other")
    thread.start()
    inside.wait()
    launch(x)  # outside, though the other thread is inside
    with nvrtc.early_launches():
        launch(x)
        launch(x)
    done.set()
    thread.join()
    mine = driver.launched[threading.current_thread().name]
    assert [early for _, early in mine] == [False, False, EARLY]
    assert [early for _, early in driver.launched["other"]] == [False, EARLY]


def test_structures_are_the_drivers() -> None:
    """Sizes and offsets of CUlaunchAttribute and CUlaunchConfig in cuda.h."""
    assert ctypes.sizeof(nvrtc._Attribute) == 72 and nvrtc._Attribute.value.offset == 8
    assert ctypes.sizeof(nvrtc._Config) == 56
    assert [getattr(nvrtc._Config, name).offset for name in ("stream", "attributes", "num_attributes")] == [32, 40, 48]


def test_every_kernel_waits_for_the_others() -> None:
    """What `load_kernel` demands; tests/gpu/test_gpu_early.py compares results."""
    texts = [file.read_text() for file in resources.files("tinyvae.engines").iterdir() if file.name.endswith(".cu")]
    kernels = [part for text in texts for part in re.split(r'(?=extern "C" __global__)', text)[1:]]
    names = [re.search(r"\b(\w+)\(\s*(?:const )?\w+\*", kernel) for kernel in kernels]
    assert len(kernels) >= 7 and all(names)
    for kernel in kernels:
        assert kernel.index("let_next_start()") < kernel.index("wait_for_others()"), kernel[:200]


def test_a_library_that_does_not_say_its_cards_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an error: an engine without this kernel does the work."""
    silent = types.SimpleNamespace(nvrtcGetNumSupportedArchs=lambda count: 1)
    monkeypatch.setattr(nvrtc, "_driver", lambda: None)
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: silent)
    nvrtc._known_architectures.cache_clear()
    assert nvrtc.why_unavailable((8, 0)) == "NVRTC does not say which cards it compiles for"
    assert nvrtc.why_unavailable() is None
