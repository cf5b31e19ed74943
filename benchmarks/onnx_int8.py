"""What int8 costs and gives in onnxruntime on a CPU: PSNR against the float model, and CPU time for one latent.

Per-channel int8 weights, uint8 activations calibrated on clips, convolutions alone (QDQ). Trained weights matter here:
a fresh network has little contrast, so its rounding error looks small. Needs the extra 'onnx'.

example:
  python benchmarks/onnx_int8.py output/my_run --calibrate CLIPS/train --clips CLIPS/val
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from torch import Tensor

from tinyvae import TAEHV, load_model
from tinyvae.convert.onnx import GraphStream, build_graph, stream_decode, stream_encode

REPEATS = 8


def read_clip(file: Path, num_frames: int, size: int) -> Tensor | None:
    """The first frames of a video, its centre, 1TCHW in [0, 1]; None where it is too small or too short."""
    with av.open(str(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in islice(container.decode(video=0), num_frames)]
    if len(frames) < num_frames or min(frames[0].shape[:2]) < size:
        return None
    video = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    top, left = ((side - size) // 2 for side in video.shape[-2:])
    return video[None, :, :, top : top + size, left : left + size].float() / 255


def read_clips(folder: Path, count: int, num_frames: int, size: int) -> list[Tensor]:
    clips = (read_clip(file, num_frames, size) for file in sorted(folder.glob("*.mp4")))
    return list(islice((clip for clip in clips if clip is not None), count))


class Calibration(CalibrationDataReader):
    """The inputs of every call when clips stream through the float graph: what the activations look like in use."""

    def __init__(self, graph: Path, videos: list[list[Tensor]]) -> None:
        self._calls = self._record(graph, videos)

    def _record(self, graph: Path, videos: list[list[Tensor]]) -> Iterator[dict[str, np.ndarray]]:
        for video in videos:
            stream = GraphStream(graph)
            for given in video:
                yield stream.feeds(given)
                stream.step(given)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._calls, None)


def quantize(graph: Path, videos: list[list[Tensor]]) -> Path:
    made = graph.with_name(f"{graph.stem}_int8.onnx")
    quantize_static(
        graph,
        made,
        Calibration(graph, videos),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["Conv"],
    )
    return made


def psnr(a: Tensor, b: Tensor) -> float:
    return -10 * torch.log10((a - b).square().mean()).item()


def cpu_time(graph: Path, given: Tensor) -> Callable[[], float]:
    stream = GraphStream(graph)
    stream.step(given)

    def once() -> float:
        start = time.process_time()
        stream.step(given)
        return time.process_time() - start

    return once


def measure(model: TAEHV, folder: Path, calibration: list[Tensor], clips: list[Tensor]) -> dict[str, Any]:
    spec = model.spec
    encoder, decoder = folder / "encoder.onnx", folder / "decoder.onnx"
    encoder.write_bytes(build_graph(model, "encoder", torch.float32).SerializeToString())
    decoder.write_bytes(build_graph(model, "decoder", torch.float32).SerializeToString())
    groups = [list(clip[0].split(spec.time_factor)) for clip in calibration]
    latents = [list(model.encode_video(clip).unbind(1)) for clip in calibration]
    small_encoder, small_decoder = quantize(encoder, groups), quantize(decoder, latents)
    rows: dict[str, list[tuple[float, float]]] = {"int8 decoder": [], "int8 encoder and decoder": []}
    for clip in clips:
        plain = stream_encode(encoder, clip, spec)
        frames = stream_decode(decoder, plain, spec)
        target = clip[:, : frames.shape[1]]
        for name, given in zip(rows, (plain, stream_encode(small_encoder, clip, spec)), strict=True):
            made = stream_decode(small_decoder, given, spec)
            rows[name].append((psnr(made, frames), psnr(made, target) - psnr(frames, target)))
    times = {}
    for name, plain_graph, small_graph, given in (
        ("encoder", encoder, small_encoder, clips[0][0, : spec.time_factor]),
        ("decoder", decoder, small_decoder, stream_encode(encoder, clips[0], spec)[:, 0]),
    ):
        runs = cpu_time(plain_graph, given), cpu_time(small_graph, given)
        times[name] = np.array([[run() for run in runs] for _ in range(REPEATS)]).min(axis=0)  # in turns
    return {"rows": rows, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", type=Path, required=True, help="folder of clips to calibrate on")
    parser.add_argument("--clips", type=Path, required=True, help="folder of clips to measure on")
    parser.add_argument("--count", type=int, default=6, help="clips of each (default: 6)")
    parser.add_argument("--size", type=int, default=192, help="height and width of the centre (default: 192)")
    arguments = parser.parse_args()
    model = load_model(arguments.model).float()
    num_frames = 4 * model.spec.time_factor
    folders = (arguments.calibrate, arguments.clips)
    calibration, clips = (read_clips(folder, arguments.count, num_frames, arguments.size) for folder in folders)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(model, Path(folder), calibration, clips)
    for name, values in found["rows"].items():
        against_float, change = np.mean(values, axis=0)
        print(f"{name}: {against_float:.1f} dB against float, {change:+.2f} dB against the video ({len(values)} clips)")
    for name, (plain, small) in found["times"].items():
        print(f"{name}: {plain:.3f} s CPU a latent in float32, {small:.3f} s in int8: {plain / small:.2f}x")


if __name__ == "__main__":
    main()
