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
        self._encodes, self._makes_round_trip = config.trains_encoder, config.makes_round_trip
        self._decodes_teacher = config.decodes_teacher
        self._tells_more = config.debug  # the first call of `losses` logs what it works with
        # With several clip sizes each has a graph of its own: a graph for any size would be slower.
        self._forward = self._student
        if config.compile_model:
            self._forward = torch.compile(self._student, mode=config.compile_mode, dynamic=False)

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

        A term of weight 0 is not computed, and neither is what only it needs: encoder, decoder, own round trip. LPIPS,
        temporal loss and Seraena look at the own round trip, else at the decoded teacher latents. ``step`` decides
        which ``perceptual_frames`` LPIPS sees. ``corrected``: Seraena's result where `correct_in_parts` has made it
        already. ``stored``: the teacher's latents of these clips, on their device, where the run has a store.
        ``positions``: of the clips in the run, for ``ref_vae_sample``. If Seraena met values that are not finite on
        any rank, the total is not finite on all ranks.
        """
        target = self.model.target(frames_NTCHW)
        teacher_latents = self._teacher_latents(frames_NTCHW, stored, positions)
        decoded, latents, taught = self._forward(frames_NTCHW, teacher_latents if self._decodes_teacher else None)
        if self._tells_more:
            log_tensors(
                {"frames": frames_NTCHW, "target frames": target, "teacher latents": teacher_latents}
                | {"student latents": latents, "decoded frames": decoded, "decoded teacher latents": taught}
            )
        terms = self._distances(target, decoded, latents, taught, teacher_latents, step=step)
        logged: dict[str, Tensor] = {}
        if use_seraena:
            assert self.seraena is not None
            output, made_of = (taught, teacher_latents) if decoded is None else (decoded, latents)
            assert output is not None and made_of is not None, "Seraena is on: makes_round_trip or decodes_teacher"
            if corrected is None:
                corrected = self.seraena.step(target, output, made_of, average=self._average)
            terms["seraena_loss"] = (self.config.seraena_loss_weight, seraena_loss(output, corrected.target_NTCHW))
            logged |= {f"seraena_{name}": value for name, value in corrected.scalars.items()}
        total = torch.stack([weight * value for weight, value in terms.values()]).sum()
        logged |= {"loss": total.detach()} | {name: value.detach() for name, (_, value) in terms.items()}
        if self._tells_more:
            log_losses(logged)
            self._tells_more = False
        if corrected is not None and not corrected.finite:
            total = total * math.nan  # `logged` stays this rank's own, so that a report can name the right clips
        return StepLosses(total=total, logged=logged)

    def _distances(
        self,
        target: Tensor,
        decoded: Tensor | None,
        latents: Tensor | None,
        taught: Tensor | None,
        teacher_latents: Tensor | None,
        *,
        step: int,
    ) -> dict[str, tuple[float, Tensor]]:
        """Name -> (weight, value) of all losses except Seraena's; frames and latents are NTCHW."""
        config, kind = self.config, self.config.reconstruction_loss_type
        terms: dict[str, tuple[float, Tensor]] = {}
        if decoded is not None and config.reconstruction_loss_weight > 0:
            distance = reconstruction_loss(decoded, target, kind)
            terms["reconstruction_loss"] = (config.reconstruction_loss_weight, distance)
        if latents is not None and teacher_latents is not None and config.encoder_loss_weight > 0:
            terms["encoder_loss"] = (config.encoder_loss_weight, latent_loss(latents, teacher_latents))
        if taught is not None:
            terms["decoder_loss"] = (config.decoder_loss_weight, reconstruction_loss(taught, target, kind))
        output = taught if decoded is None else decoded
        if output is None:
            return terms
        if self.lpips is not None and config.perceptual_loss_weight > 0:
            distance = perceptual_loss(self.lpips, output, target, max_frames=config.perceptual_frames, offset=step)
            terms["perceptual_loss"] = (config.perceptual_loss_weight, distance)
        if config.temporal_loss_weight > 0:
            terms["temporal_loss"] = (config.temporal_loss_weight, temporal_loss(output, target))
        return terms

    def correct_in_parts(
        self,
        parts: Sequence[Tensor],
        *,
        stored: Sequence[StoredLatents | None],
        positions: Sequence[Sequence[int]],
    ) -> list[SeraenaResult]:
        """Seraena's step over clips that the student passes in parts; the discriminator still sees all at once.

        ``stored`` and ``positions``: of each part, as in `losses`.
        """
        assert self.seraena is not None
        targets = [self.model.target(frames) for frames in parts]
        with torch.no_grad():
            if self._makes_round_trip:
                made_of = [self.model.encode(frames) for frames in parts]
            else:
                teaching = map(self._teacher_latents, parts, stored, positions)
                made_of = [latents for latents in teaching if latents is not None]
            output = torch.cat([self.model.decode(latents) for latents in made_of])
        whole = self.seraena.step(torch.cat(targets), output, torch.cat(made_of), average=self._average)
        corrected = whole.target_NTCHW.split([len(frames) for frames in parts])
        return [replace(whole, target_NTCHW=target_NTCHW) for target_NTCHW in corrected]

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

    def _student(
        self, frames_NTCHW: Tensor, teacher_latents: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(decoded frames, latents, decoded teacher latents), None where no loss needs it: all of the student's work,
        for one compilation."""
        latents = self.model.encode(frames_NTCHW) if self._encodes else None
        decoded = self.model.decode(latents) if self._makes_round_trip and latents is not None else None
        taught = None if teacher_latents is None else self.model.decode(teacher_latents)
        return decoded, latents, taught
