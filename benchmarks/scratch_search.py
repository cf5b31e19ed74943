"""Which settings learn fastest from scratch? Short runs of many candidates on one GPU, clips held in its memory.

The network, initialisation, optimisers, schedule and average are the shipped ones; only the clip source differs from
`tinyvae train scratch` (whole files decoded once, random crops cut on the GPU), so that the search is not bound by
decoding. The figure is the mean per-frame PSNR over 20 frames of the centre 256x256 of every validation clip.

  python benchmarks/scratch_search.py --clips DIR --steps 1000 "" muon_learning_rate=0.003 seed=1,lr_warmup_steps=100
  python benchmarks/scratch_search.py --clips DIR --seconds 260 "" --output results.json
  python benchmarks/scratch_search.py --clips DIR --score output/RUN/final_model.safetensors
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
from scratch_ideas import IDEAS, loss_of, optimizers_of, start_bilinear, start_orthogonal
from torch import Tensor

from tinyvae.config import TrainConfig, load_preset
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import load_model
from tinyvae.training import build as initialisation
from tinyvae.training.build import QUIET_BRANCH, initialize_he
from tinyvae.training.engine import Engine
from tinyvae.training.optim import WeightAverage, learning_rate_factor

BASE = load_preset("scratch")


def decode(path: str) -> Tensor:
    """uint8 TCHW of a whole file; by OpenCV on a machine that has no PyAV."""
    torch.set_num_threads(1)
    if importlib.util.find_spec("av") is not None:
        from tinyvae.video.decode import iterate_frames

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


class Rig:
    """One network, its compiled round trip and the engine, for all candidates; drawn anew for each."""

    def __init__(self) -> None:
        self.engine = Engine(BASE)
        self.model = TAEHV(BASE.variant).to(self.engine.device, memory_format=torch.channels_last)
        self.model.folded_training = True
        self.round_trip = torch.compile(
            lambda frames: self.model.decode(self.model.encode(frames)), mode=BASE.compile_mode
        )

    def draw(self, seed: int, options: dict[str, Any]) -> TAEHV:
        initialisation.QUIET_BRANCH = options.get("quiet", QUIET_BRANCH)
        fresh = TAEHV(BASE.variant)
        initialize_he(fresh, seed=seed)
        if options.get("bilinear"):
            start_bilinear(fresh)
        if options.get("orthogonal"):
            start_orthogonal(fresh)
        fresh.decoder[-1].weight.data.mul_(options.get("output_gain", 1.0))
        self.model.load_state_dict(fresh.state_dict())
        return self.model


def run(
    rig: Rig,
    name: str,
    config: TrainConfig,
    options: dict[str, Any],
    train: list[Tensor],
    val: list[Tensor],
    *,
    seconds: float | None,
) -> dict[str, Any]:
    model = rig.draw(config.seed, options)
    optimizer_set = optimizers_of(model, config, options)
    average = WeightAverage(model, decay=config.ema_decay)
    generator = torch.Generator().manual_seed(config.seed)
    engine = rig.engine
    engine.prepare(model, optimizer_set)
    curve: list[tuple[int, float, float]] = []
    trained, step = 0.0, 0
    while step < config.max_train_steps:
        started = time.perf_counter()
        frames = random_batch(train, config, generator)
        progress = step if seconds is None else int(trained / seconds * config.max_train_steps)
        optimizer_set.set_rates(learning_rate_factor(min(progress, config.max_train_steps - 1), config))
        with engine.autocast():
            decoded = rig.round_trip(frames)
        loss = 10 * loss_of(decoded, model.target(frames), options.get("loss", "mse"))
        engine.backward(loss)
        result = engine.finish_step(max_grad_norm=config.max_grad_norm)
        average.update(model)
        if step >= 3:  # compilation is start-up
            trained += time.perf_counter() - started
        step += 1
        last = step == config.max_train_steps or (seconds is not None and trained >= seconds)
        if last or step % 1000 == 0:
            with average.swapped_into(model):
                psnr = score(model, val)
            curve.append((step, trained, psnr))
            words = f"{psnr:.2f} dB (raw {score(model, val):.2f}), loss {loss:.4f}, gradient {result.gradient_norm:.3f}"
            print(f"{name}: step {step}, {trained:.0f} s, {words}", flush=True)
        if last:
            break
    return {"name": name, "curve": curve, "steps": step, "seconds": trained, "psnr": curve[-1][2]}


def read_candidate(words: str) -> dict[str, Any]:
    """``lr_scheduler=cosine,seed=1`` -> {"lr_scheduler": "cosine", "seed": 1}"""
    changes: dict[str, Any] = {}
    for key, value in (pair.split("=", 1) for pair in words.split(",") if pair):
        try:
            changes[key] = json.loads(value)
        except json.JSONDecodeError:
            changes[key] = value
    return changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ideas = "; ".join(f"{name}: {meaning}" for name, meaning in IDEAS.items())
    parser.add_argument(
        "candidates",
        nargs="*",
        help="each key=value,...: what differs from the preset scratch (nothing: it itself). Keys of the "
        f"configuration, or {ideas}",
    )
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, help="end by training time; the schedule follows the clock")
    parser.add_argument("--set", default="", help="key=value,... for every candidate")
    parser.add_argument("--budget_s", type=float, default=540, help="stop starting candidates after this")
    parser.add_argument("--score", type=Path, nargs="*", default=[], help="only give these weight files' figure")
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
    for weights in arguments.score:
        print(f"{score(load_model(weights).cuda(), val):.2f} dB  {weights}", flush=True)
    if arguments.score:
        return
    results, rig = [], Rig()
    for name in arguments.candidates:
        if time.perf_counter() - began > arguments.budget_s:
            print(f"no time left for {name!r}")
            continue
        changes = read_candidate(arguments.set) | read_candidate(name)
        options = {key: changes.pop(key) for key in IDEAS if key in changes}
        config = replace(BASE, max_train_steps=arguments.steps, **changes)
        try:
            results.append(run(rig, name or "scratch", config, options, train, val, seconds=arguments.seconds))
        except torch.OutOfMemoryError as fault:
            print(f"{name!r}: {fault}")
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1))
    for result in sorted(results, key=lambda r: -r["psnr"]):
        print(f"{result['psnr']:6.2f} dB  {result['steps']:6d} steps  {result['seconds']:6.1f} s  {result['name']}")


if __name__ == "__main__":
    main()
