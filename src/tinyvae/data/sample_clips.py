"""The sample set: procedural clips as real H.264 files, the same on every run, to try things without any data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tinyvae.data.sample_scenes import SCENES, Shot
from tinyvae.errors import FileExistsAlreadyError, UserError
from tinyvae.files import atomic_write
from tinyvae.video.write import VideoWriter

FPS = 24
LENS_SIGMA = 2.2 / 128  # of the height; drawn edges are sharper than any camera's, and would be all that is learned
VALIDATION_EVERY = 5


def write_sample_clips(
    folder: Path,
    *,
    count: int = 40,
    height: int = 128,
    width: int = 192,
    frames: int = 33,
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Write ``count`` clips and ``annotations.json`` into ``folder`` (made if needed).

    >>> write_sample_clips(Path("sample_clips"), count=10)  # doctest: +SKIP

    A smaller set is the beginning of a larger one. Clips that are there already are an error unless ``overwrite``;
    other files in the folder stay as they are.
    """
    folder = Path(folder)
    if count < 1 or frames < 1:
        raise UserError(f"a sample set needs at least one clip of one frame, not {count} of {frames}")
    if height < 32 or width < 32 or height % 2 or width % 2:
        raise UserError(f"sample clips need even sizes of at least 32, not {width}x{height}")
    names = [clip_name(number) for number in range(count)]
    present = [name for name in (*names, "annotations.json") if (folder / name).exists()]
    if present and not overwrite:
        way_out = "name an empty folder, or add --overwrite (in Python: overwrite=True)"
        raise FileExistsAlreadyError(f"{folder / present[0]} exists already; {way_out}")
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True, exist_ok=True)
    quality: Any = {"crf": 16, "preset": "veryfast", "key_interval": 12}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the pictures are so small that threads only wait for each other
    try:
        for number, name in enumerate(names):
            clip_TCHW = render_clip(number, height=height, width=width, frames=frames, seed=seed)
            file = folder / name
            with VideoWriter(file, fps=FPS, width=width, height=height, overwrite=overwrite, **quality) as writer:
                writer.write(clip_TCHW)
    finally:
        torch.set_num_threads(num_threads)
    entries = [
        {"path": name, "split": name.split("/")[0], "frames": frames, "fps": FPS, "width": width, "height": height}
        for name in names
    ]
    with atomic_write(folder / "annotations.json", "w") as stream:
        stream.write(json.dumps({"total": count, "list": entries}, indent=1) + "\n")


def clip_name(number: int) -> str:
    """Path of clip ``number`` inside the folder: its split, its number, its kind of scene."""
    kinds = list(SCENES)
    # One further in each round through the kinds, so that validation sees different kinds.
    is_validation = (number + number // len(kinds)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return f"{'val' if is_validation else 'train'}/{number:03d}_{kinds[number % len(kinds)]}.mp4"


def render_clip(number: int, *, height: int, width: int, frames: int, seed: int) -> torch.Tensor:
    """Clip ``number`` of the set ``seed``: uint8 RGB, TCHW."""
    scene = list(SCENES.values())[number % len(SCENES)]
    generator = torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
    shot = Shot(height=height, width=width, frames=frames, generator=generator)
    return (through_lens(scene(shot), LENS_SIGMA * height) * 255).round().clamp(0, 255).to(torch.uint8)


def through_lens(frames_TCHW: torch.Tensor, sigma: float) -> torch.Tensor:
    """Frames as a lens would draw them: a Gaussian blur of ``sigma`` pixels, edges repeated."""
    reach = max(1, round(3 * sigma))
    kernel = torch.exp(-torch.arange(-reach, reach + 1.0).square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).repeat(3, 1, 1, 1)
    padded = F.pad(frames_TCHW, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, kernel.view(3, 1, 1, -1), groups=3)
    return F.conv2d(rows, kernel.view(3, 1, -1, 1), groups=3)
