"""The codec with folded weights: the same calls and the same output as `TAEHV`, faster.

`model.fused()` folds a copy of the weights once (see `fold`) and chooses, for encoder and decoder each, an engine:

- ``hopper``: own kernels, fp16 and bf16 on GPUs of compute capability 9.0 (H100, H200), base networks whose hidden
  channel counts are multiples of 64. Kernels are compiled once per process and tile height (four at most); frame
  count and frame size may change at every call without compiling again.
- ``cudnn``: cuDNN's fused convolutions, on other CUDA devices, in float32, for other widths and the super decoders.
  Nothing is compiled, sizes and lengths may change freely.
- ``eager``: torch's own operators, on CPUs and wherever the other two cannot run.

`FusedTAEHV.engines` says what was chosen and why. The object follows the model's device and dtype at construction;
for another one, move the model and call `fused()` again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.errors import UserError
from tinyvae.models import hopper_engine
from tinyvae.models.chunk_memory import Engine, chunk_bytes, chunk_latents
from tinyvae.models.codec import CodecMemory, Side, VideoCodec
from tinyvae.models.cudnn_engine import CudnnStack
from tinyvae.models.fold import ConvStep, Step, channels_last, fold_layers, map_weights
from tinyvae.models.folded_run import run_steps, slice_bytes
from tinyvae.models.hopper_engine import HopperStack, why_not_hopper
from tinyvae.models.library_conv import why_not_fused

if TYPE_CHECKING:
    from tinyvae.models.taehv import TAEHV

ChunkFunction = Callable[[Tensor, list[Tensor | None] | None], tuple[Tensor, list[Tensor | None]]]


class FusedTAEHV(VideoCodec):
    """A folded copy of ``model``, for inference. ``engine`` forces one of the three (see the module)."""

    records_gradients = False

    def __init__(self, model: TAEHV, *, engine: Engine | None = None) -> None:
        self.spec = model.spec
        self._dtype, self._device = model.dtype, model.device
        self.engines: dict[str, str] = {}
        self._stacks: dict[Side, tuple[Engine, list[Step]]] = {}
        self._chunks: dict[tuple[Side, int], int] = {}  # latents of a chunk by side and pixels of a latent
        with torch.no_grad():
            self._encode = self._build("encoder", folded_copy(model.encoder), engine)
            self._decode = self._build("decoder", folded_copy(model.decoder), engine)

    def encode_chunk(self, frames_NTCHW: Tensor, memory: CodecMemory | None) -> tuple[Tensor, CodecMemory]:
        return self._run("encoder", self._encode, frames_NTCHW, memory)

    def decode_chunk(self, latents_NTCHW: Tensor, memory: CodecMemory | None) -> tuple[Tensor, CodecMemory]:
        return self._run("decoder", self._decode, latents_NTCHW, memory)

    def _run(
        self, side: Side, run: ChunkFunction, x_NTCHW: Tensor, memory: CodecMemory | None
    ) -> tuple[Tensor, CodecMemory]:
        assert memory is None or (isinstance(memory, list) and len(memory) == len(self._stacks[side][1])), (
            "this memory has been used; pass a copy of the list to go on twice from one"
        )
        with torch.no_grad():
            made = run(x_NTCHW, memory)
        if memory is not None:
            memory.clear()  # so that nobody takes what is left of it for a fresh start
        return made

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def stream_chunk_latents(self, side: Side, latent_height: int, latent_width: int, *, num_videos: int = 1) -> int:
        """As many as take some half a gigabyte by count (see `chunk_memory`); counted once per size."""
        case = side, latent_height * latent_width * num_videos
        if case not in self._chunks:
            self._chunks[case] = self._count_chunk(*case)
        return self._chunks[case]

    def _count_chunk(self, side: Side, latent_pixels: int) -> int:
        engine, steps = self._stacks[side]

        def bytes_of(num_latents: int) -> int:
            return chunk_bytes(
                steps,
                self.spec,
                engine,
                num_latents=num_latents,
                latent_pixels=latent_pixels,
                element_size=self._dtype.itemsize,
                slice_bytes=hopper_engine.FULL_SIZE_BYTES if engine == "hopper" else slice_bytes(self._device),
            )

        return chunk_latents(bytes_of, few_cost_time=engine == "hopper")

    def __repr__(self) -> str:
        chosen = ", ".join(f"{side}: {words}" for side, words in self.engines.items())
        return f"FusedTAEHV({self.spec.name}, {self._dtype}, {self._device}; {chosen})"

    def _build(self, side: Side, steps: list[Step], wanted: Engine | None) -> ChunkFunction:
        engine, reason = choose_engine(steps, self._dtype, self._device, wanted)
        self.engines[side] = f"{engine} ({reason})" if reason else engine
        self._stacks[side] = engine, map_weights(steps, lambda weight: weight.to("meta"))  # shapes are enough to count
        patch = self.spec.patch_size
        if engine == "hopper":
            return HopperStack(steps, patch_size=patch).run
        if engine == "cudnn":
            return CudnnStack(steps, patch_size=patch).run
        return partial(_run_stack, side, map_weights(steps, channels_last), patch)  # which can be pickled


def _run_stack(
    side: Side, steps: list[Step], patch: int, x_NTCHW: Tensor, memory: list[Tensor | None] | None
) -> tuple[Tensor, list[Tensor | None]]:
    """A stack by torch's own operators, from or to pixels; at patch size 1 a shuffle would only be a copy."""
    if side == "encoder":
        first = steps[0]
        assert isinstance(first, ConvStep)
        x_NTCHW = x_NTCHW.to(first.weight.dtype)
    if side == "encoder" and patch > 1:
        x_NTCHW = F.pixel_unshuffle(x_NTCHW, patch)
    made, memory = run_steps(steps, x_NTCHW, memory)
    return (F.pixel_shuffle(made, patch) if side == "decoder" and patch > 1 else made).contiguous(), memory


def choose_engine(
    steps: list[Step], dtype: torch.dtype, device: torch.device, wanted: Engine | None
) -> tuple[Engine, str]:
    """(engine, why not a faster one); a wanted engine that cannot run here is refused."""
    if wanted is not None and wanted not in get_args(Engine):
        names = ", ".join(get_args(Engine))
        raise UserError(f"engine={wanted!r} is not known; use one of {names}, or leave it out to have one chosen.")
    reasons: dict[Engine, str | None] = {
        "hopper": why_not_hopper(steps, dtype, device),
        "cudnn": why_not_fused(dtype, device),
        "eager": None,
    }
    if wanted is not None:
        if reasons[wanted]:
            raise UserError(
                f"engine={wanted!r} cannot run here: {reasons[wanted]}; leave engine out to have one chosen."
            )
        return wanted, "as asked"
    said = dict.fromkeys(reason for reason in reasons.values() if reason)  # each reason once
    if reasons["hopper"] is None:
        return "hopper", ""
    if reasons["cudnn"] is None:
        is_exact = dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
        return "cudnn", reasons["hopper"] + ("; with TF32 off the plain network is as fast" if is_exact else "")
    return "eager", "; ".join(said)


def folded_copy(layers: torch.nn.Sequential) -> list[Step]:
    """The folded steps of a stack with weights of their own, in the stack's dtype.

    Folded weights are sums of products, so they are taken in float64 and rounded once.
    """
    dtype = next(layers.parameters()).dtype
    exact = copy.deepcopy(layers).double()
    return map_weights(fold_layers(exact), lambda weight: weight.detach().to(dtype).contiguous())
