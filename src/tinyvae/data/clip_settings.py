"""What a clip is: its size, its frames and its augmentation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from tinyvae.errors import UserError

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
