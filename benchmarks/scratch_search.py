"""Which settings learn fastest from scratch? Short runs of many candidates on one GPU, clips held in its memory.

The network, initialisation, optimisers, schedule and average are the shipped ones; only the clip source differs from
`tinyvae train scratch` (whole files decoded once, random crops cut on the GPU), so that the search is not bound by
decoding. The figure is the mean per-frame PSNR over 20 frames of the centre 256x256 of every validation clip.

  python benchmarks/scratch_search.py --clips DIR --steps 1000 --only base,muon_lr_0.02
  python benchmarks/scratch_search.py --clips DIR --seconds 260 --only base --output results.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinyvae.config import TrainConfig
from tinyvae.models.taehv import TAEHV
from tinyvae.training import initialisation
from tinyvae.training.ema import WeightAverage
from tinyvae.training.initialisation import initialise_he
from tinyvae.training.optimizers import make_optimizers
from tinyvae.training.schedule import learning_rate_factor

BASE = TrainConfig(
    variant="taehv",
    height=128,
    width=128,
    n_frames=12,
    train_batch_size=16,
    optimizer="muon",
    learning_rate=1e-3,
    muon_learning_rate=0.01,
    lr_warmup_steps=100,
    weight_decay=0.0,
    max_grad_norm=1.0,
    ema_decay=0.998,
)

CANDIDATES: dict[str, dict[str, Any]] = {
    "base": {},
    "muon_lr_0.005": {"muon_learning_rate": 0.005},
    "muon_lr_0.015": {"muon_learning_rate": 0.015},
    "muon_lr_0.02": {"muon_learning_rate": 0.02},
    "adam_lr_3e-3": {"learning_rate": 3e-3},
    "linear": {"lr_scheduler": "linear"},
    "no_clip": {"max_grad_norm": 0.0},
    "warmup_30": {"lr_warmup_steps": 30},
    "momentum_0.9": {"muon_momentum": 0.9},
    "ema_0.99": {"ema_decay": 0.99},
    "l1": {"loss": "l1"},
    "charbonnier": {"loss": "charbonnier"},
    "quiet_0.3": {"quiet": 0.3},
    "quiet_0.03": {"quiet": 0.03},
    "size_96_batch_28": {"height": 96, "width": 96, "train_batch_size": 28},
    "size_64_batch_64": {"height": 64, "width": 64, "train_batch_size": 64},
    "size_192_batch_7": {"height": 192, "width": 192, "train_batch_size": 7},
    "adamw": {"optimizer": "adamw"},
    "0.005_linear": {"muon_learning_rate": 0.005, "lr_scheduler": "linear"},
    "0.003_linear": {"muon_learning_rate": 0.003, "lr_scheduler": "linear"},
    "0.007_linear": {"muon_learning_rate": 0.007, "lr_scheduler": "linear"},
    "0.005_linear_ema_0.99": {"muon_learning_rate": 0.005, "lr_scheduler": "linear", "ema_decay": 0.99},
    "0.005_linear_warmup_30": {"muon_learning_rate": 0.005, "lr_scheduler": "linear", "lr_warmup_steps": 30},
    "0.005_linear_64": {
        "muon_learning_rate": 0.005,
        "lr_scheduler": "linear",
        "height": 64,
        "width": 64,
        "train_batch_size": 64,
    },
    "0.004_linear": {"muon_learning_rate": 0.004, "lr_scheduler": "linear"},
    "0.005_linear_clip_0.3": {"muon_learning_rate": 0.005, "lr_scheduler": "linear", "max_grad_norm": 0.3},
    "0.005_linear_momentum_0.9": {"muon_learning_rate": 0.005, "lr_scheduler": "linear", "muon_momentum": 0.9},
    "0.005_linear_quiet_0.3": {"muon_learning_rate": 0.005, "lr_scheduler": "linear", "quiet": 0.3},
    "0.005_linear_adam_3e-3": {"muon_learning_rate": 0.005, "lr_scheduler": "linear", "learning_rate": 3e-3},
    "log_0.005": {"muon_learning_rate": 0.005, "loss": "log_mse"},
    "log_0.0025": {"muon_learning_rate": 0.0025, "loss": "log_mse"},
    "log_0.0025_linear": {"muon_learning_rate": 0.0025, "loss": "log_mse", "lr_scheduler": "linear"},
    "log_0.005_linear": {"muon_learning_rate": 0.005, "loss": "log_mse", "lr_scheduler": "linear"},
    "mse_0.0025_linear": {"muon_learning_rate": 0.0025, "lr_scheduler": "linear"},
    "log_0.005_64": {"muon_learning_rate": 0.005, "loss": "log_mse", "height": 64, "width": 64, "train_batch_size": 64},
    "log_0.005_adam_3e-4": {"muon_learning_rate": 0.005, "loss": "log_mse", "learning_rate": 3e-4},
    "log_0.005_quiet_0.3": {"muon_learning_rate": 0.005, "loss": "log_mse", "quiet": 0.3},
}


def decode(path: str) -> Tensor:
    """uint8 TCHW of a whole file; by OpenCV on a machine that has no PyAV."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("av") is not None:
        from tinyvae.data.decode import iterate_frames

        return torch.stack(list(iterate_frames(Path(path))))
    import cv2

    video, frames = cv2.VideoCapture(path), []
    while (read := video.read())[0]:
        frames.append(torch.from_numpy(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB)).permute(2, 0, 1))
    return torch.stack(frames)


def load_split(clips: Path, split: str) -> list[Tensor]:
    """uint8 TCHW of every file of a split, decoded in parallel."""
    listed = json.loads((clips / "annotations.json").read_text())["list"]
    paths = [str(clips / entry["path"]) for entry in listed if entry["split"] == split]
    with ProcessPoolExecutor() as pool:
        return list(pool.map(decode, sorted(paths)))


def random_batch(videos: list[Tensor], config: TrainConfig, generator: torch.Generator) -> Tensor:
    """float NTCHW in [0, 1]: random files, start frames, places and mirrorings."""
    t, h, w = config.n_frames, config.height, config.width
    usable = [v for v in videos if v.shape[0] >= t and v.shape[2] >= h and v.shape[3] >= w]
    clips = []
    for number in torch.randint(len(usable), (config.train_batch_size,), generator=generator).tolist():
        video = usable[number]
        limits = (video.shape[0] - t, video.shape[2] - h, video.shape[3] - w)
        first, top, left = (int(torch.randint(n + 1, (1,), generator=generator)) for n in limits)
        clip = video[first : first + t, :, top : top + h, left : left + w]
        clips.append(clip.flip(-1) if torch.rand((), generator=generator) < 0.5 else clip)
    return torch.stack(clips).float().div_(255)


@torch.no_grad()
def score(model: TAEHV, videos: list[Tensor]) -> float:
    """Mean over clips of the mean per-frame PSNR, dB."""
    values = []
    for video in videos:
        height, width = (min(256, side // 8 * 8) for side in video.shape[-2:])
        top, left, first = (video.shape[2] - height) // 2, (video.shape[3] - width) // 2, (len(video) - 20) // 2
        clip = video[None, first : first + 20, :, top : top + height, left : left + width].float() / 255
        error = (model.reconstruct(clip) - model.target(clip)).square().mean(dim=(0, 2, 3, 4))
        values.append((-10 * error.log10()).mean())
    return float(torch.stack(values).mean())


def loss_of(decoded: Tensor, target: Tensor, kind: str) -> Tensor:
    from tinyvae.losses.reconstruction import reconstruction_loss

    if kind == "log_mse":
        error = (decoded.float() - target.float()).square().mean(dim=(2, 3, 4))
        return (error + 1e-5).log().mean() / 10

    return reconstruction_loss(decoded, target, kind)  # type: ignore[arg-type]


def run(
    name: str,
    config: TrainConfig,
    quiet: float,
    loss_kind: str,
    train: list[Tensor],
    val: list[Tensor],
    *,
    seconds: float | None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TAEHV(config.variant)
    initialisation.QUIET_BRANCH = quiet
    initialise_he(model, seed=config.seed)
    model = model.cuda()
    model.folded_training = True
    optimizer_set = make_optimizers(model, config)
    average = WeightAverage(model, decay=config.ema_decay)

    def forward(frames: Tensor) -> Tensor:
        return model.decode(model.encode(frames))

    compiled = torch.compile(forward, dynamic=False)
    generator = torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    curve: list[tuple[int, float, float]] = []
    trained, step = 0.0, 0
    while step < config.max_train_steps:
        started = time.perf_counter()
        frames = random_batch(train, config, generator)
        progress = step if seconds is None else int(trained / seconds * config.max_train_steps)
        optimizer_set.set_rates(learning_rate_factor(min(progress, config.max_train_steps - 1), config))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            decoded = compiled(frames)
        loss = 10 * loss_of(decoded, model.target(frames), loss_kind)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm or float("inf"))
        for optimizer in optimizer_set.optimizers:
            optimizer.step()
        optimizer_set.zero_grad()
        average.update(model)
        torch.cuda.synchronize()
        if step >= 3:  # compilation is start-up
            trained += time.perf_counter() - started
        step += 1
        last = step == config.max_train_steps or (seconds is not None and trained >= seconds)
        if last or step % 1000 == 0:
            with average.swapped_into(model):
                psnr = score(model, val)
            curve.append((step, trained, psnr))
            print(f"{name}: step {step}, {trained:.0f} s, {psnr:.2f} dB (raw {score(model, val):.2f})", flush=True)
        if last:
            break
    return {"name": name, "curve": curve, "steps": step, "seconds": trained, "psnr": curve[-1][2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="end by training time; the schedule follows the clock")
    parser.add_argument("--only", default=",".join(CANDIDATES))
    parser.add_argument("--set", nargs="*", default=[], help="key=value for every candidate")
    parser.add_argument("--budget_s", type=float, default=540, help="stop starting candidates after this")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    train, val = ([video.cuda() for video in load_split(arguments.clips, split)] for split in ("train", "val"))
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}; {len(train)} + {len(val)} files, "
        f"{time.perf_counter() - began:.0f} s to decode",
        flush=True,
    )
    common = {key: json.loads(value) for key, value in (pair.split("=") for pair in arguments.set)}
    results = []
    for name in arguments.only.split(","):
        if time.perf_counter() - began > arguments.budget_s:
            print(f"no time left for {name}")
            continue
        changes = {**common, **CANDIDATES[name]}
        quiet, loss_kind = changes.pop("quiet", 0.1), changes.pop("loss", "mse")
        config = replace(BASE, max_train_steps=arguments.steps, **changes)
        try:
            results.append(run(name, config, quiet, loss_kind, train, val, seconds=arguments.seconds))
        except torch.OutOfMemoryError as fault:
            print(f"{name}: {fault}")
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1))
    for result in sorted(results, key=lambda r: -r["psnr"]):
        print(f"{result['psnr']:6.2f} dB  {result['steps']:6d} steps  {result['seconds']:6.1f} s  {result['name']}")


if __name__ == "__main__":
    main()
