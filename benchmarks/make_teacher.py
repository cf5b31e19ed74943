"""Train a small teacher: a real video VAE of diffusers, narrowed, from fresh weights on one GPU in a few minutes.

The released teachers cannot be had everywhere. Distillation is proven on teachers of the same classes that anyone can
make again. Their latents are normalized by their own statistics, as released ones are.

    python benchmarks/make_teacher.py cogvideox --clips DIR --seconds 460 --output teacher_cogvideox

``DIR`` holds annotations.json with train and val clips. Prints the PSNR of the teacher's round trip on the validation
clips (centre 256x256; of 20 frames the first 17, which both families take) and writes a diffusers folder.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from scratch_search import load_split
from torch import Tensor

FAMILIES: dict[str, dict[str, Any]] = {
    "cogvideox": {"block_out_channels": (48, 96, 96, 192), "layers_per_block": 2, "norm_num_groups": 16},
    "wan": {"base_dim": 40},
}
NUM_FRAMES = 9  # 1 + 4k: what Wan takes; CogVideoX takes any
KL_WEIGHT = 1e-6


def make_vae(family: str) -> Any:
    import diffusers

    torch.manual_seed(0)
    kind = {"cogvideox": diffusers.AutoencoderKLCogVideoX, "wan": diffusers.AutoencoderKLWan}[family]
    return kind(**FAMILIES[family]).cuda()


def random_crops(videos: list[Tensor], batch_size: int, size: int, generator: torch.Generator) -> Tensor:
    """float NCTHW in [-1, 1] of random files, start frames, places and mirrorings; ``videos`` are uint8 TCHW."""
    usable = [video for video in videos if len(video) >= NUM_FRAMES and min(video.shape[2:]) >= size]
    clips = []
    for number in torch.randint(len(usable), (batch_size,), generator=generator).tolist():
        video = usable[number]
        limits = (len(video) - NUM_FRAMES, video.shape[2] - size, video.shape[3] - size)
        first, top, left = (int(torch.randint(limit + 1, (1,), generator=generator)) for limit in limits)
        clip = video[first : first + NUM_FRAMES, :, top : top + size, left : left + size]
        clips.append(clip.flip(-1) if torch.rand((), generator=generator) < 0.5 else clip)
    return torch.stack(clips).transpose(1, 2).float().div_(127.5).sub_(1)


def validation_clips(videos: list[Tensor]) -> list[Tensor]:
    """float 1CTHW in [-1, 1]: of 20 frames in the middle 256x256 of every file the 17 that both families take."""
    clips = []
    for video in videos:
        height, width = (min(256, side // 8 * 8) for side in video.shape[-2:])
        top, left, first = (video.shape[2] - height) // 2, (video.shape[3] - width) // 2, (len(video) - 20) // 2
        clip = video[first : first + 17, :, top : top + height, left : left + width]
        clips.append(clip.transpose(0, 1)[None].float().div(127.5).sub(1))
    return clips


@torch.no_grad()
def score(vae: Any, clips: list[Tensor]) -> float:
    """Mean over clips of the mean per-frame PSNR of the round trip, dB, pixels in [0, 1]."""
    values = []
    for clip in clips:
        with torch.autocast("cuda", torch.bfloat16):
            decoded = vae.decode(vae.encode(clip).latent_dist.mode()).sample.float().clamp(-1, 1)
        error = ((decoded - clip) / 2).square().mean(dim=(0, 1, 3, 4))
        values.append((-10 * error.log10()).mean())
    return float(torch.stack(values).mean())


@torch.no_grad()
def latent_statistics(vae: Any, videos: list[Tensor]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over training crops."""
    generator = torch.Generator().manual_seed(1)
    latents = []
    for _ in range(8):
        with torch.autocast("cuda", torch.bfloat16):
            latents.append(vae.encode(random_crops(videos, 16, 128, generator)).latent_dist.mode().float())
    columns = torch.cat(latents).transpose(0, 1).flatten(1)
    return columns.mean(dim=1).tolist(), columns.std(dim=1).tolist()


def train(vae: Any, videos: list[Tensor], *, seconds: float, batch_size: int, size: int, learning_rate: float) -> Any:
    """Train for ``seconds``; the rate falls in a line to zero. Returns the VAE with averaged weights."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=True)
    average = torch.optim.swa_utils.AveragedModel(vae, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998))
    generator = torch.Generator().manual_seed(0)
    began, step, share = time.perf_counter(), 0, 0.0
    while share < 1:
        share = min(1.0, (time.perf_counter() - began) / seconds)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 100) * (1 - share)
        frames = random_crops(videos, batch_size, size, generator)
        with torch.autocast("cuda", torch.bfloat16):
            latents = vae.encode(frames).latent_dist
            decoded = vae.decode(latents.sample()).sample
        error = decoded.float() - frames
        loss = error.square().mean() + 0.02 * error.abs().mean() + KL_WEIGHT * latents.kl().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(vae)
        step += 1
        if step % 200 == 0:
            psnr = float(-10 * (error.detach() / 2).square().mean().log10())
            print(f"  step {step}, {time.perf_counter() - began:.0f} s, {psnr:.2f} dB on the batch", flush=True)
    print(f"  {step} steps in {time.perf_counter() - began:.0f} s")
    return average.module


def save(vae: Any, folder: Path, family: str, statistics: tuple[list[float], list[float]]) -> None:
    """A diffusers folder in bfloat16, with the latents' own statistics."""
    mean, std = statistics
    if family == "wan":
        vae.register_to_config(latents_mean=mean, latents_std=std)
    else:  # CogVideoX has one factor and no mean
        root_mean_square = sum(m * m + s * s for m, s in zip(mean, std, strict=True)) / len(mean)
        vae.register_to_config(scaling_factor=root_mean_square**-0.5)
    vae.to(torch.bfloat16).save_pretrained(folder, max_shard_size="15MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--size", type=int, default=128, help="height and width of the training crops")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    train_videos, val_videos = ([v.cuda() for v in load_split(arguments.clips, name)] for name in ("train", "val"))
    vae = make_vae(arguments.family)
    size_M = sum(parameter.numel() for parameter in vae.parameters()) / 1e6
    print(f"{arguments.family}: {size_M:.1f} M parameters, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    vae = train(
        vae,
        train_videos,
        seconds=arguments.seconds,
        batch_size=arguments.batch_size,
        size=arguments.size,
        learning_rate=arguments.learning_rate,
    )
    clips = validation_clips(val_videos)
    figures = {"validation": score(vae, clips)}
    figures["training"] = score(vae, validation_clips(train_videos[:20]))
    save(vae, arguments.output, arguments.family, latent_statistics(vae, train_videos))
    (arguments.output / "figures.json").write_text(json.dumps(figures))
    print(f"{arguments.family}: " + ", ".join(f"{value:.2f} dB on {name} clips" for name, value in figures.items()))


if __name__ == "__main__":
    main()
