"""What MODEL of a command means: a network of the family, a reference VAE, or a codec in memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tinyvae.errors import UserError
from tinyvae.evaluation.cost import fitting_in_memory
from tinyvae.evaluation.round_trip import Model, RoundTrip, StreamedCodec, codec_facts, label_of
from tinyvae.evaluation.teacher_codec import is_reference_vae, open_reference_vae
from tinyvae.models.codec import VideoCodec
from tinyvae.models.weights import load_model


def open_model(
    model: Model,
    *,
    variant: str | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    label: str | None = None,
    fused: bool = False,
) -> RoundTrip:
    """Any model as a round trip: a path that `load_model` takes, a diffusers VAE folder, or a codec in memory.

    On a CPU the weights run in float32 unless ``dtype`` says otherwise (half precision is slow there); on a GPU in the
    file's dtype. ``fused`` runs the folded network (`TAEHV.fused`). A codec in memory stays as it is.
    """
    if not isinstance(model, str | os.PathLike | VideoCodec):
        return model
    if isinstance(model, VideoCodec):
        return StreamedCodec(model, codec_facts(model, label=label or type(model).__name__, path=None))
    path, device = Path(model), device or torch.device("cpu")
    with fitting_in_memory(path):
        return _open_path(path, variant=variant, device=device, dtype=dtype, label=label, fused=fused)


def _open_path(
    path: Path, *, variant: str | None, device: torch.device, dtype: torch.dtype | None, label: str | None, fused: bool
) -> RoundTrip:
    if is_reference_vae(path):
        if variant is not None or fused:
            flag = f"--variant {variant}" if variant is not None else "--fused"
            raise UserError(f"{flag} is for models of the family, and {path} is a reference VAE; leave it out.")
        return open_reference_vae(path, device=device, dtype=dtype, label=label)
    if dtype is None and device.type == "cpu":
        dtype = torch.float32

    def reopen(where: torch.device) -> VideoCodec:
        plain = load_model(path, variant, device=where, dtype=dtype)
        return plain.fused() if fused else plain

    codec = reopen(device)
    label = label or label_of(path) + (" (fused)" if fused else "")
    return StreamedCodec(codec, codec_facts(codec, label=label, path=path), reopen=reopen)
