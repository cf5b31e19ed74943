"""Compile CUDA source at run time and launch it: NVRTC and the driver, through ctypes.

NVRTC comes with every CUDA build of torch, so the user needs neither nvcc nor a host compiler. The process keeps each
compiled kernel, per device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

EARLY_LAUNCH = True
"""Whether kernels may start before those in front of them have ended, inside `early_launches`. Without it taew2_2 takes
1.04 times as long on an H200 to decode by pushes of three latents."""
EARLY_CAPABILITY = (9, 0)  # the first cards that can


class KernelBuildError(RuntimeError):
    """The CUDA source could not be compiled or loaded here; the message carries the compiler's words."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One loaded kernel function of one device; its module is unloaded with the process."""

    function: ctypes.c_void_p
    threads: int
    device_index: int
    shared_bytes: int = 0  # as much as a block of it may have
    starts_early: bool = False  # on this device, inside `early_launches`


class _Order(threading.local):
    """Of the kernels that this thread launches."""

    inside = False  # `early_launches`
    started = False  # the first kernel in there has been launched


_order = _Order()


@contextlib.contextmanager
def early_launches() -> Iterator[None]:
    """Inside, a kernel starts while the one in front of it still runs, and copies its weights meanwhile. Not the first
    one: weights that were made just before are complete when it starts, and so for all behind it. On one stream; each
    thread has its own order."""
    outer = _order.inside, _order.started
    _order.inside, _order.started = EARLY_LAUNCH, False
    try:
        yield
    finally:
        _order.inside, _order.started = outer


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute with a number as its value."""

    _fields_ = [("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("blocks", "threads") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_STARTS_EARLY = ctypes.pointer(_Attribute(id=6, value=1))  # PROGRAMMATIC_STREAM_SERIALIZATION


def int_fields(names: str) -> list[tuple[str, type[ctypes.c_int]]]:
    """Fields of a kernel's structure; ``names`` with blanks between them."""
    return [(name, ctypes.c_int) for name in names.split()]


class Launch:
    """A kernel with ``values``, all arguments except its tensors; each call gives those, the first ``pointers`` ones.
    ``shared_bytes`` are those of a block (None: as many as it may have). It never changes, so any number of threads may
    share it."""

    def __init__(
        self,
        kernel: Kernel,
        pointers: int,
        values: Sequence[ctypes.Structure | int],
        *,
        blocks: int,
        shared_bytes: int | None = None,
    ) -> None:
        self._values = [ctypes.c_int(value) if isinstance(value, int) else value for value in values]
        self._value_addresses = [ctypes.addressof(value) for value in self._values]
        self._offsets = [place * ctypes.sizeof(ctypes.c_void_p) for place in range(pointers)]
        self._pointer_array = ctypes.c_void_p * pointers
        self._address_array = ctypes.c_void_p * (pointers + len(self._values))
        self._kernel, self._blocks = kernel, blocks
        self._shared_bytes = kernel.shared_bytes if shared_bytes is None else shared_bytes

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on torch's current stream; None is a null pointer."""
        # Made for this call only: another thread may launch the same kernel on its own tensors at the same time.
        pointers = self._pointer_array(*(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
        start = ctypes.addressof(pointers)
        addresses = self._address_array(*(start + offset for offset in self._offsets), *self._value_addresses)
        kernel, driver = self._kernel, _driver()
        stream = torch._C._cuda_getCurrentRawStream(kernel.device_index)
        grid = self._blocks, 1, 1, kernel.threads, 1, 1, self._shared_bytes, ctypes.c_void_p(stream)
        if _order.started and kernel.starts_early:
            config = _Config(*grid, _STARTS_EARLY, 1)
            status = driver.cuLaunchKernelEx(ctypes.byref(config), kernel.function, addresses, None)
        else:
            status = driver.cuLaunchKernel(kernel.function, *grid, addresses, None)
        _check_driver(status, "the launch of a kernel")
        _order.started = _order.inside


@functools.cache
def load_kernel(
    files: tuple[str, ...],
    name: str,
    device_index: int,
    *,
    threads: int,
    shared_bytes: int = 0,
    **constants: float,
) -> Kernel:
    """The function ``name`` (extern "C") of these files of this folder, one behind the other: compiled for a device and
    loaded onto it once. They see ``constants`` and THREADS as macros, and a macro with the function's own name in
    capitals. For Hopper they may use the instructions that no other card has (sm_90a). Each thread must call
    ``wait_for_others`` before it touches what other kernels read or write, because the kernel may start early.

    Example: ``load_kernel(("instructions.cu", "depthwise.cu"), "super_depthwise", 0, threads=512, BFLOAT=1)``
    """
    folder = resources.files("tinyvae.engines")
    source = "".join(folder.joinpath(file).read_text(encoding="utf-8") for file in files)
    macros = {name.upper(): 1, "THREADS": threads, **constants}
    major, minor = torch.cuda.get_device_capability(device_index)
    target = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    image = _compile(source, target, tuple(f"-D{macro}={value}" for macro, value in macros.items()))
    driver = _driver()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes torch's context current before the driver is asked
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check_driver(driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        _check_driver(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        most_dynamic_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check_driver(driver.cuFuncSetAttribute(function, most_dynamic_shared, shared_bytes), "cuFuncSetAttribute")
    return Kernel(
        function=function,
        threads=threads,
        device_index=device_index,
        shared_bytes=shared_bytes,
        starts_early=(major, minor) >= EARLY_CAPABILITY,
    )


@functools.cache
def _compile(source: str, target: str, macros: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"tinyvae.cu", 0, None, None)
    if status != 0:
        raise KernelBuildError(f"nvrtcCreateProgram failed with code {status}.")
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17", *(macro.encode() for macro in macros)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    if status != 0:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelBuildError(f"NVRTC refused the kernel (code {status}): {log.value.decode(errors='replace')}")
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


@functools.cache
def processors(device_index: int) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def why_unavailable(capability: tuple[int, int] | None = None) -> str | None:
    """None where kernels can be compiled (for cards of this ``capability``) and loaded, else the reason in words."""
    try:
        _driver()
        _nvrtc()
        if capability is not None and 10 * capability[0] + capability[1] not in _known_architectures():
            return f"this NVRTC does not compile for compute capability {capability[0]}.{capability[1]}"
    except KernelBuildError as reason:
        return str(reason).rstrip(".")
    return None


@functools.cache
def _known_architectures() -> frozenset[int]:
    """What NVRTC compiles for: 80 is compute capability 8.0."""
    nvrtc, count = _nvrtc(), ctypes.c_int()
    status = nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    if status != 0 or nvrtc.nvrtcGetSupportedArchs(known) != 0:
        raise KernelBuildError("NVRTC does not say which cards it compiles for.")
    return frozenset(known)


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as missing:
        raise KernelBuildError(f"the CUDA driver library could not be opened: {missing}.") from missing


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    tried = []
    for candidate in _nvrtc_candidates():
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            tried.append(candidate)
    raise KernelBuildError(f"libnvrtc could not be opened; tried {', '.join(tried)}.")


def _nvrtc_candidates() -> list[str]:
    """Where the library may be: beside torch's other CUDA packages, in a CUDA toolkit, on the loader's path."""
    major = (torch.version.cuda or "12").split(".")[0]
    found: list[str] = []
    package = importlib.util.find_spec("nvidia")
    roots = list(package.submodule_search_locations or []) if package else []
    roots += [str(Path(torch.__file__).parent / "lib"), os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for root in filter(None, roots):
        for pattern in ("*/lib/libnvrtc.so.*", "libnvrtc*.so.*", "lib64/libnvrtc.so.*"):
            found += [path for path in sorted(glob.glob(os.path.join(root, pattern))) if "builtins" not in path]
    matching = [path for path in found if f".so.{major}" in path]
    return [*matching, f"libnvrtc.so.{major}", "libnvrtc.so"]


def _check_driver(status: int, what: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise KernelBuildError(f"{what} failed with code {status}: {words}.")
