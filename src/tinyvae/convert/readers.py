"""How other programs read a weights file: an independent reading of their rules, in plain torch.

An export checks itself with this file. It shares no code with our own network: keys and shapes are written out again,
and a video runs frame by frame instead of all at once. So a mistake in our export shows as a difference.

A `Reading` is what a program decides about a file. Each program has a function that decides as the program does: by
shapes and dtype (ComfyUI), by the path (upstream), by the model that it runs (stable-diffusion.cpp, LightX2V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.models.weights import shape_differences

State = Mapping[str, Tensor]


class Layer(NamedTuple):
    """One layer: its kind, its number in the file's keys, its channels, and its stride in time."""

    kind: str
    number: int
    into: int = 0
    out: int = 0
    stride: int = 1


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


WAN_2_1, WAN_2_2, HUNYUAN_15 = (Reading(channels=c, patch=p) for c, p in ((16, 1), (48, 2), (32, 2)))
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
    if channels == 16 and state["decoder.22.bias"].dtype == torch.float16:
        return replace(WAN_2_1, scale=HUNYUAN_SCALE)
    if channels == 32 and outputs == 12:
        return replace(HUNYUAN_15, slope=0.2, scale=HUNYUAN_15_SCALE, pixel_range=(-1, 1))
    known = {reading.channels: reading for reading in (WAN_2_1, WAN_2_2, LTX, H3)}
    if channels not in known:
        raise UnreadableByProgramError(f"no model there has {channels} latent channels")
    return known[channels]


def lightx2v_reading(_state: State, path: Path, variant: str) -> Reading:
    """By the model that it runs; ``taecvx`` anywhere in the path changes the frame rule."""
    hunyuan = replace(HUNYUAN_15, slope=0.2, scale=1 / HUNYUAN_15_SCALE, pixel_range=(-1, 1))
    chosen = {"taew2_1": WAN_2_1, "taew2_2": WAN_2_2, "taehv1_5": hunyuan}[variant]
    return replace(chosen, frames="cogvideox") if "taecvx" in str(path) else chosen


def sdcpp_reading(state: State, _path: Path, variant: str) -> Reading:
    """By the model that it runs; a wide decoder by one of its keys."""
    hosts = {"taew2_1": WAN_2_1, "taew2_2": WAN_2_2, "taehv1_5": HUNYUAN_15, "taeh3": H3}
    hosts |= dict.fromkeys(("taeltx_2", "taeltx2_3", "taeltx2_3_wide"), LTX)
    is_wide = "decoder.3.conv.6.weight" in state
    return replace(hosts[variant], decoder="wide") if is_wide else hosts[variant]


def upstream_reading(_state: State, path: Path, _variant: str) -> Reading:
    """By words anywhere in the path; without one, the network of Hunyuan Video."""
    words = str(path)
    for word, reading in (("taeltx", LTX), ("taeh3", H3)):
        if word in words:
            return reading
    found = HUNYUAN_15 if "taehv1_5" in words else WAN_2_2 if "taew2_2" in words else WAN_2_1
    if found is WAN_2_1 and "taecvx" in words:
        found = replace(found, frames="cogvideox")
    return replace(found, decoder="super") if "_super" in words else found


READINGS: dict[str, Callable[[State, Path, str], Reading]] = {
    "comfyui": comfyui_reading,
    "lightx2v": lightx2v_reading,
    "sdcpp": sdcpp_reading,
    "upstream": upstream_reading,
}


# the network, written out again


def encoder_layers(reading: Reading) -> list[Layer]:
    layers = [Layer("conv", 0, 3 * reading.patch**2, 64), Layer("act", 1)]
    for stage, stride in enumerate(reading.encoder_strides):
        first = 2 + 5 * stage
        layers += [Layer("pool", first, 64, 64, stride), Layer("down", first + 1, 64, 64)]
        layers += [Layer("mem", first + 2 + n, 64, 64) for n in range(3)]
    return [*layers, Layer("conv", 17, 64, reading.channels)]


def decoder_layers(reading: Reading) -> list[Layer]:
    is_super, block = reading.decoder == "super", "mem" if reading.decoder == "base" else reading.decoder
    widths = {"base": (256, 128, 64, 64), "super": (512, 256, 128, 64), "wide": (1024, 512, 256, 64)}[reading.decoder]
    if is_super:
        layers = [Layer("point", 0, reading.channels, widths[0])]
    else:
        layers = [Layer("clamp", 0), Layer("conv", 1, reading.channels, widths[0]), Layer("act", 2)]
    for here, after, stride in zip(widths, widths[1:], reading.decoder_strides, strict=False):
        layers += [Layer(block, len(layers) + n, here, here) for n in range(3)]
        first = len(layers)
        if is_super:
            layers += [Layer("conv", first, here, 4 * after), Layer("act", first + 1), Layer("shuffle", first + 2)]
            layers += [Layer("grow", first + 3, after, after, stride)]
        else:
            layers += [Layer("double", first), Layer("grow", first + 1, here, here, stride)]
            layers += [Layer("plain", first + 2, here, after)]
    layers += [] if is_super else [Layer("act", 21)]
    return [*layers, Layer("conv", 22, widths[-1], 3 * reading.patch**2)]


def convolutions(layer: Layer) -> list[tuple[str, int, int, int, bool]]:
    """(key after the number, output channels, input channels, kernel, whether it has a bias) of a layer."""
    _, _, into, out, stride = layer
    return {
        "conv": [("", out, into, 3, True)],
        "plain": [("", out, into, 3, False)],
        "down": [("", out, into, 3, False)],
        "point": [("", out, into, 1, False)],
        "pool": [(".conv", out, stride * into, 1, False)],
        "grow": [(".conv", stride * out, into, 1, False)],
        "mem": [(f".conv.{n}", out, wide, 3, True) for n, wide in ((0, 2 * into), (2, out), (4, out))],
        "super": [
            (".conv.0", 2 * into, 1, 7, False),
            (".conv.1", 4 * into, 2 * into, 1, True),
            (".conv.3", out, 4 * into, 1, False),
        ],
        "wide": [
            (f".conv.{n}", out, wide, kernel, True)
            for n, wide, kernel in ((0, 2 * into, 1), (2, 64, 3), (4, out, 1), (6, 64, 3))
        ],
    }.get(layer.kind, [])


def expected_shapes(reading: Reading) -> dict[str, tuple[int, ...]]:
    """Every key of the file that the program expects, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for half, layers in (("encoder", encoder_layers(reading)), ("decoder", decoder_layers(reading))):
        for layer in layers:
            for key, out, into, kernel, has_bias in convolutions(layer):
                name = f"{half}.{layer.number}{key}"
                shapes[f"{name}.weight"] = (out, into, kernel, kernel)
                if has_bias:
                    shapes[f"{name}.bias"] = (out,)
    return shapes


def check_shapes(state: State, reading: Reading) -> None:
    """Raise where a program that loads strictly would: a missing key, a key too many, another shape."""
    if wrong := shape_differences(state, expected_shapes(reading)):
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
        for made in self._run(frame_NCHW, self._layers[place]):
            yield from self.push(made, place + 1)

    def _run(self, x: Tensor, layer: Layer) -> Sequence[Tensor]:
        name = f"{self._name}.{layer.number}"
        match layer.kind:
            case "conv" | "plain" | "point":
                return [self._convolve(x, name)]
            case "down":
                return [self._convolve(x, name, stride=2)]
            case "act":
                return [self._activate(x)]
            case "clamp":
                return [3 * torch.tanh(x / 3)]
            case "double":
                return [x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)]
            case "shuffle":
                return [F.pixel_shuffle(x, 2)]
            case "grow":
                return self._convolve(x, f"{name}.conv").chunk(layer.stride, dim=1)
            case "pool":
                waiting = [*self._past.get(layer.number, []), x]
                is_full = len(waiting) == layer.stride
                self._past[layer.number] = [] if is_full else waiting
                return [self._convolve(torch.cat(waiting, dim=1), f"{name}.conv")] if is_full else []
        before = self._past.get(layer.number, torch.zeros_like(x))
        self._past[layer.number] = x
        return [getattr(self, f"_{layer.kind}")(x, torch.cat([x, before], dim=1), f"{name}.conv")]

    def _mem(self, x: Tensor, both: Tensor, name: str) -> Tensor:
        y = self._activate(self._convolve(both, f"{name}.0"))
        y = self._activate(self._convolve(y, f"{name}.2"))
        return self._activate(self._convolve(y, f"{name}.4") + x)

    def _wide(self, x: Tensor, both: Tensor, name: str) -> Tensor:
        groups = x.shape[1] // 64
        y = self._activate(self._convolve(both, f"{name}.0"))
        y = self._activate(self._convolve(y, f"{name}.2", groups=groups))
        y = self._activate(self._convolve(y, f"{name}.4"))
        return self._activate(self._convolve(y, f"{name}.6", groups=groups) + x)

    def _super(self, x: Tensor, both: Tensor, name: str) -> Tensor:
        y = self._convolve(both, f"{name}.0", groups=both.shape[1])
        return x + self._convolve(self._activate(self._convolve(y, f"{name}.1")), f"{name}.3")

    def _convolve(self, x: Tensor, name: str, **options: Any) -> Tensor:
        weight, bias = self._state[f"{name}.weight"], self._state.get(f"{name}.bias")
        if name == "encoder.0" and self._border:
            return F.conv2d(F.pad(x, (1, 1, 1, 1), value=self._border), weight, bias)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, **options)

    def _activate(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self._slope) if self._slope else x.clamp_min(0)


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
