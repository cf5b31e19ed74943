"""Which settings learn fastest from scratch? Short runs of many candidates on one GPU, clips held in its memory (on a
machine without one on its CPU, for a look).

The network, initialization, optimizers, schedule and average are the shipped ones; only the clip source differs from
`tinyvae train scratch` (whole files decoded once, random crops cut on the GPU, their detail measured in the middle
frame of the file), so that the search is not bound by decoding. The figure is the mean per-frame PSNR over 20
frames of the center 256x256 of every validation clip.

  python benchmarks/scratch_search.py --clips DIR --steps 1000 "" muon_learning_rate=0.003 seed=1,lr_warmup_steps=100
  python benchmarks/scratch_search.py --clips DIR --seconds 260 "" --output results.json
  python benchmarks/scratch_search.py --clips DIR --score output/RUN/final_model.safetensors

`turns.py` says how several commands share one GPU: they compile side by side and train in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scratch_ideas import IDEAS, optimizers_of
from torch import Tensor
from torch.nn import functional as F
from turns import gpu_turn

from tinyvae.config import TrainConfig, load_preset
from tinyvae.config.schema import FIELDS
from tinyvae.files import check_output_file, make_output_folder
from tinyvae.losses.distances import LossKind, reconstruction_loss
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec
from tinyvae.models.weights import load_model, save_model
from tinyvae.training.engine import Engine
from tinyvae.training.first_weights import draw_weights
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


class Crops:
    """Random crops of files that lie in memory (uint8 TCHW): file, first frame, place, mirroring.

    Each clip has a seed of its own: a candidate that draws more numbers for a clip still takes the next one from the
    file and frame that the other candidates take. Without this, other clips hide small differences.
    """

    def __init__(self, videos: list[Tensor], config: TrainConfig, options: dict[str, Any]) -> None:
        self.videos, self.config, self.options, self.drawn = videos, config, options, 0
        self.generator = torch.Generator()
        wanted = "detail" in options or config.crop_candidates > 1
        self.details = [detail_table(video) for video in videos] if wanted else []

    def batch(self, count: int, num_frames: int, size: int) -> Tensor:
        """float NTCHW in [0, 1]."""
        shape = (num_frames, size, size)
        usable = [n for n, v in enumerate(self.videos) if all(a >= b for a, b in zip(places(v), shape, strict=True))]
        return torch.stack([self._one(usable, shape) for _ in range(count)]).float().div_(255)

    def _one(self, usable: list[int], shape: tuple[int, int, int]) -> Tensor:
        self.generator.manual_seed(self.config.seed * 1_000_003 + self.drawn)
        self.drawn += 1
        drawn = [self._draw(usable, shape) for _ in range(self.options.get("detail", 1))]
        number, first = drawn[0][:2]
        drawn += [(number, first, *self._draw([number], shape)[2:]) for _ in range(self.config.crop_candidates - 1)]
        if len(drawn) > 1:
            number, first, top, left = max(drawn, key=lambda d: detail_of(self.details[d[0]], d[2], d[3], shape[1]))
        else:
            number, first, top, left = drawn[0]
        video = self.videos[number]
        clip = video[first : first + shape[0], :, top : top + shape[1], left : left + shape[2]]
        config = self.config
        for dim, is_on in ((3, config.random_flip), (2, config.random_turn), (0, config.random_reverse)):
            clip = clip.flip(dim) if is_on and self._chance() else clip
        return clip.mT if config.random_turn and self._chance() else clip

    def _draw(self, usable: list[int], shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
        number = usable[int(torch.randint(len(usable), (1,), generator=self.generator))]
        limits = (side - wanted for side, wanted in zip(places(self.videos[number]), shape, strict=True))
        first, top, left = (int(torch.randint(limit + 1, (1,), generator=self.generator)) for limit in limits)
        return number, first, top, left

    def _chance(self) -> bool:
        return float(torch.rand((), generator=self.generator)) < 0.5


def places(video: Tensor) -> tuple[int, int, int]:
    return video.shape[0], video.shape[2], video.shape[3]


def detail_table(video: Tensor) -> Tensor:
    """HW, on the CPU: the sum of the steps from pixel to pixel above and left of each place of the middle frame."""
    gray = video[len(video) // 2].float().mean(dim=0)
    steps = gray.diff(dim=0, prepend=gray[:1]).abs() + gray.diff(dim=1, prepend=gray[:, :1]).abs()
    return torch.nn.functional.pad(steps.double().cumsum(0).cumsum(1), (1, 0, 1, 0)).cpu()


def detail_of(table: Tensor, top: int, left: int, size: int) -> float:
    bottom, right = top + size, left + size
    return float(table[bottom, right] - table[top, right] - table[bottom, left] + table[top, left])


def center(video: Tensor, num_frames: int, side: int = 256) -> Tensor:
    """float NTCHW in [0, 1], N = 1: the middle frames of a file, the center of each (less where it has less)."""
    height, width = (min(side, available // 8 * 8) for available in video.shape[-2:])
    top, left, first = (video.shape[2] - height) // 2, (video.shape[3] - width) // 2, (len(video) - num_frames) // 2
    return video[None, first : first + num_frames, :, top : top + height, left : left + width].float() / 255


def frame_psnr(model: TAEHV, clip: Tensor, inner: int | None = None) -> Tensor:
    """dB of each frame of one clip; ``inner``: only of this many lines and columns in the middle."""
    error = (model.reconstruct(clip) - model.target(clip)).square()
    if inner is not None:
        top, left = (max(0, side - inner) // 2 for side in error.shape[-2:])
        error = error[..., top : top + inner, left : left + inner]
    return -10 * error.mean(dim=(0, 2, 3, 4)).log10()


@torch.no_grad()
def score(model: TAEHV, videos: list[Tensor]) -> float:
    """Mean over clips of the mean per-frame PSNR, dB."""
    return float(torch.stack([frame_psnr(model, center(video, 20)).mean() for video in videos]).mean())


def score_enlarged(videos: list[Tensor]) -> float:
    """The same figure of the clips themselves, shrunk to a quarter and enlarged again (bicubic): how hard they are."""
    scores = []
    for video in videos:
        frames = center(video, 20)[0]
        small = F.interpolate(frames, scale_factor=0.25, mode="bicubic", antialias=True)
        error = F.interpolate(small, size=frames.shape[-2:], mode="bicubic").clamp(0, 1) - frames
        scores.append(-10 * error.square().mean(dim=(1, 2, 3)).log10().mean())
    return float(torch.stack(scores).mean())


@torch.no_grad()
def score_elsewhere(model: TAEHV, videos: list[Tensor], latents: int = 5) -> str:
    """dB of the same pixels at other places: lower where the training clips were too short, or their crops too small.

    By latent: the clips end at the same frame and begin earlier and earlier. By side: the same center 64x64 in larger
    and larger pictures, because a network that was trained on small crops relies on the zeros around them.
    """
    each = model.spec.time_factor
    latents = min(latents, max(map(len, videos)) // each)
    clips = [center(video, each * latents) for video in videos if len(video) >= each * latents]
    large = [video for video in videos if min(video.shape[-2:]) >= 256] or videos
    by_latent = [
        torch.stack([frame_psnr(model, clip[:, -each * count :])[-each:].mean() for clip in clips]).mean()
        for count in range(2, latents + 1)
    ]
    by_side = [
        torch.stack([frame_psnr(model, center(video, 12, side), inner=64).mean() for video in large]).mean()
        for side in (64, 128, 192, 256)
    ]
    words = [" ".join(f"{mean:.2f}" for mean in means) for means in (by_latent, by_side)]
    return f"same frames as latent 2, 3, ...: {words[0]}; same center in 64, 128, 192, 256 lines: {words[1]}"


class Rig:
    """The network of one spec with its compiled round trip, for all candidates of that spec; drawn again for each."""

    def __init__(self, spec: VariantSpec, engine: Engine) -> None:
        self.engine = engine
        self.model = TAEHV.of(spec).to(engine.device, memory_format=torch.channels_last)
        self.model.folded_training = True
        self.round_trip: Callable[[Tensor], Tensor] = lambda frames: self.model.decode(self.model.encode(frames))
        if engine.device.type == "cuda":
            self.round_trip = torch.compile(self.round_trip, mode=BASE.compile_mode, dynamic=False)

    def draw(self, config: TrainConfig) -> TAEHV:
        fresh = TAEHV.of(self.model.spec)
        draw_weights(fresh, config)
        self.model.load_state_dict(fresh.state_dict())
        return self.model

    def add_gradients(self, frames: Tensor, kind: LossKind) -> Tensor:
        """One pass forward and back over frames NTCHW in [0, 1]; gives the loss."""
        with self.engine.autocast():
            decoded = self.round_trip(frames)
        loss = 10 * reconstruction_loss(decoded, self.model.target(frames), kind)
        self.engine.backward(loss)
        return loss

    def compile(self, shapes: list[tuple[int, int, int]], kind: LossKind) -> None:
        """Three passes over gray clips of each shape, for nothing: they compile, warm up and record CUDA graphs. This
        needs no turn, and the clock does not run yet."""
        for count, num_frames, size in shapes:
            gray = torch.full((count, num_frames, 3, size, size), 0.5, device=self.engine.device)
            for _ in range(3):
                self.add_gradients(gray, kind)
                self.engine.discard_gradients()


def run(
    rig: Rig,
    name: str,
    config: TrainConfig,
    options: dict[str, Any],
    train: list[Tensor],
    val: list[Tensor],
    *,
    seconds: float | None,
    weights: Path | None,
) -> dict[str, Any]:
    model, kind = rig.draw(config), config.reconstruction_loss_type
    optimizer_set = optimizers_of(model, config, options)
    average = WeightAverage(model, decay=config.ema_decay)
    crops = Crops(train, config, options)
    rig.engine.prepare(model, optimizer_set)
    shapes = read_shapes(options.get("shapes"), config)
    rig.compile([shape for _, shape in shapes], kind)
    curve: list[tuple[int, float, float]] = []
    trained, step, last = 0.0, 0, False
    with gpu_turn(name):
        while not last:
            started = time.perf_counter()
            progress = step if seconds is None else int(trained / seconds * config.max_train_steps)
            frames = crops.batch(*next(shape for end, shape in shapes if progress < end * config.max_train_steps))
            optimizer_set.set_rates(learning_rate_factor(min(progress, config.max_train_steps - 1), config))
            loss = rig.add_gradients(frames, kind)
            result = rig.engine.finish_step(max_grad_norm=config.max_grad_norm)
            average.update(model)
            step, trained = step + 1, trained + time.perf_counter() - started
            last = step == config.max_train_steps if seconds is None else trained >= seconds
            if last or step % 1000 == 0:
                with average.swapped_into(model):
                    psnr = score(model, val)
                curve.append((step, trained, psnr))
                raw = f"(raw {score(model, val):.2f})"
                words = f"{psnr:.2f} dB {raw}, loss {loss:.4f}, gradient {result.gradient_norm:.3f}"
                print(f"{name}: step {step}, {trained:.0f} s, {words}", flush=True)
    with average.swapped_into(model):
        print(f"{name}: {score_elsewhere(model, val)}", flush=True)
        if weights is not None:
            save_model(model, weights, overwrite=True)
    return {"name": name, "curve": curve, "steps": step, "seconds": trained, "psnr": curve[-1][2]}


def read_shapes(words: str | None, config: TrainConfig) -> list[tuple[float, tuple[int, int, int]]]:
    """``0.8:16x12x128+0.2:4x12x256`` -> [(0.8, (16, 12, 128)), (inf, (4, 12, 256))]: until which share of the run a
    step takes how many clips of how many frames of which side."""
    if words is None:
        return [(math.inf, (config.train_batch_size, config.n_frames, config.height))]
    parts = [part.split(":") for part in words.split("+")]
    ends = [*itertools.accumulate(float(share) for share, _ in parts)]
    shapes = [tuple(map(int, shape.split("x"))) for _, shape in parts]
    return [*zip([*ends[:-1], math.inf], shapes, strict=True)]  # type: ignore[list-item]


def read_candidate(words: str, ideas: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``lr_scheduler=cosine,detail=2`` -> ({"lr_scheduler": "cosine"}, {"detail": 2}): settings, and ideas."""
    settings: dict[str, Any] = {}
    for key, value in (pair.split("=", 1) for pair in words.split(",") if pair):
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    tried = {key: settings.pop(key) for key in ideas if key in settings}
    if unknown := settings.keys() - FIELDS.keys():
        raise SystemExit(f"no idea and no setting: {', '.join(sorted(unknown))}; --help lists the ideas.")
    return settings, tried


def read_arguments() -> argparse.Namespace:
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
    parser.add_argument(
        "--save", type=Path, help="folder for the averaged weights of each candidate: 0.safetensors, ..."
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.save:
        make_output_folder(arguments.save, option="--save")
    if arguments.output:
        check_output_file(arguments.output, option="--output")
    return arguments


def main() -> None:
    arguments, began = read_arguments(), time.perf_counter()
    # Beyond its limit torch runs a new graph uncompiled. Each spec and clip shape has one here.
    torch._dynamo.config.cache_size_limit = 64
    candidates = [read_candidate(f"{arguments.set},{words}", IDEAS) for words in arguments.candidates]
    engine = Engine(BASE)
    device = engine.device
    train, val = ([video.to(device) for video in load_split(arguments.clips, split)] for split in ("train", "val"))
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    seconds = time.perf_counter() - began
    print(f"torch {torch.__version__}, {machine}; {len(train)} + {len(val)} files after {seconds:.0f} s", flush=True)
    if arguments.score:
        hard, easy = score_enlarged(val), score_enlarged(train)
        print(f"enlarged from a quarter: {hard:.2f} dB, training clips {easy:.2f} dB", flush=True)
    for weights in arguments.score:
        model = load_model(weights).to(device)
        print(f"{score(model, val):.2f} dB, on training clips {score(model, train):.2f} dB  {weights}", flush=True)
        print(score_elsewhere(model, val, latents=7), flush=True)
    if arguments.score:
        return
    results, rigs = [], {}
    for number, (name, (settings, options)) in enumerate(zip(arguments.candidates, candidates, strict=True)):
        if time.perf_counter() - began > arguments.budget_s:
            print(f"no time left for {name!r}")
            continue
        config = replace(BASE, max_train_steps=arguments.steps, **settings)
        rig = rigs[config.spec] = rigs.get(config.spec) or Rig(config.spec, engine)
        try:
            weights = arguments.save and arguments.save / f"{number}.safetensors"
            trained = run(
                rig, name or "scratch", config, options, train, val, seconds=arguments.seconds, weights=weights
            )
            results.append(trained)
        except torch.OutOfMemoryError as fault:
            print(f"{name!r}: {fault}")
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1))
    for result in sorted(results, key=lambda r: -r["psnr"]):
        print(f"{result['psnr']:6.2f} dB  {result['steps']:6d} steps  {result['seconds']:6.1f} s  {result['name']}")


if __name__ == "__main__":
    main()
