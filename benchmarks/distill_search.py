"""Which settings bring a student nearest to its teacher? Short runs of many candidates on one GPU, clips in its memory.

Network, first weights, engine, optimizers, schedule and average are the shipped ones. The teacher (any diffusers folder
that tinyvae reads; `make_teacher.py` makes two) encodes ``--pool`` random crops once, so that steps are cheap. Three
figures count, each the mean PSNR of the frames of the center 256x256 of every validation clip (20 frames, of which
student and teacher share 17): the teacher's own round trip; the teacher's latents decoded by the student; the student's
latents decoded by the teacher. Each row has them for averaged and raw weights.

On one H200; a candidate takes its seconds and, where the network or the clip size is new, a minute of compilation:

    P="python benchmarks/distill_search.py --clips DIR --teacher teacher_wan"
    $P --seconds 40 "" train=decoder teacher_frames=5 features=0.1 consistency=0.1 reconstruction_loss_weight=2
    $P --seconds 40 reconstruction_loss_weight=2,round_trip_to=encoder small_first=64 freeze_encoder=0.33
    $P --seconds 40 optimizer=adamw,lr_scheduler=cosine activation=leaky_relu pretrained_model_path=scratch.safetensors
    $P --seconds 260 train=decoder train=encoder --output figures.json

An empty candidate is the base: both sides, each against the teacher alone. A long run sees a small pool many times:
give it ``--pool 16384`` (10 GB of the GPU's memory at 12 frames of 128x128).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from make_teacher import center_clips, frame_psnr, random_crops
from scratch_search import load_split, read_candidate
from torch import Tensor, nn

from tinyvae.config import TrainConfig, load_preset
from tinyvae.engines.eager import run_folded
from tinyvae.losses.distances import latent_loss, reconstruction_loss
from tinyvae.models.streaming import keep_frames
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec
from tinyvae.models.weights import load_model
from tinyvae.teachers import Teacher, find_teacher, load_teacher
from tinyvae.training.build import initialize_he
from tinyvae.training.engine import Engine
from tinyvae.training.optim import OptimizerSet, WeightAverage, learning_rate_factor, make_optimizers

BASE = replace(
    load_preset("scratch"),
    reconstruction_loss_weight=0.0,
    encoder_loss_weight=1.0,
    decoder_loss_weight=10.0,
    compile_mode="default",
)
FIRST_BLOCKS = 6  # layers of the student's decoder up to its last block of the latents' size
CLIPS_PER_CALL = 32


def idea(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class Ideas:
    """What a candidate can change besides the keys of the configuration."""

    train: Literal["both", "decoder", "encoder"] = idea("both", "both, decoder or encoder: the other is left out")
    round_trip_to: Literal["both", "encoder"] = idea(
        "both", "who learns from reconstruction_loss_weight: both, encoder"
    )
    teacher_frames: float = idea(0.0, "weight of the teacher's decoding as a second target of the decoder")
    features: float = idea(0.0, "weight of the teacher's features behind its middle block, through a 1x1 head")
    consistency: float = idea(0.0, "weight of the latents of decoded teacher latents against these latents")
    freeze_encoder: float = idea(0.0, "share of the run, at its end, in which the encoder rests")
    small_first: int = idea(0, "size of the crops in the first half of the run, with more clips in a batch")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Crops uint8 NTCHW with what the teacher makes of them: latents NTCHW fp32 and, where a candidate needs it, its
    decoding uint8 NTCHW."""

    frames: Tensor
    latents: Tensor
    decoded: Tensor | None

    def batch(self, size: int, generator: torch.Generator) -> Pool:
        chosen = torch.randint(len(self.frames), (size,), generator=generator).to(self.frames.device)
        decoded = None if self.decoded is None else self.decoded[chosen]
        return Pool(frames=self.frames[chosen], latents=self.latents[chosen], decoded=decoded)


class Rig:
    """The student of one spec with its two compiled sides, for all candidates of that spec; drawn anew for each."""

    def __init__(self, spec: VariantSpec, device: torch.device) -> None:
        self.model = TAEHV.of(spec).to(device, memory_format=torch.channels_last)
        self.model.folded_training = True
        self._first, self._rest = self.model.decoder[:FIRST_BLOCKS], self.model.decoder[FIRST_BLOCKS:]
        self.encode, self.decode = self.model.encode, self._decode
        if device.type == "cuda":
            self.encode, self.decode = (torch.compile(side, dynamic=False) for side in (self.encode, self.decode))

    def _decode(self, latents_NTCHW: Tensor) -> tuple[Tensor, Tensor]:
        """(frames NTCHW, features NTCHW of the latents' size)."""
        features, _ = run_folded(self._first, latents_NTCHW, None, checkpointing=False)
        raw, _ = run_folded(self._rest, features, None, checkpointing=False)
        kept = keep_frames(raw, first_index=0, num_latents=latents_NTCHW.shape[1], spec=self.model.spec)
        return kept, features

    def draw(self, config: TrainConfig) -> TAEHV:
        if config.pretrained_model_path is not None:  # of any variant with the same shapes: `scratch` makes taehv
            self.model.load_state_dict(load_model(config.pretrained_model_path, dtype=torch.float32).state_dict())
            return self.model
        fresh = TAEHV.of(self.model.spec)
        initialize_he(fresh, seed=config.seed)
        self.model.load_state_dict(fresh.state_dict())
        return self.model


class Lesson:
    """The teacher, its pools of crops by size, and what it reaches itself on the validation clips."""

    def __init__(
        self, teacher: Teacher, train: list[Tensor], val: list[Tensor], *, spec: VariantSpec, pool: int, decodes: bool
    ) -> None:
        self.teacher, self.spec, self._train, self._pool_size, self._decodes = teacher, spec, train, pool, decodes
        self._pools: dict[tuple[int, int], Pool] = {}
        self.clips = list(center_clips(val, num_frames=20))
        self.targets = [clip[:, : spec.aligned_frames(clip.shape[1])] for clip in self.clips]
        self.latents = [teacher.encode(target) for target in self.targets]
        decoded = [teacher.decode(latents) for latents in self.latents]
        self.psnr = mean_psnr(decoded, self.targets)

    def pool(self, size: int, num_frames: int) -> Pool:
        """The crops of a size and length; made when they are first asked for."""
        if (size, num_frames) not in self._pools:
            began, generator = time.perf_counter(), torch.Generator().manual_seed(size)
            count = min(CLIPS_PER_CALL, self._pool_size)
            parts = [self._part((count, num_frames, size), generator) for _ in range(-(-self._pool_size // count))]
            made = [torch.cat([getattr(part, name) for part in parts]).contiguous() for name in ("frames", "latents")]
            decoded = torch.cat([part.decoded for part in parts if part.decoded is not None]) if self._decodes else None
            self._pools[size, num_frames] = Pool(frames=made[0], latents=made[1], decoded=decoded)
            what = f"{len(made[0])} crops of {num_frames} x {size} x {size}"
            print(f"  the teacher saw {what} in {time.perf_counter() - began:.0f} s", flush=True)
        return self._pools[size, num_frames]

    def _part(self, shape: tuple[int, int, int], generator: torch.Generator) -> Pool:
        frames = random_crops(self._train, shape, generator).transpose(1, 2)
        latents = self.teacher.encode(frames[:, : self.spec.aligned_frames(shape[1])].float() / 255)
        decoded = (self.teacher.decode(latents) * 255).round().to(torch.uint8) if self._decodes else None
        return Pool(frames=frames, latents=latents, decoded=decoded)

    @torch.no_grad()
    def features(self, latents_NTCHW: Tensor) -> Tensor:
        """The teacher's features NTCHW behind its middle block, each channel with mean 0 and deviation 1."""
        vae = self.teacher._vae
        z = self.teacher.space.denormalize(latents_NTCHW).to(self.teacher.dtype).transpose(1, 2)
        if vae.post_quant_conv is None:  # CogVideoX, whose layers also return what they carry on
            made = vae.decoder.mid_block(vae.decoder.conv_in(z)[0], None, z)[0]
        else:
            made = vae.decoder.mid_block(vae.decoder.conv_in(vae.post_quant_conv(z)))
        std, mean = torch.std_mean(made.float(), dim=(0, 2, 3, 4), keepdim=True)
        return ((made - mean) / (std + 1e-6)).transpose(1, 2)

    @torch.no_grad()
    def examine(self, model: TAEHV) -> dict[str, float]:
        """PSNR of each way through the student, dB."""
        latents = [model.encode_video(clip) for clip in self.clips]
        ways = {
            "decoder": [model.decode_video(known) for known in self.latents],
            "encoder": [self.teacher.decode(made) for made in latents],
            "own": [model.decode_video(made) for made in latents],
        }
        return {way: mean_psnr(decoded, self.targets) for way, decoded in ways.items()}


def mean_psnr(decoded: list[Tensor], targets: list[Tensor]) -> float:
    each = [
        frame_psnr(made[:, : wanted.shape[1]], wanted).mean() for made, wanted in zip(decoded, targets, strict=True)
    ]
    return float(torch.stack(each).mean())


def losses(
    rig: Rig, lesson: Lesson, head: nn.Module | None, batch: Pool, config: TrainConfig, ideas: Ideas, *, learns: bool
) -> Tensor:
    """The weighted sum of a candidate's terms. ``learns``: whether the encoder does in this step."""
    frames = batch.frames.float() / 255
    target, total = rig.model.target(frames), torch.zeros((), device=frames.device)
    if ideas.train != "encoder":
        taught, features = rig.decode(batch.latents)
        total = total + config.decoder_loss_weight * reconstruction_loss(taught, target)
        if ideas.teacher_frames:
            assert batch.decoded is not None
            total = total + ideas.teacher_frames * reconstruction_loss(taught, batch.decoded.float() / 255)
        if head is not None:
            seen = head(features.flatten(0, 1)).unflatten(0, features.shape[:2])
            total = total + ideas.features * latent_loss(seen, lesson.features(batch.latents))
        if ideas.consistency:
            total = total + ideas.consistency * latent_loss(rig.encode(taught), batch.latents)
    if ideas.train != "decoder" and (learns or config.reconstruction_loss_weight):
        with torch.set_grad_enabled(learns):
            latents = rig.encode(frames)
        if learns:
            total = total + config.encoder_loss_weight * latent_loss(latents, batch.latents)
        if config.reconstruction_loss_weight:
            rig.model.decoder.requires_grad_(ideas.round_trip_to == "both")
            decoded, _ = rig.decode(latents)
            rig.model.decoder.requires_grad_(True)
            total = total + config.reconstruction_loss_weight * reconstruction_loss(decoded, target)
    return total


def run(
    rig: Rig, lesson: Lesson, engine: Engine, name: str, config: TrainConfig, ideas: Ideas, *, seconds: float | None
) -> dict[str, Any]:
    model, generator = rig.draw(config), torch.Generator().manual_seed(config.seed)
    optimizers, head = make_optimizers(model, config), None
    if ideas.features:
        channels = lesson.features(lesson.latents[0]).shape[2]
        head = nn.Conv2d(model.spec.decoder_channels[0], channels, 1).to(engine.device)
        optimizers = OptimizerSet([*optimizers.optimizers, torch.optim.AdamW(head.parameters(), lr=1e-3)])
    average = WeightAverage(model, decay=config.ema_decay)
    engine.prepare(model, optimizers)
    trained, timed, step, share, phase, rest = 0.0, 0, 0, 0.0, (0, False), 0
    while share < 1:
        size = ideas.small_first if ideas.small_first and share < 0.5 else config.height
        learns = share < 1 - ideas.freeze_encoder
        pool = lesson.pool(size, config.n_frames)
        if phase != (size, learns):
            phase, rest = (size, learns), 3  # steps that may compile are start-up
        started = time.perf_counter()
        batch = pool.batch(config.train_batch_size * config.height**2 // size**2, generator)
        progress = int(share * config.max_train_steps)  # by steps: the step itself
        optimizers.set_rates(learning_rate_factor(progress, config))
        with engine.autocast():
            total = losses(rig, lesson, head, batch, config, ideas, learns=learns)
        engine.backward(total)
        engine.finish_step(max_grad_norm=config.max_grad_norm)
        average.update(model)
        step += 1
        if rest:
            rest -= 1
        else:
            trained, timed = trained + time.perf_counter() - started, timed + 1
        share = step / config.max_train_steps if seconds is None else trained / seconds
    raw = lesson.examine(model)
    with average.swapped_into(model):
        averaged = lesson.examine(model)
    row = {"name": name, "teacher": lesson.psnr, **averaged, "raw": raw, "steps": step, "seconds": trained}
    row["step_ms"] = trained / max(1, timed) * 1e3
    print(as_line(row), flush=True)
    return row


def as_line(row: dict[str, Any]) -> str:
    """A row as a reader compares it: figures, gaps to the teacher, cost."""
    gaps = ", ".join(f"{way} {row[way]:.2f} ({row[way] - row['teacher']:+.2f})" for way in ("decoder", "encoder"))
    raw = ", ".join(f"{value:.2f}" for value in row["raw"].values())
    cost = f"{row['steps']} steps, {row['seconds']:.0f} s, {row['step_ms']:.1f} ms each"
    return f"teacher {row['teacher']:.2f} dB, {gaps}, own {row['own']:.2f}; raw {raw}; {cost}: {row['name']}"


def open_lesson(arguments: argparse.Namespace, device: torch.device) -> Lesson:
    found = find_teacher(arguments.teacher, None)
    spec = replace(BASE, variant=found.family.variant_candidates(found.geometry)[0]).spec
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = load_teacher(None, arguments.teacher, dtype=dtype, device=device, spec=spec)
    train, val = ([video.to(device) for video in load_split(arguments.clips, split)] for split in ("train", "val"))
    decodes = any("teacher_frames" in words for words in (arguments.set, *arguments.candidates))
    lesson = Lesson(teacher, train, val[: arguments.max_clips], spec=spec, pool=arguments.pool, decodes=decodes)
    print(f"{teacher.class_name} reaches {lesson.psnr:.2f} dB itself; its student is {spec.name}", flush=True)
    return lesson


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ideas = "; ".join(f"{each.name}: {each.metadata['meaning']}" for each in fields(Ideas))
    what = f"each key=value,...: what differs from the base. Keys of the configuration, or {ideas}"
    parser.add_argument("candidates", nargs="+", help=what)
    parser.add_argument("--clips", type=Path, required=True, help="folder with annotations.json: train and val clips")
    parser.add_argument("--teacher", type=Path, required=True, help="diffusers folder")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="end by training time; the schedule follows the clock")
    parser.add_argument("--set", default="", help="key=value,... for every candidate")
    parser.add_argument("--pool", type=int, default=4096, help="crops of each size that the teacher encodes")
    parser.add_argument("--max_clips", type=int, default=20, help="of validation")
    parser.add_argument("--budget_s", type=float, default=540, help="stop starting candidates after this")
    parser.add_argument("--output", type=Path, help="file for the rows, JSON")
    arguments = parser.parse_args()
    began = time.perf_counter()
    # Beyond its limit torch runs a new graph uncompiled. Each spec, clip size and kind of gradient has one here.
    torch._dynamo.config.cache_size_limit = 64
    engine = Engine(BASE if torch.cuda.is_available() else replace(BASE, mixed_precision="no"))
    lesson, rigs, rows = open_lesson(arguments, engine.device), {}, []
    for name in arguments.candidates:
        if time.perf_counter() - began > arguments.budget_s:
            print(f"no time left for {name!r}")
            continue
        changes: dict[str, Any] = read_candidate(arguments.set) | read_candidate(name)
        ideas_of = Ideas(**{each.name: changes.pop(each.name) for each in fields(Ideas) if each.name in changes})
        config = replace(BASE, variant=lesson.spec.name, max_train_steps=arguments.steps, **changes)
        if config.spec not in rigs:
            rigs[config.spec] = Rig(config.spec, engine.device)
        rows.append(run(rigs[config.spec], lesson, engine, name or "base", config, ideas_of, seconds=arguments.seconds))
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
