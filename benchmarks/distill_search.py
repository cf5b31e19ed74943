"""Which settings bring a student nearest to its teacher? Short runs of many candidates on one GPU, clips in its memory.

The base is the preset `distill`; network, first weights, engine, optimizers, schedule and average are the shipped ones.
The teacher (any diffusers folder of Wan's or CogVideoX's class; `make_teacher.py` makes two) encodes ``--pool`` random
crops once, so that steps are cheap. Three figures count, each the mean PSNR of 17 frames of the center 256x256 of every
validation clip: the teacher's own round trip; the teacher's latents decoded by the student; the student's latents
decoded by the teacher. Each row has them for averaged and raw weights, and by latent: of the first frame, then of the
frames of each further latent. A student that drifts with the time shows there at once.

On one H200:

    P="python benchmarks/distill_search.py --clips DIR --teacher teacher_wan --at_once 4 --output rows.json"
    $P --seconds 28 "" crop_candidates=1 train=decoder teacher_frames=5 features=0.1 consistency=0.1 latent_metric=1 \\
        picture_loss=20,picture_clips=2 freeze_encoder=0.33 small_first=64
    $P --seconds 28 optimizer=adamw,lr_scheduler=cosine activation=leaky_relu pretrained_model_path=scratch.safetensors
    $P --seconds 260 train=decoder train=encoder

An empty candidate is the base: both sides, each against the teacher alone. ``--at_once`` starts a process for each
candidate, this many together. One of them trains at a time (`turns.py`), so that the clock is fair: a training student
fills the GPU. The others meanwhile import, compile, wait or are examined. This process lets the teacher encode the
crops once, for all of them, into ``--pool_file``. A long run sees a small pool many times: give it ``--pool 16384``
(14 GB of the GPU's memory at 17 frames of 128x128). On a CPU, for a look:

    python benchmarks/distill_search.py "" crop_candidates=1 --clips DIR --teacher /tmp/teachers/wan --at_once 2 \\
        --steps 4 --pool 8 --max_clips 1 --set height=32,width=32,train_batch_size=2,model_width=0.25
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from distill_lesson import (
    Cut,
    Lesson,
    Pool,
    Wanted,
    by_latent,
    draw_pool,
    make_lesson,
    teacher_features,
    teacher_picture,
)
from scratch_search import load_split, read_candidate
from torch import Tensor, nn
from turns import gpu_turn, side_by_side

from tinyvae.config import TrainConfig, load_preset
from tinyvae.engines.eager import run_folded
from tinyvae.files import check_output_file
from tinyvae.losses.distances import latent_loss, reconstruction_loss
from tinyvae.models.streaming import keep_frames
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec
from tinyvae.models.weights import load_model
from tinyvae.teachers import Teacher, find_teacher, identify_teacher, load_teacher
from tinyvae.training.engine import Engine
from tinyvae.training.first_weights import draw_weights
from tinyvae.training.optim import OptimizerSet, WeightAverage, learning_rate_factor, make_optimizers

BASE = replace(load_preset("distill"), compile_mode="default")  # what ships, without CUDA graphs: terms come and go
FIRST_BLOCKS = 6  # layers of the student's decoder up to its last block of the latents' size
GO = "go\n"  # what a process of `--at_once` waits for: the crops are in the file


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
    latent_metric: float = idea(
        0.0, "share of the encoder's loss that weighs an error by what it does to the teacher's picture"
    )
    picture_loss: float = idea(0.0, "weight of the teacher's decoding of the student's latents against the frames")
    picture_clips: int = idea(2, "clips of a batch that picture_loss sees")
    freeze_encoder: float = idea(0.0, "share of the run, at its end, in which the encoder rests")
    small_first: int = idea(0, "size of the crops in the first half of the run, with more clips in a batch")

    def __post_init__(self) -> None:
        if unknown := {self.train, self.round_trip_to} - {"both", "decoder", "encoder"}:
            raise SystemExit(f"train and round_trip_to take both, decoder or encoder, not {', '.join(unknown)}.")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """``words``: as it was asked for."""

    words: str
    config: TrainConfig
    ideas: Ideas

    def phase(self, share: float) -> tuple[int, bool]:
        """(height of the crops, whether the encoder learns) at this share of the run."""
        small = self.ideas.small_first and share < 0.5
        return self.ideas.small_first if small else self.config.height, share < 1 - self.ideas.freeze_encoder

    def cut(self, share: float) -> Cut:
        """How the crops of this share of the run are cut."""
        return Cut(self.phase(share)[0], self.config.crop_candidates, self.config.n_frames)

    @property
    def cuts(self) -> set[Cut]:
        """All of the run."""
        return {self.cut(share) for share in (0.0, 0.99)}

    def shape(self, size: int) -> tuple[int, int, int]:
        """Clips, frames and height of a batch."""
        return self.config.train_batch_size * self.config.height**2 // size**2, self.config.n_frames, size


class Rig:
    """The student of one spec with its two compiled sides, for all candidates of that spec; drawn again for each."""

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
        draw_weights(fresh, config)
        self.model.load_state_dict(fresh.state_dict())
        return self.model


class Student:
    """One candidate in training: weights as drawn, optimizers, average, and the step."""

    def __init__(self, rig: Rig, teacher: Teacher, engine: Engine, candidate: Candidate) -> None:
        self.rig, self.teacher, self.engine, self.candidate = rig, teacher, engine, candidate
        config = candidate.config
        self.model, self.head = rig.draw(config), None
        self.average = WeightAverage(self.model, decay=config.ema_decay)
        self.optimizers = make_optimizers(self.model, config)
        if candidate.ideas.features:
            torch.manual_seed(config.seed)
            spec = self.model.spec
            channels = teacher_features(teacher, draw_pool(spec, (1, 9, 64), engine.device).latents).shape[2]
            self.head = nn.Conv2d(spec.decoder_channels[0], channels, 1).to(engine.device)
            self.optimizers = OptimizerSet(
                [*self.optimizers.optimizers, torch.optim.AdamW(self.head.parameters(), lr=1e-3)]
            )
        engine.prepare(self.model, self.optimizers)

    def step(self, batch: Pool, metric: Tensor | None, share: float) -> None:
        config = self.candidate.config
        self.optimizers.set_rates(learning_rate_factor(int(share * config.max_train_steps), config))
        with self.engine.autocast():
            total = self.decoder_loss(batch) + self.encoder_loss(batch, metric, self.candidate.phase(share)[1])
        self.engine.backward(total)
        self.engine.finish_step(max_grad_norm=config.max_grad_norm)
        self.average.update(self.model)

    def decoder_loss(self, batch: Pool) -> Tensor:
        """The weighted sum of what the decoder learns from the teacher's latents."""
        config, ideas, total = self.candidate.config, self.candidate.ideas, torch.zeros((), device=self.engine.device)
        if ideas.train == "encoder":
            return total
        taught, features = self.rig.decode(batch.latents)
        target = self.model.target(batch.frames.float() / 255)
        total = total + config.decoder_loss_weight * reconstruction_loss(taught, target)
        if ideas.teacher_frames:
            assert batch.decoded is not None
            total = total + ideas.teacher_frames * reconstruction_loss(taught, batch.decoded.float() / 255)
        if self.head is not None:
            seen = self.head(features.flatten(0, 1)).unflatten(0, features.shape[:2])
            total = total + ideas.features * latent_loss(seen, teacher_features(self.teacher, batch.latents))
        if ideas.consistency:
            total = total + ideas.consistency * latent_loss(self.rig.encode(taught), batch.latents)
        return total

    def encoder_loss(self, batch: Pool, metric: Tensor | None, learns: bool) -> Tensor:
        """The weighted sum of what the encoder learns, and of the own round trip. ``learns``: in this step."""
        config, ideas, total = self.candidate.config, self.candidate.ideas, torch.zeros((), device=self.engine.device)
        if ideas.train == "decoder" or not (learns or config.reconstruction_loss_weight):
            return total
        frames = batch.frames.float() / 255
        target = self.model.target(frames)
        with torch.set_grad_enabled(learns):
            latents = self.rig.encode(frames)
        if learns:
            distance = latent_loss(latents, batch.latents)
            if ideas.latent_metric:
                assert metric is not None
                weighed = weighted_latent_loss(latents, batch.latents, metric)
                distance = torch.lerp(distance, weighed, ideas.latent_metric)
            total = total + config.encoder_loss_weight * distance
            if ideas.picture_loss:
                shown = teacher_picture(self.teacher, latents[: ideas.picture_clips])
                seen = reconstruction_loss(shown, target[: ideas.picture_clips])
                total = total + ideas.picture_loss * seen
        if config.reconstruction_loss_weight:
            self.model.decoder.requires_grad_(ideas.round_trip_to == "both")
            decoded, _ = self.rig.decode(latents)
            self.model.decoder.requires_grad_(True)
            total = total + config.reconstruction_loss_weight * reconstruction_loss(decoded, target)
        return total


def weighted_latent_loss(student_NTCHW: Tensor, teacher_NTCHW: Tensor, metric_CC: Tensor) -> Tensor:
    """Mean over latents of e^T G e / C for their errors e; `latent_loss` where G is the identity."""
    with torch.autocast(student_NTCHW.device.type, enabled=False):
        errors = (student_NTCHW.float() - teacher_NTCHW).movedim(2, -1)
        return (errors @ metric_CC * errors).mean()


def compile_steps(rig: Rig, teacher: Teacher, engine: Engine, candidate: Candidate) -> None:
    """Take two steps of each kind on random numbers: whatever compiles or tries kernels does it now."""
    student = Student(rig, teacher, engine, candidate)
    metric = torch.eye(rig.model.spec.latent_channels, device=engine.device)
    for share in {candidate.phase(share): share for share in (0.99, 0.5, 0.0)}.values():
        batch = draw_pool(rig.model.spec, candidate.shape(candidate.phase(share)[0]), engine.device)
        for _ in range(2):
            student.step(batch, metric, share)


def run(
    rig: Rig, teacher: Teacher, lesson: Lesson, engine: Engine, candidate: Candidate, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train a candidate for ``--seconds`` or ``--steps``, examine it, and give its row."""
    decodes = bool(candidate.ideas.teacher_frames)
    pools = {cut: lesson.pools[cut].to(engine.device, decodes=decodes) for cut in candidate.cuts}
    student, generator = Student(rig, teacher, engine, candidate), torch.Generator().manual_seed(candidate.config.seed)
    step, share, seconds = 0, 0.0, 0.0
    with gpu_turn(candidate.words or "base"):
        began = time.perf_counter()
        while share < 1:
            cut = candidate.cut(share)
            student.step(pools[cut].batch(candidate.shape(cut.size)[0], generator), lesson.metric, share)
            step, seconds = step + 1, time.perf_counter() - began
            share = step / arguments.steps if arguments.seconds is None else seconds / arguments.seconds
    raw = lesson.examine(student.model, teacher)
    with student.average.swapped_into(student.model):
        averaged = lesson.examine(student.model, teacher)
    row: dict[str, Any] = {"name": candidate.words or "base", "teacher": float(lesson.psnr.mean())}
    row |= {way: float(psnr.mean()) for way, psnr in averaged.items()}
    row |= {"raw": {way: float(psnr.mean()) for way, psnr in raw.items()}}
    factor = rig.model.spec.time_factor
    row["by_latent"] = {way: by_latent(psnr, factor) for way, psnr in {"teacher": lesson.psnr, **averaged}.items()}
    return row | {"steps": step, "seconds": seconds, "step_ms": seconds / step * 1e3}


def as_lines(row: dict[str, Any]) -> str:
    """A row as a reader compares it: figures, gaps to the teacher, cost; then PSNR by latent."""
    gaps = ", ".join(f"{way} {row[way]:.2f} ({row[way] - row['teacher']:+.2f})" for way in ("decoder", "encoder"))
    raw = ", ".join(f"{value:.2f}" for value in row["raw"].values())
    cost = f"{row['steps']} steps, {row['seconds']:.0f} s, {row['step_ms']:.1f} ms each"
    places = "; ".join(
        f"{way} {' '.join(f'{value:.2f}' for value in row['by_latent'][way])}"
        for way in ("teacher", "decoder", "encoder")
    )
    figures = f"teacher {row['teacher']:.2f} dB, {gaps}, own {row['own']:.2f}; raw {raw}"
    return f"{figures}; {cost}: {row['name']}\n    by latent: {places}"


class Work:
    """The candidates of a call with the teacher and the engine that they share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        # Beyond its limit torch runs a new graph uncompiled. Each spec, clip size and kind of gradient has one here.
        torch._dynamo.config.cache_size_limit = 64
        self.engine = Engine(BASE if torch.cuda.is_available() else replace(BASE, mixed_precision="no"))
        found = find_teacher(arguments.teacher, None)
        self.spec = replace(BASE, variant=found.family.variant_candidates(found.geometry)[0]).spec
        dtype = torch.bfloat16 if self.engine.device.type == "cuda" else torch.float32
        self.teacher = load_teacher(None, arguments.teacher, dtype=dtype, device=self.engine.device, spec=self.spec)
        self.candidates = [self._read(words) for words in arguments.candidates]
        self._rigs: dict[VariantSpec, Rig] = {}

    def _read(self, words: str) -> Candidate:
        settings, tried = read_candidate(f"{self.arguments.set},{words}", [each.name for each in fields(Ideas)])
        config = replace(BASE, variant=self.spec.name, max_train_steps=self.arguments.steps, **settings)
        return Candidate(words=words, config=config, ideas=Ideas(**tried))

    def lesson(self) -> Lesson:
        """From ``--pool_file``, if it is there; else made, and kept there if it is named."""
        file: Path | None = self.arguments.pool_file
        asked = self.candidates
        identity = identify_teacher(self.arguments.teacher)
        assert identity is not None, "it is loaded from this folder"
        wanted = Wanted(
            teacher=identity,
            cuts={cut for each in asked for cut in each.cuts},
            decoded={cut for each in asked if each.ideas.teacher_frames for cut in each.cuts},
            metric=any(each.ideas.latent_metric for each in asked),
            pool=self.arguments.pool,
        )
        if file is not None and file.is_file():
            known = Lesson.load(file, self.engine.device)
            if not known.fits(wanted):
                what = "is of another teacher, or lacks crops, decodings or the metric of a candidate"
                raise SystemExit(f"{file} {what}; name another file.")
            return known
        clips, device = self.arguments.clips, self.engine.device
        train, val = ([video.to(device) for video in load_split(clips, split)] for split in ("train", "val"))
        made = make_lesson(self.teacher, train, val[: self.arguments.max_clips], spec=self.spec, wanted=wanted)
        words = f"{self.teacher.class_name} reaches {made.psnr.mean():.2f} dB itself; its student is {self.spec.name}"
        print(words, flush=True)
        if file is not None:
            part = file.with_suffix(".part")
            made.save(part)
            part.rename(file)
        return made

    def run_here(self) -> Iterator[dict[str, Any]]:
        """One candidate after the other in this process; `--wait_for_crops` says that it is one of several."""
        began = time.perf_counter()
        lesson = None if self.arguments.wait_for_crops else self.lesson()
        for candidate in self.candidates:
            if time.perf_counter() - began > self.arguments.budget_s:
                print(f"no time left for {candidate.words!r}")
                continue
            spec = candidate.config.spec
            rig = self._rigs[spec] = self._rigs.get(spec) or Rig(spec, self.engine.device)
            compile_steps(rig, self.teacher, self.engine, candidate)
            if lesson is None:
                if sys.stdin.readline() != GO:
                    raise SystemExit("the process that started this one has made no crops.")
                lesson = self.lesson()
            yield run(rig, self.teacher, lesson, self.engine, candidate, self.arguments)


def run_at_once(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A process for each candidate, ``--at_once`` together; rows as they are done. A failed one has none."""
    began, ready = time.perf_counter(), threading.Event()
    made: list[bool] = []  # one entry when the crops are in the file
    with tempfile.TemporaryDirectory() as folder:
        environment = side_by_side(arguments.at_once, Path(folder))
        arguments.pool_file = arguments.pool_file or Path(folder) / "pool.pt"

        def start(number: int) -> dict[str, Any] | None:
            words = arguments.candidates[number]
            if time.perf_counter() - began > arguments.budget_s:
                print(f"no time left for {words!r}", flush=True)
                return None
            row_file = Path(folder) / f"{number}.json"
            same = ("clips", "teacher", "steps", "set", "max_clips", "pool", "pool_file")
            shared = {key: getattr(arguments, key) for key in same} | {"output": row_file}
            shared |= {} if arguments.seconds is None else {"seconds": arguments.seconds}
            options = [f"--{key}={value}" for key, value in shared.items()]
            command = [sys.executable, __file__, words, *options, "--wait_for_crops"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment) as process:
                ready.wait()
                process.communicate(GO if made else "")
            if process.returncode != 0:
                print(f"{words!r} failed with exit code {process.returncode}", flush=True)
                return None
            row: dict[str, Any] = json.loads(row_file.read_text())[0]
            return row

        with ThreadPoolExecutor(arguments.at_once) as pool:
            started = [pool.submit(start, number) for number in range(len(arguments.candidates))]
            try:
                Work(arguments).lesson()
                made.append(True)
                print(f"crops are ready after {time.perf_counter() - began:.0f} s", flush=True)
            finally:  # without crops every process ends by itself
                ready.set()
            yield from (row for future in as_completed(started) if (row := future.result()) is not None)


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
    parser.add_argument("--pool", type=int, default=4096, help="crops of each kind that the teacher encodes")
    parser.add_argument("--pool_file", type=Path, help="where they are kept; a file that is there is read instead")
    parser.add_argument("--at_once", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--wait_for_crops", action="store_true", help=argparse.SUPPRESS)  # a process of --at_once
    parser.add_argument("--max_clips", type=int, default=20, help="of validation")
    parser.add_argument("--budget_s", type=float, default=540, help="stop starting candidates after this")
    parser.add_argument("--output", type=Path, help="file for the rows, JSON")
    arguments = parser.parse_args()
    for option in ("pool_file", "output"):
        if (file := getattr(arguments, option)) is not None:
            check_output_file(file, option=f"--{option}")
    rows: list[dict[str, Any]] = []
    for row in run_at_once(arguments) if arguments.at_once > 1 else Work(arguments).run_here():
        rows.append(row)
        if not arguments.wait_for_crops:
            print(as_lines(row), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1))
    if len(rows) < len(arguments.candidates):
        raise SystemExit(f"{len(rows)} of {len(arguments.candidates)} candidates have a row.")


if __name__ == "__main__":
    main()
