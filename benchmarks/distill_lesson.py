"""What `distill_search.py` knows of a teacher: crops with its latents, its features and pictures, and the examination
of students. All of it can lie in one file, so that several processes share the work of the teacher."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from make_teacher import frame_psnr, random_crops
from scratch_search import center, detail_table
from torch import Tensor
from whole_clips import decode_whole, whole_clips

from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers import Teacher

CLIPS_PER_CALL = 32
METRIC_CLIPS = 32  # one random direction of each: 40,000 latents of 128x128 crops, so G is sure to a percent


class Cut(NamedTuple):
    """How the crops of a pool are cut: their height and width, of how many places each is the one with the most detail,
    and how many frames they have."""

    size: int
    candidates: int
    num_frames: int


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

    def to(self, device: torch.device, *, decodes: bool) -> Pool:
        decoded = self.decoded.to(device) if self.decoded is not None and decodes else None
        return Pool(frames=self.frames.to(device), latents=self.latents.to(device), decoded=decoded)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the candidates need: crops, the teacher's decoding of some, the metric. ``teacher``: which (its hashes)."""

    teacher: dict[str, str]
    cuts: set[Cut]
    decoded: set[Cut]
    metric: bool
    pool: int  # crops of each kind


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """``pools``: by how their crops are cut. ``targets`` (float 1TCHW in [0, 1]) and ``latents`` (the teacher's): of
    each validation clip. ``psnr``: of the teacher's own round trip, of each frame, mean over clips, dB. ``metric``: CC,
    how much the teacher's picture changes with the latents (`latent_metric`); None where nobody asked."""

    teacher: dict[str, str]
    pools: dict[Cut, Pool]
    targets: list[Tensor]
    latents: list[Tensor]
    psnr: Tensor
    metric: Tensor | None

    def fits(self, wanted: Wanted) -> bool:
        """Whether it holds what candidates need, of the same teacher."""
        decoded = {cut for cut, pool in self.pools.items() if pool.decoded is not None}
        has_metric = self.metric is not None or not wanted.metric
        enough = self.teacher == wanted.teacher and all(len(p.frames) >= wanted.pool for p in self.pools.values())
        return enough and wanted.cuts <= self.pools.keys() and wanted.decoded <= decoded and has_metric

    def save(self, file: Path) -> None:
        torch.save({**vars(self), "pools": {tuple(cut): vars(pool) for cut, pool in self.pools.items()}}, file)

    @classmethod
    def load(cls, file: Path, device: torch.device) -> Lesson:
        """The pools stay in the file until `Pool.to` asks for them."""
        read: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True)
        pools = {Cut(*cut): Pool(**parts) for cut, parts in read.pop("pools").items()}
        metric = None if read["metric"] is None else read["metric"].to(device)
        moved = {name: [clip.to(device) for clip in read[name]] for name in ("targets", "latents")}
        return cls(teacher=read["teacher"], pools=pools, psnr=read["psnr"], metric=metric, **moved)

    @torch.no_grad()
    def examine(self, model: TAEHV, teacher: Teacher) -> dict[str, Tensor]:
        """PSNR of each frame for each way through the student, mean over clips, dB: T."""
        made = [model.encode_video(target) for target in self.targets]
        ways = {
            "decoder": [model.decode_video(known) for known in self.latents],
            "encoder": [teacher.decode(latents) for latents in made],
            "own": [model.decode_video(latents) for latents in made],
        }
        return {way: mean_psnr(decoded, self.targets) for way, decoded in ways.items()}


def make_lesson(
    teacher: Teacher, train: list[Tensor], val: list[Tensor], *, spec: VariantSpec, wanted: Wanted
) -> Lesson:
    clips = [center(video, 20) for video in val]
    targets = [clip[:, : spec.aligned_frames(clip.shape[1])] for clip in clips]
    latents = [teacher.encode(target) for target in targets]
    psnr = mean_psnr([teacher.decode(known) for known in latents], targets)
    pools = {cut: make_pool(teacher, train, cut, wanted.pool) for cut in wanted.cuts}
    pools |= {cut: add_decoding(teacher, pools[cut]) for cut in wanted.decoded}
    metric = None
    if wanted.metric:
        metric = latent_metric(teacher, pools[max(pools)].latents[:METRIC_CLIPS])
        values = ", ".join(f"{value:.2f}" for value in torch.linalg.eigvalsh(metric).flip(0).tolist())
        print(f"  what a latent error does to the teacher's picture, by direction: {values}", flush=True)
    return Lesson(teacher=wanted.teacher, pools=pools, targets=targets, latents=latents, psnr=psnr, metric=metric)


def make_pool(teacher: Teacher, videos: list[Tensor], cut: Cut, count: int) -> Pool:
    began, generator, frames = time.perf_counter(), torch.Generator().manual_seed(cut.size), []
    details = [detail_table(video) for video in videos] if cut.candidates > 1 else None
    for first in range(0, count, CLIPS_PER_CALL):
        part = (min(CLIPS_PER_CALL, count - first), cut.num_frames, cut.size)
        crops = random_crops(videos, part, generator, candidates=cut.candidates, details=details)
        frames.append(crops.transpose(1, 2))
    latents = [teacher.encode(teacher.clip_of(part.float() / 255)) for part in frames]
    words = f"{count} crops of {cut.num_frames} x {cut.size} x {cut.size}, each the best of {cut.candidates}"
    print(f"  {words}: {time.perf_counter() - began:.0f} s", flush=True)
    return Pool(frames=torch.cat(frames).contiguous(), latents=torch.cat(latents).contiguous(), decoded=None)


def add_decoding(teacher: Teacher, pool: Pool) -> Pool:
    began = time.perf_counter()
    parts = [(teacher.decode(latents) * 255).round().to(torch.uint8) for latents in pool.latents.split(CLIPS_PER_CALL)]
    print(f"  decoded by the teacher: {time.perf_counter() - began:.0f} s", flush=True)
    return Pool(frames=pool.frames, latents=pool.latents, decoded=torch.cat(parts))


def draw_pool(spec: VariantSpec, shape: tuple[int, int, int], device: torch.device) -> Pool:
    """Random numbers in the shape of a pool, for steps that only compile."""
    count, num_frames, size = shape
    side = size // spec.space_factor
    frames = torch.randint(0, 256, (count, num_frames, 3, size, size), dtype=torch.uint8, device=device)
    latents = torch.randn(count, spec.latents(num_frames), spec.latent_channels, side, side, device=device)
    return Pool(frames=frames, latents=latents, decoded=frames[:, : spec.aligned_frames(num_frames)])


def teacher_picture(teacher: Teacher, latents_NTCHW: Tensor) -> Tensor:
    """What the teacher decodes, NTCHW, about [0, 1] and not clamped, with the gradient of the latents. Only for the
    classes that `whole_clips` knows: diffusers' own way, latent by latent, takes several times as long."""
    z_NTCHW = teacher._student_space.denormalize(latents_NTCHW)
    device = teacher.device.type
    in_two_parts = teacher.class_name == "AutoencoderKLCogVideoX" and latents_NTCHW.shape[1] == 5
    with torch.autocast(device, enabled=False), whole_clips(in_two_parts=in_two_parts):
        video = decode_whole(teacher._vae, z_NTCHW.to(teacher.dtype).transpose(1, 2))
    return (video.float() * teacher._pixel_std + teacher._pixel_mean).transpose(1, 2)


@torch.no_grad()
def teacher_features(teacher: Teacher, latents_NTCHW: Tensor) -> Tensor:
    """The teacher's features NTCHW behind its middle block, each channel with mean 0 and deviation 1."""
    vae = teacher._vae
    z = teacher._student_space.denormalize(latents_NTCHW).to(teacher.dtype).transpose(1, 2)
    with torch.autocast(teacher.device.type, enabled=False):
        if vae.post_quant_conv is None:  # CogVideoX, whose layers also return what they carry on
            made = vae.decoder.mid_block(vae.decoder.conv_in(z)[0], None, z)[0]
        else:
            made = vae.decoder.mid_block(vae.decoder.conv_in(vae.post_quant_conv(z)))
    std, mean = torch.std_mean(made.float(), dim=(0, 2, 3, 4), keepdim=True)
    return ((made - mean) / (std + 1e-6)).transpose(1, 2)


def latent_metric(teacher: Teacher, latents_NTCHW: Tensor) -> Tensor:
    """G = E[J^T J] over positions, CC with trace C: e^T G e is the squared change of the teacher's picture for an
    error e of one latent. J^T times random pictures has just this covariance, so one backward pass measures it."""
    seeds, total = torch.Generator().manual_seed(0), torch.zeros((), dtype=torch.float64)
    for part in latents_NTCHW.split(4):
        latents = part.detach().requires_grad_()
        with torch.enable_grad():
            picture = teacher_picture(teacher, latents)
        direction = torch.randn(picture.shape, generator=seeds).to(picture.device)
        (change,) = torch.autograd.grad(picture, latents, direction)
        columns = change.double().movedim(2, 0).flatten(1)
        total = total + (columns @ columns.T).cpu()
    return (total * len(total) / total.trace()).float().to(latents_NTCHW.device)


def mean_psnr(decoded: list[Tensor], targets: list[Tensor]) -> Tensor:
    """PSNR of each frame, mean over clips, dB: T."""
    pairs = zip(decoded, targets, strict=True)
    return torch.stack([frame_psnr(made[:, : wanted.shape[1]], wanted)[0] for made, wanted in pairs]).mean(dim=0).cpu()


def by_latent(psnr_T: Tensor, time_factor: int) -> list[float]:
    """PSNR of the first frame, then of the frames of each further latent."""
    return [float(part.mean()) for part in (psnr_T[:1], *psnr_T[1:].split(time_factor))]
