"""Train a small teacher: a real video VAE of diffusers, narrowed, from fresh weights on one GPU in a few minutes.

The released teachers cannot be had everywhere. Distillation is proven on teachers of the same classes that anyone can
make again: 16 latent channels, 4x8x8, latents normalized by their own statistics. On one H200, with diffusers and PyAV
installed:

    python benchmarks/make_teacher.py wan --clips DIR --seconds 380 --output $OUT/teacher_wan         # about 8 minutes
    python benchmarks/make_teacher.py wan cogvideox --clips DIR --seconds 225 --output $OUT/teachers  # 9 to 10 minutes

``DIR`` holds annotations.json with train and val clips. ``--seconds`` counts the steps of training alone, and the
learning rates reach zero with it. Imports, decoding and compilation come before (about 80 s where nothing was compiled
yet), the figures after. Several families have a process each, which writes the folder ``$OUT/teachers/FAMILY``: they
get ready side by side and take turns to train (`turns.py`), so both take little more than the sum of their seconds.
``--steps 200`` instead of ``--seconds`` tells in two minutes whether all compiles here, and the time of a step.

The script writes a diffusers folder (bfloat16, files of at most 16 MB) with figures.json. ``validation_db`` and
``training_db`` are PSNR of the round trip of 20 clips each (center 256x256; of 20 frames the 17 that both families
take), as `tinyvae` loads the folder. ``seconds`` is the time of the steps alone. ``compile_s`` (until a first step had
run, on trial) and ``waited_s`` (for the turn) are not part of it; in folders made before 2026-11-18 the first is called
``first_step_s`` and is part of ``seconds``.

    python benchmarks/make_teacher.py wan cogvideox --clips DIR --device cpu --steps 4 --batch_size 2 --size 32 \\
        --settings '{"wan": {"base_dim": 8}, "cogvideox": {"block_out_channels": [16, 16, 16, 32]}}' \\
        --max_clips 2 --output /tmp/teachers  # a minute, for a look; one family takes its settings alone
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from scratch_search import center, detail_of, detail_table, load_split
from torch import Tensor, nn
from turns import gpu_turn, side_by_side
from whole_clips import decode_whole, encode_whole, whole_clips

from tinyvae.files import make_output_folder
from tinyvae.teachers import Teacher, load_teacher
from tinyvae.training.optim import Muon, OptimizerSet, WeightAverage

CLASSES = {"cogvideox": "AutoencoderKLCogVideoX", "wan": "AutoencoderKLWan"}
# Cost of a step of 144 frames of 128x128, counted by FlopCounterMode. The full-size blocks of 3x3x3 convs are dear.
#   CogVideoX  (48, 96, 96, 192) x 2   24.3 M  21.3 TFLOP   Wan  40 x (1, 2, 4, 4) x 2  22.2 M  17.1 TFLOP  first try
#   CogVideoX  (32, 64, 128, 224) x 1  23.4 M   9.2 TFLOP   Wan  32 x (1, 2, 4, 7) x 1  23.3 M   8.0 TFLOP  chosen
SETTINGS: dict[str, dict[str, Any]] = {
    "cogvideox": {"block_out_channels": (32, 64, 128, 224), "layers_per_block": 1, "norm_num_groups": 16},
    "wan": {"base_dim": 32, "dim_mult": [1, 2, 4, 7], "num_res_blocks": 1},
}
NUM_FRAMES, BATCH_SIZE = 17, 8  # trained on 9 frames, both families lose about 4 dB in the frames after those
CANDIDATES = 4  # places of a crop: half a dB for `scratch` after 1,000 steps (docs/results.md)
FIRST_LOG_VARIANCE = -7.0  # a deviation of 0.03: with diffusers' first weights the noise is as large as the latents
QUIET_BRANCH = 0.03  # first size of the last conv of a residual branch; 1: as loud as any other conv
KL_WEIGHT, L1_WEIGHT = 1e-5, 0.02
LEARNING_RATE, MUON_LEARNING_RATE, WARMUP_STEPS, EMA_DECAY = 1e-3, 0.004, 50, 0.95


def make_vae(family: str, settings: dict[str, Any], *, seed: int) -> Any:
    """A VAE whose residual branches begin quiet and whose norms begin plain."""
    torch.manual_seed(seed)
    vae = getattr(diffusers, CLASSES[family])(**SETTINGS[family] | settings)
    for name, module in vae.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            nn.init.zeros_(module.bias)
        elif name.endswith((".conv_y", ".conv_b")):  # scale and shift by the latents, behind a norm of CogVideoX
            nn.init.zeros_(module.conv.weight)
            nn.init.constant_(module.conv.bias, 1.0 if name.endswith("y") else 0.0)
    for conv in branch_ends(vae):
        conv.weight.data.mul_(QUIET_BRANCH)
    # The rows that make the variance begin as a constant; Wan has one more 1x1 conv on the way.
    moments = vae.encoder.conv_out.conv if vae.quant_conv is None else vae.quant_conv
    half = moments.out_channels // 2
    moments.weight.data[half:] = 0
    moments.bias.data[half:] = FIRST_LOG_VARIANCE
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}  # `vae.to` can set one of them only
    for parameter in vae.parameters():
        if parameter.ndim in formats:
            parameter.data = parameter.data.to(memory_format=formats[parameter.ndim])
    return vae


def branch_ends(vae: Any) -> Iterator[nn.Conv2d | nn.Conv3d]:
    """The last conv of every residual branch."""
    for name, module in vae.named_modules():
        if name.endswith(".conv2"):  # CogVideoX wraps the conv that pads in time
            yield module if isinstance(module, nn.Conv3d) else module.conv
        elif name.endswith(".proj"):  # of Wan's attention
            yield module


def make_optimizers(vae: Any) -> OptimizerSet:
    """Muon for the convs inside, AdamW for the first, the last, norms, biases and what norms hold."""
    outside = ("encoder.conv_in.", "decoder.conv_out.")
    inner = [
        parameter
        for name, parameter in vae.named_parameters()
        if parameter.ndim >= 4 and "norm" not in name and not name.startswith(outside)
    ]
    chosen = {id(parameter) for parameter in inner}
    plain = [parameter for parameter in vae.parameters() if id(parameter) not in chosen]
    # Not fused: the fused step refuses gradients whose strides differ from the weight's, as 1x1 convs' can.
    adamw = torch.optim.AdamW(plain, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return OptimizerSet([adamw, Muon(inner, lr=MUON_LEARNING_RATE, momentum=0.95)])


def random_crops(
    videos: list[Tensor],
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    candidates: int = 1,
    details: list[Tensor] | None = None,
) -> Tensor:
    """uint8 NCTHW of random files, start frames, places and mirrorings; ``videos`` are uint8 TCHW. ``shape``: number
    of crops, frames of each, height and width. Of several ``candidates`` for a place the one with the most detail is
    taken, as `detail_table` of each video (``details``) says."""
    batch_size, num_frames, size = shape
    usable = [n for n, video in enumerate(videos) if len(video) >= num_frames and min(video.shape[2:]) >= size]
    clips = []
    for number in torch.randint(len(usable), (batch_size,), generator=generator).tolist():
        video = videos[usable[number]]
        limits = (len(video) - num_frames, video.shape[2] - size, video.shape[3] - size)
        draws = [
            [int(torch.randint(limit + 1, (1,), generator=generator)) for limit in limits] for _ in range(candidates)
        ]
        first, top, left = draws[0]
        if candidates > 1:
            assert details is not None
            table = details[usable[number]]
            _, top, left = max(draws, key=lambda draw: detail_of(table, draw[1], draw[2], size))
        clip = video[first : first + num_frames, :, top : top + size, left : left + size]
        clips.append(clip.flip(-1) if torch.rand((), generator=generator) < 0.5 else clip)
    return torch.stack(clips).transpose(1, 2)


def make_losses(vae: Any, device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The function (uint8 crops, noise like their latents) -> (loss, mean squared error of pixels in [0, 1])."""

    def losses(crops: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        frames = (crops.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last_3d)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            mean, log_variance = encode_whole(vae, frames)
            mean, log_variance = mean.float(), log_variance.float()
            decoded = decode_whole(vae, mean + noise * torch.exp(log_variance / 2))
        error = decoded.float() - frames
        squared = error.square().mean()
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        return squared + L1_WEIGHT * error.abs().mean() + KL_WEIGHT * kl, squared.detach() / 4

    return losses


def compile_or_not(losses: Any, crops: Tensor, noise: Tensor) -> Any:
    """``losses`` compiled, where that works here (one step is tried); on a CPU it would take minutes."""
    if not crops.is_cuda:
        return losses
    compiled = torch.compile(losses, dynamic=False)
    try:
        compiled(crops, noise)[0].backward()
        torch.cuda.synchronize()
    except Exception as fault:  # noqa: BLE001  # compilers fail in many ways; the run goes on slower, and says why
        print(f"  torch.compile fails here, so steps take longer: {type(fault).__name__}: {str(fault)[:400]}")
        torch._dynamo.reset()
        return losses
    return compiled


def train(vae: Any, videos: list[Tensor], family: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train by the clock or by steps; rates rise for WARMUP_STEPS and fall in a line to zero. Leaves the averaged
    weights in ``vae``. The clock runs while this process has its turn on the GPU; compilation needs none."""
    asked = time.perf_counter()
    device = next(vae.parameters()).device
    optimizers = make_optimizers(vae)
    average = WeightAverage(vae, decay=EMA_DECAY)
    generator = torch.Generator().manual_seed(arguments.seed)
    shape = batch_size, num_frames, size = arguments.batch_size, arguments.frames, arguments.size
    latents = torch.empty(batch_size, 16, 1 + num_frames // 4, size // 8, size // 8, device=device)
    details = [detail_table(video) for video in videos]
    draw = partial(random_crops, videos, shape, generator, candidates=CANDIDATES, details=details)
    losses = compile_or_not(make_losses(vae, device), draw(), torch.randn_like(latents))
    optimizers.zero_grad()
    step, share, curve, compile_s = 0, 0.0, [], time.perf_counter() - asked
    print(f"  the first step was ready after {compile_s:.0f} s", flush=True)
    with gpu_turn(family) as waited_s:
        began = time.perf_counter()
        while share < 1:
            optimizers.set_rates(min(1.0, (step + 1) / WARMUP_STEPS) * (1 - share))
            loss, error = losses(draw(), torch.randn_like(latents))
            loss.backward()
            nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            for optimizer in optimizers.optimizers:
                optimizer.step()
            optimizers.zero_grad()
            average.update(vae)
            step += 1
            if step % arguments.log_steps == 0:
                curve.append((step, time.perf_counter() - began, float(-10 * error.log10())))
                print("  step {}, {:.0f} s, {:.2f} dB on the batch".format(*curve[-1]), flush=True)
                if curve[-1][2] != curve[-1][2]:
                    raise SystemExit("the loss is not a number; take smaller rates (at the top of this file).")
            elapsed = time.perf_counter() - began
            share = step / arguments.steps if arguments.steps else min(1.0, elapsed / arguments.seconds)
        torch._foreach_copy_([parameter.data for parameter in vae.parameters()], list(average.values.values()))
    seconds = time.perf_counter() - began
    print(f"  {step} steps in {seconds:.0f} s, {seconds / step * 1e3:.1f} ms a step", flush=True)
    return {"steps": step, "seconds": seconds, "compile_s": compile_s, "waited_s": waited_s, "curve": curve}


@torch.no_grad()
def normalize_latents(vae: Any, videos: list[Tensor], family: str, arguments: argparse.Namespace) -> None:
    """Write the statistics of the latents of training crops into the VAE's config."""
    generator, means = torch.Generator().manual_seed(arguments.seed + 1), []
    for _ in range(8):
        crops = random_crops(videos, (arguments.batch_size, arguments.frames, arguments.size), generator)
        means.append(vae.encode(crops.float() / 127.5 - 1).latent_dist.mode())
    columns = torch.cat(means).transpose(0, 1).flatten(1)
    if family == "wan":
        vae.register_to_config(latents_mean=columns.mean(dim=1).tolist(), latents_std=columns.std(dim=1).tolist())
    else:  # CogVideoX has one factor and no mean
        vae.register_to_config(scaling_factor=float(columns.square().mean().rsqrt()))


def frame_psnr(decoded_NTCHW: Tensor, frames_NTCHW: Tensor) -> Tensor:
    """PSNR of each frame, dB, pixels in [0, 1]: NT."""
    return -10 * (decoded_NTCHW.float() - frames_NTCHW).square().mean(dim=(2, 3, 4)).clamp(min=1e-10).log10()


def score(teacher: Teacher, videos: list[Tensor]) -> float:
    """Mean over clips of the mean PSNR of their frames, of the round trip. Of 20 frames in the middle, 256x256, the 17
    that both families take."""
    clips = (center(video, 20)[:, :NUM_FRAMES] for video in videos)
    return float(torch.stack([frame_psnr(teacher.decode(teacher.encode(clip)), clip).mean() for clip in clips]).mean())


def make_teacher(family: str, arguments: argparse.Namespace) -> None:
    """Train one teacher, save it, and measure what was saved."""
    make_output_folder(arguments.output)
    diffusers.logging.set_verbosity_error()  # it warns of every change of precision
    device, began = torch.device(arguments.device), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 5  # of cuDNN's best guesses
    training, validation = ([v.to(device) for v in load_split(arguments.clips, name)] for name in ("train", "val"))
    vae = make_vae(family, arguments.settings, seed=arguments.seed).to(device)
    parameters = sum(parameter.numel() for parameter in vae.parameters())
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{family}: {parameters / 1e6:.1f} M parameters, torch {torch.__version__}, {name}")
    print(f"  {len(training)} + {len(validation)} clips after {time.perf_counter() - began:.0f} s", flush=True)
    with whole_clips(in_two_parts=family == "cogvideox" and arguments.frames == 17):
        figures = train(vae, training, family, arguments)
    normalize_latents(vae, training, family, arguments)
    vae.to(torch.bfloat16).save_pretrained(arguments.output, max_shard_size="16MB")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = load_teacher(family, arguments.output, dtype=dtype, device=device)
    figures |= {"validation_db": score(teacher, validation[: arguments.max_clips])}
    figures |= {"training_db": score(teacher, training[:: len(training) // arguments.max_clips or 1])}
    figures |= {"parameters": parameters, "torch": torch.__version__, "seed": arguments.seed}
    figures["arguments"] = {key: str(value) for key, value in vars(arguments).items()}
    (arguments.output / "figures.json").write_text(json.dumps(figures, indent=1))
    words = ", ".join(f"{figures[f'{name}_db']:.2f} dB on {name} clips" for name in ("validation", "training"))
    print(f"{family}: {words}; {time.perf_counter() - began:.0f} s in all")


def make_side_by_side(arguments: argparse.Namespace) -> list[str]:
    """A process for each family. Prints their lines with the family's name as they come; gives the families that
    failed."""

    def make(family: str) -> bool:
        """Whether the family has its folder."""
        options = {**vars(arguments), "output": arguments.output / family}
        options["settings"] = json.dumps(arguments.settings.get(family, {}))
        words = [f"--{key}={value}" for key, value in options.items() if key != "families" and value is not None]
        command = [sys.executable, "-u", __file__, family, *words]
        to_here: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with subprocess.Popen(command, env=environment, **to_here) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"{family} | {line}", end="", flush=True)
        return process.returncode == 0

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(arguments.families)) as pool:
        environment = side_by_side(len(arguments.families), Path(folder))
        made = list(pool.map(make, arguments.families))
    return [family for family, good in zip(arguments.families, made, strict=True) if not good]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=CLASSES, help="several: one process and one folder for each")
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="the folder; of several families, its parent")
    parser.add_argument("--seconds", type=float, default=380, help="of training, without the compilation")
    parser.add_argument("--steps", type=int, help="end by steps instead")
    parser.add_argument("--frames", type=int, choices=(9, 17), default=NUM_FRAMES, help="of a training clip")
    parser.add_argument("--batch_size", type=int, default=BATCH_SIZE)
    parser.add_argument("--size", type=int, default=128, help="height and width of the training crops")
    parser.add_argument("--seed", type=int, default=0)
    settings = "JSON: what differs in the VAE's config; of several families by family: {'wan': {...}}"
    parser.add_argument("--settings", type=json.loads, default={}, help=settings)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--log_steps", type=int, default=200)
    parser.add_argument("--max_clips", type=int, default=20, help="of each figure")
    arguments = parser.parse_args()
    families = arguments.families
    if len(set(families)) < len(families):
        parser.error("a family is named twice; each has one folder.")
    if len(families) > 1 and (unknown := arguments.settings.keys() - set(families)):
        parser.error(f"--settings of several families are by family, but it has {', '.join(sorted(unknown))}.")
    return arguments


def main() -> None:
    arguments = read_arguments()
    if len(arguments.families) == 1:
        make_teacher(arguments.families[0], arguments)
    elif failed := make_side_by_side(arguments):
        raise SystemExit(f"no teacher of {', '.join(failed)}: its lines say why.")


if __name__ == "__main__":
    main()
