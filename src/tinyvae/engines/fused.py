"""The codec with folded weights: the same calls and the same output as `TAEHV`, faster.

`model.fused()` folds a copy of the weights once (see `fold`) and chooses, for encoder and decoder each, an engine:

- ``hopper``: own kernels, fp16 and bf16 on GPUs of compute capability 9.0 (H100, H200), base networks and the wide
  decoder where hidden channel counts are multiples of 64. Kernels are compiled once per process and tile height (five
  at most). A narrow base network runs here if you ask for it: zeros fill up its channels (`fill`).
- ``cudnn``: cuDNN's fused convolutions, on other CUDA devices, in float32, for other widths and the super decoders,
  whose depthwise convolutions have a kernel of their own; with LeakyReLU, which cuDNN lacks, its plain convolutions and
  one own pass behind each.
- ``onednn``: oneDNN's fused convolutions, on x86 CPUs, in float32, and in bfloat16 if the CPU has instructions for it.
- ``eager``: torch's own operators, where the others cannot run: other CPUs, cards without cuDNN's fused convolutions.

`FusedTAEHV.engines` says what was chosen and why. Frame count and size may change at every call. The object keeps the
device and dtype that the model has now. A stream runs a chunk of latents at a time that fits into STREAM_BYTES.
"""

from __future__ import annotations

import copy
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from tinyvae.engines import hopper
from tinyvae.engines.cudnn import CudnnStack, why_not_cudnn
from tinyvae.engines.eager import EagerStack
from tinyvae.engines.fill import fill_channels
from tinyvae.engines.fold import Layer, channels_last, fold_layers, map_weights
from tinyvae.engines.hopper import HopperStack, why_not_hopper
from tinyvae.engines.onednn import OnednnStack, has_bfloat16, why_not_onednn
from tinyvae.engines.replay import Replay, stop_recording
from tinyvae.engines.stack import Stack, slice_bytes
from tinyvae.errors import UserError
from tinyvae.models.codec import CodecState, VideoCodec
from tinyvae.models.streaming import Side, joined_latents
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec

log = logging.getLogger(__name__)

Engine = Literal["hopper", "cudnn", "onednn", "eager"]
STACKS: dict[Engine, Callable[..., Stack]] = {
    "hopper": HopperStack,
    "cudnn": CudnnStack,
    "onednn": OnednnStack,
    "eager": EagerStack,
}

STREAM_BYTES = 608 * 2**20  # for one chunk, beside its input
MOST_LATENTS = 4096
REPLAY_CHUNKS = True
"""Whether a GPU replays chunks that fit into STREAM_BYTES from CUDA graphs (`replay`): on an H200 taeltx_2 decodes
480x736x49 in 1.40 instead of 1.74 ms (`benchmarks/speed_engines.py --engines hopper hopper:launched` compares)."""
FEW_LATENTS = 4  # to have this many, a chunk may take twice the memory: on an H200 each chunk costs 0.2 to 0.7 ms
SUPER_COPIES: dict[Engine, int] = {"cudnn": 4, "onednn": 7, "eager": 10}
"""A super block holds its input, two tensors side by side and four widened ones; in the eager engine also both
depthwise results and one of them shifted. Other blocks hold three tensors. In the cudnn engine the widened ones are of
one slice; before them, one depthwise result is alive beside the first three. In the onednn engine all but the input are
of a few frames only."""


def chunk_latents(
    spec: VariantSpec, side: Side, engine: Engine, *, latent_pixels: int, element_size: int, slice_bytes: int
) -> int:
    """Latents of a chunk, at least 1. ``latent_pixels`` counts all videos of the batch."""

    def bytes_of(num_latents: int) -> int:
        return chunk_bytes(spec, side, engine, num_latents, latent_pixels, element_size, slice_bytes)

    fits = bisect_right(range(1, MOST_LATENTS + 1), STREAM_BYTES, key=bytes_of)
    if engine == "hopper" and fits < FEW_LATENTS:
        fits = bisect_right(range(1, FEW_LATENTS + 1), 2 * STREAM_BYTES, key=bytes_of)
    return max(1, fits)


def chunk_bytes(
    spec: VariantSpec,
    side: Side,
    engine: Engine,
    num_latents: int,
    latent_pixels: int,
    element_size: int,
    slice_bytes: int,
) -> int:
    """The most bytes alive at once while a chunk runs in the middle of a stream; ``slice_bytes`` as in `stack`."""
    is_encoder = side == "encoder"
    # Values for one latent pixel:
    slice_values = slice_bytes / element_size / latent_pixels
    state = (63 if is_encoder else 84) * _block_channels(spec, side)  # one frame of each of the nine memory blocks
    alive = _values_alive(spec, side, engine, num_latents, slice_values)
    if is_encoder:  # frames that waited and new ones are joined in a tensor of their own
        joined = joined_latents(num_latents)
        alive = max(alive, _values_alive(spec, side, engine, joined, slice_values) + joined * _image_values(spec))
    return round((alive + state) * latent_pixels * element_size)


def _values_alive(spec: VariantSpec, side: Side, engine: Engine, num_latents: int, slice_values: float) -> float:
    """Values alive at once for one latent pixel, without the state."""
    is_chunked = spec.frame_rule == "chunked"
    stride = spec.encoder_strides[0] if side == "encoder" else spec.decoder_strides[2]
    image = num_latents * _image_values(spec)
    frame = 16 * _block_channels(spec, side)  # of the widest memory block
    block = num_latents * spec.time_factor // stride * frame
    is_super = side == "decoder" and spec.decoder == "super"
    copies = SUPER_COPIES[engine] if is_super else 3
    in_blocks: float = copies * block + frame
    if engine == "cudnn" and is_super:
        in_blocks = max(in_blocks, 3 * block + frame + min(max(slice_values, 4 * frame), 4 * block))
    if engine == "onednn":
        at_once = min(max(slice_values, frame), block)
        in_blocks = block + copies * at_once + 2 * frame
    full_frame = 64 * spec.hidden(64)  # on the full grid
    # onednn cuts a slice of too large frames into bands of rows
    least = slice_values if engine == "onednn" else stride * full_frame
    one_slice = min(max(slice_values, least), num_latents * spec.time_factor * full_frame)
    two_slices = one_slice if engine == "hopper" else 2 * one_slice  # the kernels need no second one
    if side == "decoder":
        # written, perhaps chosen from, and clamped; onednn lays pixels out for itself first
        lays_out = engine == "onednn" and spec.patch_size > 1
        results = (3 if is_chunked or lays_out else 2) * image
        return max(in_blocks, block + image + two_slices, results)
    whole_images = 3 * image if is_chunked else 0  # taeh3 joins each push with frames that waited and with zeros
    if engine in ("eager", "onednn"):  # which cast and lay out the whole push
        return max(in_blocks, block + image + two_slices) + whole_images + image
    if engine == "cudnn":  # which casts and lays out the image of one slice
        two_slices = one_slice * (1 + 2 * spec.image_channels / spec.hidden(64))
    return max(in_blocks, block + two_slices) + whole_images


def _image_values(spec: VariantSpec) -> int:
    """Values of the frames of one latent, for one latent pixel."""
    return spec.time_factor * 64 * spec.image_channels


def _block_channels(spec: VariantSpec, side: Side) -> int:
    """Channels of the memory blocks next to the image."""
    return spec.decoder_channels[2] if side == "decoder" else spec.hidden(64)


class FusedTAEHV(VideoCodec):
    """A folded copy of ``model`` for inference, as in ``FusedTAEHV(model, engine="eager").decode_video(latents)``."""

    records_gradients = False

    def __init__(self, model: TAEHV, *, engine: Engine | None = None) -> None:
        self.spec = model.spec
        self._dtype, self._device = model.dtype, model.device
        self.engines: dict[str, str] = {}
        self._chosen: dict[Side, Engine] = {}
        self._chunks: dict[tuple[Side, int], int] = {}  # latents of a chunk by side and pixels of a latent
        is_short_on_cpu = self._device.type == "cpu" and self._dtype == torch.bfloat16
        if engine is None and is_short_on_cpu and (reason := why_not_onednn(self._dtype, self._device)):
            log.warning("%s: use model.float().fused().", reason)
        networks: dict[Side, nn.Sequential] = {"encoder": model.encoder, "decoder": model.decoder}
        with torch.no_grad():
            self._stacks = {side: self._build(side, folded_copy(net), engine) for side, net in networks.items()}
        is_replayed = REPLAY_CHUNKS and self._device.type == "cuda"
        self._replays = {side: Replay(stack) for side, stack in self._stacks.items() if is_replayed}

    def encode_chunk(self, frames_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        return self._run("encoder", frames_NTCHW, state)

    def decode_chunk(self, latents_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        return self._run("decoder", latents_NTCHW, state)

    def _run(self, side: Side, x_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        stack = self._stacks[side]
        assert state is None or (isinstance(state, list) and len(state) == len(stack.layers)), (
            "this state has been used; pass a copy of the list to continue twice from one state"
        )
        runner = self._replays[side] if side in self._replays and self._is_small(side, x_NTCHW.shape) else stack
        try:
            with torch.no_grad():
                return runner.run(x_NTCHW, state)
        except torch.OutOfMemoryError:
            stop_recording()  # the caller may try again with less
            raise
        finally:
            if state is not None:
                state.clear()  # so that what is left of a used state is never taken for that of a new video

    def _is_small(self, side: Side, shape: torch.Size) -> bool:
        """Whether a chunk NTCHW takes no more memory than a chunk of a stream."""
        num_videos, length, _, height, width = shape
        if side == "encoder":
            length = -(-length // self.spec.time_factor)
            height, width = height // self.spec.space_factor, width // self.spec.space_factor
        return length <= self.stream_chunk_latents(side, height, width, num_videos=num_videos)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def stream_chunk_latents(self, side: Side, latent_height: int, latent_width: int, *, num_videos: int = 1) -> int:
        """As many as take about 600 MiB; computed once per size."""
        case = side, latent_height * latent_width * num_videos
        if case not in self._chunks:
            engine = self._chosen[side]
            # The hopper engine has filled up what is not a multiple of 64 channels.
            spec = replace(self.spec, width=float(math.ceil(self.spec.width))) if engine == "hopper" else self.spec
            self._chunks[case] = chunk_latents(
                spec,
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
        if wanted == "hopper":
            layers = fill_channels(layers, hopper.CHANNELS) or layers
        engine, reason = choose_engine(layers, self._dtype, self._device, wanted)
        self.engines[side] = f"{engine} ({reason})" if reason else engine
        self._chosen[side] = engine
        return STACKS[engine](layers, patch_size=self.spec.patch_size)


def choose_engine(
    layers: Sequence[Layer], dtype: torch.dtype, device: torch.device, wanted: Engine | None
) -> tuple[Engine, str]:
    """(engine, why not a faster one); a wanted engine that cannot run here is refused."""
    hopper_reason = why_not_hopper(layers, dtype, device)
    cudnn_reason, onednn_reason = why_not_cudnn(dtype, device), why_not_onednn(dtype, device)
    reasons: dict[Engine, str | None] = {
        "hopper": hopper_reason,
        "cudnn": cudnn_reason,
        "onednn": onednn_reason,
        "eager": None,
    }
    if wanted is not None:
        if wanted not in reasons:
            names = ", ".join(reasons)
            raise UserError(f"engine={wanted!r} is not known; use one of {names}, or leave it out to have one chosen.")
        if reason := reasons[wanted]:
            raise UserError(f"engine={wanted!r} cannot run here: {reason}; leave engine out to have one chosen.")
        return wanted, "as asked"
    if hopper_reason is None:
        return "hopper", ""
    if cudnn_reason is None:
        is_exact = dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
        return "cudnn", hopper_reason + ("; with TF32 off the plain network is as fast" if is_exact else "")
    if onednn_reason is None:
        is_slower = dtype == torch.float32 and has_bfloat16()
        return "onednn", "in bfloat16 it is about twice as fast on this CPU" if is_slower else ""
    why = [onednn_reason] if device.type == "cpu" else [hopper_reason, cudnn_reason]
    return "eager", "; ".join(dict.fromkeys(why))  # each reason once


def folded_copy(network: nn.Sequential) -> list[Layer]:
    """The folded layers of a stack with weights of their own, computed in float64 and rounded once to its dtype;
    those of convolutions are in channels_last memory."""
    dtype = next(network.parameters()).dtype
    exact = copy.deepcopy(network).double()
    return map_weights(fold_layers(exact), lambda weight: channels_last(weight.detach().to(dtype)))
