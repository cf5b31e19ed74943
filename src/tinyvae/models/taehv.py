"""The network: encoder and decoder of every variant, with the keys that other programs know.

The two stacks are flat Sequentials because their indices *are* the file format (``encoder.{i}.*``,
``decoder.{i}.*``): ComfyUI, stable-diffusion.cpp and others recognize the models by these keys and shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae import models
from tinyvae.models.blocks import Clamp, MemBlock, State, SuperMemBlock, TGrow, TPool, Upsample, conv3x3, run_layers
from tinyvae.models.codec import CodecState, VideoCodec
from tinyvae.models.variants import Preview, VariantSpec, get_spec

if TYPE_CHECKING:
    from tinyvae.engines.fused import FusedTAEHV


class TAEHV(VideoCodec, nn.Module):
    """A tiny video autoencoder with random weights (torch's default initialization); `load_model` reads a file.

    ``width`` scales every hidden channel count (1.0 = the released networks; multiples of 0.125). ``preview`` makes a
    cheaper decoder of the same weights, without upsampling in "time", in "space" or in "both". The attribute
    ``gradient_checkpointing`` saves memory in training; ``folded_training`` trains the folded form, which is faster.

    Example: ``decoded, latents = TAEHV("taew2_2")(frames)``.
    """

    def __init__(self, variant: str = "taehv", *, width: float = 1.0, preview: Preview | None = None) -> None:
        super().__init__()
        self.spec: VariantSpec = get_spec(variant, width=width, preview=preview)
        self.gradient_checkpointing = False
        self.folded_training = False
        self.encoder = build_encoder(self.spec)
        self.decoder = build_super_decoder(self.spec) if self.spec.decoder == "super" else build_decoder(self.spec)

    def forward(self, frames_NTCHW: Tensor) -> tuple[Tensor, Tensor]:
        """(decoded frames without clamp, latents) of a video: the training path."""
        latents = self.encode(frames_NTCHW)
        return self.decode(latents), latents

    def encode_chunk(self, frames_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        assert state is None or isinstance(state, list)
        patches = F.pixel_unshuffle(frames_NTCHW.to(self.dtype), self.spec.patch_size)
        return self._run(self.encoder, patches, state)

    def decode_chunk(self, latents_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        assert state is None or isinstance(state, list)
        patches, state = self._run(self.decoder, latents_NTCHW, state)
        return F.pixel_shuffle(patches, self.spec.patch_size), state

    def fused(self) -> FusedTAEHV:
        """The same codec with folded weights: same calls, same output, faster. This model stays usable.

        Example: ``fast = load_model("run").half().cuda().fused(); latents = fast.encode_video(frames)``.
        """
        return models.fuse(self)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _run(self, layers: nn.Sequential, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        run = models.run_folded if self.folded_training else run_layers
        return run(layers, x, state, checkpointing=self.gradient_checkpointing)


def build_encoder(spec: VariantSpec) -> nn.Sequential:
    n = spec.hidden(64)
    layers: list[nn.Module] = [conv3x3(spec.image_channels, n), nn.ReLU(inplace=True)]
    for stride in spec.encoder_strides:
        layers += [TPool(n, stride), conv3x3(n, n, stride=2, bias=False), MemBlock(n), MemBlock(n), MemBlock(n)]
    return nn.Sequential(*layers, conv3x3(n, spec.latent_channels))


def build_decoder(spec: VariantSpec) -> nn.Sequential:
    widths = [spec.hidden(c) for c in (256, 128, 64, 64)]
    layers: list[nn.Module] = [Clamp(), conv3x3(spec.latent_channels, widths[0]), nn.ReLU(inplace=True)]
    for n, following, stride in zip(widths, widths[1:], spec.decoder_strides, strict=False):
        layers += [MemBlock(n), MemBlock(n), MemBlock(n)]
        layers += [Upsample(enabled=not spec.previews_space), TGrow(n, stride, last_only=spec.previews_time)]
        layers += [conv3x3(n, following, bias=False)]
    return nn.Sequential(*layers, nn.ReLU(inplace=True), conv3x3(widths[-1], spec.image_channels))


def build_super_decoder(spec: VariantSpec) -> nn.Sequential:
    widths = [spec.hidden(c) for c in (512, 256, 128, 64)]
    layers: list[nn.Module] = [nn.Conv2d(spec.latent_channels, widths[0], 1, bias=False)]
    for n, following, stride in zip(widths, widths[1:], spec.decoder_strides, strict=False):
        layers += [SuperMemBlock(n), SuperMemBlock(n), SuperMemBlock(n)]
        layers += [conv3x3(n, 4 * following), nn.ReLU(inplace=True), nn.PixelShuffle(2)]
        layers += [TGrow(following, stride, last_only=spec.previews_time)]
    return nn.Sequential(*layers, conv3x3(widths[-1], spec.image_channels))
