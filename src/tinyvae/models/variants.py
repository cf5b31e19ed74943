"""The family as one table: what each variant is, and how it counts frames.

T is a number of input frames, L of latents, S the time factor. The one fact to remember: **decoded frame j is input
frame j**, so the target of a reconstruction is ``frames[:, :spec.aligned_frames(T)]``: the tail is dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tinyvae.errors import UserError, nearest_name

Preview = Literal["time", "space", "both"]
LatentSpaceName = Literal["diffusion", "vae"]
Activation = Literal["relu", "leaky_relu"]

LEAKY_SLOPE = 0.2  # of LeakyReLU below zero, as in the networks that use it
DECODER_CHANNELS = {"base": (256, 128, 64, 64), "super": (512, 256, 128, 64), "wide": (1024, 512, 256, 64)}
"""Channels of the decoder's three stages, and behind them."""

WIDTH_STEP = 0.125  # 64 channels times 1/8 is 8: every hidden count stays a multiple of 8
H3_CHUNK_FRAMES = 17  # taeh3 encodes chunks of this many frames,
H3_CHUNK_ZEROS = 3  # each with this many zero frames in front,
H3_CHUNK_LATENTS = 5  # which makes this many latents a chunk;
H3_DROPPED_LATENTS = 3  # the last ones of the whole video are dropped.


@dataclass(frozen=True, kw_only=True)
class VariantSpec:
    """One network of the family and its frame rule. Example: ``get_spec("taecvx").latents(17)`` is 5.

    ``frame_rule``: ``causal`` drops the first S-1 decoded frames; ``even_keeps_all`` (CogVideoX) does so only when
    the latent count is odd; ``chunked`` (MiniMax H3) encodes chunks of 17 frames on their own.
    ``width`` scales every hidden channel count; 1.0 is the released network. ``preview`` names what the decoder
    leaves out: upsampling in time, in space, or both. ``latent_space`` says which latents the network makes and takes:
    "diffusion", what the diffusion model sees, or "vae", what its VAE makes before scaling. ``activation`` is that of
    every layer: ReLU, or LeakyReLU with slope 0.2.
    """

    name: str
    teacher: str
    patch_size: int
    latent_channels: int
    encoder_strides: tuple[int, int, int] = (2, 2, 1)
    decoder_strides: tuple[int, int, int] = (1, 2, 2)
    decoder: Literal["base", "super", "wide"] = "base"
    frame_rule: Literal["causal", "even_keeps_all", "chunked"] = "causal"
    width: float = 1.0
    preview: Preview | None = None
    latent_space: LatentSpaceName = "diffusion"
    activation: Activation = "relu"

    # sizes

    @property
    def time_factor(self) -> int:
        """Input frames per latent (S)."""
        return math.prod(self.encoder_strides)

    @property
    def space_factor(self) -> int:
        """Input pixels per latent pixel, along height and along width."""
        return 8 * self.patch_size

    @property
    def trim(self) -> int:
        """Frames that the decoder makes at the start of a video and drops (S-1); see `first_frames_dropped`."""
        return self.time_factor - 1

    @property
    def image_channels(self) -> int:
        """Channels of a frame after pixel-unshuffle by the patch size."""
        return 3 * self.patch_size**2

    def hidden(self, channels: int) -> int:
        """A hidden channel count of the released network, scaled by ``width``."""
        scaled = channels * self.width
        assert scaled == int(scaled), f"width {self.width} does not divide {channels} channels"
        return int(scaled)

    @property
    def decoder_channels(self) -> tuple[int, ...]:
        """Channels of the decoder's three stages, and behind them."""
        return tuple(self.hidden(channels) for channels in DECODER_CHANNELS[self.decoder])

    @property
    def slope(self) -> float:
        """Slope of the activation below zero; 0 is ReLU."""
        return LEAKY_SLOPE if self.activation == "leaky_relu" else 0.0

    @property
    def previews_time(self) -> bool:
        return self.preview in ("time", "both")

    @property
    def previews_space(self) -> bool:
        return self.preview in ("space", "both")

    # the frame rule

    def padded_frames(self, num_frames: int) -> int:
        """Frames the encoder works on: T with the last frame repeated to whole latents (taeh3: whole chunks)."""
        if num_frames < 1:
            raise UserError(f"a video needs at least 1 frame, got {num_frames}; the clip is empty.")
        unit = H3_CHUNK_FRAMES if self.frame_rule == "chunked" else self.time_factor
        return math.ceil(num_frames / unit) * unit

    def latents(self, num_frames: int) -> int:
        """Latents that T input frames make."""
        padded = self.padded_frames(num_frames)
        if self.frame_rule == "chunked":
            return padded // H3_CHUNK_FRAMES * H3_CHUNK_LATENTS - H3_DROPPED_LATENTS
        return padded // self.time_factor

    def first_frames_dropped(self, num_latents: int) -> int:
        """How many of the S·L raw decoded frames are dropped at the start of the video (chunked: of each chunk)."""
        if self.previews_time or (self.frame_rule == "even_keeps_all" and num_latents % 2 == 0):
            return 0
        return self.trim

    def frame_is_kept(self, raw_index: int, num_latents: int) -> bool:
        """Whether raw decoded frame ``raw_index`` (0 .. S·L-1, before any drop) belongs to the output."""
        if self.frame_rule == "chunked":
            raw_index %= H3_CHUNK_LATENTS * self.time_factor
        return raw_index >= self.first_frames_dropped(num_latents)

    def frames_from_latents(self, num_latents: int) -> int:
        """Frames that `decode_video` returns for L latents."""
        if num_latents < 1:
            raise UserError(f"a video needs at least 1 latent, got {num_latents}; pass a longer latent sequence.")
        num_raw = num_latents if self.previews_time else self.time_factor * num_latents
        return sum(self.frame_is_kept(index, num_latents) for index in range(num_raw))

    def frames_out(self, num_frames: int) -> int:
        """Frames that decoding the latents of T input frames returns; can be more than T (taecvx 5 -> 8)."""
        return self.frames_from_latents(self.latents(num_frames))

    def aligned_frames(self, num_frames: int) -> int:
        """How many leading frames input and output share: compare ``frames[:, :n]`` with ``decoded[:, :n]``."""
        if self.previews_time:
            what = "a preview decoder makes one frame per latent, which does not line up with the input frames"
            raise UserError(f"{what}; load the model without preview= to compare it with its input.")
        return min(num_frames, self.frames_out(num_frames))

    # rules for the user's numbers

    def check_size(self, height: int, width: int) -> None:
        """Refuse a frame size that is not a multiple of the space factor, naming the nearest ones."""
        factor = self.space_factor
        if height % factor == 0 and width % factor == 0 and height > 0 and width > 0:
            return
        smaller = f"{max(factor, height // factor * factor)}x{max(factor, width // factor * factor)}"
        larger = f"{math.ceil(max(height, 1) / factor) * factor}x{math.ceil(max(width, 1) / factor) * factor}"
        nearest = smaller if smaller == larger else f"{smaller} or {larger}"
        needs = f"{self.name} needs a height and width that are multiples of {factor}, got {height}x{width}"
        raise UserError(f"{needs}; the nearest sizes are {nearest}.")

    def is_training_length(self, num_frames: int) -> bool:
        """Whether student and teacher count T frames alike."""
        if num_frames < 1:
            return False
        if self.frame_rule == "chunked":
            return num_frames % H3_CHUNK_FRAMES == 0
        period = 2 * self.time_factor if self.frame_rule == "even_keeps_all" else self.time_factor
        # A single frame is 0·k+1: one latent, one frame out, an image.
        return num_frames % period in (0, 1)

    def training_length(self, num_frames: int) -> int:
        """The longest part of T frames that student and teacher count alike; T itself where there is none."""
        return next((t for t in range(num_frames, 0, -1) if self.is_training_length(t)), num_frames)

    def check_training_length(self, num_frames: int) -> None:
        """Refuse a clip length that student and teacher would count differently, naming the nearest valid ones."""
        if self.is_training_length(num_frames):
            return
        below = next((t for t in range(num_frames - 1, 0, -1) if self.is_training_length(t)), None)
        above = next(t for t in itertools.count(max(num_frames, 0) + 1) if self.is_training_length(t))
        if self.frame_rule == "chunked":
            form, why = "17c", "the encoder starts again every 17 frames"
        elif self.frame_rule == "even_keeps_all":
            form, why = "8k or 8k+1", "at other lengths the CogVideoX VAE encodes in one mode and decodes in the other"
        else:
            s = self.time_factor
            form, why = f"{s}k+1 or {s}k", f"the last latent would hold fewer than {s} real frames"
        nearest = " or ".join(str(length) for length in (below, above) if length)
        what = f"n_frames={num_frames} does not suit {self.name}: {why}"
        raise UserError(f"{what}; use a length of {form}, here {nearest}.")

    def seraena_divisors(self, num_frames: int) -> list[int]:
        """The group sizes (``n_seraena_frames``) that divide the padded length of a T-frame clip."""
        padded = self.padded_frames(num_frames)
        small = [k for k in range(1, math.isqrt(padded) + 1) if padded % k == 0]
        return sorted({*small, *(padded // k for k in small)})

    def check_seraena_frames(self, num_frames: int, group_frames: int) -> None:
        """Refuse a group size that does not divide the padded clip length, listing those that do."""
        divisors = self.seraena_divisors(num_frames)
        if group_frames not in divisors:
            what = f"n_seraena_frames={group_frames} does not divide the {divisors[-1]} padded frames that {self.name} "
            raise UserError(f"{what}makes of n_frames={num_frames}; use one of {', '.join(map(str, divisors))}.")


_HUNYUAN_15, _WAN_22, _LTX_2_3 = "Hunyuan Video 1.5", "Wan 2.2-5B", "LTX-2.3, LTX-2.5"
_LTX_2 = VariantSpec(
    name="taeltx_2",
    teacher="LTX-2",
    patch_size=4,
    latent_channels=128,
    encoder_strides=(2, 2, 2),
    decoder_strides=(2, 2, 2),
)

_SPECS = (
    VariantSpec(name="taehv", teacher="Hunyuan Video, Kandinsky 5", patch_size=1, latent_channels=16),
    VariantSpec(name="taehv1_5", teacher=_HUNYUAN_15, patch_size=2, latent_channels=32),
    VariantSpec(name="taehv1_5_super", teacher=_HUNYUAN_15, patch_size=2, latent_channels=32, decoder="super"),
    VariantSpec(name="taecvx", teacher="CogVideoX", patch_size=1, latent_channels=16, frame_rule="even_keeps_all"),
    VariantSpec(name="taew2_1", teacher="Wan 2.1, Wan 2.2-14B, Qwen-Image, Anima", patch_size=1, latent_channels=16),
    VariantSpec(name="taew2_2", teacher=_WAN_22, patch_size=2, latent_channels=48),
    VariantSpec(name="taew2_2_super", teacher=_WAN_22, patch_size=2, latent_channels=48, decoder="super"),
    VariantSpec(name="taeos1_3", teacher="Open-Sora 1.3", patch_size=1, latent_channels=16),
    _LTX_2,
    replace(_LTX_2, name="taeltx2_3", teacher=_LTX_2_3),
    replace(_LTX_2, name="taeltx2_3_wide", teacher=_LTX_2_3, decoder="wide"),
    VariantSpec(name="taeh3", teacher="MiniMax H3", patch_size=2, latent_channels=24, frame_rule="chunked"),
)
VARIANTS: dict[str, VariantSpec] = {spec.name: spec for spec in _SPECS}


def list_variants() -> list[str]:
    """The names of the variants. Example: ``"taecvx" in list_variants()``."""
    return list(VARIANTS)


def get_spec(
    variant: str,
    *,
    width: float = 1.0,
    preview: Preview | None = None,
    latent_space: LatentSpaceName = "diffusion",
    activation: Activation = "relu",
) -> VariantSpec:
    """The spec of a variant with its options (see `VariantSpec`). An error names the nearest right value.

    Example: ``get_spec("taew2_2", width=0.5).latent_channels`` is 48.
    """
    if variant not in VARIANTS:
        hint = nearest_name(variant, VARIANTS)
        raise UserError(f"there is no variant {variant!r}.{hint} The variants are {', '.join(VARIANTS)}.")
    steps = width / WIDTH_STEP
    if not math.isfinite(steps) or steps != int(steps) or steps < 1:
        nearest = max(1, round(steps)) * WIDTH_STEP if math.isfinite(steps) else 1.0
        what = f"width={width} would give channel counts that are no multiple of 8"
        raise UserError(f"{what}; use a multiple of {WIDTH_STEP}, here {nearest}.")
    if preview not in (None, "time", "space", "both"):
        raise UserError(f"preview={preview!r} is not known; use 'time', 'space', 'both' or None.")
    for key, value, known in (
        ("latent_space", latent_space, get_args(LatentSpaceName)),
        ("activation", activation, get_args(Activation)),
    ):
        if value not in known:
            raise UserError(f"{key}={value!r} is not known; use {' or '.join(map(repr, known))}.")
    spec = replace(
        VARIANTS[variant], width=float(width), preview=preview, latent_space=latent_space, activation=activation
    )
    if spec.decoder == "super" and spec.previews_space:
        what = f"{variant} upsamples by pixel-shuffle and has no spatial preview"
        raise UserError(f"{what}; use preview='time', or the base variant.")
    return spec
