"""Pictures of errors and latents: heat maps, latents as colours, pieces of frames, and their form in a web page."""

from __future__ import annotations

import base64
import io

import torch
from torch import Tensor
from torch.nn import functional as F

HEAT_FULL_SCALE = 0.25
"""Mean absolute error over RGB (values in [0, 1]) that is painted at the bright end: 64 levels of 255."""
HEAT_STOPS = torch.tensor(
    [
        [8, 9, 14],
        [38, 16, 78],
        [110, 24, 110],
        [185, 44, 86],
        [236, 98, 42],
        [250, 178, 44],
        [255, 250, 200],
    ],
    dtype=torch.float32,
)
"""Dark to bright through violet and orange: rising in lightness, so that it also reads in grey."""


def heat_map(decoded_TCHW: Tensor, target_TCHW: Tensor, *, full_scale: float = HEAT_FULL_SCALE) -> Tensor:
    """Absolute error, averaged over RGB, in colour: uint8 TCHW. Inputs in [0, 1]."""
    error_THW = (decoded_TCHW.clamp(0, 1) - target_TCHW).abs().mean(dim=1)
    # The square root spreads the small errors, where all the structure is.
    place = (error_THW / full_scale).clamp(0, 1).sqrt() * (len(HEAT_STOPS) - 1)
    place = place.nan_to_num(len(HEAT_STOPS) - 1)
    lower = place.floor().clamp(max=len(HEAT_STOPS) - 2).long()
    stops = HEAT_STOPS.to(error_THW.device)
    weight = (place - lower).unsqueeze(-1)
    colour = stops[lower] * (1 - weight) + stops[lower + 1] * weight
    return colour.round().to(torch.uint8).movedim(-1, 1)


def to_bytes_range(frames_TCHW: Tensor) -> Tensor:
    """Values in [0, 1] as uint8 0..255, rounded; what is no number becomes magenta, so that nobody overlooks it."""
    frames = frames_TCHW.clamp(0, 1)
    broken = frames.isnan().any(dim=-3, keepdim=True)
    magenta = frames.new_tensor([1.0, 0.0, 1.0]).view(3, 1, 1)
    return (torch.where(broken, magenta, frames) * 255).round().to(torch.uint8)


def latents_as_colour(latents_TCHW: Tensor) -> Tensor:
    """The three strongest directions of the latents (PCA over all their pixels) as RGB: uint8 TCHW.

    One scale for all pictures of a call, from the 2nd to the 98th percentile, so that they can be compared.
    """
    latents = latents_TCHW.detach().float().cpu().nan_to_num()
    samples = latents.movedim(1, -1).flatten(0, 2)
    centred = samples - samples.mean(dim=0)
    # Of the C x C covariance, not of the samples: C is at most 128.
    _, directions = torch.linalg.eigh(centred.double().T @ centred.double())
    strongest = directions[:, -3:].flip(1).float()
    # An eigenvector's sign is arbitrary; the same latents must give the same picture everywhere.
    strongest = strongest * strongest.gather(0, strongest.abs().argmax(dim=0, keepdim=True)).sign()
    projected = centred @ strongest
    spread = projected[torch.linspace(0, len(projected) - 1, min(len(projected), 100_000)).long()]
    low, high = spread.quantile(0.02, dim=0), spread.quantile(0.98, dim=0)
    scaled = ((projected - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    t, _, h, w = latents.shape
    return (scaled * 255).round().to(torch.uint8).view(t, h, w, 3).movedim(-1, 1)


def shrink(frames_TCHW: Tensor, *, width: int) -> Tensor:
    """Scale frames down to at most ``width`` pixels wide (never up), to even sizes: uint8 TCHW."""
    in_height, in_width = frames_TCHW.shape[-2:]
    scale = min(1.0, width / in_width)
    size = (_even(in_height * scale), _even(in_width * scale))
    if size == (in_height, in_width):
        return frames_TCHW
    # In float: torch scales bytes on a CPU only.
    scaled = F.interpolate(frames_TCHW.float(), size=size, mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8)


def worst_patch(decoded_CHW: Tensor, target_CHW: Tensor, *, side: int) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the square of about ``side`` pixels with the largest error."""
    error = (decoded_CHW.clamp(0, 1) - target_CHW).square().mean(dim=0)[None, None].nan_to_num(1.0)
    height, width = min(side, error.shape[-2]), min(side, error.shape[-1])
    means = F.avg_pool2d(error, (height, width), stride=max(1, side // 8))[0, 0]
    row, column = divmod(int(means.argmax()), means.shape[1])
    return row * max(1, side // 8), column * max(1, side // 8), height, width


def png_uri(image_CHW: Tensor) -> str:
    """A uint8 picture as a ``data:`` address, without loss."""
    return _uri(image_CHW, "PNG")


def jpeg_uri(image_CHW: Tensor) -> str:
    """A uint8 picture as a ``data:`` address, small."""
    return _uri(image_CHW, "JPEG", quality=85)


def _uri(image_CHW: Tensor, kind: str, **options: int) -> str:
    from PIL import Image

    assert image_CHW.dtype == torch.uint8 and image_CHW.ndim == 3, (image_CHW.dtype, image_CHW.shape)
    stream = io.BytesIO()
    Image.fromarray(image_CHW.movedim(0, -1).contiguous().cpu().numpy()).save(stream, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _even(length: float) -> int:
    return max(2, round(length / 2) * 2)
