"""Which clip a global position gets: a pure function of the settings and (seed, epoch, position).

Positions count samples over the whole run; epoch = position // files. Inside an epoch a shuffle gives each file one
position. When a file is bad, attempts 1, 2, ... draw another one. There is no random generator: a draw hashes its key,
so it is the same in every process and in any order, and a resumed run only needs to know how far it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyvae.errors import UserError

if TYPE_CHECKING:
    from tinyvae.data.index import IndexRow

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FEISTEL_ROUNDS = 6

# What a draw is for: the last part of its key, so that two draws of one position are independent.
SHUFFLE, SUBSTITUTE, STEP, START, CROP, FLIP, COLOR, SIZE, CANDIDATE, UPSIDE_DOWN, ON_SIDE, BACKWARDS = range(12)
SCALE, TOP, LEFT = range(3)
BRIGHTNESS, CONTRAST, SATURATION, HUE, BLUR_OR_NOT, BLUR_SIGMA = range(6)


def mix(value: Any) -> Any:
    """The output function of splitmix64, a bijection of 64-bit integers, for a Python int or a uint64 array."""
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
        if value < size:  # at the latest when the cycle of this bijection comes back to ``place``
            return value


def fractions_of_hashes(hashes: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[Any]:
    """Each hash with a salt, mixed, as a float in [0, 1): ``uniform`` for whole columns."""
    mixed: npt.NDArray[np.uint64] = mix(hashes + np.uint64(hash_key(salt)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class ClipSettings:
    """Size in pixels, time in frames. Names and defaults are those of ``TrainConfig``.

    >>> settings = ClipSettings(height=480, width=720, n_frames=16, variant="taehv")
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
    crop_candidates: int = 1
    """Of this many drawn windows, the one with the most detail is taken (`clip_reading.settle_window`)."""
    random_flip: bool = True
    """Mirror left to right, half of the samples."""
    random_turn: bool = False
    """Mirror top to bottom, half of the samples, and turn half of the square ones on their side."""
    random_reverse: bool = False
    """Play backwards, half of the samples."""
    color_jitter: bool = False
    color_jitter_params: tuple[float, float, float, float] = (0.15, 0.15, 0.15, 0.08)
    """Brightness, contrast, saturation: factors 1 - p .. 1 + p; hue: -p .. p of a full turn."""
    gaussian_blur: bool = False
    gaussian_blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Range of the standard deviation, in pixels of the clip."""
    gaussian_blur_probability: float = 0.5
    allow_upscale: bool = False
    """Also use files smaller than the clip, scaled up."""
    seed: int = 42
    decode_timeout_s: float = 30.0
    """Deadline for decoding one clip; a file that passes it is a bad file."""
    decoded_cache_gb: float = 0.0
    """Size of the cache of decoded files in GiB; 0: none (see `tinyvae.data.decoded_cache`)."""
    decoded_cache_dir: Path | None = None
    """Where that cache lies; None: `tinyvae.cache_folder.default_cache_folder("decoded")`."""
    variant: str | None = None
    """When given, height and width must suit this variant; else they must be multiples of 8."""

    @classmethod
    def from_config(cls, config: object) -> ClipSettings:
        """The fields of the same names of a ``TrainConfig``, which has all of them."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def clip_bytes(self) -> int:
        """Bytes of a clip in memory: RGB, one byte for each value."""
        return 3 * self.n_frames * self.height * self.width

    def __post_init__(self) -> None:
        if self.variant is not None:
            # Here, not above: a process that only reads an index need not load the models.
            from tinyvae.models.variants import get_spec

            get_spec(self.variant).check_size(self.height, self.width)
        jitter, (low, high) = self.color_jitter_params, self.gaussian_blur_sigma
        rules = (
            ("height", self.height >= 8 and self.height % 8 == 0, "a multiple of 8, such as 96 or 480"),
            ("width", self.width >= 8 and self.width % 8 == 0, "a multiple of 8, such as 96 or 720"),
            ("n_frames", self.n_frames >= 1, "at least 1"),
            ("min_frame_delta", self.min_frame_delta >= 1, "at least 1"),
            ("max_frame_delta", self.max_frame_delta >= self.min_frame_delta, "at least min_frame_delta"),
            ("crop_candidates", self.crop_candidates >= 1, "at least 1"),
            ("decode_timeout_s", self.decode_timeout_s > 0, "above 0"),
            (
                "color_jitter_params",
                len(jitter) == 4 and all(0 <= factor < 1 for factor in jitter[:3]) and 0 <= jitter[3] <= 0.5,
                "4 numbers: brightness, contrast and saturation from 0 to below 1, hue from 0 to 0.5",
            ),
            ("gaussian_blur_sigma", 0 < low <= high, "a range above 0, low before high"),
            ("gaussian_blur_probability", 0 <= self.gaussian_blur_probability <= 1, "from 0 to 1"),
        )
        for name, is_kept, rule in rules:
            if not is_kept:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {rule}")


class CropWindow(NamedTuple):
    """A window of the decoded picture, in its pixels."""

    top: int
    left: int
    height: int
    width: int


class Turn(NamedTuple):
    """How a clip is turned; the default values change nothing."""

    mirrored: bool = False
    """Left to right."""
    upside_down: bool = False
    """Mirrored top to bottom."""
    on_side: bool = False
    """Rows and columns change places, before the clip is mirrored; square clips only."""
    backwards: bool = False
    """The last frame comes first."""

    def in_words(self) -> str:
        """``mirrored, backwards``; empty where nothing is turned."""
        return ", ".join(name.replace("_", " ") for name, is_so in self._asdict().items() if is_so)


AS_IT_IS = Turn()


class ColorAndBlur(NamedTuple):
    """The default values change nothing. ``hue`` is a share of a full turn, ``blur_sigma`` is in pixels."""

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    blur_sigma: float = 0.0


UNCHANGED = ColorAndBlur()


@dataclass(frozen=True, kw_only=True)
class ClipChoice:
    """Everything that is random about one sample."""

    frame_indices: tuple[int, ...]
    window: CropWindow
    more_windows: tuple[CropWindow, ...] = ()
    """Drawn after ``window``; of all of them the reader, which has the frames, takes the one with the most detail."""
    turn: Turn = AS_IT_IS
    color_and_blur: ColorAndBlur = UNCHANGED

    @property
    def area(self) -> CropWindow:
        """The smallest window that holds every drawn one."""
        windows = (self.window, *self.more_windows)
        top, left = min(window.top for window in windows), min(window.left for window in windows)
        bottom = max(window.top + window.height for window in windows)
        right = max(window.left + window.width for window in windows)
        return CropWindow(top=top, left=left, height=bottom - top, width=right - left)


def frames_needed(n_frames: int, frame_delta: int) -> int:
    """Length of the shortest file that can give ``n_frames`` frames at this step."""
    return (n_frames - 1) * frame_delta + 1


def file_of(position: int, num_files: int, seed: int, attempt: int = 0) -> int:
    """Which of ``num_files`` files the position gets; ``attempt`` counts the bad files drawn before it."""
    epoch, place = divmod(position, num_files)
    if attempt == 0:
        return shuffled(place, num_files, seed, epoch, SHUFFLE)
    return below(num_files, seed, epoch, place, SUBSTITUTE, attempt)


def choose_clip(row: IndexRow, settings: ClipSettings, position: int, num_files: int, attempt: int = 0) -> ClipChoice:
    """Frames, crop, turn and color of a training sample."""
    n_frames, min_delta, longest = settings.n_frames, settings.min_frame_delta, settings.max_frame_delta
    assert row.frames >= frames_needed(n_frames, min_delta), "split() leaves out shorter files"
    epoch, place = divmod(position, num_files)
    key = (settings.seed, epoch, place, attempt)
    if n_frames > 1:
        longest = min(longest, (row.frames - 1) // (n_frames - 1))
    delta = min_delta + below(longest - min_delta + 1, *key, STEP)
    start = below(row.frames - frames_needed(n_frames, delta) + 1, *key, START)
    if settings.random_crop:
        keys = [(*key, CROP), *((*key, CANDIDATE, number) for number in range(1, settings.crop_candidates))]
        windows = [random_window(row.height, row.width, settings, window_key) for window_key in keys]
    else:
        windows = [center_window(row.height, row.width, settings)]
    return ClipChoice(
        frame_indices=tuple(start + delta * frame for frame in range(n_frames)),
        window=windows[0],
        more_windows=tuple(windows[1:]),
        turn=choose_turn(settings, key),
        color_and_blur=choose_color_and_blur(settings, (*key, COLOR)),
    )


def choose_validation_clip(row: IndexRow, settings: ClipSettings) -> ClipChoice:
    """The middle of the file at the smallest step, the middle of the picture, nothing random."""
    length = frames_needed(settings.n_frames, settings.min_frame_delta)
    start = (row.frames - length) // 2
    indices = tuple(range(start, start + length, settings.min_frame_delta))
    return ClipChoice(frame_indices=indices, window=center_window(row.height, row.width, settings))


def random_window(frame_height: int, frame_width: int, settings: ClipSettings, key: tuple[int, ...]) -> CropWindow:
    """A window at a random place, and with ``random_resize`` of a random scale (log-uniform)."""
    largest = _largest_scale(frame_height, frame_width, settings)
    scale = min(1.0, largest)
    if settings.random_resize and largest > 1.0:
        scale = math.exp(uniform(*key, SCALE) * math.log(largest))
    height, width = _window_size(frame_height, frame_width, settings, scale)
    top, left = below(frame_height - height + 1, *key, TOP), below(frame_width - width + 1, *key, LEFT)
    return CropWindow(top=top, left=left, height=height, width=width)


def center_window(frame_height: int, frame_width: int, settings: ClipSettings) -> CropWindow:
    """The middle of the picture: as much as fits where clips are resized, else exactly clip size."""
    largest = _largest_scale(frame_height, frame_width, settings)
    scale = largest if settings.random_resize else min(1.0, largest)
    height, width = _window_size(frame_height, frame_width, settings, scale)
    return CropWindow(top=(frame_height - height) // 2, left=(frame_width - width) // 2, height=height, width=width)


def _largest_scale(frame_height: int, frame_width: int, settings: ClipSettings) -> float:
    """The size of the largest window of the clip's shape, as a multiple of the clip's own size."""
    scale = min(frame_height / settings.height, frame_width / settings.width)
    assert scale >= 1.0 or settings.allow_upscale, "split() leaves out files smaller than the clip"
    return scale


def _window_size(frame_height: int, frame_width: int, settings: ClipSettings, scale: float) -> tuple[int, int]:
    """Height and width of the window at ``scale``, in whole pixels of the picture."""
    height, width = (max(1, round(side * scale)) for side in (settings.height, settings.width))
    return min(frame_height, height), min(frame_width, width)


def choose_turn(settings: ClipSettings, key: tuple[int, ...]) -> Turn:
    """Which way a training sample is turned; each way by a draw of its own."""
    is_square = settings.height == settings.width
    return Turn(
        mirrored=settings.random_flip and uniform(*key, FLIP) < 0.5,
        upside_down=settings.random_turn and uniform(*key, UPSIDE_DOWN) < 0.5,
        on_side=settings.random_turn and is_square and uniform(*key, ON_SIDE) < 0.5,
        backwards=settings.random_reverse and uniform(*key, BACKWARDS) < 0.5,
    )


def choose_color_and_blur(settings: ClipSettings, key: tuple[int, ...]) -> ColorAndBlur:
    """The five numbers of one sample, the same for all of its frames."""
    sigma = 0.0
    if settings.gaussian_blur and uniform(*key, BLUR_OR_NOT) < settings.gaussian_blur_probability:
        low, high = settings.gaussian_blur_sigma
        sigma = low + (high - low) * uniform(*key, BLUR_SIGMA)
    if not settings.color_jitter:
        return ColorAndBlur(blur_sigma=sigma)
    draws = zip(UNCHANGED[:4], settings.color_jitter_params, (BRIGHTNESS, CONTRAST, SATURATION, HUE), strict=True)
    color = (middle + reach * (2.0 * uniform(*key, purpose) - 1.0) for middle, reach, purpose in draws)
    return ColorAndBlur._make([*color, sigma])
