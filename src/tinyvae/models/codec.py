"""What every network of the family does with a video: checks, padding, frame rule, clamp, alignment."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.errors import UserError
from tinyvae.models.streaming import Side, StreamingDecoder, StreamingEncoder, join, keep_frames
from tinyvae.models.variants import H3_CHUNK_FRAMES, H3_CHUNK_ZEROS, H3_DROPPED_LATENTS, VariantSpec
from tinyvae.terminal import progress_bar

CodecState = object
"""What a network carries between two chunks; only the network itself looks inside."""


class VideoCodec:
    """Encode and decode whole videos. Frames are NTCHW RGB in [0, 1]; latents NTCHW in diffusion space.

    Example::

        model = load_model("output/my_run")
        latents = model.encode_video(frames)  # frames: float, (1, 17, 3, 480, 720)
        decoded = model.decode_video(latents)
    """

    spec: VariantSpec
    records_gradients = True
    """Whether `encode` and `decode` do; `encode_video` and `decode_video` never do."""
    _values_were_seen = _range_was_said = False

    # a network provides these four

    def encode_chunk(self, frames_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        """Raw latents of the next frames of a video, and the state for the chunk after. A run may use up ``state``."""
        raise AssertionError("a network must implement encode_chunk")

    def decode_chunk(self, latents_NTCHW: Tensor, state: CodecState | None) -> tuple[Tensor, CodecState]:
        """S raw frames for each of the next latents (in the model's dtype), and the state; no drop, no clamp."""
        raise AssertionError("a network must implement decode_chunk")

    @property
    def dtype(self) -> torch.dtype:
        raise AssertionError("a network must say its dtype")

    @property
    def device(self) -> torch.device:
        raise AssertionError("a network must say its device")

    def stream_chunk_latents(
        self, side: Side, latent_height: int, latent_width: int, *, num_videos: int = 1
    ) -> int | None:
        """How many latents of this size a stream of this side should run at once; None: as many as it is given."""
        return None

    # for everybody

    def encode_video(self, frames_NTCHW: Tensor, parallel: bool = True, show_progress_bar: bool = False) -> Tensor:
        """Latents NTCHW of a video NTCHW in [0, 1], in the model's dtype; no gradient is recorded (see `encode`).

        ``parallel`` runs all frames at once; otherwise one frame (fused: a chunk) at a time, in constant memory.
        """
        self.check_frames(frames_NTCHW)
        if parallel:
            with torch.no_grad():
                return self.encode(frames_NTCHW)
        stream = StreamingEncoder(self, num_frames=frames_NTCHW.shape[1])
        size = (side // self.spec.space_factor for side in frames_NTCHW.shape[-2:])
        chunk = self.stream_chunk_latents("encoder", *size, num_videos=frames_NTCHW.shape[0])
        step = self.spec.time_factor * chunk if chunk else 1
        steps = progress_bar(frames_NTCHW.split(step, dim=1), desc="encode", unit="step", disable=not show_progress_bar)
        return torch.cat([stream.push(part) for part in steps], dim=1)

    def decode_video(self, latents_NTCHW: Tensor, parallel: bool = True, show_progress_bar: bool = False) -> Tensor:
        """`spec.frames_from_latents(T)` frames NTCHW in [0, 1] of latents NTCHW, in the model's dtype; no gradient.

        ``parallel`` runs all latents at once; otherwise one (fused: a chunk) at a time, in constant memory.
        """
        self.check_latents(latents_NTCHW)
        if parallel:
            with torch.no_grad():
                return self.decode(latents_NTCHW).clamp_(0, 1)
        num_videos, num_latents, _, *size = latents_NTCHW.shape
        stream = StreamingDecoder(self, num_latents=num_latents)
        parts = latents_NTCHW.split(self.stream_chunk_latents("decoder", *size, num_videos=num_videos) or 1, dim=1)
        steps = progress_bar(parts, desc="decode", unit="step", disable=not show_progress_bar)
        return join((stream.push(part) for part in steps), self.spec.frames_from_latents(num_latents))

    def reconstruct(self, frames_NTCHW: Tensor) -> Tensor:
        """Encode and decode a video of any size and length; the first `spec.aligned_frames(T)` frames, same size.

        Sizes that are no multiple of the space factor are padded by their edge pixels and cropped back. A spatial
        preview gives its small frames; one in time is refused.
        """
        self._check_tensor(frames_NTCHW, "a video", channels=3, channel_word="RGB", may_be_none=False)
        num_frames, (height, width) = self.spec.aligned_frames(frames_NTCHW.shape[1]), frames_NTCHW.shape[-2:]
        padded = pad_to_multiple(frames_NTCHW, self.spec.space_factor)
        return self.decode_video(self.encode_video(padded))[:, :num_frames, :, :height, :width]

    # the training path: with gradients, without range check, and without the clamp, which would stop gradients

    def encode(self, frames_NTCHW: Tensor) -> Tensor:
        """`encode_video` for training: with gradients, no range check."""
        frames, num_frames = frames_NTCHW, frames_NTCHW.shape[1]
        padding = self.spec.padded_frames(num_frames) - num_frames
        if padding:
            frames = torch.cat([frames, frames[:, -1:].expand(-1, padding, -1, -1, -1)], dim=1)
        if self.spec.frame_rule != "chunked":
            return self.encode_chunk(frames, None)[0]
        # Each chunk is a video of its own: fold the chunks into the batch.
        chunks = frames.unflatten(1, (-1, H3_CHUNK_FRAMES)).flatten(0, 1)
        chunks = F.pad(chunks, (0, 0, 0, 0, 0, 0, H3_CHUNK_ZEROS, 0))
        latents = self.encode_chunk(chunks, None)[0].unflatten(0, (frames.shape[0], -1)).flatten(1, 2)
        return latents[:, :-H3_DROPPED_LATENTS]

    def decode(self, latents_NTCHW: Tensor) -> Tensor:
        """`decode_video` for training: with gradients, no clamp."""
        num_latents = latents_NTCHW.shape[1]
        raw = self.decode_chunk(latents_NTCHW.to(self.dtype), None)[0]
        return keep_frames(raw, first_index=0, num_latents=num_latents, spec=self.spec)

    def target(self, frames_NTCHW: Tensor) -> Tensor:
        """The input frames to compare the decoded frames with: decoded frame j is input frame j."""
        return frames_NTCHW[:, : self.spec.aligned_frames(frames_NTCHW.shape[1])]

    # checks

    def check_frames(self, frames_NTCHW: Tensor, *, may_be_none: bool = False) -> None:
        """Refuse what is no video (``may_be_none``: T = 0 is one); warn once about values outside [0, 1].

        On a GPU only the first call looks at the values, because the host must wait for them.
        """
        self._check_tensor(frames_NTCHW, "a video", channels=3, channel_word="RGB", may_be_none=may_be_none)
        self.spec.check_size(*frames_NTCHW.shape[-2:])
        if frames_NTCHW.shape[1] == 0 or (self._values_were_seen and frames_NTCHW.device.type != "cpu"):
            return
        self._values_were_seen = True
        low, high = (value.item() for value in torch.aminmax(frames_NTCHW.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            video, frame = (~frames_NTCHW.isfinite()).flatten(2).any(dim=2).nonzero()[0].tolist()
            kind = "NaN" if frames_NTCHW[video, frame].isnan().any() else "infinite"
            where = f"frame {frame} of video {video} in the batch has {kind} ones"
            raise UserError(f"a video must have values in [0, 1], and {where}; look at what made these frames.")
        if (high > 2 or low < -0.5) and not self._range_was_said:
            self._range_was_said = True
            hint = "; bring them to [0, 1]: RGB, 0 is black and 1 is full."
            if low >= 0 and high <= 255:
                hint = " (looks like 0..255; divide by 255)."
            elif low >= -1 and high <= 1:
                hint = " (looks like -1..1; map x to (x + 1) / 2)."
            warnings.warn(f"video values should be in [0, 1] but span {low:.3g}..{high:.3g}{hint}", stacklevel=3)

    def check_latents(self, latents_NTCHW: Tensor, *, may_be_none: bool = False) -> None:
        """Refuse what cannot be this variant's latents (``may_be_none``: T = 0 can)."""
        what, channels = f"{self.spec.name} latents", self.spec.latent_channels
        self._check_tensor(latents_NTCHW, what, channels=channels, channel_word="latent", may_be_none=may_be_none)

    def _check_tensor(self, x: Tensor, what: str, *, channels: int, channel_word: str, may_be_none: bool) -> None:
        if not isinstance(x, Tensor):
            raise UserError(f"{what} must be a torch.Tensor, got {type(x).__name__}; use torch.as_tensor(x).")
        shape = tuple(x.shape)
        if x.ndim != 5:
            hint = "; add a batch dimension with x[None]" if x.ndim == 4 else ""
            raise UserError(f"{what} must have 5 dimensions, N T C H W, got shape {shape}{hint}.")
        if x.shape[2] != channels:
            hint = "; the layout is N T C H W, try x.transpose(1, 2)" if x.shape[1] == channels else ""
            if x.shape[4] == channels:
                hint = "; the layout is N T C H W, try x.movedim(-1, 2)"
            raise UserError(f"{what} must have {channels} {channel_word} channels, got shape {shape}{hint}.")
        if 0 in (shape[0], *shape[2:]) or (shape[1] == 0 and not may_be_none):
            raise UserError(f"{what} of shape {shape} is empty; pass at least one frame.")
        if not x.is_floating_point() or x.element_size() < 2:  # nothing is computed in float8
            hint = "x.float() / 255" if x.dtype == torch.uint8 else "x.float()"
            raise UserError(f"{what} must be floating point, got {x.dtype}; convert with {hint}.")
        if x.device != self.device:
            raise UserError(f"{what} is on {x.device} but the model is on {self.device}; move one with .to(device).")


def pad_to_multiple(frames_NTCHW: Tensor, factor: int) -> Tensor:
    """Repeat the right and bottom edge pixels until height and width are multiples of ``factor``; NTCHW in and out."""
    height, width = frames_NTCHW.shape[-2:]
    below, right = -height % factor, -width % factor
    if not (below or right):
        return frames_NTCHW
    flat = F.pad(frames_NTCHW.flatten(0, 1), (0, right, 0, below), mode="replicate")
    return flat.unflatten(0, frames_NTCHW.shape[:2])
