"""Does Seraena's correction survive at training sizes? The two normalisations, with discriminators that have learned.

A discriminator is trained on real frames against the same frames with a fault, then asked, at several sizes, for the
standard deviation of its correction in both modes (1 is full strength, 0 is silence). Two faults: a fifth of the
contrast, which it learns in some dozens of steps, and a slight blur, which it does not learn in so few: there a good
normalisation stays quiet, for what it would amplify is noise.

  python benchmarks/seraena_normalisation.py --clips FOLDER_OF_VIDEOS [--steps 60]

FOLDER_OF_VIDEOS holds videos of at least 480x720 among others.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from pathlib import Path

import av
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyvae.losses.seraena import Seraena
from tinyvae.losses.seraena.discriminator import make_correction
from tinyvae.models.variants import get_spec

SPEC = get_spec("taecvx")  # 1 frame: one latent, one decoded frame, padded to 4, which are one group
GROUP_FRAMES = 4
BATCH = 4
TRAINING_SIZE = (32, 32)
SIZES = ((32, 48), (128, 128), (256, 256), (480, 720))


def tenth_frames(folder: Path, min_height: int, min_width: int, limit: int) -> list[Tensor]:
    """The tenth frame of every large enough video: CHW in [0, 1]."""
    frames = []
    for path in sorted(folder.glob("*.mp4")):
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            if stream.height < min_height or stream.width < min_width or len(frames) == limit:
                continue
            for index, frame in enumerate(container.decode(stream)):
                if index == 9:
                    frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1) / 255)
                    break
    return frames


def crops(frames: list[Tensor], size: tuple[int, int], count: int, generator: torch.Generator) -> Tensor:
    """Random crops as one-frame videos [count, 1, 3, H, W]."""
    height, width = size
    taken = []
    for _ in range(count):
        frame = frames[int(torch.randint(len(frames), (1,), generator=generator))]
        top = int(torch.randint(frame.shape[1] - height + 1, (1,), generator=generator))
        left = int(torch.randint(frame.shape[2] - width + 1, (1,), generator=generator))
        taken.append(frame[:, top : top + height, left : left + width])
    return torch.stack(taken)[:, None]


def low_contrast(video_NTCHW: Tensor) -> Tensor:
    return 0.5 + 0.2 * (video_NTCHW - 0.5)


def blurred(video_NTCHW: Tensor) -> Tensor:
    flat = F.interpolate(F.avg_pool2d(video_NTCHW.flatten(0, 1), 2), scale_factor=2, mode="bilinear")
    return flat.unflatten(0, video_NTCHW.shape[:2])


def latents_of(video_NTCHW: Tensor) -> Tensor:
    """Latents [N, 1, 16, h, w] that describe the picture: brightness of the sixteen 2x2 cells of every patch."""
    grey = video_NTCHW.flatten(0, 1).mean(dim=1, keepdim=True)
    return F.pixel_unshuffle(F.avg_pool2d(grey, 2), 4)[:, None] * 4 - 2


def measure(frames: list[Tensor], fault: Callable[[Tensor], Tensor], steps: int, asked_at: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    seraena = Seraena(SPEC, 1, GROUP_FRAMES, buffer_mb=16, learning_rate=3e-3)
    for step in range(1, steps + 1):
        real = crops(frames, TRAINING_SIZE, BATCH, generator)
        result = seraena.step(real, fault(real), latents_of(real))
        if step not in asked_at:
            continue
        print(f"{fault.__name__}, {step} steps, discriminator loss {float(result.scalars['discriminator_loss']):.2f}")
        for size in SIZES:
            real = crops(frames, size, 1, torch.Generator().manual_seed(9))
            inputs = (seraena._groups(real), seraena._groups(fault(real)), latents_of(real)[:, 0])
            found = {
                mode: make_correction(seraena.discriminator, *inputs, mode)[1]
                for mode in ("golden", "size_independent")
            }
            stds = ", ".join(f"{mode} {float(scalars['correction_std']):.4f}" for mode, scalars in found.items())
            scores = "real {real_score:.2f}, fake {fake_score:.2f}".format(**found["golden"])
            print(f"  {size[0]}x{size[1]}: std {stds}; scores {scores}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads", flush=True)
    frames = tenth_frames(arguments.clips, 480, 720, limit=40)
    assert frames, "no video is large enough"
    print(f"{len(frames)} frames of at least 480x720", flush=True)
    for fault in (low_contrast, blurred):
        measure(frames, fault, arguments.steps, (arguments.steps // 4, arguments.steps))


if __name__ == "__main__":
    main()
