"""A decoder graph in int8: calibrated on the user's videos, compared with the float graph on other frames of them.

The convolutions alone are quantized: int8 weights with a scale for each output channel, uint8 activations. Inputs,
outputs and carried state stay float32, so the caller's loop is the same for both graphs. The encoder stays float32
(docs/decisions.md).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tinyvae.convert.onnx import METADATA_KEY, GraphStream, stream_decode
from tinyvae.errors import UnreadableVideoError, UserError, require_package
from tinyvae.evaluation.clip_sources import ClipPart, find_clips, frame_chunks, measure_clip
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.models.variants import VariantSpec
from tinyvae.storage import Place
from tinyvae.terminal import count_of

if TYPE_CHECKING:
    from tinyvae.models.taehv import TAEHV

MIN_PSNR_DB = 40.0
"""Below this against the float graph, an int8 graph is refused."""
MAX_PARTS = 9
PART_LATENTS = 4  # at least: so that the carried state is in use
PART_SIZE = (192, 192)  # a multiple of every variant's space factor
TIMED_CALLS = 8
PREPARED = {"onnx.quant.pre_process": "onnxruntime.quant"}
"""Tells onnxruntime's quantizer that the graph needs no preparation: ours is folded already."""


@dataclass(frozen=True, kw_only=True)
class Int8Check:
    """An int8 decoder against the float one.

    ``psnr_db``: mean PSNR of frames that were not calibrated on. ``speedup``: time of a float call / time of an int8
    call, on one core of this CPU.
    """

    psnr_db: float
    speedup: float

    def words(self) -> str:
        quality = f"{self.psnr_db:.1f} dB from float32 on frames that it was not calibrated on"
        return f"decoder, {quality}, {self.speedup:.1f}x as fast on one core of this CPU; float32 encoder"


@dataclass(frozen=True, kw_only=True)
class Videos:
    """Parts of videos, frames 1TCHW in [0, 1]: those to calibrate on, and others to check with."""

    calibration: list[Tensor]
    check: list[Tensor]


def read_videos(data: Place, spec: VariantSpec) -> Videos:
    """A few short parts of the videos of a file, folder, annotation file or index, scaled to `PART_SIZE`. Files that
    cannot be read are left out with a warning.

    Example: ``read_videos(Path("my_clips"), model.spec).check``.
    """
    num_frames = next(spec.padded_frames(n) for n in count(1) if spec.latents(n) >= PART_LATENTS)
    clips = find_clips(data, max_clips=MAX_PARTS)
    groups: list[list[Tensor]] = []
    readable: list[ClipPart] = []
    unreadable: list[UnreadableVideoError] = []
    for clip in clips:
        try:
            whole = measure_clip(clip, max_frames=None, size=PART_SIZE)
            groups.append([read_part(part) for part in cut(whole, num_frames, MAX_PARTS // len(clips))])
            readable.append(whole)
        except UnreadableVideoError as bad:
            unreadable.append(bad)
    if not groups:
        raise UserError(f"{unreadable[0]}; int8 cannot be calibrated with it: name other videos with --data.")
    for fault in unreadable:
        warnings.warn(f"left out: {fault}", stacklevel=2)
    if len(groups) == 1:
        if unreadable:  # beside them it was cut as one of several
            return read_videos(readable[0].path, spec)
        groups = [[part] for part in groups[0]]
    if len(groups) == 1:
        raise UserError(
            f"{data} has {count_of(readable[0].num_frames, 'frame')}, and int8 needs {2 * num_frames} or more, to "
            "calibrate on some and to check with others; name a longer video, or a folder of several, with --data."
        )
    calibration = [part for number, group in enumerate(groups) if number % 3 != 1 for part in group]
    return Videos(calibration=calibration, check=[part for group in groups[1::3] for part in group])


def read_part(part: ClipPart) -> Tensor:
    """The frames of a part: 1TCHW in [0, 1]."""
    return next(frame_chunks(part, chunk_frames=part.num_frames))[None].float() / 255


def cut(whole: ClipPart, num_frames: int, most: int) -> Iterator[ClipPart]:
    """Up to ``most`` parts of ``num_frames`` frames, evenly spread; a video that is shorter is one part."""
    num_parts = max(1, min(most, whole.num_frames // num_frames))
    length = min(num_frames, whole.num_frames)
    for number in range(num_parts):
        middle = (2 * number + 1) * whole.num_frames // (2 * num_parts)
        yield replace(whole, first_frame=middle - length // 2, num_frames=length)


def quantize_decoder(file: Path, model: TAEHV, videos: Videos) -> Int8Check:
    """Put the int8 form of a float32 graph in its place; a `UserError` where the two are too far apart.

    ``model``: the network of the graph, float32 on the CPU. Its encoder makes the latents of the videos.
    """
    made = file.with_suffix(".int8")
    write_int8(file, made, [model.encode_video(video).unbind(1) for video in videos.calibration])
    latents = [model.encode_video(video) for video in videos.check]
    psnr = fmean(psnr_between(file, made, each, model.spec) for each in latents)
    if not psnr >= MIN_PSNR_DB:  # also where it is NaN
        raise UserError(
            f"as int8 this decoder is {psnr:.1f} dB from its float32 form on frames that it was not calibrated on, and "
            f"{MIN_PSNR_DB:g} dB are needed; name more videos like those that you decode with --data, or use "
            "--dtype float16; nothing was written."
        )
    speedup = measure_speedup(file, made, latents[0][:, 0])
    os.replace(made, file)
    return Int8Check(psnr_db=psnr, speedup=speedup)


def write_int8(graph: Path, made: Path, videos: Sequence[Sequence[Tensor]]) -> None:
    """Write the int8 form of a float32 graph. Each video (what goes in, call by call) streams through it, so that the
    quantizer sees its activations with the carried state."""
    onnx = require_package("onnx", extra="onnx", needed_for="an ONNX export")
    quantization = require_package("onnxruntime.quantization", extra="onnx", needed_for="an int8 export")
    proto = onnx.load(graph)
    stated = {prop.key: prop.value for prop in proto.metadata_props}
    onnx.helper.set_model_props(proto, {**stated, **PREPARED})
    calls = _stream_calls(graph, videos)
    quantization.quantize_static(
        proto,
        made,
        SimpleNamespace(get_next=lambda: next(calls, None)),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=["Conv"],
    )
    proto = onnx.load(made)
    onnx.helper.set_model_props(proto, {METADATA_KEY: stated[METADATA_KEY]})
    onnx.save(proto, made)


def _stream_calls(graph: Path, videos: Sequence[Sequence[Tensor]]) -> Iterator[dict[str, np.ndarray]]:
    """All inputs of every call, carried state included, while videos stream through a graph."""
    for video in videos:
        stream = GraphStream(graph)
        for given in video:
            yield stream.feeds(given)
            stream.step(given)


def psnr_between(graph: Path, other: Path, latents_1TCHW: Tensor, spec: VariantSpec) -> float:
    """PSNR in dB between the frames that two decoder graphs make of a video's latents."""
    frames, others = (stream_decode(file, latents_1TCHW, spec) for file in (graph, other))
    return psnr_from_mse((frames - others).square().mean().item())


def measure_speedup(graph: Path, other: Path, given: Tensor) -> float:
    """How many times as fast as ``graph`` the graph ``other`` is on one core: the best call of each, made in turns.

    ``given``: what goes in, a latent (1, C, h, w) or the frames of one.
    """
    streams = [GraphStream(file, num_threads=1) for file in (graph, other)]
    times_s = np.array([[_cpu_time_s(stream, given) for stream in streams] for _ in range(TIMED_CALLS)])
    slow, fast = times_s.min(axis=0)
    return float(slow / fast)


def _cpu_time_s(stream: GraphStream, given: Tensor) -> float:
    start = time.process_time()  # of this process alone, however busy the machine is
    stream.step(given)
    return time.process_time() - start
