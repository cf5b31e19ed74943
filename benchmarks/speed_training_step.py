"""A training step (encode, decode, MSE, AdamW; bf16 autocast): the plain network against the folded one.

    python benchmarks/speed_training_step.py [--cases 2x12x480x720 16x12x128x128] [--ways plain ...] [--output DIR]
    python benchmarks/speed_training_step.py --cases 1x4x64x64 --ways plain folded --curve_steps 2     # on a CPU

Ways: ``plain`` eager; ``folded``: folded_training, eager; ``folded compiled``: the same under torch.compile;
``folded compiled graphs``: the same replayed as CUDA graphs; ``plain compiled``; ``plain again``: how far two runs of
the same thing drift apart. All start from the same weights and see the same batches, so their losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae import TAEHV
from tinyvae.convert.bench import peak_bytes, time_alternating_ms
from tinyvae.files import make_output_folder
from tinyvae.training.first_weights import initialize_he

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def make_step(way: str, batches: list[Tensor]) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = TAEHV("taehv").to(DEVICE)
    initialize_he(model, seed=0)
    fast = not way.startswith("plain")
    model.folded_training = "folded" in way
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=fast)
    mode = "reduce-overhead" if "graphs" in way else "default"
    forward = torch.compile(model, mode=mode) if "compiled" in way else model
    turn = 0

    def step() -> Tensor:
        nonlocal turn
        frames = batches[turn % len(batches)].float().div_(255)
        turn += 1
        with torch.autocast(DEVICE.type, torch.bfloat16):
            decoded, _ = forward(frames)
        target = frames[:, : decoded.shape[1]]
        loss = F.mse_loss(decoded.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def moving_pictures(count: int, videos: int, frames: int, height: int, width: int) -> list[Tensor]:
    """uint8 batches that a network can learn: smooth random fields that drift."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    batches = []
    for _ in range(count):
        coarse = torch.rand(videos, 3, height // 16 + 4, width // 16 + 4, generator=generator, device=DEVICE)
        field = F.interpolate(coarse, size=(height + 64, width + 64), mode="bicubic").clamp(0, 1)
        shots = [field[:, :, t : t + height, 2 * t : 2 * t + width] for t in range(frames)]
        batches.append((torch.stack(shots, 1) * 255).round().to(torch.uint8))
    return batches


def print_profile(step: Callable[[], Tensor]) -> None:
    """The kernels that take the most time in one step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    print(f"    {total / 1e3:7.3f} ms  all kernels")
    kernels = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in kernels[:24]:
        print(f"    {event.self_device_time_total / 1e3:7.3f} ms  x{event.count:<3} {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["2x12x480x720", "16x12x128x128"])
    parser.add_argument(
        "--ways", nargs="+", default=["plain", "plain again", "folded compiled", "folded compiled graphs"]
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--curve_steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels of the last way")
    parser.add_argument("--output", type=Path, help="folder for training.json; it grows case by case")
    arguments = parser.parse_args()
    if arguments.output:
        make_output_folder(arguments.output)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    results: dict[str, object] = {}
    for case in arguments.cases:
        videos, frames, height, width = map(int, case.split("x"))
        batches = moving_pictures(8, videos, frames, height, width)
        rows, curves = {}, {}
        for way in arguments.ways:
            torch.compiler.reset()
            began = time.perf_counter()
            step = make_step(way, batches)
            curves[way] = [step().item() for _ in range(arguments.curve_steps)]
            print(
                f"{case} {way}: {time.perf_counter() - began:.0f} s for {arguments.curve_steps} first steps", flush=True
            )
            peak = peak_bytes(step, DEVICE) or 0
            times = time_alternating_ms({way: step}, DEVICE, repeats=arguments.repeats, warmups=2)
            rows[way] = {"ms": statistics.median(times[way]), "GiB": peak / 2**30}
            if arguments.profile and way == arguments.ways[-1]:
                print_profile(step)
            del step
        base = rows["plain"]["ms"] if "plain" in rows else float("nan")
        for way, row in rows.items():
            curve = curves[way]
            row["ratio"] = base / row["ms"]
            print(f"{case} {way}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items())
                  + "; loss of every tenth " + " ".join(f"{loss:.5f}" for loss in curve[::10]), flush=True)  # fmt: skip
        results[case] = {"times": rows, "losses": curves}
        if arguments.output:
            (arguments.output / "training.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
