"""What one training step computes: clips in, losses out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tinyvae.config.schema import TrainConfig
from tinyvae.data.latent_store import StoredLatents
from tinyvae.losses.distances import latent_loss, reconstruction_loss, temporal_loss
from tinyvae.losses.perceptual import LPIPS, perceptual_loss
from tinyvae.losses.seraena import AverageInPlace, Seraena, SeraenaResult, seraena_loss
from tinyvae.models.taehv import TAEHV
from tinyvae.teachers import LatentSpace, Teacher, draw
from tinyvae.training.diagnostics import log_losses, log_tensors


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """``total``: the weighted sum to differentiate. ``logged``: every term unweighted, detached, fp32, by name."""

    total: Tensor
    logged: dict[str, Tensor]


class TrainingTask:
    """The student and what teaches it; teacher, LPIPS and Seraena are no part of the student's module.

    ``space``: of the latents of a store, for a run without ``teacher``.

    Example::

        task = TrainingTask(config, TAEHV("taehv"))
        losses = task.losses(frames_NTCHW, use_seraena=False)
        losses.total.backward()
    """

    def __init__(
        self,
        config: TrainConfig,
        model: TAEHV,
        *,
        teacher: Teacher | None = None,
        space: LatentSpace | None = None,
        lpips: LPIPS | None = None,
        seraena: Seraena | None = None,
        average: AverageInPlace | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.teacher = teacher
        space = teacher.space if teacher is not None else space
        self._space = None if space is None else space.of_student(model.spec)
        self.lpips = lpips
        self.seraena = seraena
        self._average = average
        self._tells_more = config.debug  # the first call of `losses` logs what it works with
        # With several clip sizes each has a graph of its own: a graph for any size would be slower.
        compiled = (
            torch.compile(self._student, mode=config.compile_mode, dynamic=False) if config.compile_model else None
        )
        self._forward = compiled or self._student

    def begin_step(self, step: int) -> None:
        """The computation of an optimizer step starts, or starts again; what it draws depends on the step alone."""
        if self.seraena is not None:
            self.seraena.begin_step(step)

    def losses(
        self,
        frames_NTCHW: Tensor,
        *,
        use_seraena: bool,
        step: int = 0,
        corrected: SeraenaResult | None = None,
        stored: StoredLatents | None = None,
        positions: Sequence[int] = (),
    ) -> StepLosses:
        """Losses of clips NTCHW in [0, 1]; each term is a mean over its elements, so slices of a batch average.

        A term of weight 0 is not computed, except the reconstruction, which every log shows. ``step`` decides which
        ``perceptual_frames`` LPIPS sees. ``corrected``: Seraena's result where `correct_in_parts` has made it already.
        ``stored``: the teacher's latents of these clips, on their device, where the run has a store. ``positions``: of
        the clips in the run, for ``ref_vae_sample``. If Seraena met values that are not finite on any rank, the total
        is not finite on all ranks.
        """
        config = self.config
        target = self.model.target(frames_NTCHW)
        teacher_latents = self._teacher_latents(frames_NTCHW, stored, positions)
        to_decode = teacher_latents if config.decoder_loss_weight > 0 else None
        decoded, latents, taught = self._forward(frames_NTCHW, to_decode)
        if self._tells_more:
            log_tensors(
                {"frames": frames_NTCHW, "target frames": target, "teacher latents": teacher_latents}
                | {"student latents": latents, "decoded frames": decoded, "decoded teacher latents": taught}
            )
        kind = config.reconstruction_loss_type
        terms: dict[str, tuple[float, Tensor]] = {
            "reconstruction_loss": (config.reconstruction_loss_weight, reconstruction_loss(decoded, target, kind))
        }
        if teacher_latents is not None and config.encoder_loss_weight > 0:
            terms["encoder_loss"] = (config.encoder_loss_weight, latent_loss(latents, teacher_latents))
        if taught is not None:
            terms["decoder_loss"] = (config.decoder_loss_weight, reconstruction_loss(taught, target, kind))
        if self.lpips is not None and config.perceptual_loss_weight > 0:
            distance = perceptual_loss(self.lpips, decoded, target, max_frames=config.perceptual_frames, offset=step)
            terms["perceptual_loss"] = (config.perceptual_loss_weight, distance)
        if config.temporal_loss_weight > 0:
            terms["temporal_loss"] = (config.temporal_loss_weight, temporal_loss(decoded, target))
        logged: dict[str, Tensor] = {}
        if use_seraena:
            assert self.seraena is not None
            if corrected is None:
                corrected = self.seraena.step(target, decoded, latents, average=self._average)
            terms["seraena_loss"] = (config.seraena_loss_weight, seraena_loss(decoded, corrected.target_NTCHW))
            logged |= {f"seraena_{name}": value for name, value in corrected.scalars.items()}
        total = torch.stack([weight * value for weight, value in terms.values()]).sum()
        logged |= {"loss": total.detach()} | {name: value.detach() for name, (_, value) in terms.items()}
        if self._tells_more:
            log_losses(logged)
            self._tells_more = False
        if corrected is not None and not corrected.finite:
            total = total * math.nan  # `logged` stays this rank's own, so that a report can name the right clips
        return StepLosses(total=total, logged=logged)

    def correct_in_parts(self, parts: Sequence[Tensor]) -> list[SeraenaResult]:
        """Seraena's step over clips that the student passes in parts; the discriminator still sees all at once."""
        assert self.seraena is not None
        with torch.no_grad():
            made = [self._student(frames, None)[:2] for frames in parts]
        decoded, latents = (torch.cat(column) for column in zip(*made, strict=True))
        target = torch.cat([self.model.target(frames) for frames in parts])
        whole = self.seraena.step(target, decoded, latents, average=self._average)
        targets = whole.target_NTCHW.split([len(frames) for frames in parts])
        return [replace(whole, target_NTCHW=target_NTCHW) for target_NTCHW in targets]

    def _teacher_latents(
        self, frames_NTCHW: Tensor, stored: StoredLatents | None, positions: Sequence[int]
    ) -> Tensor | None:
        """Teacher latents NTCHW in the student's space, fp32, from the store or by the teacher; None without one."""
        if self._space is None:
            return None
        sample = self.config.ref_vae_sample
        if stored is not None:
            mean, std = stored.mean, stored.std
        else:
            assert self.teacher is not None, "a run with a store gets latents with every batch"
            mean, std = self.teacher.distribution(self.teacher.clip_of(frames_NTCHW), with_std=sample)
        if sample:
            assert std is not None, "a store without spread was refused at the start"
            mean = draw(mean, std, seed=self.config.seed, positions=positions)
        return self._space.normalize(mean).contiguous()  # one layout, so that one compilation serves store and teacher

    def _student(self, frames_NTCHW: Tensor, teacher_latents: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(decoded frames, latents, decoded teacher latents): all of the student's work, for one compilation."""
        latents = self.model.encode(frames_NTCHW)
        decoded = self.model.decode(latents)
        taught = None if teacher_latents is None else self.model.decode(teacher_latents)
        return decoded, latents, taught
