"""Where int8 pays in onnxruntime on a CPU: PSNR and speed of an int8 decoder, and of an int8 encoder too.

`tinyvae export --dtype int8` quantizes the decoder alone. This script asks whether the encoder would be worth it, and
what int8 costs against the video itself. Trained weights matter: a fresh network has little contrast, so its rounding
error looks small. Needs the extra 'onnx'.

example:
  python benchmarks/onnx_int8.py output/my_run --data CLIPS
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from tinyvae import TAEHV, load_model
from tinyvae.convert.int8 import Videos, measure_speedup, read_videos, write_int8
from tinyvae.convert.onnx import FILES, build_graph, stream_decode, stream_encode
from tinyvae.evaluation.metrics import psnr_from_mse


def psnr(a: Tensor, b: Tensor) -> float:
    return psnr_from_mse((a - b).square().mean().item())


def measure(model: TAEHV, folder: Path, videos: Videos) -> None:
    spec = model.spec
    plain = {side: folder / name for side, name in FILES.items()}
    small = {side: folder / f"int8_{name}" for side, name in FILES.items()}
    for side, file in plain.items():
        file.write_bytes(build_graph(model, side, torch.float32).SerializeToString())
    calls = {
        "encoder": [video[0].split(spec.time_factor) for video in videos.calibration],
        "decoder": [model.encode_video(video).unbind(1) for video in videos.calibration],
    }
    for side in FILES:
        write_int8(plain[side], small[side], calls[side])
        print(
            f"{side}: {measure_speedup(plain[side], small[side], calls[side][0][0]):.2f}x as fast in int8, on one core"
        )
    rows: dict[str, list[tuple[float, float]]] = {"int8 decoder": [], "int8 encoder and decoder": []}
    for video in videos.check:
        latents = stream_encode(plain["encoder"], video, spec)
        frames = stream_decode(plain["decoder"], latents, spec)
        target = video[:, : frames.shape[1]]
        for name, given in zip(rows, (latents, stream_encode(small["encoder"], video, spec)), strict=True):
            made = stream_decode(small["decoder"], given, spec)
            rows[name].append((psnr(made, frames), psnr(made, target) - psnr(frames, target)))
    for name, values in rows.items():
        near, change = (fmean(column) for column in zip(*values, strict=True))
        print(f"{name}: {near:.1f} dB against float32, {change:+.2f} dB against the video ({len(values)} parts)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="not taeh3, whose encoder starts with zeros")
    parser.add_argument(
        "--data", type=Path, required=True, help="videos to calibrate on; a third of them is measured on"
    )
    arguments = parser.parse_args()
    model = load_model(arguments.model).float().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        measure(model, Path(folder), read_videos(arguments.data, model.spec))


if __name__ == "__main__":
    main()
