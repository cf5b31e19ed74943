"""Does the folded training step learn as the plain one does, in the precision that runs use? Several seeds, on a CPU.

    python benchmarks/training_curves.py [--seeds 8] [--steps 200]

taehv at a quarter of the width, AdamW 1e-3, clips of 12 x 64 x 64 (smooth fields that drift, eight batches again and
again); fp32 and bf16 autocast. One seed's curves part after some twenty steps whatever differs: means over seeds count.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae import TAEHV
from tinyvae.training.initialisation import initialise_he

WAYS = {"plain fp32": (False, False), "plain bf16": (False, True), "folded bf16": (True, True)}
NUM_CLIPS, NUM_FRAMES, SIDE, WINDOW = 2, 12, 64, 20


def moving_pictures(seed: int) -> Tensor:
    """NTCHW in [0, 1]"""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(NUM_CLIPS, 3, SIDE // 16 + 4, SIDE // 16 + 4, generator=generator)
    field = F.interpolate(coarse, size=(2 * SIDE, 2 * SIDE), mode="bicubic").clamp(0, 1)
    return torch.stack([field[:, :, t : t + SIDE, 2 * t : 2 * t + SIDE] for t in range(NUM_FRAMES)], dim=1)


def losses_of(seed: int, steps: int, *, folded: bool, bf16: bool) -> list[float]:
    model = TAEHV("taehv", width=0.25)
    initialise_he(model, seed=seed)
    model.folded_training = folded
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        frames = moving_pictures(100 * seed + step % 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            decoded, _ = model(frames)
        loss = F.mse_loss(decoded.float(), model.target(frames))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    last: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(arguments.seeds):
        for name, (folded, bf16) in WAYS.items():
            losses = losses_of(seed, arguments.steps, folded=folded, bf16=bf16)
            means = [statistics.mean(losses[k : k + WINDOW]) for k in range(0, arguments.steps, WINDOW)]
            last[name].append(means[-1])
            print(f"seed {seed}, {name}: " + " ".join(f"{mean:.5f}" for mean in means), flush=True)
    for name, values in last.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        print(f"{name}: last {WINDOW} steps {statistics.mean(values):.5f} +- {error:.5f} over {len(values)} seeds")


if __name__ == "__main__":
    main()
