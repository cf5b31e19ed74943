"""Does the folded training step learn as the plain one does, in the precision that runs use? Several seeds.

    python benchmarks/training_curves.py [--seeds 8] [--steps 200]
    python benchmarks/training_curves.py --device cuda --width 1 --clips 2x12x480x720 --learning_rate 3e-4 --compiled

Smooth fields that drift, eight batches again and again, AdamW; fp32 and bf16 autocast (``--ways``). One seed's curves
part after some twenty steps whatever differs: means over seeds count.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae import TAEHV
from tinyvae.training.build import initialize_he

WAYS = {"plain_fp32": (False, False), "plain_bf16": (False, True), "folded_bf16": (True, True)}
WINDOW = 20


def moving_pictures(seed: int, clips: str, device: torch.device) -> Tensor:
    """NTCHW in [0, 1]"""
    count, num_frames, height, width = map(int, clips.split("x"))
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, height // 16 + 4, width // 16 + 4, generator=generator).to(device)
    field = F.interpolate(coarse, size=(height + 64, width + 64), mode="bicubic").clamp(0, 1)
    return torch.stack([field[:, :, t : t + height, 2 * t : 2 * t + width] for t in range(num_frames)], dim=1)


def losses_of(seed: int, arguments: argparse.Namespace, *, folded: bool, bf16: bool) -> Iterator[float]:
    device = torch.device(arguments.device)
    model = TAEHV("taehv", width=arguments.width).to(device)
    initialize_he(model, seed=seed)
    model.folded_training = folded
    forward = torch.compile(model) if arguments.compiled and folded else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95))
    batches = [moving_pictures(100 * seed + place, arguments.clips, device) for place in range(8)]
    for step in range(arguments.steps):
        frames = batches[step % 8]
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            decoded, _ = forward(frames)
        loss = F.mse_loss(decoded.float(), model.target(frames))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        yield loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=float, default=0.25, help="of taehv's channels")
    parser.add_argument("--clips", default="2x12x64x64", help="clips x frames x height x width of a batch")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--compiled", action="store_true", help="the folded step under torch.compile, as on a GPU")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    last: dict[str, list[float]] = {name: [] for name in arguments.ways}
    for seed in range(arguments.seeds):
        for name in arguments.ways:
            folded, bf16 = WAYS[name]
            losses = list(losses_of(seed, arguments, folded=folded, bf16=bf16))
            means = [statistics.mean(losses[k : k + WINDOW]) for k in range(0, arguments.steps, WINDOW)]
            last[name].append(means[-1])
            print(f"seed {seed}, {name}: " + " ".join(f"{mean:.5f}" for mean in means), flush=True)
    for name, values in last.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        print(f"{name}: last {WINDOW} steps {statistics.mean(values):.5f} +- {error:.5f} over {len(values)} seeds")


if __name__ == "__main__":
    main()
