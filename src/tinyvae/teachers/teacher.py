"""A teacher: a frozen VAE that turns frames into the latents a diffusion model knows.

It is a plain object around the VAE, not a module: assigned to anything it adds no parameters there, so it cannot come
under a distributed wrapper, into an optimiser or into a checkpoint. It works without gradients, in its own dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers.families import LatentSpace, TeacherFamily, TeacherGeometry

PIXELS_PER_CALL = 6_000_000
"""A batch goes through the VAE in parts of about this many pixels (17 frames of 480x720): the VAE of a large model
would otherwise need more memory than the student that is being trained."""


class TeacherError(UserError):
    """A teacher that does not do its work; the run stops, for training on made-up latents is worse."""


class ReferenceVAE:
    """Frames NTCHW in [0, 1] to latents NTCHW in diffusion space and back; both ends in fp32."""

    def __init__(
        self,
        vae: Any,
        *,
        family: TeacherFamily,
        geometry: TeacherGeometry,
        latent_space: LatentSpace,
        spec: VariantSpec | None = None,
        sample: bool = False,
        seed: int = 0,
    ) -> None:
        """``vae``: a diffusers VAE. ``spec``: the student whose frame rule the latents must fit. ``sample`` draws
        latents instead of taking the distribution's mode, with random numbers from ``seed`` (see `begin_step`)."""
        self._vae = vae.eval().requires_grad_(False)
        self._family = family
        self._geometry = geometry
        self._spec = spec
        self._sample = sample
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self.device: torch.device = self._vae.device
        self.dtype: torch.dtype = self._vae.dtype
        self._factor = latent_space.factor
        self._mean, self._std, self._pixel_mean, self._pixel_std = (
            torch.tensor(values, dtype=torch.float32, device=self.device).view(1, -1, 1, 1, 1)
            for values in (latent_space.mean, latent_space.std, family.pixel_mean, family.pixel_std)
        )

    @property
    def class_name(self) -> str:
        return self._family.class_name

    @property
    def latent_channels(self) -> int:
        return self._geometry.latent_channels

    @property
    def time_factor(self) -> int:
        return self._geometry.time_factor

    @property
    def space_factor(self) -> int:
        return self._geometry.space_factor

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._vae.parameters())

    @property
    def variant_candidates(self) -> tuple[str, ...]:
        """The students whose latent space this teacher's is."""
        return self._family.variant_candidates(self._geometry)

    @torch.no_grad()
    def encode(self, frames_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW in diffusion space, fp32, of frames NTCHW in [0, 1] on any device.

        Give it exactly `VideoCodec.target` of the clip: those frames make the same latents as the student's clip.
        Latents of another number or size, or that are not finite, stop the run.
        """
        num_frames = frames_NTCHW.shape[1]
        if self._spec is not None:
            aligned = self._spec.aligned_frames(num_frames)
            assert aligned == num_frames, f"give the {aligned} frames of VideoCodec.target, not all {num_frames}"
        with torch.autocast(device_type=self.device.type, enabled=False):
            parts = [self._encode_part(part) for part in self._parts(frames_NTCHW, frames_NTCHW[0].numel() // 3)]
        latents = torch.cat(parts).transpose(1, 2)
        self._check_latents(latents, frames_NTCHW)
        return latents

    @torch.no_grad()
    def decode(self, latents_NTCHW: Tensor) -> Tensor:
        """Frames NTCHW in [0, 1], fp32, of latents NTCHW in diffusion space: the quality a student is measured by."""
        pixels = latents_NTCHW[0, :, 0].numel() * self.time_factor * self.space_factor**2
        with torch.autocast(device_type=self.device.type, enabled=False):
            parts = [self._decode_part(part) for part in self._parts(latents_NTCHW, pixels)]
        return torch.cat(parts).transpose(1, 2)

    def _parts(self, videos_NTCHW: Tensor, pixels_each: int) -> tuple[Tensor, ...]:
        return videos_NTCHW.split(1 if self._family.one_at_a_time else max(1, PIXELS_PER_CALL // pixels_each))

    def _encode_part(self, frames_NTCHW: Tensor) -> Tensor:
        video_NCTHW = frames_NTCHW.to(self.device, torch.float32).transpose(1, 2)
        video_NCTHW = (video_NCTHW - self._pixel_mean) / self._pixel_std
        distribution = self._vae.encode(video_NCTHW.to(self.dtype)).latent_dist
        z = distribution.sample(generator=self._generator) if self._sample else distribution.mode()
        return (z.float() - self._mean) * self._factor / self._std

    def _decode_part(self, latents_NTCHW: Tensor) -> Tensor:
        z_NCTHW = latents_NTCHW.to(self.device, torch.float32).transpose(1, 2)
        z_NCTHW = (z_NCTHW * self._std / self._factor + self._mean).to(self.dtype)
        if self._vae.config.get("timestep_conditioning"):
            # LTX decoders that can also denoise: time 0 says that the latents are clean.
            clean = torch.zeros(len(z_NCTHW), dtype=self.dtype, device=self.device)
            video_NCTHW = self._vae.decode(z_NCTHW, clean).sample
        else:
            video_NCTHW = self._vae.decode(z_NCTHW).sample
        return (video_NCTHW.float() * self._pixel_std + self._pixel_mean).clamp(0, 1)

    def _check_latents(self, latents_NTCHW: Tensor, frames_NTCHW: Tensor) -> None:
        num_frames = frames_NTCHW.shape[1]
        if self._spec is not None:
            height, width = (size // self._spec.space_factor for size in frames_NTCHW.shape[-2:])
            wanted = (len(frames_NTCHW), self._spec.latents(num_frames), self._spec.latent_channels, height, width)
            if tuple(latents_NTCHW.shape) != wanted:
                raise TeacherError(
                    f"the teacher {self.class_name} made latents of shape {tuple(latents_NTCHW.shape)} from "
                    f"{num_frames} frames where {self._spec.name} makes {wanted}; choose a clip length and size on "
                    "which they agree."
                )
        if not bool(torch.isfinite(latents_NTCHW).all()):
            remedy = "the frames themselves are not finite"
            if bool(torch.isfinite(frames_NTCHW).all()):
                remedy = f"it runs in {str(self.dtype).removeprefix('torch.')}; set ref_vae_dtype to bf16 or fp32"
            raise TeacherError(f"the teacher {self.class_name} made latents that are not finite: {remedy}.")

    def begin_step(self, step: int) -> None:
        """The draws of ``sample`` that follow depend on the seed and this number alone, so there is no state to save:
        a resumed run draws what it would have drawn."""
        self._generator.manual_seed((self._seed * 1_000_003 + step) % 2**63)
