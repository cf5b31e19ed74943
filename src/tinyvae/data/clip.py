"""What a clip is: its size, its frames and its augmentation."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.errors import UserError

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FEISTEL_ROUNDS = 6


def mix(value: int) -> int:
    """splitmix64's output function: a bijection of 64-bit integers in which every bit depends on every bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def hash_key(*parts: int) -> int:
    """64 bits that depend on every part of the key and on their order."""
    state = 0
    for part in parts:
        state = mix((state + GOLDEN + (part & MASK)) & MASK)
    return state


def uniform(*key: int) -> float:
    """A float in [0, 1), with 53 bits."""
    return (hash_key(*key) >> 11) * 2.0**-53


def below(limit: int, *key: int) -> int:
    """An integer in 0..limit-1. The bias is under limit / 2^64."""
    assert limit > 0, "there is nothing to draw from"
    return (hash_key(*key) * limit) >> 64


def shuffled(place: int, size: int, *key: int) -> int:
    """Where a shuffle of ``size`` things, named by ``key``, puts place ``place``: a bijection of 0..size-1."""
    assert 0 <= place < size, "the place is outside the shuffle"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    round_keys = [hash_key(*key, round_number) for round_number in range(FEISTEL_ROUNDS)]
    value = place
    while True:
        left, right = value >> half_bits, value & half_mask
        for round_key in round_keys:
            left, right = right, left ^ (mix((right + round_key) & MASK) & half_mask)
        value = (left << half_bits) | right
        # At most four times as many values as places, so this ends after under four turns on average; it always
        # ends, because a bijection's cycle through ``place`` must come back inside.
        if value < size:
            return value


def fractions_of_hashes(hashes: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[Any]:
    """Each hash with a salt, mixed, as a float in [0, 1): ``uniform`` for whole columns."""
    value = hashes + np.uint64(hash_key(salt))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return (value >> np.uint64(11)).astype(np.float64) * 2.0**-53


SMALLEST_SPACE_FACTOR = 8


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """Size in pixels, time in frames. Names and defaults are those of ``TrainConfig``.

    Raises ``UserError`` for values that cannot be meant, such as a size the variant cannot encode.
    """

    height: int
    width: int
    n_frames: int
    min_frame_delta: int = 1
    max_frame_delta: int = 1
    """Step between frames: drawn from min..max for each sample, at most what the file's length allows."""
    random_crop: bool = True
    """Off: the middle of the picture, as in validation."""
    random_resize: bool = True
    """On: the crop takes any window of the right shape, from clip size up to the whole picture, and is scaled down.
    Off: pixels are never resampled; the crop is exactly clip size, in training and in validation."""
    random_flip: bool = True
    """Mirror left to right, half of the samples."""
    color_jitter: bool = False
    color_jitter_params: tuple[float, float, float, float] = (0.15, 0.15, 0.15, 0.08)
    """Brightness, contrast, saturation: factors 1 - p .. 1 + p; hue: -p .. p of a full turn."""
    gaussian_blur: bool = False
    gaussian_blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Range of the standard deviation, in pixels of the clip."""
    gaussian_blur_probability: float = 0.5
    """Share of the samples that are blurred when ``gaussian_blur`` is on."""
    allow_upscale: bool = False
    """Also use files smaller than the clip, scaled up."""
    seed: int = 42
    decode_timeout_s: float = 30.0
    """Deadline for decoding one clip; a file that passes it is a bad file."""
    decoded_cache_gb: float = 0.0
    """Size of the cache of decoded files in GiB; 0: none (see `tinyvae.data.decoded_cache`)."""
    decoded_cache_dir: Path | None = None
    """Where that cache lies; None: `default_cache_dir()`."""
    variant: str | None = None
    """When given, height and width must suit this variant; else they must be multiples of 8."""

    @classmethod
    def from_config(cls, config: object) -> ClipSettings:
        """The fields of the same names of a ``TrainConfig``, which has all of them."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        self._check_size()
        self._check_frames()
        self._check_augmentation()

    def _check_size(self) -> None:
        if self.variant is not None:
            # Here, not above: a process that only reads an index need not load the models.
            from tinyvae.models.variants import get_spec

            get_spec(self.variant).check_size(self.height, self.width)
        for name, value in (("height", self.height), ("width", self.width)):
            if value < SMALLEST_SPACE_FACTOR or value % SMALLEST_SPACE_FACTOR:
                lower = max(SMALLEST_SPACE_FACTOR, value // SMALLEST_SPACE_FACTOR * SMALLEST_SPACE_FACTOR)
                raise UserError(
                    f"{name} is {value}; it must be a multiple of {SMALLEST_SPACE_FACTOR}, "
                    f"such as {lower} or {lower + SMALLEST_SPACE_FACTOR}"
                )

    def _check_frames(self) -> None:
        if self.n_frames < 1:
            raise UserError(f"n_frames is {self.n_frames}; a clip has at least 1 frame")
        if not 1 <= self.min_frame_delta <= self.max_frame_delta:
            raise UserError(
                f"min_frame_delta is {self.min_frame_delta} and max_frame_delta is {self.max_frame_delta}; "
                "they must be at least 1, the first not above the second"
            )
        if self.decode_timeout_s <= 0:
            raise UserError(f"decode_timeout_s is {self.decode_timeout_s}; it must be above 0")

    def _check_augmentation(self) -> None:
        if len(self.color_jitter_params) != 4:
            raise UserError("color_jitter_params takes 4 numbers: brightness, contrast, saturation, hue")
        *factors, hue = self.color_jitter_params
        if not all(0 <= factor < 1 for factor in factors) or not 0 <= hue <= 0.5:
            raise UserError(
                f"color_jitter_params is {tuple(self.color_jitter_params)}; brightness, contrast and saturation "
                "must be from 0 to below 1, hue from 0 to 0.5"
            )
        low, high = self.gaussian_blur_sigma
        if not 0 < low <= high:
            raise UserError(f"gaussian_blur_sigma is {low}, {high}; it must be a range above 0, low before high")
        if not 0 <= self.gaussian_blur_probability <= 1:
            raise UserError(f"gaussian_blur_probability is {self.gaussian_blur_probability}; it must be from 0 to 1")


SCALE, TOP, LEFT = range(3)


@dataclass(frozen=True, kw_only=True)
class CropWindow:
    """A window of the decoded picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


def random_window(frame_height: int, frame_width: int, settings: ClipSettings, key: tuple[int, ...]) -> CropWindow:
    """A window at a random place, and with ``random_resize`` of a random scale (log-uniform)."""
    largest = largest_scale(frame_height, frame_width, settings)
    scale = 1.0 if largest >= 1.0 else largest
    if settings.random_resize and largest > 1.0:
        scale = math.exp(uniform(*key, SCALE) * math.log(largest))
    height, width = window_size(frame_height, frame_width, settings, scale)
    return CropWindow(
        top=below(frame_height - height + 1, *key, TOP),
        left=below(frame_width - width + 1, *key, LEFT),
        height=height,
        width=width,
    )


def centre_window(frame_height: int, frame_width: int, settings: ClipSettings) -> CropWindow:
    """The middle of the picture: as much as fits where clips are resized, else exactly clip size."""
    largest = largest_scale(frame_height, frame_width, settings)
    scale = largest if settings.random_resize else min(1.0, largest)
    height, width = window_size(frame_height, frame_width, settings, scale)
    return CropWindow(top=(frame_height - height) // 2, left=(frame_width - width) // 2, height=height, width=width)


def largest_scale(frame_height: int, frame_width: int, settings: ClipSettings) -> float:
    """Side of the largest window of the clip's shape, as a multiple of the clip's own size."""
    scale = min(frame_height / settings.height, frame_width / settings.width)
    assert scale >= 1.0 or settings.allow_upscale, "split() leaves out files smaller than the clip"
    return scale


def window_size(frame_height: int, frame_width: int, settings: ClipSettings, scale: float) -> tuple[int, int]:
    """Height and width of the window at ``scale``, in whole pixels of the picture."""
    height = min(frame_height, max(1, round(settings.height * scale)))
    width = min(frame_width, max(1, round(settings.width * scale)))
    return height, width


def cut_clip(frames_TCHW: Tensor, window: CropWindow, height: int, width: int, flip: bool) -> Tensor:
    """The window of every frame at exactly ``height`` x ``width``. uint8 TCHW in, uint8 TCHW out."""
    bottom, right = window.top + window.height, window.left + window.width
    assert bottom <= frames_TCHW.shape[-2] and right <= frames_TCHW.shape[-1], "the window leaves the picture"
    clip = frames_TCHW[..., window.top : bottom, window.left : right]
    return finish_clip(clip, torch.empty((*clip.shape[:2], height, width), dtype=torch.uint8), flip)


def finish_clip(window_TCHW: Tensor, out_TCHW: Tensor, flip: bool) -> Tensor:
    """Scale the pixels of a window to the size of ``out_TCHW`` and mirror them; both uint8, may be the same tensor."""
    assert window_TCHW.dtype == out_TCHW.dtype == torch.uint8, "frames stay bytes until they are on the device"
    size = out_TCHW.shape[-2:]
    # Frame by frame: what is made in between then fits into the processor's cache.
    for frame, out in zip(window_TCHW, out_TCHW, strict=True):
        if frame.shape[-2:] != size:
            frame = F.interpolate(frame[None].contiguous(), size=size, mode="bilinear", antialias=True)[0]
        if flip:
            frame = frame.flip(-1)
        if frame.data_ptr() != out.data_ptr():
            out.copy_(frame)
    return out_TCHW
