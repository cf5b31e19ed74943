"""The teacher in validation and report: its latents of the validation clips, and which score decides.

A run that trains encoder and decoder each against the teacher need not train the student's own round trip. Then that
round trip is not what tells the best model.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tinyvae.config.schema import TrainConfig
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers import Teacher, identify_teacher, load_teacher
from tinyvae.teachers.network import is_network
from tinyvae.training.engine import Engine

log = logging.getLogger(__name__)

DECODER, LATENT_SNR = "decoder_", "latent_snr"
"""``decoder_psnr`` and the like: the source against student-decoded teacher latents; the score of `latent_snr`."""


class ValidationTeacher:
    """The teacher of a run, for its validation clips. Their latents are computed once and stay in main memory.

    ``open``: gives the teacher; the run's own, or one that is loaded where the run trains with a latent store. After
    the first validation nothing here holds it.

    Example: ``teacher.latents(batch.names, frames_NTCHW)``
    """

    def __init__(self, path: str, spec: VariantSpec, open: Callable[[], Teacher]) -> None:
        self.path, self.open = path, open
        self._spec = spec
        self._opened: Teacher | None = None
        self._kept: dict[str, Tensor] = {}  # TCHW by the clip's name

    def frames(self, frames_NTCHW: Tensor) -> Tensor:
        """The first frames NTCHW of clips: as many as teacher and student count alike."""
        return frames_NTCHW[:, : self._spec.training_length(frames_NTCHW.shape[1])]

    def latents(self, names: Sequence[str], frames_NTCHW: Tensor) -> Tensor:
        """Latents NTCHW of the clips with these names (frames as `frames` gives them), in the student's space, fp32."""
        if not self._kept.keys() >= set(names):
            self._opened = self._opened or self.open()
            with uncompiled():
                latents_NTCHW = self._opened.encode(self._opened.clip_of(frames_NTCHW))
            self._kept |= zip(names, latents_NTCHW.cpu(), strict=True)
        return torch.stack([self._kept[name] for name in names]).to(frames_NTCHW.device)

    def forget(self) -> None:
        """Hold the teacher no longer: the latents of all clips are known."""
        self._opened = None


def uncompiled() -> AbstractContextManager[None]:
    """Inside it nothing is compiled: a new clip size would take a minute, for a few clips."""
    return torch.compiler.set_stance("force_eager")


def find_validation_teacher(config: TrainConfig, engine: Engine, live: Teacher | None) -> ValidationTeacher | None:
    """The teacher for the validation clips: ``live``, or with a latent store the one that the settings name, if its
    files are here; None without one. All ranks get the same answer."""
    path = config.ref_vae_path if config.use_ref_vae else None
    if live is not None:
        assert path is not None, "a live teacher has a path"
        return ValidationTeacher(path, config.spec, lambda: live)
    if config.latent_store is None:
        return None
    lack = engine.from_main(lambda: _lack(path))
    if lack or path is None:
        log.info("%s: validation and report score the student's own round trip alone", lack)
        return None
    kind, dtype = config.ref_vae_type, getattr(torch, config.ref_vae_dtype)
    return ValidationTeacher(
        path, config.spec, lambda: load_teacher(kind, path, dtype=dtype, device=engine.device, spec=config.spec)
    )


def _lack(path: str | None) -> str:
    """Why a teacher beside a latent store cannot be loaded here; empty where it can."""
    if path is None:
        return "no teacher is named beside the latent store"
    if identify_teacher(path) is None:
        return f"the teacher {path} is not here"
    can_be_loaded = is_network(path) or importlib.util.find_spec("diffusers")
    return "" if can_be_loaded else "diffusers, which loads the teacher, is not installed"


def deciding_score(config: TrainConfig, *, with_teacher: bool) -> str:
    """The name of the validation score that decides on best_model and early stopping.

    It is metric_for_best_model of what the run trains: the student's own round trip; where that is not trained, its
    decoder on teacher latents; where only the encoder is, its latents (psnr), else the own round trip again.
    """
    metric = config.metric_for_best_model
    if config.makes_round_trip or not with_teacher:
        return metric
    if config.decoder_loss_weight > 0:
        return f"{DECODER}{metric}"
    return LATENT_SNR if metric == "psnr" and config.encoder_loss_weight > 0 else metric


def latent_snr(latents_NTCHW: Tensor, wanted_NTCHW: Tensor) -> list[float]:
    """Of each clip: the variance of the teacher's latents over the mean squared distance from them, in dB."""
    signal = wanted_NTCHW.flatten(1).var(dim=1)
    noise = (latents_NTCHW.float() - wanted_NTCHW).square().flatten(1).mean(dim=1)
    return (10 * torch.log10((signal / noise.clamp(min=1e-10)).clamp(min=1e-10))).tolist()
