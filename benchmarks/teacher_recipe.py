"""The recipe of ``h100`` on one GPU: whole runs in frames per second, and a step's time by parts.

    python benchmarks/teacher_recipe.py [runs] [parts] [--steps 40] [--work FOLDER]

It makes films of 480x720, a CogVideoX teacher of real size with random weights, a student, and (`tinyvae latents`) a
latent store. ``runs``: `tinyvae train h100` on 2 clips of 16 x 480x720 a step with Seraena from the first step, live
teacher and store in turn. ``parts``: teacher, student, LPIPS, Seraena, optimizer and data one by one, medians. Needs
diffusers and LPIPS weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from tinyvae import TAEHV, save_model
from tinyvae.config import TrainConfig, load_preset
from tinyvae.data.sample_clips import render_clip
from tinyvae.losses.distances import latent_loss, reconstruction_loss
from tinyvae.losses.perceptual import perceptual_loss
from tinyvae.training.build import build_model, build_task
from tinyvae.training.clips import open_data
from tinyvae.training.engine import Engine
from tinyvae.training.first_weights import initialize_he
from tinyvae.training.optim import WeightAverage, make_optimizers
from tinyvae.video.write import VideoWriter

FRAMES, HEIGHT, WIDTH, CLIPS = 16, 480, 720, 2


def prepare(work: Path) -> None:
    """Films, teacher and student; nothing where they are there."""
    (work / "clips").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(make_film, [work / "clips" / f"clip_{number:02}.mp4" for number in range(32)]))
    if not (work / "teacher").exists():
        from diffusers import AutoencoderKLCogVideoX

        torch.manual_seed(0)
        AutoencoderKLCogVideoX(scaling_factor=1.15258426).to(torch.bfloat16).save_pretrained(work / "teacher")
    if not (work / "student.safetensors").exists():
        model = TAEHV("taecvx")
        initialize_he(model, seed=0)
        save_model(model, work / "student.safetensors")


def make_film(file: Path) -> None:
    if not file.exists():
        torch.set_num_threads(1)
        small = render_clip(int(file.stem[-2:]), height=HEIGHT // 2, width=WIDTH // 2, frames=49, seed=0)
        frames = F.interpolate(small.float(), scale_factor=2, mode="bilinear").round().to(torch.uint8)
        with VideoWriter(file, fps=24, width=WIDTH, height=HEIGHT) as writer:
            writer.write(frames)


def settings(work: Path, **changes: object) -> dict[str, object]:
    return {
        "data_root": work / "clips",
        "ref_vae_path": work / "teacher",
        "pretrained_model_path": work / "student.safetensors",
        "train_split": 0.9,
        "gradient_accumulation_steps": 1,
        "seraena_start": 0,
        "dataloader_num_workers": min(16, os.cpu_count() or 1),
        **changes,
    }


def start(verb: str, work: Path, *options: str, **changes: object) -> float:
    """Run `tinyvae VERB h100`; the seconds that it took."""
    words = [str(word) for key, value in settings(work, **changes).items() for word in (f"--{key}", value)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    command = [sys.executable, "-m", "tinyvae", verb, "h100", *words, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\ntinyvae {verb} h100 failed.")
    return time.perf_counter() - began


def time_run(name: str, work: Path, steps: int, **changes: object) -> None:
    """Frames per second of the log lines, without the first half, and the memory of a run."""
    folder = Path(tempfile.mkdtemp(dir=work)) / "run"
    quick = {
        "max_train_steps": steps,
        "lr_warmup_steps": 1,
        "log_every": 5,
        "validation_steps": 0,
        "report": "false",
        "early_stopping_patience": 0,
    }
    seconds = start("train", work, output_dir=folder, checkpointing_steps=0, report_to="none", **quick, **changes)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["train/frames_per_second"] for line in lines if "train/frames_per_second" in line]
    late = speeds[len(speeds) // 2 :]
    memory = max(line.get("train/gpu_memory_gb", 0) for line in lines)
    print(f"{name:44s} {statistics.median(late):7.1f} frames/s ({min(late):.0f} to {max(late):.0f}), "
          f"{memory:.1f} GiB, command {seconds:.0f} s", flush=True)  # fmt: skip


def time_part(name: str, work: Callable[[], object], repeats: int = 9) -> None:
    """Median milliseconds, and the memory above what was there before."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"{name:44s} {statistics.median(times):7.1f} ms, {peak:.2f} GiB", flush=True)


def time_parts(work: Path) -> None:
    """The parts of a step of the run with a live teacher."""
    changes = settings(work, ref_vae_path=str(work / "teacher"), use_ref_vae=True, output_dir=work / "parts")
    config: TrainConfig = replace(load_preset("h100"), **changes)  # type: ignore[arg-type]
    engine = Engine(config)
    data = open_data(config, engine, work, index_folder=work, keeps_verdicts=False)
    batches = iter(data.training_loader(engine, start_sample=0, start_step=0))
    batch = next(batches)
    began = time.perf_counter()
    for _ in range(60):
        next(batches)
    print(f"{'data: loader alone':44s} {60 * CLIPS * FRAMES / (time.perf_counter() - began):7.0f} frames/s")
    batches.close()
    model = build_model(config).to(engine.device)
    optimizers = make_optimizers(model, config)
    engine.prepare(model, optimizers)
    task = build_task(config, engine, model)
    average = WeightAverage(model, decay=config.ema_decay)
    time_part("data: bytes to the model's input", lambda: batch.model_input(engine.device))
    frames = batch.model_input(engine.device)
    target = model.target(frames)
    assert task.teacher is not None and task.lpips is not None and task.seraena is not None
    teacher, lpips, seraena = task.teacher, task.lpips, task.seraena
    time_part("teacher", lambda: teacher.encode(target))
    taught = teacher.encode(target)

    def student() -> None:
        with engine.autocast():
            decoded, latents, second = task._forward(frames, taught)
        losses = [reconstruction_loss(decoded, target, "mse"), reconstruction_loss(second, target, "mse")]
        engine.backward(sum([*losses, latent_loss(latents, taught)]))

    time_part("student: encode, two decodes, backward", student)

    student()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def optimize() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        engine.finish_step(max_grad_norm=1.0)
        average.update(model)

    time_part("optimizer, norm and average", optimize)
    decoded = (target + 0.05 * torch.randn_like(target)).requires_grad_()
    time_part("LPIPS, 4 frames of each clip", lambda: perceptual_loss(lpips, decoded, target, 4).backward())
    step = 0

    def correct() -> None:
        nonlocal step
        seraena.begin_step(step)
        seraena.step(target, decoded, taught)
        step += 1

    time_part("Seraena", correct)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["runs", "parts"], help="runs, parts")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tinyvae-teacher-recipe")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - {"runs", "parts"}:
        parser.error(f"{', '.join(sorted(unknown))}: this is neither runs nor parts.")
    work: Path = arguments.work
    prepare(work)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {os.cpu_count()} cores", flush=True)
    if "runs" in arguments.what:
        time_run("h100 as shipped, live teacher", work, arguments.steps)
        seconds = start("latents", work, "--clips", "48", "--output", str(work / "latents"))
        print(f"{'tinyvae latents, 48 clips':44s} {seconds:7.1f} s", flush=True)
        time_run("h100 with a latent store", work, 2 * arguments.steps, latent_store=work / "latents")
        plain = {"compile_model": "false"}
        time_run(
            "h100 with a latent store, not compiled", work, arguments.steps, latent_store=work / "latents", **plain
        )
    if "parts" in arguments.what:
        time_parts(work)


if __name__ == "__main__":
    main()
