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
from tinyvae.models.blocks import (
    Clamp,
    MemBlock,
    State,
    SuperMemBlock,
    TGrow,
    TPool,
    Upsample,
    WideMemBlock,
    conv3x3,
    make_activation,
    run_layers,
)
from tinyvae.models.codec import CodecState, VideoCodec
from tinyvae.models.variants import Activation, LatentSpaceName, Preview, VariantSpec, get_spec

if TYPE_CHECKING:
    from tinyvae.engines.fused import Engine, FusedTAEHV


class TAEHV(VideoCodec, nn.Module):
    """A tiny video autoencoder with random weights (torch's default initialization); `load_model` reads a file.

    ``width`` scales every hidden channel count (1.0 = the released networks; multiples of 0.125). ``preview`` makes a
    cheaper decoder of the same weights, without upsampling in "time", in "space" or in "both". ``latent_space`` and
    ``activation`` are those of `VariantSpec`. The attribute ``gradient_checkpointing`` saves memory in training;
    ``folded_training`` trains the folded form, which is faster.

    Example: ``decoded, latents = TAEHV("taew2_2")(frames)``.
    """

    def __init__(
        self,
        variant: str = "taehv",
        *,
        width: float = 1.0,
        preview: Preview | None = None,
        latent_space: LatentSpaceName = "diffusion",
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.spec: VariantSpec = get_spec(
            variant, width=width, preview=preview, latent_space=latent_space, activation=activation
        )
        self.gradient_checkpointing = False
        self.folded_training = False
        self.encoder = build_encoder(self.spec)
        self.decoder = build_decoder(self.spec)

    @classmethod
    def of(cls, spec: VariantSpec) -> TAEHV:
        """The network of a spec. Example: ``TAEHV.of(other.spec)``."""
        return cls(
            spec.name,
            width=spec.width,
            preview=spec.preview,
            latent_space=spec.latent_space,
            activation=spec.activation,
        )

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

    def fused(self, *, engine: Engine | None = None) -> FusedTAEHV:
        """The same codec with folded weights: same calls, same output, faster. This model stays usable.

        ``engine``: "hopper", "cudnn", "onednn" or "eager" instead of the one that is chosen; what cannot run here is
        refused.

        Example: ``fast = load_model("run").half().cuda().fused(); latents = fast.encode_video(frames)``; on a CPU
        ``load_model("run").bfloat16().fused()``.
        """
        return models.fuse(self, engine=engine)

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
    n, slope = spec.hidden(64), spec.slope
    layers: list[nn.Module] = [conv3x3(spec.image_channels, n), make_activation(slope)]
    for stride in spec.encoder_strides:
        layers += [TPool(n, stride), conv3x3(n, n, stride=2, bias=False), *(MemBlock(n, slope) for _ in range(3))]
    return nn.Sequential(*layers, conv3x3(n, spec.latent_channels))


def build_decoder(spec: VariantSpec) -> nn.Sequential:
    return _build_super_decoder(spec) if spec.decoder == "super" else _build_base_decoder(spec)


def _build_base_decoder(spec: VariantSpec) -> nn.Sequential:
    widths, slope = spec.decoder_channels, spec.slope
    block = WideMemBlock if spec.decoder == "wide" else MemBlock
    layers: list[nn.Module] = [Clamp(), conv3x3(spec.latent_channels, widths[0]), make_activation(slope)]
    for n, following, stride in zip(widths, widths[1:], spec.decoder_strides, strict=False):
        layers += [block(n, slope) for _ in range(3)]
        layers += [Upsample(enabled=not spec.previews_space), TGrow(n, stride, last_only=spec.previews_time)]
        layers += [conv3x3(n, following, bias=False)]
    return nn.Sequential(*layers, make_activation(slope), conv3x3(widths[-1], spec.image_channels))


def _build_super_decoder(spec: VariantSpec) -> nn.Sequential:
    widths, slope = spec.decoder_channels, spec.slope
    layers: list[nn.Module] = [nn.Conv2d(spec.latent_channels, widths[0], 1, bias=False)]
    for n, following, stride in zip(widths, widths[1:], spec.decoder_strides, strict=False):
        layers += [SuperMemBlock(n, slope) for _ in range(3)]
        layers += [conv3x3(n, 4 * following), make_activation(slope), nn.PixelShuffle(2)]
        layers += [TGrow(following, stride, last_only=spec.previews_time)]
    return nn.Sequential(*layers, conv3x3(widths[-1], spec.image_channels))
