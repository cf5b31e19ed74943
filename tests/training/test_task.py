"""One step's losses: each term has its weight, its needs and its gradient; nothing that teaches is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tinyvae import TAEHV
from tinyvae.config.schema import TrainConfig
from tinyvae.data.latent_store import StoredLatents
from tinyvae.losses.distances import latent_loss, temporal_loss
from tinyvae.losses.perceptual import LPIPS
from tinyvae.losses.seraena import Seraena
from tinyvae.teachers import LatentSpace
from tinyvae.training.task import TrainingTask


class LinearTeacher:
    """A stand-in with a teacher's interface: latents are pooled frames; it counts what it is fed."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.space = LatentSpace(mean=(0.0,) * spec.latent_channels, std=(1.0,) * spec.latent_channels, factor=1.0)
        self.fed: list[int] = []

    def clip_of(self, frames: torch.Tensor) -> torch.Tensor:
        return frames[:, : self.spec.aligned_frames(frames.shape[1])]

    def distribution(self, frames: torch.Tensor, *, with_std: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.fed.append(frames.shape[1])
        latents = (frames.shape[1] + self.spec.trim) // self.spec.time_factor
        pooled = torch.nn.functional.adaptive_avg_pool3d(frames.transpose(1, 2), (latents, 2, 2))
        mean = pooled.mean(dim=1, keepdim=True).transpose(1, 2).expand(-1, -1, self.spec.latent_channels, -1, -1)
        return mean, torch.full_like(mean, 0.1) if with_std else None


def make_task(**changes: Any) -> TrainingTask:
    config = TrainConfig(variant="taehv", model_width=0.125, n_frames=8, height=16, width=16, **changes)
    model = TAEHV("taehv", width=0.125)
    teacher = LinearTeacher(model.spec) if config.use_ref_vae else None
    seraena = None
    if config.use_seraena:
        seraena = Seraena(model.spec, config.n_frames, config.n_seraena_frames, buffer_mb=1)
    return TrainingTask(config, model, teacher=teacher, seraena=seraena)  # type: ignore[arg-type]


FRAMES = torch.rand(2, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_reconstruction_alone_is_ten_times_the_mse_of_the_aligned_frames() -> None:
    task = make_task()
    losses = task.losses(FRAMES, use_seraena=False)
    decoded, _ = task.model(FRAMES)
    mse = (decoded - FRAMES[:, :5]).square().mean()  # 8 frames -> 2 latents -> 5 frames, the first five
    torch.testing.assert_close(losses.total, 10 * mse)
    torch.testing.assert_close(losses.logged["reconstruction_loss"], mse.detach())
    assert set(losses.logged) == {"loss", "reconstruction_loss"}


def test_every_weight_counts_and_the_total_is_their_sum() -> None:
    weights = {
        "reconstruction_loss_weight": 2.0,
        "encoder_loss_weight": 3.0,
        "decoder_loss_weight": 5.0,
        "temporal_loss_weight": 7.0,
        "seraena_loss_weight": 11.0,
    }
    task = make_task(use_ref_vae=True, ref_vae_path="somewhere", use_seraena=True, n_seraena_frames=2, **weights)
    logged = task.losses(FRAMES, use_seraena=True).logged
    expected = sum(weight * logged[name.removesuffix("_weight")] for name, weight in weights.items())
    torch.testing.assert_close(logged["loss"], expected)
    assert {"seraena_correction_std", "seraena_discriminator_loss"} <= set(logged)


def test_the_teacher_is_fed_exactly_the_decoded_frames() -> None:
    task = make_task(use_ref_vae=True, ref_vae_path="x", encoder_loss_weight=0.1, decoder_loss_weight=0.1)
    task.losses(FRAMES, use_seraena=False)
    assert task.teacher.fed == [5]  # type: ignore[union-attr]


@pytest.mark.parametrize("sample", [False, True])
def test_stored_latents_stand_in_for_the_teacher_and_slices_average(sample: bool) -> None:
    weights = {"encoder_loss_weight": 0.1, "decoder_loss_weight": 0.1, "temporal_loss_weight": 1.0}
    live = make_task(use_ref_vae=True, ref_vae_path="x", ref_vae_sample=sample, **weights)
    assert live.teacher is not None
    mean, std = live.teacher.distribution(live.model.target(FRAMES), with_std=sample)
    stored, positions = StoredLatents(mean=mean, std=std), [6, 7]
    task = TrainingTask(replace(live.config, use_ref_vae=False), live.model, space=live.teacher.space)
    expected = live.losses(FRAMES, use_seraena=False, positions=positions).total
    found = task.losses(FRAMES, use_seraena=False, positions=positions, stored=stored).total
    assert torch.equal(found, expected)
    parts = [
        task.losses(FRAMES[rows], use_seraena=False, positions=positions[rows], stored=stored[rows]).total
        for rows in (slice(0, 1), slice(1, 2))
    ]
    torch.testing.assert_close(sum(parts) / 2, expected)


def test_a_student_of_vae_space_learns_the_stored_latents_themselves() -> None:
    """A store holds the VAE's own latents, whatever the student's space is."""
    config = TrainConfig(
        model_width=0.125, n_frames=8, height=16, width=16, encoder_loss_weight=1.0, latent_space="vae"
    )
    model = TAEHV("taehv", width=0.125, latent_space="vae")
    space = LatentSpace(mean=(0.5,) * 16, std=(2.0,) * 16, factor=0.7)
    stored = StoredLatents(mean=torch.randn(2, 2, 16, 2, 2), std=None)
    losses = TrainingTask(config, model, space=space).losses(FRAMES, use_seraena=False, positions=[0, 1], stored=stored)
    expected = latent_loss(model.encode(FRAMES), stored.mean)
    torch.testing.assert_close(losses.logged["encoder_loss"], expected.detach())


SERAENA = {"use_seraena": True, "n_seraena_frames": 2}

ASKED = [  # loss weights above 0, times that the student encodes and decodes, and what gets gradients
    ({"reconstruction": 1.0}, 1, 1, "encoder and decoder"),
    ({"reconstruction": 1.0, "encoder": 1.0}, 1, 1, "encoder and decoder"),
    ({"reconstruction": 1.0, "encoder": 1.0, "decoder": 1.0}, 1, 2, "encoder and decoder"),
    ({"encoder": 1.0, "decoder": 1.0}, 1, 1, "encoder and decoder"),
    ({"decoder": 1.0}, 0, 1, "decoder"),
    ({"encoder": 1.0}, 1, 0, "encoder"),
    ({"decoder": 1.0, "temporal": 1.0}, 0, 1, "decoder"),
    ({"decoder": 1.0, "seraena": 1.0}, 0, 1, "decoder"),
    ({"encoder": 1.0, "decoder": 1.0, "seraena": 1.0}, 1, 1, "encoder and decoder"),
    ({"encoder": 1.0, "temporal": 1.0}, 1, 1, "encoder and decoder"),
    ({"temporal": 1.0}, 1, 1, "encoder and decoder"),
    ({"seraena": 1.0}, 1, 1, "encoder and decoder"),
]


@pytest.mark.parametrize(("weights", "encodings", "decodings", "trained"), ASKED, ids=lambda value: str(value))
def test_a_step_computes_what_its_losses_need(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, float], encodings: int, decodings: int, trained: str
) -> None:
    changes: dict[str, Any] = {f"{name}_loss_weight": value for name, value in weights.items()}
    changes |= {"reconstruction_loss_weight": weights.get("reconstruction", 0.0)}
    changes |= SERAENA if "seraena" in weights else {}
    task = make_task(use_ref_vae=bool({"encoder", "decoder"} & set(weights)), ref_vae_path="x", **changes)
    calls: list[str] = []
    for name in ("encode", "decode"):
        run = getattr(task.model, name)
        monkeypatch.setattr(task.model, name, lambda x, run=run, name=name: calls.append(name) or run(x))
    losses = task.losses(FRAMES, use_seraena="seraena" in weights)
    assert (calls.count("encode"), calls.count("decode")) == (encodings, decodings)
    terms = {name for name in losses.logged if name.endswith("_loss") and name != "seraena_discriminator_loss"}
    assert terms == {f"{name}_loss" for name in weights}
    losses.total.backward()
    parts = {"encoder": task.model.encoder, "decoder": task.model.decoder}
    learning = [name for name, part in parts.items() if all(p.grad is not None for p in part.parameters())]
    still = [name for name, part in parts.items() if all(p.grad is None for p in part.parameters())]
    assert " and ".join(learning) == trained == task.config.trained_parts and len(learning) + len(still) == 2


def test_without_a_round_trip_the_losses_on_the_output_are_those_of_the_decoded_teacher_latents() -> None:
    """The temporal loss sees those frames, and so does Seraena, with the latents that made them."""
    changes = {"reconstruction_loss_weight": 0.0, "encoder_loss_weight": 1.0, "decoder_loss_weight": 1.0}
    changes |= {"temporal_loss_weight": 1.0, "seraena_loss_weight": 1.0}
    task = make_task(use_ref_vae=True, ref_vae_path="x", **changes, **SERAENA)
    assert task.teacher is not None and task.seraena is not None
    target = task.model.target(FRAMES)
    latents = task.teacher.distribution(target, with_std=False)[0]
    decoded = task.model.decode(latents)
    seen: list[torch.Tensor] = []
    step = task.seraena.step
    task.seraena.step = lambda *tensors, average: seen.extend(tensors) or step(*tensors, average=average)  # type: ignore[method-assign]
    logged = task.losses(FRAMES, use_seraena=True).logged
    torch.testing.assert_close(logged["temporal_loss"], temporal_loss(decoded, target).detach())
    for found, wanted in zip(seen, (target, decoded, latents), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_one_graph_for_encoder_and_decoder_of_a_distillation() -> None:
    """torch.compile sees the whole of the student's work, without a break."""
    task = make_task(
        use_ref_vae=True,
        ref_vae_path="x",
        reconstruction_loss_weight=0.0,
        encoder_loss_weight=1.0,
        decoder_loss_weight=1.0,
    )
    found = torch._dynamo.explain(task._student)(FRAMES, torch.zeros(2, 2, 16, 2, 2))
    assert (found.graph_count, found.graph_break_count) == (1, 0)


@pytest.mark.parametrize("decodes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_seraenas_correction_in_parts_is_that_of_the_whole(decodes: bool) -> None:
    """Where memory runs out, the discriminator still sees all clips at once, and the same frames as otherwise."""
    changes = {"reconstruction_loss_weight": 0.0, "encoder_loss_weight": 1.0, "seraena_loss_weight": 1.0, **SERAENA}
    changes |= {"decoder_loss_weight": 1.0} if decodes else {}
    whole, parted = (make_task(use_ref_vae=True, ref_vae_path="x", **changes) for _ in range(2))
    parted.model.load_state_dict(whole.model.state_dict())
    assert whole.seraena is not None and parted.seraena is not None
    parted.seraena.load_shared_state_dict(whole.seraena.shared_state_dict())
    expected = whole.losses(FRAMES, use_seraena=True).logged["seraena_loss"]
    parts, positions = FRAMES.chunk(2), [[0], [1]]
    corrections = parted.correct_in_parts(parts, stored=[None, None], positions=positions)
    found = [
        parted.losses(part, use_seraena=True, corrected=corrected).logged["seraena_loss"]
        for part, corrected in zip(parts, corrections, strict=True)
    ]
    torch.testing.assert_close(sum(found) / 2, expected)


def test_the_compile_switch_compiles_the_students_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, *, mode, dynamic: asked.append(mode) or function)
    make_task()
    assert asked == []
    make_task(compile_model=True, compile_mode="max-autotune")
    assert asked == ["max-autotune"]


def test_perceptual_loss_joins_in_and_its_frames_take_turns(shared: Path) -> None:
    config = TrainConfig(model_width=0.125, n_frames=5, perceptual_loss_weight=2.0, perceptual_frames=1)
    lpips = LPIPS.from_file(shared / "lpips" / "alex.safetensors")
    task = TrainingTask(config, TAEHV("taehv", width=0.125), lpips=lpips)
    frames = torch.rand(1, 5, 3, 64, 64)
    steps = [task.losses(frames, use_seraena=False, step=step) for step in range(5)]
    assert len({round(float(losses.logged["perceptual_loss"]), 7) for losses in steps}) == 5
    expected = 10 * steps[0].logged["reconstruction_loss"] + 2 * steps[0].logged["perceptual_loss"]
    torch.testing.assert_close(steps[0].logged["loss"], expected)
    steps[0].total.backward()
    assert all(p.grad is None for p in lpips.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_fp32_under_autocast_and_with_half_weights(dtype: torch.dtype) -> None:
    task = make_task(temporal_loss_weight=1.0)
    with torch.autocast("cpu", dtype=dtype):
        losses = task.losses(FRAMES, use_seraena=False)
    assert losses.total.dtype == torch.float32
    task.model.to(dtype)
    assert task.losses(FRAMES, use_seraena=False).total.dtype == torch.float32
