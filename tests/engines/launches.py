"""What the CUDA engines ask of a GPU, written down without one: each kernel with all its arguments, each call of cuDNN
and cuBLAS, in order. The results stay empty, and no launch depends on them.

test_launches.py compares a digest of these lines with those of the code that a Hopper GPU has run:

    python -m tests.engines.launches lines.txt    # the lines themselves, to compare two commits
    python -m tests.engines.launches --write      # keep the digests, after `pytest -m gpu` has passed on such a GPU
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae import TAEHV
from tinyvae.engines import (
    conv_rows,
    cudnn,
    depthwise,
    first_pool,
    first_rows,
    grow_image,
    hopper_kernels,
    nvrtc,
    pointwise,
    stack,
)
from tinyvae.engines.fused import STACKS, Engine, folded_copy

DIGESTS = Path(__file__).with_name("launches.json")
LEAKY = {"activation": "leaky_relu"}
CASES: dict[str, tuple[Engine, str, dict[str, Any]]] = {
    "hopper taehv": ("hopper", "taehv", {}),
    "hopper taehv, LeakyReLU": ("hopper", "taehv", LEAKY),
    "hopper taehv, preview": ("hopper", "taehv", {"preview": "both"}),
    "hopper taew2_2": ("hopper", "taew2_2", {}),
    "hopper taew2_2, twice as wide": ("hopper", "taew2_2", {"width": 2.0}),
    "hopper taeltx_2": ("hopper", "taeltx_2", {}),
    "hopper taeltx2_3_wide": ("hopper", "taeltx2_3_wide", {}),
    "cudnn taehv": ("cudnn", "taehv", {}),
    "cudnn taehv, LeakyReLU": ("cudnn", "taehv", LEAKY),
    "cudnn taew2_2_super": ("cudnn", "taew2_2_super", {}),
    "cudnn taeltx2_3_wide, half as wide": ("cudnn", "taeltx2_3_wide", {"width": 0.5}),
}
SIZES = (
    (2, 3, 5, 3),
    (1, 15, 23, 13),
)  # videos, height and width of the latents, latents: few, and waves of processors
PROCESSORS = 132  # of an H200
KERNELS = "kernels"  # their name among the digests


class Recorder:
    """Stands where driver, compiler and cuDNN are."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self._kernels: list[str] = []
        self._held: list[Tensor] = []  # so that no address is used twice
        self._storages: dict[int, int] = {}
        patch.setattr(nvrtc.Launch, "__call__", lambda launch, *tensors: self._launch(launch, *tensors))
        for module in (nvrtc, hopper_kernels, conv_rows, first_pool, first_rows, grow_image, depthwise, pointwise):
            for name, stand_in in (("load_kernel", self._load_kernel), ("processors", lambda index: PROCESSORS)):
                if hasattr(module, name):
                    patch.setattr(module, name, stand_in)
            for made in vars(module).values():  # launches of another recorder
                if module is not nvrtc and hasattr(made, "cache_clear"):
                    made.cache_clear()
        patch.setattr(cudnn, "fuses_groups", lambda dtype, device: True)
        patch.setattr(cudnn, "_refused", set())
        patch.setattr(depthwise, "why_not_depthwise", lambda dtype, device: None)
        patch.setattr(torch.Tensor, "is_cuda", True)  # asks `pointwise`
        patch.setattr(torch, "cudnn_convolution_relu", self._conv_relu)
        patch.setattr(torch, "cudnn_convolution_add_relu", self._conv_add_relu)
        patch.setattr(torch.Tensor, "addmm_", lambda out, *factors: self._product(out, *factors))
        patch.setattr(F, "conv2d", self._conv)
        patch.setattr(F, "conv3d", self._conv)
        patch.setattr(stack, "CPU_SLICE_BYTES", stack.SLICE_BYTES)
        patch.setattr(torch.cuda, "device", lambda device: torch.no_grad())

    def name(self, tensor: Tensor | None) -> str:
        """The storage by the order in which storages come, the place in it, and how the tensor lies there."""
        if tensor is None:
            return "null"
        self._held.append(tensor)
        number = self._storages.setdefault(tensor.untyped_storage().data_ptr(), len(self._storages))
        return f"{number}+{tensor.storage_offset()}{list(tensor.shape)}{list(tensor.stride())}{tensor.dtype}"

    def _load_kernel(
        self,
        files: tuple[str, ...],
        name: str,
        device_index: int,
        *,
        threads: int,
        shared_bytes: int = 0,
        **macros: Any,
    ) -> nvrtc.Kernel:
        self._kernels.append(f"{name} of {files}, {sorted(macros.items())}, {threads} threads, {shared_bytes} bytes")
        return nvrtc.Kernel(
            function=ctypes.c_void_p(len(self._kernels)),
            threads=threads,
            device_index=0,
            shared_bytes=shared_bytes,
            starts_early=True,
        )

    def _launch(self, launch: nvrtc.Launch, *tensors: Tensor | None) -> None:
        assert len(tensors) == len(launch._offsets)
        kernel = self._kernels[(launch._kernel.function.value or 0) - 1]
        order = "early" if nvrtc._order.started and launch._kernel.starts_early else "in turn"
        values = [bytes(value).hex() for value in launch._values]
        size = f"{launch._blocks} blocks, {launch._shared_bytes} bytes, {order}"
        self.lines.append(f"{kernel}: {size}, {values}, {[self.name(tensor) for tensor in tensors]}")
        nvrtc._order.started = nvrtc._order.inside

    def _product(self, out: Tensor, left: Tensor, right: Tensor) -> Tensor:
        self.lines.append(f"product: {[self.name(tensor) for tensor in (out, left, right)]}")
        return out

    def _conv_relu(self, x: Tensor, weight: Tensor, bias: Tensor, *how: Any) -> Tensor:
        return self._noted("convolution, ReLU", x, weight, bias, None, how[0], how[1], how[3])

    def _conv_add_relu(self, x: Tensor, weight: Tensor, z: Tensor, alpha: float, bias: Tensor, *how: Any) -> Tensor:
        return self._noted(f"convolution, {alpha} z, ReLU", x, weight, bias, z, how[0], how[1], how[3])

    def _conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Any = 1,
        padding: Any = 0,
        groups: int = 1,
    ) -> Tensor:
        axes = x.ndim - 2
        strides, paddings = ((value,) * axes if isinstance(value, int) else value for value in (stride, padding))
        return self._noted("convolution", x, weight, bias, None, strides, paddings, groups)

    def _noted(self, what: str, x: Tensor, *others: Any) -> Tensor:
        weight, bias, z, stride, padding, groups = others
        tensors = [self.name(tensor) for tensor in (x, weight, bias, z)]
        self.lines.append(f"{what}: {tensors}, stride {list(stride)}, padding {list(padding)}, {groups} groups")
        reach = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
        sizes = [(side + 2 * pad - taps) // step + 1 for side, taps, step, pad in reach]
        layout = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        return torch.empty(x.shape[0], weight.shape[0], *sizes, dtype=x.dtype, memory_format=layout)


def record(engine: Engine, variant: str, words: dict[str, Any]) -> list[str]:
    """The lines of an encoder and a decoder: whole videos, then streams by several pushes."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        recorder = Recorder(patch)
        model = TAEHV(variant, **words).half()
        encoder, decoder = (
            STACKS[engine](folded_copy(side), patch_size=model.spec.patch_size)
            for side in (model.encoder, model.decoder)
        )
        for what, run, videos in (("encode", encoder, frames(model)), ("decode", decoder, latents(model))):
            for video in videos:
                recorder.lines.append(f"{what} {variant} {words}: {[list(chunk.shape) for chunk in video]}")
                state = None
                for chunk in video:
                    with nvrtc.early_launches():
                        made, state = run.run(chunk, state)
                    kept = [recorder.name(part) for part in state]
                    recorder.lines.append(f"gives {recorder.name(made)}, keeps {kept}")
    return recorder.lines


def frames(model: TAEHV) -> Iterator[list[Tensor]]:
    """Videos of images, each as the chunks that come; with some that wait for their partners."""
    factor, side = model.spec.time_factor, model.spec.space_factor
    for videos, height, width, count in SIZES:
        shape = (3, height * side, width * side)
        for lengths in ((count * factor,), (1, factor, 2 * factor - 1, factor)):
            yield [torch.empty(videos, length, *shape, dtype=torch.float16) for length in lengths]


def latents(model: TAEHV) -> Iterator[list[Tensor]]:
    for videos, height, width, count in SIZES:
        shape = (model.spec.latent_channels, height, width)
        for lengths in ((count,), (1, 2, 3)):
            yield [torch.empty(videos, length, *shape, dtype=torch.float16) for length in lengths]


def kernel_code() -> list[str]:
    """The CUDA files line by line, without comments."""
    files = sorted((Path(nvrtc.__file__).parent).glob("*.cu"))
    lines = [re.sub(r"//.*", "", line).strip() for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line]


def digest(lines: list[str]) -> str:
    return f"{len(lines)} lines, sha256 {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


if __name__ == "__main__":
    recorded = {name: record(*case) for name, case in CASES.items()} | {KERNELS: kernel_code()}
    if sys.argv[1] == "--write":
        DIGESTS.write_text(json.dumps({name: digest(lines) for name, lines in recorded.items()}, indent=1) + "\n")
    else:
        Path(sys.argv[1]).write_text("\n".join(line for lines in recorded.values() for line in lines) + "\n")
