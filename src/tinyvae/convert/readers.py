"""How other programs read a weights file: an independent reading of their rules, in plain torch.

An export checks itself with this file. It shares no code with our own network: keys and shapes are written out again,
and a video runs frame by frame instead of all at once. So a mistake in our export shows as a difference.

A `Reading` is what a program decides about a file. Each program has a function that decides as the program does: by
shapes and dtype (ComfyUI), by the path (upstream), by the model that it runs (stable-diffusion.cpp, LightX2V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

State = Mapping[str, Tensor]
Layer = tuple[str, int, int]
"""(kind, index in the file's keys, stride in time)."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a program takes a file for.

    ``scale``: the program multiplies the latents by this before the decoder, and divides by it after the encoder.
    ``slope``: of the activation below zero; 0 is ReLU.
    """

    channels: int
    patch: int
    encoder_strides: tuple[int, int, int] = (2, 2, 1)
    decoder_strides: tuple[int, int, int] = (1, 2, 2)
    decoder: Literal["base", "super", "wide"] = "base"
    frames: Literal["causal", "cogvideox", "h3"] = "causal"
    scale: float = 1.0
    slope: float = 0.0
    pixel_range: tuple[int, int] = (0, 1)


LTX = Reading(channels=128, patch=4, encoder_strides=(2, 2, 2), decoder_strides=(2, 2, 2))
H3 = Reading(channels=24, patch=2, frames="h3")
HUNYUAN_SCALE, HUNYUAN_15_SCALE = 0.476986, 1.03682


class UnreadableByProgramError(Exception):
    """The program would stop with an error at this file; the text says at what."""


# what each program decides


def comfyui_reading(state: State, _path: Path, _variant: str) -> Reading:
    """By the shapes, and for 16 channels by the dtype."""
    if "decoder.22.bias" not in state or "decoder.1.weight" not in state:
        raise UnreadableByProgramError("decoder.22.bias or decoder.1.weight is missing")
    channels, outputs = state["decoder.1.weight"].shape[1], state["decoder.22.bias"].shape[0]
    if channels == 16:
        is_hunyuan = state["decoder.22.bias"].dtype == torch.float16
        return Reading(channels=16, patch=1, scale=HUNYUAN_SCALE if is_hunyuan else 1.0)
    if channels == 32 and outputs == 12:
        return Reading(channels=32, patch=2, slope=0.2, scale=HUNYUAN_15_SCALE, pixel_range=(-1, 1))
    known = {48: Reading(channels=48, patch=2), 128: LTX, 24: H3}
    if channels not in known:
        raise UnreadableByProgramError(f"no model there has {channels} latent channels")
    return known[channels]


def lightx2v_reading(_state: State, path: Path, variant: str) -> Reading:
    """By the model that it runs; ``taecvx`` anywhere in the path changes the frame rule."""
    hosts = {
        "taew2_1": Reading(channels=16, patch=1),
        "taew2_2": Reading(channels=48, patch=2),
        "taehv1_5": Reading(channels=32, patch=2, slope=0.2, scale=1 / HUNYUAN_15_SCALE, pixel_range=(-1, 1)),
    }
    chosen = hosts[variant]
    if "taecvx" in str(path):
        return Reading(channels=chosen.channels, patch=chosen.patch, slope=chosen.slope, frames="cogvideox")
    return chosen


def sdcpp_reading(state: State, _path: Path, variant: str) -> Reading:
    """By the model that it runs; a wide decoder by one of its keys."""
    hosts = {
        "taew2_1": Reading(channels=16, patch=1),
        "taew2_2": Reading(channels=48, patch=2),
        "taehv1_5": Reading(channels=32, patch=2),
        "taeltx_2": LTX,
        "taeltx2_3": LTX,
        "taeltx2_3_wide": LTX,
        "taeh3": H3,
    }
    is_wide = "decoder.3.conv.6.weight" in state
    return replace(hosts[variant], decoder="wide") if is_wide else hosts[variant]


def upstream_reading(_state: State, path: Path, _variant: str) -> Reading:
    """By words anywhere in the path; without one, the network of Hunyuan Video."""
    words = str(path)
    decoder: Literal["base", "super"] = "super" if "_super" in words else "base"
    if "taeltx" in words:
        return LTX
    if "taeh3" in words:
        return H3
    if "taehv1_5" in words:
        return Reading(channels=32, patch=2, decoder=decoder)
    if "taew2_2" in words:
        return Reading(channels=48, patch=2, decoder=decoder)
    return Reading(channels=16, patch=1, decoder=decoder, frames="cogvideox" if "taecvx" in words else "causal")


READINGS: dict[str, Callable[[State, Path, str], Reading]] = {
    "comfyui": comfyui_reading,
    "lightx2v": lightx2v_reading,
    "sdcpp": sdcpp_reading,
    "upstream": upstream_reading,
}


# the network, written out again


def encoder_layers(reading: Reading) -> list[Layer]:
    layers: list[Layer] = [("conv", 0, 1), ("act", 1, 1)]
    for stage, stride in enumerate(reading.encoder_strides):
        first = 2 + 5 * stage
        layers += [("pool", first, stride), ("down", first + 1, 1)]
        layers += [("mem", first + 2 + number, 1) for number in range(3)]
    return [*layers, ("conv", 17, 1)]


def decoder_layers(reading: Reading) -> list[Layer]:
    if reading.decoder == "super":
        layers: list[Layer] = [("conv", 0, 1)]
        for stage, stride in enumerate(reading.decoder_strides):
            first = 1 + 7 * stage
            layers += [("super", first + number, 1) for number in range(3)]
            layers += [("conv", first + 3, 1), ("act", first + 4, 1), ("shuffle", first + 5, 1)]
            layers += [("grow", first + 6, stride)]
        return [*layers, ("conv", 22, 1)]
    layers = [("clamp", 0, 1), ("conv", 1, 1), ("act", 2, 1)]
    for stage, stride in enumerate(reading.decoder_strides):
        first, block = 3 + 6 * stage, "wide" if reading.decoder == "wide" else "mem"
        layers += [(block, first + number, 1) for number in range(3)]
        layers += [("double", first + 3, 1), ("grow", first + 4, stride), ("conv", first + 5, 1)]
    return [*layers, ("act", 21, 1), ("conv", 22, 1)]


def expected_shapes(reading: Reading) -> dict[str, tuple[int, ...]]:
    """Every key of the file that the program expects, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, out: int, into: int, kernel: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out, into, kernel, kernel)
        if bias:
            shapes[f"{name}.bias"] = (out,)

    def add_mem(name: str, channels: int) -> None:
        for number, into in ((0, 2 * channels), (2, channels), (4, channels)):
            add(f"{name}.conv.{number}", channels, into, 3, True)

    def add_super(name: str, channels: int) -> None:
        add(f"{name}.conv.0", 2 * channels, 1, 7, False)
        add(f"{name}.conv.1", 4 * channels, 2 * channels, 1, True)
        add(f"{name}.conv.3", channels, 4 * channels, 1, False)

    def add_wide(name: str, channels: int) -> None:
        for number, into, kernel in ((0, 2 * channels, 1), (2, 64, 3), (4, channels, 1), (6, 64, 3)):
            add(f"{name}.conv.{number}", channels, into, kernel, True)

    pixels = 3 * reading.patch**2
    add("encoder.0", 64, pixels, 3, True)
    for stage, stride in enumerate(reading.encoder_strides):
        first = 2 + 5 * stage
        add(f"encoder.{first}.conv", 64, 64 * stride, 1, False)
        add(f"encoder.{first + 1}", 64, 64, 3, False)
        for number in range(3):
            add_mem(f"encoder.{first + 2 + number}", 64)
    add("encoder.17", reading.channels, 64, 3, True)
    is_super = reading.decoder == "super"
    widths = {"base": (256, 128, 64, 64), "super": (512, 256, 128, 64), "wide": (1024, 512, 256, 64)}[reading.decoder]
    add_block = {"base": add_mem, "super": add_super, "wide": add_wide}[reading.decoder]
    add("decoder.0" if is_super else "decoder.1", widths[0], reading.channels, 1 if is_super else 3, not is_super)
    for stage, stride in enumerate(reading.decoder_strides):
        here, after = widths[stage], widths[stage + 1]
        first = (1 + 7 * stage) if is_super else (3 + 6 * stage)
        for number in range(3):
            add_block(f"decoder.{first + number}", here)
        if is_super:
            add(f"decoder.{first + 3}", 4 * after, here, 3, True)
            add(f"decoder.{first + 6}.conv", stride * after, after, 1, False)
        else:
            add(f"decoder.{first + 4}.conv", stride * here, here, 1, False)
            add(f"decoder.{first + 5}", after, here, 3, False)
    add("decoder.22", pixels, widths[-1], 3, True)
    return shapes


def check_shapes(state: State, reading: Reading) -> None:
    """Raise where a program that loads strictly would: a missing key, a key too many, another shape."""
    expected = expected_shapes(reading)
    wrong = [f"{key} is missing" for key in expected if key not in state]
    wrong += [f"{key} is not known" for key in state if key not in expected]
    wrong += [
        f"{key} is {list(state[key].shape)} instead of {list(shape)}"
        for key, shape in expected.items()
        if key in state and tuple(state[key].shape) != shape
    ]
    if wrong:
        raise UnreadableByProgramError("; ".join(wrong[:3]))


class Half:
    """One half of the network (``encoder`` or ``decoder``), which takes a video frame by frame.

    ``border``: what the first convolution sees around a frame.
    """

    def __init__(self, state: State, name: str, layers: list[Layer], slope: float, border: float = 0.0) -> None:
        self._state, self._name, self._layers, self._slope = state, name, layers, slope
        self._border = border
        self._past: dict[int, Any] = {}

    def push(self, frame_NCHW: Tensor, place: int = 0) -> Iterator[Tensor]:
        """The frames that come out when one goes in at layer ``place``: none while a pool waits, several by a grow."""
        if place == len(self._layers):
            yield frame_NCHW
            return
        kind, index, stride = self._layers[place]
        for made in getattr(self, f"_{kind}")(frame_NCHW, f"{self._name}.{index}", index, stride):
            yield from self.push(made, place + 1)

    def _convolve(self, x: Tensor, name: str, **options: Any) -> Tensor:
        weight = self._state[f"{name}.weight"]
        bias = self._state.get(f"{name}.bias")
        if name == "encoder.0" and self._border:
            return F.conv2d(F.pad(x, (1, 1, 1, 1), value=self._border), weight, bias)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, **options)

    def _activate(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self._slope) if self._slope else x.clamp_min(0)

    def _conv(self, x: Tensor, name: str, *_: int) -> list[Tensor]:
        return [self._convolve(x, name)]

    def _down(self, x: Tensor, name: str, *_: int) -> list[Tensor]:
        return [self._convolve(x, name, stride=2)]

    def _act(self, x: Tensor, *_: Any) -> list[Tensor]:
        return [self._activate(x)]

    def _clamp(self, x: Tensor, *_: Any) -> list[Tensor]:
        return [3 * torch.tanh(x / 3)]

    def _double(self, x: Tensor, *_: Any) -> list[Tensor]:
        return [x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)]

    def _shuffle(self, x: Tensor, *_: Any) -> list[Tensor]:
        return [F.pixel_shuffle(x, 2)]

    def _mem(self, x: Tensor, name: str, index: int, _stride: int) -> list[Tensor]:
        before = self._past.get(index, torch.zeros_like(x))
        self._past[index] = x
        y = self._activate(self._convolve(torch.cat([x, before], dim=1), f"{name}.conv.0"))
        y = self._activate(self._convolve(y, f"{name}.conv.2"))
        return [self._activate(self._convolve(y, f"{name}.conv.4") + x)]

    def _wide(self, x: Tensor, name: str, index: int, _stride: int) -> list[Tensor]:
        before = self._past.get(index, torch.zeros_like(x))
        self._past[index] = x
        y, groups = torch.cat([x, before], dim=1), x.shape[1] // 64
        for number, options in ((0, {}), (2, {"groups": groups}), (4, {})):
            y = self._activate(self._convolve(y, f"{name}.conv.{number}", **options))
        return [self._activate(self._convolve(y, f"{name}.conv.6", groups=groups) + x)]

    def _super(self, x: Tensor, name: str, index: int, _stride: int) -> list[Tensor]:
        before = self._past.get(index, torch.zeros_like(x))
        self._past[index] = x
        both = torch.cat([x, before], dim=1)
        y = self._convolve(both, f"{name}.conv.0", groups=both.shape[1])
        return [x + self._convolve(self._activate(self._convolve(y, f"{name}.conv.1")), f"{name}.conv.3")]

    def _pool(self, x: Tensor, name: str, index: int, stride: int) -> list[Tensor]:
        waiting = [*self._past.get(index, []), x]
        self._past[index] = waiting if len(waiting) < stride else []
        return [] if len(waiting) < stride else [self._convolve(torch.cat(waiting, dim=1), f"{name}.conv")]

    def _grow(self, x: Tensor, name: str, _index: int, stride: int) -> list[Tensor]:
        return list(self._convolve(x, f"{name}.conv").chunk(stride, dim=1))


def read_encode(state: State, reading: Reading, frames_NTCHW: Tensor, *, border: float = 0.0) -> Tensor:
    """Latents NTCHW that the program makes of frames in [0, 1]; T is a whole number of latents, or of H3's chunks.

    ``border``: the pixel value around each frame; the programs have 0.
    """
    low, high = reading.pixel_range
    pixels = F.pixel_unshuffle(frames_NTCHW * (high - low) + low, reading.patch)
    chunks = [pixels]
    if reading.frames == "h3":
        chunks = [F.pad(chunk, (0, 0, 0, 0, 0, 0, 3, 0)) for chunk in pixels.split(17, dim=1)]
    made = []
    for chunk in chunks:
        half = Half(state, "encoder", encoder_layers(reading), reading.slope, border)
        made += [latent for frame in chunk.unbind(1) for latent in half.push(frame)]
    return torch.stack(made[:-3] if reading.frames == "h3" else made, dim=1) / reading.scale


def read_decode(state: State, reading: Reading, latents_NTCHW: Tensor) -> Tensor:
    """Frames NTCHW in [0, 1] (not clamped) that the program makes of the latents that it hands to the file."""
    half = Half(state, "decoder", decoder_layers(reading), reading.slope)
    made = [frame for latent in (latents_NTCHW * reading.scale).unbind(1) for frame in half.push(latent)]
    trim = 2 ** sum(stride == 2 for stride in reading.decoder_strides) - 1
    if reading.frames == "h3":
        kept = [frame for place, frame in enumerate(made) if place % 20 >= 3]
    elif reading.frames == "cogvideox" and latents_NTCHW.shape[1] % 2 == 0:
        kept = made
    else:
        kept = made[trim:]
    low, high = reading.pixel_range
    return (F.pixel_shuffle(torch.stack(kept, dim=1), reading.patch) - low) / (high - low)
