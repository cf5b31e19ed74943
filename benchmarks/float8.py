"""How many dB does E4M3 cost? A network with 8-bit weights and activations, simulated on a CPU, against fp16.

    python benchmarks/float8.py run/final_model.safetensors --clips CLIPS [--size 256x256] [--frames 20] [--max_clips 6]

CLIPS is a folder with an annotations.json that has splits: ranges come from videos of train, dB from videos of val. A
variant's name in place of a file stands for random weights of which every layer matters, with the contrast of videos.

The layers are those of the engines (`engines/fold.py`). Every convolution reads an input as its producer stored it: in
8 bits where the setting says so, else in fp16; likewise its weights. Sums are float32. Weights have a scale for each
output channel, activations one for the tensor ("tensor") or one for each channel ("channel", folded into the weights
of the convolution that reads them). Scales come from the largest value over the videos of train. int8 is symmetric,
and unsigned behind a ReLU. The ms are no measurement: the floor of a taehv of width 1 at 480x720x49 on an H200 as in
docs/performance.md, with 8-bit products at twice the speed, convolution by convolution.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from speed_codec import spread_model
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae import TAEHV, VARIANTS, load_model
from tinyvae.cli.options import number, size
from tinyvae.convert.int8 import read_part
from tinyvae.engines import eager, fold
from tinyvae.engines.fused import Engine, FusedTAEHV, folded_copy
from tinyvae.engines.stack import Stack, State
from tinyvae.errors import UserError
from tinyvae.evaluation.clip_sources import find_clips, measure_clip
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.models.streaming import Side

FLOPS, BANDWIDTH = 757e12, 4.19e12  # per second, fp16, measured on an H200 (docs/performance.md)
COUNTED = (49, 480, 720)  # frames, height, width
CALIBRATION_CLIPS = 6
E4M3_MOST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True, kw_only=True)
class Place:
    """One convolution. ``part``: edge (first and last layer), first, second or third of a memory block, between."""

    side: str
    layer: int
    part: str
    narrow: bool = False  # in a memory block with the fewest channels: 64 at width 1, where most bytes are


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Which convolutions take 8 bits, and for what."""

    name: str
    covers: Callable[[Place], bool]
    weights: bool = True
    activations: bool = True
    residual: bool = True  # a block whose first convolution reads 8 bits adds these; else it adds fp16

    def rounds_input(self, place: Place) -> bool:
        return self.activations and self.covers(place)

    def rounds_weight(self, place: Place) -> bool:
        return self.weights and self.covers(place)


PLACES: dict[str, Callable[[Place], bool]] = {
    "everything": lambda place: True,
    "all but first and last layer": lambda place: place.part != "edge",
    "narrowest blocks": lambda place: place.narrow,
    "2nd and 3rd convolution of each block": lambda place: place.part in ("second", "third"),
    "2nd and 3rd convolution of the narrowest": lambda place: place.narrow and place.part != "first",
}
FP16 = Setting(name="fp16", covers=lambda place: False)
SETTINGS = (
    *(Setting(name=name, covers=covers) for name, covers in PLACES.items()),
    *(
        Setting(name=f"{name}, residual in fp16", covers=PLACES[name], residual=False)
        for name in ("everything", "all but first and last layer", "narrowest blocks")
    ),
    Setting(name="weights alone, everywhere", covers=PLACES["everything"], activations=False),
    Setting(name="activations alone, everywhere", covers=PLACES["everything"], weights=False),
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit format, and whether activations have a scale for each channel."""

    name: str
    is_float: bool
    by_channel: bool

    def round(self, x: Tensor, most: Tensor, *, signed: bool) -> Tensor:
        """``x`` float32 as 8 bits can say it, at scales for which ``most`` (it broadcasts) is the largest value.

        E4M3 has room for twice that: its error is relative, so the room costs nothing, and other videos need it.
        """
        limit = E4M3_MOST if self.is_float else 127 if signed else 255
        scale = most.clamp(min=1e-12) / (limit / 2 if self.is_float else limit)
        scaled = (x / scale).clamp_(-limit if signed else 0, limit)
        return (scaled.to(torch.float8_e4m3fn).float() if self.is_float else scaled.round_()).mul_(scale)


FORMATS = (
    Format(name="E4M3, tensor", is_float=True, by_channel=False),
    Format(name="E4M3, channel", is_float=True, by_channel=True),
    Format(name="int8, tensor", is_float=False, by_channel=False),
)


class Arithmetic:
    """Stores what convolutions read, and convolves: here everything in float32."""

    def store(self, place: Place, x: Tensor) -> Tensor:
        """(N·T)CHW as the convolution ``place`` finds it in memory."""
        return x

    def residual(self, place: Place, x: Tensor, stored: Tensor) -> Tensor:
        """What a block adds: its input ``x``, which its first convolution, ``place``, reads as ``stored``."""
        return x

    def conv(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1) -> Tensor:
        return F.conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2)


class Ranges(Arithmetic):
    """Notes the largest magnitude of each channel that goes into a convolution, and whether one is negative."""

    def __init__(self) -> None:
        self.most: dict[Place, Tensor] = {}
        self.negative: dict[Place, bool] = {}

    def store(self, place: Place, x: Tensor) -> Tensor:
        most = x.abs().amax(dim=(0, 2, 3))
        self.most[place] = torch.maximum(self.most.get(place, most), most)
        self.negative[place] = self.negative.get(place, False) or bool((x < 0).any())
        return x


class Rounding(Arithmetic):
    """The arithmetic of one setting in one format."""

    def __init__(self, setting: Setting, form: Format, ranges: Ranges) -> None:
        self._setting, self._form, self._ranges = setting, form, ranges
        self._weights: dict[Place, Tensor] = {}

    def store(self, place: Place, x: Tensor) -> Tensor:
        if not self._setting.rounds_input(place):
            return x.half().float()
        return self._form.round(x, self._most(place)[:, None, None], signed=self._ranges.negative[place])

    def residual(self, place: Place, x: Tensor, stored: Tensor) -> Tensor:
        return stored if self._setting.residual else x.half().float()

    def conv(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1) -> Tensor:
        if place not in self._weights:
            self._weights[place] = self._round_weight(place, weight)
        return super().conv(place, x, self._weights[place], bias, stride)

    def _round_weight(self, place: Place, weight: Tensor) -> Tensor:
        if not self._setting.rounds_weight(place):
            return weight.half().float()
        most = self._most(place) if self._setting.activations else torch.ones(1)
        inputs = most.clamp(min=1e-12).repeat(weight.shape[1] // len(most))[:, None, None]  # frames are the outer index
        scaled = weight * inputs
        return self._form.round(scaled, scaled.abs().amax(dim=(1, 2, 3), keepdim=True), signed=True) / inputs

    def _most(self, place: Place) -> Tensor:
        most = self._ranges.most[place]
        return most if self._form.by_channel else most.max().reshape(1)


class Count(Arithmetic):
    """Adds up what an H200 would at least need, convolution by convolution; takes tensors on the meta device."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._work: list[tuple[float, float]] = []  # seconds of arithmetic, bytes
        self._bytes = 0.0  # of the convolution to come

    def store(self, place: Place, x: Tensor) -> Tensor:
        # A block's input that is added in fp16 is stored in fp16, and made 8-bit by the kernel that loads it.
        keeps_both = place.part == "first" and not self._setting.residual
        moved = x.numel() * (1 if self._setting.rounds_input(place) and not keeps_both else 2)
        self._written(moved)
        self._bytes = moved
        return x

    def residual(self, place: Place, x: Tensor, stored: Tensor) -> Tensor:
        self._bytes += x.numel() * (1 if self._setting.rounds_input(place) and self._setting.residual else 2)
        return x

    def conv(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1) -> Tensor:
        is_short = self._setting.rounds_input(place) and self._setting.rounds_weight(place)
        products = x.shape[0] * x.shape[2] * x.shape[3] // stride**2 * weight.numel()
        seconds = 2 * products / FLOPS / (2 if is_short else 1)
        weights = weight.numel() * (1 if self._setting.rounds_weight(place) else 2)
        self._work.append((seconds, self._bytes + weights))
        return super().conv(place, x, weight, bias, stride)

    def floor_ms(self, out: Tensor) -> float:
        self._written(2 * out.numel())
        return 1e3 * sum(max(seconds, moved / BANDWIDTH) for seconds, moved in self._work)

    def _written(self, moved: float) -> None:
        if self._work:
            seconds, before = self._work[-1]
            self._work[-1] = seconds, before + moved


class RoundedStack(eager.EagerStack):
    """The eager engine, in which an arithmetic stores what convolutions read, and convolves. For whole videos."""

    def __init__(self, layers: Sequence[fold.Layer], *, patch_size: int, side: str, arithmetic: Arithmetic) -> None:
        super().__init__(layers, patch_size=patch_size)
        self._arithmetic, self._side = arithmetic, side
        self._first = 1 if isinstance(layers[0], fold.ClampLayer) else 0
        self._fewest = min(layer.second.shape[0] for layer in layers if isinstance(layer, fold.MemLayer))

    def slice_room(self, start: int, stop: int, x: Tensor) -> float | None:
        return None if x.is_meta else super().slice_room(start, stop, x)  # a count needs every layer once

    def compute(self, start: int, stop: int, x: Tensor) -> Tensor:
        for place in range(start, stop):
            x = self._layer(place, self.layers[place], x)
        return x

    def _layer(self, layer_number: int, layer: fold.Layer, x: Tensor) -> Tensor:
        if isinstance(layer, fold.ClampLayer):
            return eager.compute_layer(layer, x)
        part = "edge" if layer_number in (self._first, len(self.layers) - 1) else "between"
        place = Place(side=self._side, layer=layer_number, part=part)
        grid, x = x.shape[2:], self._arithmetic.store(place, x)
        if isinstance(layer, fold.PoolLayer):
            return self._arithmetic.conv(place, eager.stack_frames(x, layer), layer.weight, None, 2)
        assert isinstance(layer, fold.ConvLayer | fold.GrowLayer)
        bias = layer.bias if isinstance(layer, fold.ConvLayer) else None
        made = self._arithmetic.conv(place, x, layer.weight, bias)
        if isinstance(layer, fold.GrowLayer):
            made = eager.interleave_phases(made, layer.frames, *grid)
        else:
            made = eager.spread_frames(made, layer.frames)
        return F.leaky_relu_(made, layer.slope) if layer.relu else made

    def block(self, place: int, x: Tensor, state: State, num_videos: int) -> tuple[Tensor, Tensor]:
        layer, arithmetic = self.layers[place], self._arithmetic
        assert isinstance(layer, fold.MemLayer) and num_videos == 1 and state[place] is None
        channels = layer.second.shape[0]
        first, second, third = (
            Place(side=self._side, layer=place, part=part, narrow=channels == self._fewest)
            for part in ("first", "second", "third")
        )
        both = torch.cat(layer.first.chunk(2), dim=1)  # one sum, so one scale for each output channel
        now = arithmetic.store(first, x)
        two = torch.cat([now, torch.cat([torch.zeros_like(now[:1]), now[:-1]])], dim=1)
        hidden = F.leaky_relu_(arithmetic.conv(first, two, both, layer.first_bias[:channels]), layer.slope)
        hidden = arithmetic.conv(second, arithmetic.store(second, hidden), layer.second, layer.second_bias)
        hidden = arithmetic.store(third, F.leaky_relu_(hidden, layer.slope))
        added = arithmetic.residual(first, x, now)
        out = arithmetic.conv(third, hidden, layer.third, layer.third_bias).add_(added)
        return F.leaky_relu_(out, layer.slope), x[-1:]


class RoundedTAEHV(FusedTAEHV):
    """A float32 network in one arithmetic."""

    def __init__(self, model: TAEHV, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic
        super().__init__(model)

    def _build(self, side: Side, layers: list[fold.Layer], wanted: Engine | None) -> Stack:
        return RoundedStack(layers, patch_size=self.spec.patch_size, side=side, arithmetic=self._arithmetic)


class Quality(NamedTuple):
    """dB of one video. ``decoder``, ``decoder32``: frames of an 8-bit decoder against those of fp16 and float32;
    ``latents``: signal to noise of an 8-bit encoder's latents; ``encoder``: frames that fp16 decodes of them."""

    decoder: float
    decoder32: float
    latents: float
    encoder: float


def psnr(made: Tensor, expected: Tensor) -> float:
    return psnr_from_mse((made - expected).square().mean().item())


def signal_to_noise(made: Tensor, expected: Tensor) -> float:
    """The variance of the expected latents over the error's mean square, in dB."""
    return 10 * math.log10((expected.var() / (made - expected).square().mean()).item())


Found = dict[tuple[str, str], list[Quality]]  # by setting and format, video by video


def measure(model: TAEHV, calibration: Iterable[Tensor], videos: Sequence[Tensor]) -> Found:
    """Every setting in every format; prints what fp16 itself loses. Videos are 1TCHW in [0, 1]."""
    ranges = Ranges()
    noting = RoundedTAEHV(model, ranges)
    for video in calibration:
        noting.decode_video(noting.encode_video(video))
    exact = RoundedTAEHV(model, Arithmetic())
    half = RoundedTAEHV(model, Rounding(FP16, FORMATS[0], ranges))
    latents = [half.encode_video(video) for video in videos]
    frames = [half.decode_video(each) for each in latents]
    frames32 = [exact.decode_video(each) for each in latents]
    source = fmean(psnr(made, model.target(video)) for made, video in zip(frames, videos, strict=True))
    contrast = fmean(made.std().item() for made in frames)
    print(f"{source:.2f} dB against the videos, frames with a standard deviation of {contrast:.3f};", end=" ")
    print(f"fp16 against float32 {fmean(map(psnr, frames, frames32)):.1f} dB", flush=True)
    found: Found = {}
    for setting, form in product(SETTINGS, FORMATS):
        codec = RoundedTAEHV(model, Rounding(setting, form, ranges))
        rows = found[setting.name, form.name] = []
        for place, video in enumerate(videos):
            decoded, encoded = codec.decode_video(latents[place]), codec.encode_video(video)
            rows.append(
                Quality(
                    decoder=psnr(decoded, frames[place]),
                    decoder32=psnr(decoded, frames32[place]),
                    latents=signal_to_noise(encoded, latents[place]),
                    encoder=psnr(half.decode_video(encoded), frames[place]),
                )
            )
    return found


def count_floors(setting: Setting) -> tuple[float, float]:
    """ms of decoding and encoding, see the top of this file."""
    model = TAEHV("taehv").to("meta")
    num_frames, height, width = COUNTED
    spec, found = model.spec, []
    latents, factor = spec.latents(num_frames), spec.space_factor
    shapes = {
        "decoder": (1, latents, spec.latent_channels, height // factor, width // factor),
        "encoder": (1, latents * spec.time_factor, 3, height, width),
    }
    for side, shape in shapes.items():
        count = Count(setting)
        stack = RoundedStack(folded_copy(getattr(model, side)), patch_size=spec.patch_size, side=side, arithmetic=count)
        found.append(count.floor_ms(stack.run(torch.empty(shape, device="meta"), None)[0]))
    return found[0], found[1]


def print_tables(found: Found) -> None:
    """One table for each side; a cell is the mean over the videos and, in brackets, the worst video."""
    floors = {setting.name: count_floors(setting) for setting in (FP16, *SETTINGS)}
    heads = " | ".join(form.name for form in FORMATS)
    tables = {
        "decoder: dB of its frames": ("decoder", 0),
        "encoder: dB of its latents": ("latents", 1),
        "encoder: dB of the frames that fp16 decodes of them": ("encoder", 1),
    }
    for title, (field, side) in tables.items():
        print(f"\n| {title} | {heads} | floor |\n|---|" + "---|" * (len(FORMATS) + 1))
        for setting in SETTINGS:
            columns = [[getattr(row, field) for row in found[setting.name, form.name]] for form in FORMATS]
            cells = " | ".join(f"{fmean(values):.1f} ({min(values):.1f})" for values in columns)
            print(f"| {setting.name} | {cells} | {floors[setting.name][side]:.2f} of {floors['fp16'][side]:.2f} ms |")
    gap = max(abs(row.decoder - row.decoder32) for rows in found.values() for row in rows)
    print(f"\nagainst float32 instead of fp16 a decoder's figure changes by {gap:.2f} dB at most")


def random_model(variant: str, video: Tensor) -> TAEHV:
    """Random weights that make of ``video`` latents with a deviation of 1 and frames with one of 0.25 around 0.5: dB
    say nothing where frames are flat, as those of fresh weights are."""
    model = spread_model(variant)
    for network, run, deviation, middle in (
        (model.encoder, lambda: model.encode(video), 1.0, 0.0),
        (model.decoder, lambda: model.decode(model.encode(video)), 0.25, 0.5),
    ):
        made, last = run(), network[-1]
        assert isinstance(last, nn.Conv2d) and last.bias is not None
        scale = deviation / made.std()
        last.weight.mul_(scale)
        last.bias.sub_(made.mean()).mul_(scale).add_(middle)
    return model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file, a run, or a variant's name")
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--size", type=size, default=(256, 256), metavar="HxW", help="of the videos' middle, scaled")
    parser.add_argument("--frames", type=number(int, 1), default=20)
    parser.add_argument("--max_clips", type=number(int, 1), default=6)
    parser.add_argument("--threads", type=number(int, 1), default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    def videos(split: str, most: int) -> list[Tensor]:
        clips = find_clips(arguments.clips / "annotations.json", split=split, max_clips=most)
        return [read_part(measure_clip(clip, max_frames=arguments.frames, size=arguments.size)) for clip in clips]

    calibration = videos("train", CALIBRATION_CLIPS)
    is_random = arguments.model in VARIANTS
    model = random_model(arguments.model, calibration[0]) if is_random else load_model(arguments.model).float()
    if model.spec.decoder != "base":
        raise SystemExit(f"{model.spec.name} has no base decoder, and the Hopper kernels run no other; name another.")
    print(f"{model.spec.name}, width {model.spec.width:g}: ", end="")
    print_tables(measure(model.eval(), calibration, videos("val", arguments.max_clips)))


if __name__ == "__main__":
    try:
        main()
    except UserError as mistake:
        raise SystemExit(str(mistake)) from None
