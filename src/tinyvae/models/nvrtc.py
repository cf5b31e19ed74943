"""Compiles CUDA source at run time and launches it: NVRTC and the driver, through ctypes.

NVRTC comes with every CUDA build of torch, so kernels need neither nvcc nor a host compiler on the user's machine.
A compiled kernel is kept for the life of the process, per device.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from pathlib import Path

import torch


class KernelBuildError(RuntimeError):
    """The CUDA source could not be compiled or loaded here; the message carries the compiler's words."""


class Kernel:
    """One loaded kernel function of one device."""

    def __init__(self, function: ctypes.c_void_p, *, threads: int, shared_bytes: int, keep_alive: object) -> None:
        self._function = function
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._module = keep_alive

    def __call__(self, blocks: int, *arguments: object, shared_bytes: int | None = None) -> None:
        """Launch on torch's current stream. Arguments: tensors and None (pointers), ints, ctypes structures."""
        values = [_as_c(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shared = self._shared_bytes if shared_bytes is None else shared_bytes
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernel(
            self._function, blocks, 1, 1, self._threads, 1, 1, shared, stream, pointers, None
        )
        _check_driver(status, "cuLaunchKernel")


def _as_c(argument: object) -> ctypes.c_void_p | ctypes.c_int | ctypes.Structure:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    assert isinstance(argument, ctypes.Structure)
    return argument


@functools.cache
def compile_kernel(source: str, name: str, *, device_index: int, threads: int, shared_bytes: int) -> Kernel:
    """Compile ``source`` for sm_90a and load its function ``name`` (extern "C") onto a device."""
    image = _compile(source)
    driver = _driver()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes torch's context current before the driver is asked
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check_driver(driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        _check_driver(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        most_dynamic_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check_driver(driver.cuFuncSetAttribute(function, most_dynamic_shared, shared_bytes), "cuFuncSetAttribute")
    return Kernel(function, threads=threads, shared_bytes=shared_bytes, keep_alive=module)


@functools.cache
def _compile(source: str) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"tinyvae.cu", 0, None, None)
    if status != 0:
        raise KernelBuildError(f"nvrtcCreateProgram failed with code {status}.")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
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
    """Where the library may lie: beside torch's other CUDA packages, in a CUDA toolkit, on the loader's path."""
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
