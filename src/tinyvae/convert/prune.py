"""A narrower network made of a trained one: its most important channels, and weights fitted to what they now see.

The result is an ordinary network of the same variant with a smaller ``width``. Channels fall into groups that are kept
or removed together: the stream of a stage (all blocks add to it), the channels inside one block, and those between two
convolutions. Between the 1x1 of a `TPool` or `TGrow` and the 3x3 behind it there is no activation, so any basis will
do there; it is turned first so that the best channels come first (a singular value decomposition).

With clips, importance is measured on them, and after the cut every convolution is fitted by least squares, from the
first to the last, so that it makes the whole network's outputs from the channels that are left.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tinyvae.errors import UnreadableVideoError, UserError
from tinyvae.evaluation.clip_sources import Middle, find_clips, frame_chunks, measure_clip
from tinyvae.evaluation.metrics import psnr_from_mse
from tinyvae.evaluation.round_trip import to_unit_range
from tinyvae.models.blocks import MemBlock, SuperMemBlock, TGrow, TPool, run_layers
from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import H3_CHUNK_FRAMES, H3_CHUNK_ZEROS, WIDTH_STEP, VariantSpec
from tinyvae.storage import Place
from tinyvae.terminal import count_of, progress_bar

FITTED_PIXELS = 16_384  # of each layer, drawn from all clips: several for each weight of an output channel
RIDGES = (
    1e-4,
    1e-3,
    1e-2,
    1e-1,
    1.0,
)  # how strongly to hold fitted weights to the cut ones: parts of the inputs' energy
CLIP_FRAMES, CLIP_LATENT_SIDE = 17, 16  # of the clips that `read_clips` takes of videos
SIDES = ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where the channels of a group lie on one side of a convolution: ``outer`` times one after another (frames), and
    each of them ``inner`` times in a row (the four pixels of a pixel-shuffle)."""

    group: str
    outer: int = 1
    inner: int = 1

    def by_channel(self, values: Tensor) -> Tensor:
        """Values of this axis, summed for each channel of the group."""
        return values.view(self.outer, -1, self.inner).sum((0, 2))

    def places(self, kept: Tensor, size: int) -> Tensor:
        """The places of the kept channels on an axis of ``size``."""
        channels = size // (self.outer * self.inner)
        starts = torch.arange(self.outer).view(-1, 1, 1) * channels + kept.view(1, -1, 1)
        return (starts * self.inner + torch.arange(self.inner)).flatten()


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One convolution and the groups of its channels; None where they all stay (images, latents, depthwise inputs)."""

    conv: str  # its name in the network
    out: Axis | None
    into: Axis | None
    adds: bool = False  # whether the outputs are added to the stream that its block got


def pruned_spec(spec: VariantSpec, keep: float) -> VariantSpec:
    """The spec of the narrower network; what cannot be made is refused."""
    if spec.decoder == "wide":
        why = "its decoder convolves groups of 64 channels, which single channels cannot leave"
        raise UserError(f"{spec.name} cannot be pruned: {why}; train a student of model_width 0.5 in its place.")
    steps = spec.width * keep / WIDTH_STEP
    if not 0 < keep < 1 or steps != int(steps) or steps < 1:
        fitting = [number * WIDTH_STEP / spec.width for number in range(1, int(spec.width / WIDTH_STEP))]
        if not fitting:
            raise UserError(f"a network of width {spec.width:g} is the smallest there is; it cannot be pruned further.")
        words = ", ".join(f"{value:.6g}" for value in fitting)
        what = f"--keep {keep:g} of width {spec.width:g} gives no width of the family (multiples of {WIDTH_STEP:g})"
        raise UserError(f"{what}; use one of {words}.")
    return replace(spec, width=spec.width * keep)


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
    inputs = {"encoder": [clip.to(whole.device, torch.float32) for clip in clips]}
    inputs["decoder"] = [whole.encode(clip) for clip in inputs["encoder"]]
    cuts = {side: plan_cuts(getattr(whole, side), side) for side in SIDES}
    with torch.device("meta"):
        shapes = TAEHV.of(spec)
    kept: dict[str, Tensor] = {}
    for side in SIDES:
        energies = input_energies(whole, side, cuts[side], inputs[side]) if clips else {}
        for group, scores in channel_scores(whole, cuts[side], energies).items():
            cut, size = next((cut, _conv(shapes, cut.conv).out_channels) for cut in cuts[side] if _makes(cut, group))
            assert cut.out is not None
            count = size // (cut.out.outer * cut.out.inner)
            kept[group] = scores.topk(count).indices.sort().values
    pruned = shapes.to_empty(device=whole.device)
    for cut in (cut for side in SIDES for cut in cuts[side]):
        _cut_weights(_conv(whole, cut.conv), _conv(pruned, cut.conv), cut, kept)
    if clips:
        for side in SIDES:
            fit_layers(whole, pruned, side, cuts[side], kept, inputs[side], show_progress_bar=show_progress_bar)
    return pruned.to(model.dtype).eval()


def plan_cuts(stack: nn.Sequential, side: str) -> list[Cut]:
    """Every convolution of a stack, in the order in which they run, with the groups of its channels. A group is called
    as the layer that makes it first."""
    cuts: list[Cut] = []
    stream: Axis | None = None
    layers: list[nn.Module] = list(stack)
    for place, layer in enumerate(layers):
        name = f"{side}.{place}"
        if isinstance(layer, MemBlock):
            assert stream is not None
            first, second = Axis(group=f"{name}.conv.0"), Axis(group=f"{name}.conv.2")
            cuts.append(Cut(conv=f"{name}.conv.0", out=first, into=replace(stream, outer=2)))
            cuts.append(Cut(conv=f"{name}.conv.2", out=second, into=first))
            cuts.append(Cut(conv=f"{name}.conv.4", out=stream, into=second, adds=True))
        elif isinstance(layer, SuperMemBlock):
            assert stream is not None
            both, wide = replace(stream, outer=2), Axis(group=f"{name}.conv.1")
            cuts.append(Cut(conv=f"{name}.conv.0", out=both, into=None))
            cuts.append(Cut(conv=f"{name}.conv.1", out=wide, into=both))
            cuts.append(Cut(conv=f"{name}.conv.3", out=stream, into=wide, adds=True))
        elif isinstance(layer, TPool):
            assert stream is not None
            cuts.append(Cut(conv=f"{name}.conv", out=Axis(group=name), into=replace(stream, outer=layer.stride)))
            stream = Axis(group=name)
        elif isinstance(layer, TGrow):
            cuts.append(Cut(conv=f"{name}.conv", out=Axis(group=name, outer=layer.stride), into=stream))
            stream = Axis(group=name)
        elif isinstance(layer, nn.Conv2d):
            is_shuffled = any(isinstance(after, nn.PixelShuffle) for after in layers[place + 1 : place + 3])
            made = None if place == len(layers) - 1 else Axis(group=name, inner=4 if is_shuffled else 1)
            cuts.append(Cut(conv=name, out=made, into=stream))
            stream = None if made is None else replace(made, inner=1)
    return cuts


def turn_linear_pairs(model: TAEHV) -> None:
    """Turn the channels between the 1x1 of a `TPool` or `TGrow` and the convolution right behind it, so that the first
    channels hold as much of the product of the two as channels can. The network computes what it did."""
    for stack in (model.encoder, model.decoder):
        layers = list(stack)
        for narrow, conv in pairwise(layers):
            if not (isinstance(narrow, TPool | TGrow) and isinstance(conv, nn.Conv2d)):
                continue
            frames = narrow.stride if isinstance(narrow, TGrow) else 1
            middle = conv.in_channels
            first = narrow.conv.weight.double()[:, :, 0, 0].unflatten(0, (frames, middle)).movedim(1, 0).flatten(1)
            second = conv.weight.double().movedim(1, 3).flatten(0, 2)  # (outputs and taps, middle)
            left, values, right = torch.linalg.svd(second @ first, full_matrices=False)
            left, values, right = left[:, :middle], values[:middle].sqrt(), right[:middle]
            assert len(values) == middle, "fewer inputs or outputs than channels between them"
            taps = (left * values).unflatten(0, (conv.out_channels, *conv.kernel_size)).movedim(3, 1)
            conv.weight.copy_(taps)
            turned = (right * values[:, None]).unflatten(1, (frames, -1)).movedim(0, 1).flatten(0, 1)
            narrow.conv.weight.copy_(turned[:, :, None, None])


def channel_scores(model: TAEHV, cuts: Sequence[Cut], energies: dict[str, Tensor]) -> dict[str, Tensor]:
    """How much each channel of each group matters to the convolutions that read it: its energy times the squared norm
    of the weights that it meets, as a share of all channels; summed over those convolutions.

    ``energies``: the mean square of each input of a convolution. Where there is none, the squared norm of the weights
    that make the channel stands for it.
    """
    scores: dict[str, Tensor] = {}
    groups = dict.fromkeys(cut.out.group for cut in cuts if cut.out is not None)
    for group in groups:
        made = [cut for cut in cuts if _makes(cut, group)]
        guess = torch.stack([cut.out.by_channel(_output_norms(_conv(model, cut.conv))) for cut in made if cut.out]).sum(
            0
        )
        total = torch.zeros_like(guess)
        for cut in cuts:
            if cut.into is None or cut.into.group != group:
                continue
            met = _conv(model, cut.conv).weight.square().sum((0, 2, 3))
            if cut.conv in energies:
                share = cut.into.by_channel(energies[cut.conv] * met)
            else:
                share = guess * cut.into.by_channel(met)
            total += share / share.sum().clamp_min(1e-30)
        scores[group] = total
    return scores


def _makes(cut: Cut, group: str) -> bool:
    """Whether a convolution makes channels of a group; a depthwise one only passes them on."""
    return cut.out is not None and cut.out.group == group and (cut.into is not None or cut.conv == group)


def _output_norms(conv: nn.Conv2d) -> Tensor:
    norms = conv.weight.square().sum((1, 2, 3))
    return norms if conv.bias is None else norms + conv.bias.square()


def _conv(model: nn.Module, name: str) -> nn.Conv2d:
    conv = model.get_submodule(name)
    assert isinstance(conv, nn.Conv2d), name
    return conv


def _cut_weights(source: nn.Conv2d, target: nn.Conv2d, cut: Cut, kept: dict[str, Tensor]) -> None:
    weight, bias = source.weight, source.bias
    if cut.out is not None:
        places = cut.out.places(kept[cut.out.group].cpu(), weight.shape[0]).to(weight.device)
        weight, bias = weight[places], None if bias is None else bias[places]
    if cut.into is not None:
        weight = weight[:, cut.into.places(kept[cut.into.group].cpu(), weight.shape[1]).to(weight.device)]
    target.weight.copy_(weight)
    if bias is not None and target.bias is not None:
        target.bias.copy_(bias)


# what clips tell


def run_side(model: TAEHV, side: str, video_NTCHW: Tensor) -> Tensor:
    """Frames through the encoder, or latents through the decoder."""
    return model.encode(video_NTCHW) if side == "encoder" else model.decode(video_NTCHW)


def input_energies(model: TAEHV, side: str, cuts: Sequence[Cut], videos: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mean square of each input channel of each convolution, by its name."""
    sums: dict[str, Tensor] = {}

    def add(name: str, x_BCHW: Tensor) -> None:
        energy = x_BCHW.square().mean((0, 2, 3))
        sums[name] = sums[name] + energy if name in sums else energy

    with ExitStack() as hooks:
        for cut in cuts:
            _before(hooks, model, cut.conv, partial(add, cut.conv))
        for video in videos:
            run_side(model, side, video)
    return sums


def _before(hooks: ExitStack, model: nn.Module, name: str, see: Callable[[Tensor], None]) -> None:
    """Let ``see`` see the input of a layer before it runs."""
    layer = model.get_submodule(name)
    hooks.callback(layer.register_forward_pre_hook(lambda _, arguments: see(arguments[0])).remove)


def first_inputs(model: TAEHV, side: str, videos: Sequence[Tensor]) -> list[Tensor]:
    """What the first layer of a side gets of each video, NTCHW: padded, as patches, in the chunks of the frame rule."""
    seen: list[Tensor] = []
    is_chunked = side == "encoder" and model.spec.frame_rule == "chunked"
    with ExitStack() as hooks:
        _before(hooks, model, f"{side}.0", lambda x_BCHW: seen.append(x_BCHW.clone()))
        for video in videos:
            run_side(model, side, video)
            num_videos = len(video) if not is_chunked else len(seen[-1]) // (H3_CHUNK_FRAMES + H3_CHUNK_ZEROS)
            seen[-1] = seen[-1].unflatten(0, (num_videos, -1))
    return seen


def draw_pixels(x_BCHW: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(frame, row, column) of at most ``count`` pixels; always the same ones for frames of one size."""
    frames, _, height, width = x_BCHW.shape
    drawn = torch.randperm(frames * height * width, generator=torch.Generator().manual_seed(0))[:count]
    drawn = drawn.to(x_BCHW.device)
    return drawn // (height * width), drawn // width % height, drawn % width


def patches_of(x_BCHW: Tensor, conv: nn.Conv2d, pixels: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What a convolution sees for these output pixels: (pixels, inputs x taps), in the order of its weights."""
    frame, row, column = pixels
    side, stride, pad = conv.kernel_size[0], conv.stride[0], conv.kernel_size[0] // 2
    padded = F.pad(x_BCHW, (pad, pad, pad, pad))
    taps = [padded[frame, :, row * stride + i, column * stride + j] for i in range(side) for j in range(side)]
    return torch.stack(taps, dim=2).flatten(1)


def fit_layers(
    whole: TAEHV,
    pruned: TAEHV,
    side: str,
    cuts: Sequence[Cut],
    kept: dict[str, Tensor],
    videos: Sequence[Tensor],
    *,
    show_progress_bar: bool,
) -> None:
    """Fit the convolutions of a pruned network one after another: each to make, from what the ones before it make now,
    the outputs of the whole network. The last one of a block also makes up for what its stream lacks."""
    inputs = first_inputs(whole, side, videos)
    states = [(video, video.clone()) for video in inputs]  # before the next layer: of the whole network, of the pruned
    layers = list(zip(getattr(whole, side), getattr(pruned, side), strict=True))
    for place, (layer, cut_layer) in enumerate(
        progress_bar(layers, desc=f"fit {side}", unit="layer", disable=not show_progress_bar)
    ):
        name = f"{side}.{place}"
        for cut in cuts:
            conv = _conv(pruned, cut.conv)
            if f"{cut.conv}.".startswith(f"{name}.") and conv.groups == 1:
                seen = [_sees_and_lacks(whole, pruned, name, cut, kept, *state, len(videos)) for state in states]
                fit_conv(conv, *(torch.cat(column) for column in zip(*seen, strict=True)))
        states = [(_run_layer(layer, one), _run_layer(cut_layer, other)) for one, other in states]


def _run_layer(layer: nn.Module, video_NTCHW: Tensor) -> Tensor:
    return run_layers(nn.Sequential(layer), video_NTCHW)[0]


def _sees_and_lacks(
    whole: TAEHV,
    pruned: TAEHV,
    layer: str,
    cut: Cut,
    kept: dict[str, Tensor],
    whole_NTCHW: Tensor,
    pruned_NTCHW: Tensor,
    num_videos: int,
) -> tuple[Tensor, Tensor]:
    """(what a pruned convolution sees at drawn pixels, how far its outputs are there from those of the whole network).
    ``layer`` is the layer that it belongs to; the videos are what that layer gets in each network."""
    made: list[Tensor] = []
    seen: list[Tensor] = []
    with ExitStack() as hooks:
        hook = _conv(whole, cut.conv).register_forward_hook(lambda _, __, made_BCHW: made.append(made_BCHW.clone()))
        hooks.callback(hook.remove)
        _before(hooks, pruned, cut.conv, lambda x_BCHW: seen.append(x_BCHW.clone()))
        _run_layer(whole.get_submodule(layer), whole_NTCHW.clone())
        _run_layer(pruned.get_submodule(layer), pruned_NTCHW.clone())
    conv, pixels = _conv(pruned, cut.conv), draw_pixels(made[0], -(-FITTED_PIXELS // num_videos))
    frame, row, column = pixels
    target = made[0][frame, :, row, column]
    if cut.adds:  # the stream is to be the whole network's after the block
        target = target + whole_NTCHW.flatten(0, 1)[frame, :, row, column]
    if cut.out is not None:
        target = target[:, cut.out.places(kept[cut.out.group].cpu(), target.shape[1])]
    if cut.adds:
        target = target - pruned_NTCHW.flatten(0, 1)[frame, :, row, column]
    patches = patches_of(seen[0], conv, pixels)
    return patches, target - F.linear(patches, conv.weight.flatten(1), conv.bias)


def fit_conv(conv: nn.Conv2d, patches: Tensor, lacking: Tensor) -> None:
    """Change a convolution by what brings its outputs nearest to what they lack: (pixels, outputs)."""
    if conv.bias is not None:
        patches = torch.cat([patches, patches.new_ones(len(patches), 1)], dim=1)
    change = solve_ridge(patches, lacking)
    weights = conv.weight[0].numel()
    conv.weight += change[:weights].T.reshape(conv.weight.shape)
    if conv.bias is not None:
        conv.bias += change[weights]


def solve_ridge(inputs: Tensor, targets: Tensor) -> Tensor:
    """The weights (inputs, targets) that map rows of inputs to rows of targets with the least square error. How hard
    they are held to zero is what serves the last eighth of the rows best; zero itself is tried too."""
    last = max(1, len(inputs) // 8)
    seen, unseen = (inputs[:-last], targets[:-last]), (inputs[-last:], targets[-last:])
    gram, moment = (seen[0].T @ seen[0]).double(), (seen[0].T @ seen[1]).double()
    errors = {math.inf: unseen[1].square().sum().item()}
    for ridge in RIDGES:
        weights = _solve(gram, moment, ridge).to(inputs.dtype)
        errors[ridge] = (unseen[0] @ weights - unseen[1]).square().sum().item()
    best = min(errors, key=lambda ridge: errors[ridge])
    if math.isinf(best):
        return torch.zeros_like(moment).to(inputs.dtype)
    gram, moment = gram + unseen[0].T @ unseen[0], moment + unseen[0].T @ unseen[1]
    return _solve(gram, moment, best).to(inputs.dtype)


def _solve(gram: Tensor, moment: Tensor, ridge: float) -> Tensor:
    held = gram.clone()
    held.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(held, moment)


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
