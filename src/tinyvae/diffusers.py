"""A tinyvae network as a VAE of diffusers: `AutoencoderTinyVideo` takes the teacher's place in a pipeline.

    from tinyvae.diffusers import AutoencoderTinyVideo

    pipe.vae = AutoencoderTinyVideo.from_tinyvae("taew2_1.safetensors", variant="taew2_1", teacher=pipe.vae)

diffusers' videos are N C T H W in [-1, 1] and its latents are the VAE's own z. Our networks work with N T C H W in
[0, 1] and with diffusion space. This class converts both ways with the teacher's true statistics, which it keeps in
its config, because pipelines read them there.

It needs diffusers: ``pip install 'tinyvae[diffusers]'``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.engines.fused import FusedTAEHV
from tinyvae.errors import UserError, require_package
from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import (
    H3_CHUNK_FRAMES,
    H3_CHUNK_LATENTS,
    H3_DROPPED_LATENTS,
    VARIANTS,
    Activation,
    LatentSpaceName,
    VariantSpec,
)
from tinyvae.models.weights import load_model
from tinyvae.teachers.statistics import KNOWN_STATISTICS, chosen_statistics, pixel_normalization, statistics_of_vae

require_package("diffusers", extra="diffusers", needed_for="tinyvae.diffusers")

from diffusers.configuration_utils import ConfigMixin, register_to_config  # noqa: E402 (asked for above)
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution  # noqa: E402
from diffusers.models.modeling_outputs import AutoencoderKLOutput  # noqa: E402
from diffusers.models.modeling_utils import ModelMixin  # noqa: E402
from diffusers.utils.accelerate_utils import apply_forward_hook  # noqa: E402

__all__ = ["AutoencoderTinyVideo"]

CONVERTED_FRAMES = 16
"""Frames that become a pipeline's pixels at once: the conversion is in float32 and needs a copy."""

LOADER_NAME = "load_tinyvae"
LOADER_TEXT = "from tinyvae.diffusers import AutoencoderTinyVideo\n\n__all__ = ['AutoencoderTinyVideo']\n"
"""A file beside the weights. diffusers' AutoModel finds the class through it (with ``trust_remote_code=True``)."""


class AutoencoderTinyVideo(ModelMixin, ConfigMixin):
    """The encoder and decoder of one variant, with the interface of diffusers' video VAEs.

    `from_tinyvae` makes one of a tinyvae model; `from_pretrained` and `save_pretrained` are diffusers' own. Statistics
    that are None are those of the variant's teacher (`tinyvae.teachers.statistics`).

    Where no gradient is recorded, the fused codec runs. It is built at the first call and again whenever the weights
    are moved, cast or changed. Where gradients are recorded, the plain network runs and does not clamp.

    Example: ``AutoencoderTinyVideo("taew2_1").decode(torch.zeros(1, 16, 3, 8, 8)).sample.shape`` is (1, 3, 9, 64, 64).
    """

    _supports_gradient_checkpointing = True
    # 82 MB at most: there is nothing to win, and the fused codec reads the weights outside of any layer's forward.
    _supports_group_offloading = False
    _skip_layerwise_casting_patterns = ("encoder", "decoder")
    _no_split_modules = ("MemBlock", "SuperMemBlock", "WideMemBlock")

    @register_to_config
    def __init__(
        self,
        variant: str = "taehv",
        width: float = 1.0,
        latents_mean: list[float] | None = None,
        latents_std: list[float] | None = None,
        scaling_factor: float | None = None,
        invert_scale_latents: bool = False,
        latent_space: LatentSpaceName = "diffusion",
        activation: Activation = "relu",
    ) -> None:
        """``invert_scale_latents`` is CogVideoX's: its image-to-video pipeline reads it, this class does not."""
        super().__init__()
        network = TAEHV(variant, width=width, latent_space=latent_space, activation=activation)
        # The two halves are ours, so that the keys are the family's flat ones. The network shares them.
        self.encoder, self.decoder = network.encoder, network.decoder
        self.__dict__["network"] = network
        self.spec: VariantSpec = network.spec
        self._statistics = chosen_statistics(self.spec, latents_mean, latents_std, scaling_factor)
        self._fused: tuple[object, FusedTAEHV, list[Tensor]] | None = None
        self.use_slicing = self.use_tiling = False
        # What pipelines read from the VAE itself, as from its config.
        self.temporal_compression_ratio, self.spatial_compression_ratio = self.spec.time_factor, self.spec.space_factor
        self.temperal_downsample = derived_config(self.spec)["temperal_downsample"]
        self.tokens_chunk_size = H3_CHUNK_LATENTS
        self.register_to_config(
            latents_mean=list(self._statistics.mean),
            latents_std=list(self._statistics.std),
            scaling_factor=self._statistics.factor,
            **derived_config(self.spec),
        )

    @classmethod
    def from_tinyvae(
        cls,
        model: TAEHV | str | os.PathLike[str],
        *,
        variant: str | None = None,
        teacher: ModelMixin | None = None,
        scaling_factor: float | None = None,
    ) -> AutoencoderTinyVideo:
        """A VAE with the weights of a tinyvae model, or of anything that `load_model` reads (with ``variant``).

        ``teacher`` is the diffusers VAE whose place it takes, such as ``pipe.vae``: the statistics are taken from it,
        and one with another latent space is refused. ``scaling_factor`` overrules the teacher and the table.
        """
        if not isinstance(model, TAEHV):
            model = load_model(model, variant)
        spec = model.spec
        if spec.preview is not None:
            raise UserError(
                f"a preview decoder makes smaller or fewer frames than a pipeline expects (preview={spec.preview!r}); "
                "load the model without preview=."
            )
        options: dict[str, Any] = {} if teacher is None else statistics_of_vae(teacher, spec)
        if teacher is None and spec.name not in KNOWN_STATISTICS and spec.name != "taeos1_3":  # which has no pipeline
            warnings.warn(
                f"the latent statistics of {spec.teacher} come with its VAE; without teacher=pipe.vae they are mean 0 "
                "and deviation 1, which is wrong for a pipeline that gives latents to another network.",
                stacklevel=2,
            )
        if scaling_factor is not None:
            options["scaling_factor"] = scaling_factor
        options |= {"latent_space": spec.latent_space, "activation": spec.activation}
        vae = cls(variant=spec.name, width=spec.width, **options)
        vae.load_state_dict(model.state_dict())
        # torch's own `to`: that of diffusers warns at every cast, of no module in particular (0.42).
        torch.nn.Module.to(vae, device=model.device, dtype=model.dtype)
        return vae.eval()

    @property
    def gradient_checkpointing(self) -> bool:
        """What `enable_gradient_checkpointing` sets: recompute activations in the backward pass."""
        return self.network.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, is_on: bool) -> None:
        self.network.gradient_checkpointing = is_on

    @property
    def latents_mean(self) -> Tensor:
        """The mean of each latent channel, float32 on the CPU (the LTX pipelines read it here)."""
        return torch.tensor(self._statistics.mean)

    @property
    def latents_std(self) -> Tensor:
        """The deviation of each latent channel, float32 on the CPU."""
        return torch.tensor(self._statistics.std)

    # switches

    def enable_tiling(self, **tile_sizes: object) -> None:
        """Run long videos in pieces of time, in memory that does not grow with their length.

        The pieces carry the network's state, so the result is the same up to rounding. Frames are not cut in space,
        so the ``tile_sizes`` that other VAEs take have no effect here.
        """
        self.use_tiling = True

    def disable_tiling(self) -> None:
        """Run each video in one piece."""
        self.use_tiling = False

    def enable_slicing(self) -> None:
        """Run the videos of a batch one after the other. The result is the same up to rounding."""
        self.use_slicing = True

    def disable_slicing(self) -> None:
        """Run all videos of a batch together."""
        self.use_slicing = False

    # the calls

    @apply_forward_hook
    def encode(self, x: Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """The latents of videos N C T H W in [-1, 1] (taeh3: normalized as ImageNet's), in the VAE's own space.

        The encoder has no variance: ``latent_dist.sample(generator)`` draws as many numbers as the teacher's does and
        returns the mode.
        """
        parts = self._slices(x, channels=3)
        self.spec.check_size(*x.shape[-2:])
        z = torch.cat([self._encode(part) for part in parts])
        distribution = DiagonalGaussianDistribution(torch.cat([z, torch.zeros_like(z)], dim=1), deterministic=True)
        return AutoencoderKLOutput(latent_dist=distribution) if return_dict else (distribution,)

    @apply_forward_hook
    def decode(
        self, z: Tensor, timestep: Tensor | None = None, return_dict: bool = True, **unused: object
    ) -> DecoderOutput | tuple[Tensor]:
        """Videos N C T H W in [-1, 1] (taeh3: normalized as ImageNet's) of latents in the VAE's own space.

        T latents make as many frames as the teacher makes of them (`VariantSpec.frames_from_latents`). ``timestep`` and
        the keywords of other decoders have no effect: this decoder has no noise to remove.
        """
        parts = [self._decode(part) for part in self._slices(z, channels=self.spec.latent_channels)]
        video = parts[0] if len(parts) == 1 else torch.cat(parts)  # a single one is not copied
        return DecoderOutput(sample=video) if return_dict else (video,)

    def forward(
        self,
        sample: Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: torch.Generator | None = None,
    ) -> DecoderOutput | tuple[Tensor]:
        """Encode and decode videos, as diffusers' VAEs do."""
        distribution = self.encode(sample).latent_dist
        z = distribution.sample(generator) if sample_posterior else distribution.mode()
        return self.decode(z, return_dict=return_dict)

    def _slices(self, x: Tensor, *, channels: int) -> tuple[Tensor, ...]:
        if x.ndim != 5 or x.shape[1] != channels:
            what = f"expected diffusers' layout N C T H W with {channels} channels, got shape {tuple(x.shape)}"
            raise UserError(f"{what}; an image is a video with T = 1.")
        return x.split(1) if self.use_slicing else (x,)

    def _encode(self, video_NCTHW: Tensor) -> Tensor:
        if self._records_gradients(video_NCTHW):
            latents = self.network.encode(self._to_frames(video_NCTHW))
        else:
            latents = self._encode_without_gradients(video_NCTHW)
        if self.spec.frame_rule == "chunked" and video_NCTHW.shape[2] == 1:
            latents = latents[:, :1]  # of a single image MiniMax H3's VAE makes one latent, our rule two
        return self._to_z(latents)

    @torch.compiler.disable  # the fused codec is fast as it is, and torch.compile cannot trace how it is made
    @torch.no_grad()
    def _encode_without_gradients(self, video_NCTHW: Tensor) -> Tensor:
        codec = self._codec(video_NCTHW.device)
        if not self.use_tiling:
            return codec.encode_video(self._to_frames(video_NCTHW))
        height, width = (side // self.spec.space_factor for side in video_NCTHW.shape[-2:])
        piece = codec.stream_chunk_latents("encoder", height, width, num_videos=len(video_NCTHW))
        stream = StreamingEncoder(codec, num_frames=video_NCTHW.shape[2])
        parts = video_NCTHW.split(piece * self.spec.time_factor, dim=2)
        return torch.cat([stream.push(self._to_frames(part)) for part in parts], dim=1)

    def _decode(self, z_NCTHW: Tensor) -> Tensor:
        latents = self._to_latents(z_NCTHW)
        if self._records_gradients(z_NCTHW):
            return self._to_video(self.network.decode(latents))
        return self._decode_without_gradients(latents)

    @torch.compiler.disable
    @torch.no_grad()
    def _decode_without_gradients(self, latents_NTCHW: Tensor) -> Tensor:
        num_videos, num_latents, _, height, width = latents_NTCHW.shape
        factor, num_frames = self.spec.space_factor, self.spec.frames_from_latents(num_latents)
        video, start = None, 0
        for frames in self._decoded_pieces(latents_NTCHW):
            if video is None:
                video = frames.new_empty(num_videos, 3, num_frames, height * factor, width * factor)
            stop = start + frames.shape[1]
            video[:, :, start:stop] = self._to_video(frames)
            start = stop
        assert video is not None and start == num_frames
        return video

    def _decoded_pieces(self, latents_NTCHW: Tensor) -> Iterator[Tensor]:
        """Frames NTCHW in [0, 1], a few at a time; with tiling they are also computed a piece at a time."""
        codec = self._codec(latents_NTCHW.device)
        if not self.use_tiling:
            yield from codec.decode_video(latents_NTCHW).split(CONVERTED_FRAMES, dim=1)
            return
        piece = codec.stream_chunk_latents("decoder", *latents_NTCHW.shape[-2:], num_videos=len(latents_NTCHW))
        stream = StreamingDecoder(codec, num_latents=latents_NTCHW.shape[1])
        for part in latents_NTCHW.split(piece, dim=1):
            yield from stream.push(part).split(CONVERTED_FRAMES, dim=1)

    # pixels and latents

    def _to_frames(self, video_NCTHW: Tensor) -> Tensor:
        """NCTHW as diffusers has it -> NTCHW in [0, 1], in the weights' dtype; computed in float32."""
        mean, std = self._pixel_values(video_NCTHW.device)
        frames = video_NCTHW.transpose(1, 2).to(torch.float32, copy=True)
        return frames.mul_(std).add_(mean).to(self.network.dtype)

    def _to_video(self, frames_NTCHW: Tensor) -> Tensor:
        mean, std = self._pixel_values(frames_NTCHW.device)
        frames = frames_NTCHW.to(torch.float32, copy=True).sub_(mean).div_(std)
        return frames.transpose(1, 2).to(frames_NTCHW.dtype)

    def _pixel_values(self, device: torch.device) -> list[Tensor]:
        """Mean and deviation of each color, float32, for frames NTCHW."""
        return [torch.tensor(values, device=device).view(3, 1, 1) for values in pixel_normalization(self.spec)]

    def _to_latents(self, z_NCTHW: Tensor) -> Tensor:
        """z NCTHW -> the network's latents NTCHW, in the weights' dtype; computed in float32."""
        return self._statistics.of_student(self.spec).normalize(z_NCTHW.transpose(1, 2)).to(self.network.dtype)

    def _to_z(self, latents_NTCHW: Tensor) -> Tensor:
        z_NTCHW = self._statistics.of_student(self.spec).denormalize(latents_NTCHW)
        return z_NTCHW.transpose(1, 2).to(latents_NTCHW.dtype).contiguous()

    # the codec that runs

    def _records_gradients(self, x: Tensor) -> bool:
        return torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in self.parameters()))

    def _codec(self, device: torch.device) -> FusedTAEHV:
        """The fused codec of the present weights; ``device`` is where offloaded ones are put for one call."""
        weights = list(self.parameters())
        if any(weight.is_meta for weight in weights):
            self._fused = None
            return offloaded_network(self, device).fused()
        # An in-place change counts up the version; load_state_dict and optimizers make such changes.
        present = [(id(w), w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if self._fused is None or self._fused[0] != present:
            # The weights are kept too, so that no other tensor gets their ids and addresses.
            self._fused = present, self.network.fused(), weights
        return self._fused[1]

    def _apply(self, fn: Any, recurse: bool = True) -> AutoencoderTinyVideo:
        """`to`, `half`, `cuda` and offload hooks end here. No fused copy stays on the old device."""
        super()._apply(fn, recurse)
        codec, network = (self._fused[1] if self._fused else None), self.network
        if codec is not None and (codec.device, codec.dtype) != (network.device, network.dtype):
            self._fused = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fused": None}  # a copy builds its own

    # files

    @classmethod
    def extract_init_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """diffusers' way from a config to the constructor. What follows from the variant is computed again."""
        # taeh3's has every key that any variant has. diffusers lists positional arguments among the default values.
        left_out = {*derived_config(VARIANTS["taeh3"]), "_use_default_values"}
        given = {key: value for key, value in config_dict.items() if key not in left_out}
        return super().extract_init_dict(given, **options)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """diffusers' `save_pretrained`, and beside the weights the file through which `AutoModel` finds this class."""
        super().save_pretrained(save_directory, *arguments, **options)
        (Path(save_directory) / f"{LOADER_NAME}.py").write_text(LOADER_TEXT)


def derived_config(spec: VariantSpec) -> dict[str, Any]:
    """What pipelines read from ``vae.config`` beside the statistics, under the names of all families."""
    stages = int(math.log2(spec.space_factor)) + 1  # CogVideoX's pipelines count the entries
    config: dict[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": spec.latent_channels,
        "z_dim": spec.latent_channels,
        "block_out_channels": [spec.hidden(64)] * stages,
        "timestep_conditioning": False,
        "scale_factor_temporal": spec.time_factor,
        "scale_factor_spatial": spec.space_factor,
        "temporal_compression_ratio": spec.time_factor,
        "spatial_compression_ratio": spec.space_factor,
        "temperal_downsample": [stride == 2 for stride in reversed(spec.encoder_strides)],
        "auto_map": {"AutoModel": f"{LOADER_NAME}.AutoencoderTinyVideo"},
    }
    if spec.frame_rule == "chunked":
        config |= {"clip_length": H3_CHUNK_FRAMES, "token_drop": H3_DROPPED_LATENTS}
    return config


def offloaded_network(vae: AutoencoderTinyVideo, device: torch.device) -> TAEHV:
    """A copy of the network on ``device``, from weights that accelerate's sequential offload keeps elsewhere."""
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    with torch.device("meta"):
        network = TAEHV.of(vae.spec)
    network.load_state_dict(get_state_dict_offloaded_model(vae), assign=True)
    return network.to(device)
