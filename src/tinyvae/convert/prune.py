"""A narrower network made of a trained one: an ordinary network of the same variant with a smaller ``width``.

`channels` says which channels belong together. Between the 1x1 of a `TPool` or `TGrow` and the 3x3 behind it there is
no activation, so any basis will do there; it is turned first so that the best channels come first (a singular value
decomposition). With clips, importance is measured on them, and after the cut `fit` fits the weights.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tinyvae.convert.channels import Cut, channel_scores, find_conv, makes, plan_cuts, turn_linear_pairs
from tinyvae.convert.fit import Seen, fit_layers, look_at
from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import Middle, find_clips, frame_chunks, measure_clip
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.evaluation.round_trip import to_unit_range
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import WIDTH_STEP, VariantSpec
from tinyvae.storage import Place
from tinyvae.terminal import count_of

CLIP_FRAMES, CLIP_LATENT_SIDE = 17, 16  # of the clips that `read_clips` takes of videos


def pruned_spec(spec: VariantSpec, keep: float) -> VariantSpec:
    """The spec of the narrower network; what cannot be made is refused."""
    if spec.decoder == "wide":
        why = "its decoder convolves groups of 64 channels, which single channels cannot leave"
        raise UserError(f"{spec.name} cannot be pruned: {why}; train a student of model_width 0.5 in its place.")
    steps = spec.width * keep / WIDTH_STEP
    if not 0 < keep < 1 or abs(steps - round(steps)) > 1e-3 or round(steps) < 1:
        fitting = [number * WIDTH_STEP / spec.width for number in range(1, int(spec.width / WIDTH_STEP))]
        if not fitting:
            raise UserError(f"a network of width {spec.width:g} is the smallest there is; it cannot be pruned further.")
        words = ", ".join(f"{value:.6g}" for value in fitting)
        what = f"--keep {keep:g} of width {spec.width:g} gives no width of the family (multiples of {WIDTH_STEP:g})"
        raise UserError(f"{what}; use one of {words}.")
    return replace(spec, width=round(steps) * WIDTH_STEP)


@torch.no_grad()
def prune_model(model: TAEHV, keep: float, *, clips: Sequence[Tensor] = (), show_progress_bar: bool = False) -> TAEHV:
    """The network of ``keep`` times the width that is made of the most important channels of ``model``.

    ``clips``: videos NTCHW in [0, 1], on any device and of sizes that fit the model; by them channels are chosen and
    weights fitted. Without them channels are chosen by the norms of the weights alone. The result has the device and
    dtype of ``model``.

    Example: ``save_model(prune_model(load_model("run"), 0.5, clips=[frames]), "half.safetensors")``
    """
    spec = pruned_spec(model.spec, keep)
    whole = copy.deepcopy(model).float().eval()
    turn_linear_pairs(whole)
    with torch.device("meta"):
        pruned = TAEHV.of(spec)
    pruned = pruned.to_empty(device=whole.device)
    videos = [clip.to(whole.device, torch.float32) for clip in clips]
    for side in ("encoder", "decoder"):
        cuts = plan_cuts(getattr(whole, side), side)
        seen = look_at(whole, side, cuts, videos)
        kept = choose_channels(whole, pruned, cuts, seen)
        for cut in cuts:
            _cut_weights(find_conv(whole, cut.conv), find_conv(pruned, cut.conv), cut, kept)
        if clips:
            inputs = seen.first_inputs
            fit_layers(whole, pruned, side, cuts, kept, inputs, show_progress_bar=show_progress_bar)
        # The pruned decoder learns to decode the whole network's latents.
        videos = [whole.encode(video) for video in videos] if side == "encoder" else []
    return pruned.to(model.dtype).eval()


def choose_channels(whole: TAEHV, pruned: TAEHV, cuts: Sequence[Cut], seen: Seen) -> dict[str, Tensor]:
    """The channels of each group that stay, in their order, on the CPU: as many as the pruned network has."""
    kept = {}
    for group, scores in channel_scores(whole, cuts, seen.energies).items():
        cut = next(cut for cut in cuts if makes(cut, group))
        assert cut.out is not None
        count = find_conv(pruned, cut.conv).out_channels // (cut.out.outer * cut.out.inner)
        kept[group] = scores.topk(count).indices.sort().values.cpu()
    return kept


def _cut_weights(source: nn.Conv2d, target: nn.Conv2d, cut: Cut, kept: dict[str, Tensor]) -> None:
    weight, bias = source.weight, source.bias
    if cut.out is not None:
        places = cut.out.places(kept[cut.out.group], weight.shape[0]).to(weight.device)
        weight, bias = weight[places], None if bias is None else bias[places]
    if cut.into is not None:
        weight = weight[:, cut.into.places(kept[cut.into.group], weight.shape[1]).to(weight.device)]
    target.weight.copy_(weight)
    if bias is not None and target.bias is not None:
        target.bias.copy_(bias)


def read_clips(
    data: Place, spec: VariantSpec, *, max_clips: int, data_root: Place | None = None, split: str | None = None
) -> list[Tensor]:
    """The middle of videos, 1 T 3 H W in [0, 1]: 17 frames and 16 x 16 latent pixels each. Files that cannot be read
    are left out with a warning.

    Example: ``prune_model(model, 0.5, clips=read_clips(Path("videos"), model.spec, max_clips=32))``
    """
    side, clips = CLIP_LATENT_SIDE * spec.space_factor, []
    for clip in find_clips(data, data_root=data_root, split=split, max_clips=max_clips):
        try:
            part = measure_clip(clip, max_frames=CLIP_FRAMES, size=(side, side), middle=Middle(scaled=False))
            frames_TCHW = torch.cat(list(frame_chunks(part, chunk_frames=CLIP_FRAMES)))
        except UnreadableVideoError as bad:
            warnings.warn(f"left out: {bad}", stacklevel=2)
            continue
        clips.append(to_unit_range(frames_TCHW, torch.device("cpu"))[None])
    if not clips:
        raise UserError(f"no video of {data} can be read; name others with --data.")
    return clips


@torch.no_grad()
def describe_loss(whole: TAEHV, pruned: TAEHV, clips: Sequence[Tensor]) -> str:
    """What pruning costs on clips, in a line: the PSNR of both networks' round trips, in dB (mean over frames)."""
    if not clips:
        return "channels chosen by the norms of their weights alone: without --data nothing is fitted or measured"
    scores = []
    for model in (whole, pruned):
        errors: list[float] = []
        for clip in clips:
            frames = clip.to(model.device, model.dtype)
            decoded, target = model.reconstruct(frames), model.target(frames)
            errors += (decoded.float() - target.float()).square().flatten(2).mean(2).flatten().tolist()
        scores.append(math.fsum(map(psnr_from_mse, errors)) / len(errors))
    count = count_of(len(clips), "clip")
    return f"on these {count}, there and back: {scores[0]:.2f} dB whole, {scores[1]:.2f} dB pruned, before training"
