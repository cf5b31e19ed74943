"""One latent in, its frames out, as soon as the device can: the decoder step as a CUDA graph.

At one latent a time the host takes longer to launch the kernels than the device to run them. A graph launches them
all at once. It is recorded for one frame size, and it owns the memory of its stream: one object per stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.models.codec import VideoCodec

WARM_UPS = 3


class DecodeGraph:
    """`codec.decode_chunk` for one latent at a time, recorded once and replayed."""

    def __init__(self, codec: VideoCodec, latent_N1CHW: Tensor) -> None:
        """``latent_N1CHW`` shows shape, dtype and device; its values are not used."""
        if codec.device.type != "cuda":
            raise UserError(f"low_latency=True records a CUDA graph and the model is on {codec.device}; leave it out.")
        assert latent_N1CHW.shape[1] == 1
        with torch.no_grad(), torch.cuda.device(codec.device):
            self._latent = torch.zeros_like(latent_N1CHW, memory_format=torch.contiguous_format)
            # Recording forbids what first calls do: choosing algorithms, compiling, loading kernels.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                memory = None
                for _ in range(WARM_UPS):
                    _, memory = codec.decode_chunk(self._latent, memory)
            torch.cuda.current_stream().wait_stream(side)
            assert isinstance(memory, list)
            # The frame before a video is zero, so a memory of zeros is a fresh start.
            self._memory = [torch.zeros_like(part) if isinstance(part, Tensor) else None for part in memory]
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._frames, after = codec.decode_chunk(self._latent, list(self._memory))
                assert isinstance(after, list)
                for kept, new in zip(self._memory, after, strict=True):
                    if kept is not None:
                        kept.copy_(new)

    def step(self, latent_N1CHW: Tensor) -> Tensor:
        """Raw frames of the next latent. The tensor is the graph's own: the next step writes over it."""
        self._latent.copy_(latent_N1CHW)
        self._graph.replay()
        return self._frames
