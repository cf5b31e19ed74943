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
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from tinyvae.engines import hopper
from tinyvae.engines.chunks import Engine, chunk_latents
from tinyvae.engines.cudnn import CudnnStack, why_not_cudnn
from tinyvae.engines.eager import EagerStack
from tinyvae.engines.fold import Layer, channels_last, fold_layers, map_weights
from tinyvae.engines.hopper import HopperStack, why_not_hopper
from tinyvae.engines.stack import Stack, slice_bytes
from tinyvae.errors import UserError
from tinyvae.models.codec import CodecState, VideoCodec
from tinyvae.models.streaming import Side
from tinyvae.models.taehv import TAEHV


class FusedTAEHV(VideoCodec):
    """A folded copy of ``model``, for inference. ``engine`` forces one of the three (see the module).

    Example: ``FusedTAEHV(model, engine="eager").decode_video(latents)``.
    """

    records_gradients = False

    def __init__(self, model: TAEHV, *, engine: Engine | None = None) -> None:
        self.spec = model.spec
        self._dtype, self._device = model.dtype, model.device
        self.engines: dict[str, str] = {}
        self._chosen: dict[Side, Engine] = {}
        self._chunks: dict[tuple[Side, int], int] = {}  # latents of a chunk by side and pixels of a latent
        with torch.no_grad():
            self._encoder = self._build("encoder", folded_copy(model.encoder), engine)
            self._decoder = self._build("decoder", folded_copy(model.decoder), engine)

    def encode_chunk(self, frames_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        return self._run(self._encoder, frames_NTCHW, state)

    def decode_chunk(self, latents_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        return self._run(self._decoder, latents_NTCHW, state)

    def _run(self, stack: Stack, x_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        assert state is None or (isinstance(state, list) and len(state) == len(stack.layers)), (
            "this state has been used; pass a copy of the list to continue twice from one state"
        )
        with torch.no_grad():
            made = stack.run(x_NTCHW, state)
        if state is not None:
            state.clear()  # so that nobody takes what is left of it for a fresh start
        return made

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def stream_chunk_latents(self, side: Side, latent_height: int, latent_width: int, *, num_videos: int = 1) -> int:
        """As many as take about 600 MiB (see `chunks`); computed once per size."""
        case = side, latent_height * latent_width * num_videos
        if case not in self._chunks:
            engine = self._chosen[side]
            self._chunks[case] = chunk_latents(
                self.spec,
                side,
                engine,
                latent_pixels=case[1],
                element_size=self._dtype.itemsize,
                slice_bytes=hopper.SLICE_BYTES if engine == "hopper" else slice_bytes(self._device),
            )
        return self._chunks[case]

    def __repr__(self) -> str:
        chosen = ", ".join(f"{side}: {words}" for side, words in self.engines.items())
        return f"FusedTAEHV({self.spec.name}, {self._dtype}, {self._device}; {chosen})"

    def _build(self, side: Side, layers: list[Layer], wanted: Engine | None) -> Stack:
        engine, reason = choose_engine(layers, self._dtype, self._device, wanted)
        self.engines[side] = f"{engine} ({reason})" if reason else engine
        self._chosen[side] = engine
        if engine == "hopper":
            return HopperStack(layers, patch_size=self.spec.patch_size)
        if engine == "cudnn":
            return CudnnStack(layers, patch_size=self.spec.patch_size)
        return EagerStack(map_weights(layers, channels_last), patch_size=self.spec.patch_size)


def choose_engine(
    layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, wanted: Engine | None
) -> tuple[Engine, str]:
    """(engine, why not a faster one); a wanted engine that cannot run here is refused."""
    if wanted is not None and wanted not in get_args(Engine):
        names = ", ".join(get_args(Engine))
        raise UserError(f"engine={wanted!r} is not known; use one of {names}, or leave it out to have one chosen.")
    reasons: dict[Engine, str | None] = {
        "hopper": why_not_hopper(layers, dtype, device),
        "cudnn": why_not_cudnn(dtype, device),
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


def folded_copy(network: nn.Sequential) -> list[Layer]:
    """The folded layers of a stack with weights of their own, in the stack's dtype.

    Folded weights are sums of products, so they are computed in float64 and rounded once.
    """
    dtype = next(network.parameters()).dtype
    exact = copy.deepcopy(network).double()
    return map_weights(fold_layers(exact), lambda weight: weight.detach().to(dtype).contiguous())
