"""Procedural footage for the sample clips: worlds painted from 1/f noise, and cameras that move over them.

A scene is a function from a :class:`Shot` to frames: float TCHW RGB in [0, 1]. Large forms are strong and fine detail
is weak, as in natural pictures, so that a small autoencoder learns something from them in minutes. A single color has
the shape 311.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

# Colors from low to high ground, as hexadecimal RGB.
PALETTES = {
    "meadow": "26401f 4f7a33 86a84a c2c06b e6dca0",
    "coast": "123a5a 1f6f8f 58b0b0 e2d2a0 8a9a55",
    "desert": "5b2e1f 9c5a34 cf8d4f e6bf83 f6e6c2",
    "rock": "23262b 4a4f55 7a7c7b a9a49a dcd8cf",
    "forest": "0f1d14 1f3b24 3c5f30 6d8346 a7a860",
    "autumn": "2b1a16 6b2d1c b35a22 d99a3a efd99b",
    "snow": "3d5166 7d95ab b4c6d3 dfe8ee fbfcfc",
    "brick": "3a1d1a 7a3a2e a8594a c58a78 e0c4b5",
}
SKIES = ("2b5d9b 7fb0d8 dfeaf0", "23264f 8c4a6b f0a35e", "6b7f8f a9b8c0 dde2e2", "0b1026 1d2a55 4a5a8a")
LINES = (
    "the quick brown fox", "jumps over 13 lazy dogs", "frame by frame", "Tiny Video Autoencoder", "latent space",
    "0123456789", "north  east  south  west", "a moving picture", "QUICKSTART", "sunrise 06:42",
)  # fmt: skip


Values = torch.Tensor | float
"""One for each frame, or one for all."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """The size of a scene in pixels, its length, and its random generator."""

    height: int
    width: int
    frames: int
    generator: torch.Generator

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def either(self) -> float:
        return 1.0 if self.uniform(0, 1) < 0.5 else -1.0

    def pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def bright_color(self) -> torch.Tensor:
        return 0.15 + 0.8 * torch.rand((3, 1, 1), generator=self.generator)

    @property
    def progress(self) -> torch.Tensor:
        """0 to 1 over the clip, starting and ending gently."""
        t = torch.linspace(0, 1, self.frames)
        return 0.7 * t + 0.3 * t * t * (3 - 2 * t)


def rgb(red: float, green: float, blue: float) -> torch.Tensor:
    return torch.tensor([red, green, blue])[:, None, None]


def clouds(shot: Shot, height: int, width: int, steepness: float) -> torch.Tensor:
    """Smooth noise (HW, 0..1) whose amplitude falls as 1 / frequency ** steepness."""
    spectrum = torch.fft.rfft2(torch.randn((height, width), generator=shot.generator))
    fy = torch.fft.fftfreq(height)[:, None] * height
    fx = torch.fft.rfftfreq(width)[None] * width
    radius = torch.sqrt(fy**2 + fx**2).clamp(min=1.0)
    field = torch.fft.irfft2(spectrum / radius**steepness, s=(height, width))
    field = (field - field.mean()) / field.std()
    return (0.5 + field / 4.5).clamp(0, 1)


def ramp(field: torch.Tensor, colors: str) -> torch.Tensor:
    """Color a field (..., 0..1) with the stops of ``colors``: RGB as a new first dimension (3, ...)."""
    stops = torch.tensor([[int(c[i : i + 2], 16) / 255 for i in (0, 2, 4)] for c in colors.split()])
    position = field.clamp(0, 1) * (len(stops) - 1)
    low = position.floor().long().clamp(max=len(stops) - 2)
    share = (position - low)[..., None]
    return (stops[low] * (1 - share) + stops[low + 1] * share).movedim(-1, 0)


def terrain(shot: Shot, height: int, width: int) -> torch.Tensor:
    """A lit landscape from above (3HW)."""
    ground = clouds(shot, height, width, 1.9)
    color = ramp(ground, shot.pick(tuple(PALETTES.values())))
    slope_x, slope_y = ground - ground.roll(2, dims=1), ground - ground.roll(2, dims=0)
    angle = shot.uniform(0, 2 * math.pi)
    light = 1 + 7 * (math.cos(angle) * slope_x + math.sin(angle) * slope_y)
    return (color * light.clamp(0.55, 1.45)).clamp(0, 1)


def pixel_grid(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, x) of pixel centers, H1 and 1W."""
    return torch.arange(height)[:, None] + 0.5, torch.arange(width)[None] + 0.5


def cover(distance: torch.Tensor) -> torch.Tensor:
    """How much of a pixel lies inside a shape, from its signed distance in pixels: edges one pixel soft."""
    return (0.5 - distance).clamp(0, 1)


def paint(picture_CHW: torch.Tensor, color: torch.Tensor, mask_HW: torch.Tensor) -> torch.Tensor:
    """``color`` (3HW or 311) laid over the picture where the mask is 1."""
    return picture_CHW * (1 - mask_HW) + color * mask_HW


def _around(picture: torch.Tensor, y: float, x: float, reach: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part of a picture within ``reach`` of a point (a view), and its grid relative to the point."""
    top, left = max(0, math.floor(y - reach)), max(0, math.floor(x - reach))
    part = picture[:, top : max(top, math.ceil(y + reach)), left : max(left, math.ceil(x + reach))]
    grid_y, grid_x = pixel_grid(*part.shape[1:])
    return part, grid_y + top - y, grid_x + left - x


def paint_ball(picture: torch.Tensor, y: float, x: float, radius: float, color: torch.Tensor) -> None:
    """Draw a lit ball with a soft shadow into ``picture``."""
    part, grid_y, grid_x = _around(picture, y, x, 2 * radius)
    reach = torch.hypot(grid_y - radius * 0.35, grid_x - radius * 0.35) - radius
    shadow = 0.45 * (1 - (reach / (0.5 * radius)).clamp(0, 1))
    from_light = torch.hypot(grid_y + radius * 0.4, grid_x + radius * 0.4) / radius
    lit = color * (1.15 - 0.5 * from_light) + 0.5 * (1 - from_light * 2.2).clamp(min=0) ** 2
    part.copy_(paint(part * (1 - shadow), lit.clamp(0, 1), cover(torch.hypot(grid_y, grid_x) - radius)))


def paint_box(
    picture: torch.Tensor, y: float, x: float, half: tuple[float, float], angle: float, color: torch.Tensor
) -> None:
    """Draw a turned rectangle with a darker rim into ``picture``."""
    part, grid_y, grid_x = _around(picture, y, x, math.hypot(*half) + 2)
    across = math.cos(angle) * grid_x + math.sin(angle) * grid_y
    along = math.cos(angle) * grid_y - math.sin(angle) * grid_x
    distance = torch.maximum(along.abs() - half[0], across.abs() - half[1])
    rimmed = paint(part, color * 0.55, cover(distance))
    part.copy_(paint(rimmed, color, cover(distance + 2)))


def world(shot: Shot) -> torch.Tensor:
    """A terrain of twice the frame's size (3HW) with balls and boxes standing on it."""
    height, width = shot.height * 2, shot.width * 2
    picture = terrain(shot, height, width)
    for _ in range(14):
        y, x = shot.uniform(0, height), shot.uniform(0, width)
        size = shot.uniform(0.04, 0.13) * shot.height
        if shot.uniform(0, 1) < 0.5:
            paint_ball(picture, y, x, size, shot.bright_color())
        else:
            half = (size * shot.uniform(0.6, 1.4), size * shot.uniform(0.6, 1.4))
            paint_box(picture, y, x, half, shot.uniform(0, math.pi), shot.bright_color())
    return picture


def camera(
    shot: Shot, world_CHW: torch.Tensor, y: Values = 0.0, x: Values = 0.0, zoom: Values = 1.0, angle: Values = 0.0
) -> torch.Tensor:
    """The world seen by a camera: TCHW.

    For each frame (or for all): center in world pixels from the middle, world pixels per frame pixel, radians.
    """
    grid_y, grid_x = pixel_grid(shot.height, shot.width)
    grid_y, grid_x = grid_y - shot.height / 2, grid_x - shot.width / 2
    y, x, zoom, angle = ((torch.zeros(shot.frames) + values)[:, None, None] for values in (y, x, zoom, angle))
    cos, sin = zoom * torch.cos(angle), zoom * torch.sin(angle)
    world_y = sin * grid_x + cos * grid_y + y
    world_x = cos * grid_x - sin * grid_y + x
    height, width = world_CHW.shape[1:]
    where = torch.stack([world_x * 2 / width, world_y * 2 / height], dim=-1)
    worlds = world_CHW[None].expand(shot.frames, -1, -1, -1)
    seen = F.grid_sample(worlds, where, mode="bicubic", padding_mode="reflection", align_corners=False)
    return seen.clamp(0, 1)


def pan(shot: Shot) -> torch.Tensor:
    """The camera travels over a landscape."""
    t = shot.progress - 0.5
    y, x = shot.uniform(-0.5, 0.5) * shot.height, shot.either() * shot.uniform(0.35, 0.85) * shot.width
    return camera(shot, world(shot), t * y, t * x, angle=shot.uniform(-0.3, 0.3))


def zoom(shot: Shot) -> torch.Tensor:
    """The camera moves in or out."""
    t = shot.progress if shot.either() > 0 else 1 - shot.progress
    factor = torch.exp(t * math.log(shot.uniform(0.45, 0.65)))
    y, x = shot.uniform(-0.3, 0.3) * shot.height, shot.uniform(-0.3, 0.3) * shot.width
    return camera(shot, world(shot), t * y, t * x, 1.5 * factor, shot.uniform(-0.2, 0.2))


def rotation(shot: Shot) -> torch.Tensor:
    """The camera turns, rising a little."""
    t = shot.progress - 0.5
    turn = shot.either() * shot.uniform(0.5, 1.3)
    return camera(shot, world(shot), zoom=1.05 + 0.2 * t, angle=turn * t + shot.uniform(0, 6))


def objects(shot: Shot) -> torch.Tensor:
    """Balls and boxes cross a still background and bounce off its borders."""
    background = terrain(shot, shot.height, shot.width) * 0.8 + 0.1
    things = []
    for number in range(5):
        start = (shot.uniform(0, 1), shot.uniform(0, 1))
        speed = (shot.uniform(-1.4, 1.4), shot.uniform(-1.4, 1.4))
        size = shot.uniform(0.08, 0.2) * shot.height
        things.append((number, start, speed, size, shot.uniform(-2, 2), shot.bright_color()))
    frames = []
    for t in torch.linspace(0, 1, shot.frames).tolist():
        picture = background.clone()
        for number, start, speed, size, spin, color in things:
            places = ((s + v * t) % 2.0 for s, v in zip(start, speed, strict=True))
            y, x = (min(place, 2.0 - place) for place in places)
            y, x = size + y * (shot.height - 2 * size), size + x * (shot.width - 2 * size)
            if number % 2:
                paint_box(picture, y, x, (size * 0.7, size * 0.9), spin * t + number, color)
            else:
                paint_ball(picture, y, x, size, color)
        frames.append(picture)
    return torch.stack(frames)


def text(shot: Shot) -> torch.Tensor:
    """Lines of text pass over a soft background."""
    height, width = shot.height * 2, shot.width * 2
    soft = ramp(clouds(shot, height, width, 2.6), shot.pick(tuple(PALETTES.values())))
    dark = shot.either() > 0
    soft = soft * 0.45 if dark else 0.55 + soft * 0.45
    sheet = Image.new("L", (width, height))
    draw = ImageDraw.Draw(sheet)
    y = round(0.1 * shot.height)
    while y < height:
        size = round(shot.uniform(0.13, 0.3) * shot.height)
        place = (round(shot.uniform(0.02, 0.5) * width), y)
        draw.text(place, shot.pick(LINES), fill=255, font=ImageFont.load_default(size))
        y += round(size * 1.5)
    mask = torch.from_numpy(np.asarray(sheet, dtype=np.float32) / 255)
    ink = shot.bright_color()
    page = paint(soft, 0.6 + 0.4 * ink if dark else 0.4 * ink, mask)
    t = shot.progress - 0.5
    if shot.either() > 0:
        return camera(shot, page, y=t * shot.height * shot.either() * 0.7)
    return camera(shot, page, x=t * shot.width * shot.either() * 0.6, angle=shot.uniform(-0.06, 0.06))


def gradients(shot: Shot) -> torch.Tensor:
    """A sky: colors change slowly, a sun moves, clouds drift."""
    grid_y, grid_x = pixel_grid(shot.height, shot.width)
    down = grid_y / shot.height
    first, second = (ramp(down, shot.pick(SKIES)) for _ in range(2))
    drift = ((clouds(shot, shot.height, shot.width * 2, 2.1) - 0.55) * 3).clamp(0, 0.8)
    speed, rise = shot.uniform(0.2, 0.5) * shot.width, shot.uniform(0.2, 0.6) * shot.height
    sun_x = shot.uniform(0.2, 0.8) * shot.width
    glow, white = 0.55 * rgb(1.0, 0.85, 0.6), rgb(0.95, 0.95, 0.97)
    frames = []
    for t in shot.progress.tolist():
        from_sun = torch.hypot(grid_y - (0.75 * shot.height - rise * t), grid_x - sun_x) / shot.height
        sky = first * (1 - t) + second * t + glow * torch.exp(-((from_sun / 0.22) ** 2))
        sky = paint(sky, rgb(1.0, 1.0, 1.0), cover((from_sun - 0.07) * shot.height))
        shift = round(speed * t)
        frames.append(paint(sky, white, drift[:, shift : shift + shot.width]))
    return torch.stack(frames).clamp(0, 1)


def parallax(shot: Shot) -> torch.Tensor:
    """Ridges of hills at several distances pass by at different speeds."""
    grid_y, _ = pixel_grid(shot.height, shot.width)
    sky = ramp(grid_y / shot.height, shot.pick(SKIES))
    haze, long = rgb(0.7, 0.78, 0.86), shot.width * 3
    layers = []
    for depth in range(4):
        ridge = clouds(shot, 1, long, 1.5)[0] * shot.height * 0.35 + shot.height * (0.15 + 0.2 * depth)
        tint = ramp(torch.full((1, 1), depth / 3), PALETTES[shot.pick(("forest", "rock", "meadow", "autumn"))])
        grass = 0.75 + 0.5 * clouds(shot, shot.height, long, 1.3)
        color = (tint * (0.4 + 0.2 * depth) + haze * (0.6 - 0.2 * depth)) * grass
        layers.append((ridge, color, (0.1 + 0.22 * depth) * shot.width))
    direction = shot.either()
    frames = []
    for t in shot.progress.tolist():
        picture = sky
        for ridge, color, speed in layers:
            shift = round(direction * speed * t + shot.width)
            part = slice(shift, shift + shot.width)
            picture = paint(picture, color[:, :, part].clamp(0, 1), cover(ridge[None, part] - grid_y))
        frames.append(picture)
    return torch.stack(frames)


def water(shot: Shot) -> torch.Tensor:
    """A landscape seen through moving water: waves bend the picture, light glitters on them."""
    picture = terrain(shot, shot.height, shot.width) * rgb(0.75, 0.95, 1.05)
    grid_y, grid_x = pixel_grid(shot.height, shot.width)
    waves = []
    for _ in range(4):
        length, heading = shot.uniform(0.2, 0.7) * shot.height, shot.uniform(0, 2 * math.pi)
        waves.append((2 * math.pi / length, heading, shot.uniform(0.5, 1.5), shot.uniform(0, 6)))
    frames = []
    for t in torch.linspace(0, 1, shot.frames).tolist():
        bend_y, bend_x = torch.zeros(shot.height, shot.width), torch.zeros(shot.height, shot.width)
        for number, heading, speed, phase in waves:
            along = math.sin(heading) * grid_y + math.cos(heading) * grid_x
            slope = torch.cos(number * along + 2 * math.pi * speed * t + phase)
            bend_y, bend_x = bend_y + math.sin(heading) * slope, bend_x + math.cos(heading) * slope
        where_x = (grid_x + 0.018 * shot.height * bend_x) * 2 / shot.width - 1
        where_y = (grid_y + 0.018 * shot.height * bend_y) * 2 / shot.height - 1
        where = torch.stack([where_x, where_y], dim=-1)[None]
        seen = F.grid_sample(picture[None], where, mode="bilinear", padding_mode="reflection", align_corners=False)
        glitter = 0.35 * ((bend_x + bend_y) / 3 - 0.45).clamp(min=0)
        frames.append(seen[0] + glitter)
    return torch.stack(frames).clamp(0, 1)


def film_grain(shot: Shot) -> torch.Tensor:
    """An old film: almost no color, a vignette, unsteady light, and grain that is new in every frame."""
    frames = pan(shot) if shot.either() > 0 else zoom(shot)
    grey = (frames * rgb(0.3, 0.59, 0.11)).sum(1, keepdim=True)
    frames = 0.15 * frames + 0.85 * grey * rgb(1.05, 0.98, 0.86)
    grid_y, grid_x = pixel_grid(shot.height, shot.width)
    away = torch.hypot((grid_y / shot.height - 0.5) * 1.2, grid_x / shot.width - 0.5)
    flicker = 1 + 0.04 * torch.randn((shot.frames, 1, 1, 1), generator=shot.generator)
    grain = torch.randn((shot.frames, 1, shot.height, shot.width), generator=shot.generator)
    grain = F.avg_pool2d(grain, 3, stride=1, padding=1) * 0.07
    return ((frames + grain) * flicker * (1.1 - 1.3 * away**2)).clamp(0, 1)


def city(shot: Shot) -> torch.Tensor:
    """Houses with rows of windows pass by at dusk: straight edges and repeated forms."""
    height, width = shot.height, shot.width * 2
    grid_y, grid_x = pixel_grid(height, width)
    picture = ramp(grid_y / height, shot.pick(SKIES)) * 0.8
    for row in range(2):
        x = -10.0
        while x < width:
            wide, top = shot.uniform(0.12, 0.3) * shot.width, height * shot.uniform(0.1 + 0.2 * row, 0.5 + 0.1 * row)
            wall = ramp(torch.full((1, 1), shot.uniform(0.1, 0.7)), PALETTES[shot.pick(("brick", "rock", "desert"))])
            inside = cover(torch.maximum((grid_x - x - wide / 2).abs() - wide / 2, top - grid_y))
            shade = (0.55 + 0.3 * row) * (1.1 - 0.35 * (grid_x - x) / wide)
            picture = paint(picture, (wall * shade).clamp(0, 1), inside)
            step = 0.07 * height * shot.uniform(0.9, 1.4)
            in_cell_x, in_cell_y = ((grid_x - x) % step) / step, ((grid_y - top) % step) / step
            pane = torch.maximum((in_cell_x - 0.5).abs() * 1.3, (in_cell_y - 0.5).abs())
            lamp = rgb(1.0, 0.85, 0.5) if shot.uniform(0, 1) < 0.4 else rgb(0.25, 0.3, 0.4)
            picture = paint(picture, lamp, cover((pane - 0.28) * step) * inside * 0.85)
            x += wide + shot.uniform(-0.02, 0.06) * shot.width
    return camera(shot, picture, x=shot.either() * (shot.progress - 0.5) * 0.7 * shot.width, zoom=0.95)


SCENES: dict[str, Callable[[Shot], torch.Tensor]] = {
    scene.__name__: scene
    for scene in (pan, zoom, rotation, objects, text, gradients, parallax, water, film_grain, city)
}
