"""Make a narrower network of a trained one: its most important channels, as an ordinary model of that width.

With --data, importance is measured on those videos, and the weights are fitted to them afterwards; without, the norms
of the weights decide, and the result is only a start. Both lose quality: train the result with the whole network as its
teacher. The command that does it is printed at the end.

example:
  tinyvae prune output/my_run --keep 0.5 --output half.safetensors --data videos/train
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from tinyvae.cli.options import MODEL, add_options, number, place
from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS, VariantSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    keep = "part of the channels to keep, such as 0.5; the width must stay a multiple of 0.125"
    parser.add_argument("--keep", type=float, required=True, metavar="PART", help=keep)
    add_options(parser, "--output", required=True, metavar="FILE", help="weights file to write (.safetensors or .pth)")
    what = "videos to choose and fit by: folder, video, annotations or index; a path or a URL"
    parser.add_argument("--data", type=place, metavar="DATA", help=what)
    parser.add_argument(
        "--max_clips", type=number(int, 1), default=32, metavar="N", help="videos to take of them (default: 32)"
    )
    split = "the videos annotated so, or all; default: train where the data has splits, else all"
    add_options(parser, "--split", help=split)
    add_options(parser, "--data_root", "--variant", "--device", "--overwrite")


def run(arguments: argparse.Namespace) -> int:
    from tinyvae.convert.prune import describe_loss, prune_model, pruned_spec, read_clips
    from tinyvae.evaluation.clip_sources import choose_split
    from tinyvae.evaluation.cost import choose_devices, fitting_in_memory
    from tinyvae.files import check_output_file, refuse_existing
    from tinyvae.models.weights import FORMATS, load_model, save_model

    target: Path = arguments.output
    if target.suffix not in FORMATS:
        raise UserError(f"--output {target}: end its name in {' or '.join(FORMATS)}.")
    check_output_file(target, option="--output")
    refuse_existing([] if arguments.overwrite else [target])
    device = choose_devices(arguments.device)[0]
    model = load_model(arguments.model, variant=arguments.variant)
    spec = pruned_spec(model.spec, arguments.keep)
    clips = []
    if arguments.data is not None:
        root, split = arguments.data_root, arguments.split
        if split is None and choose_split(arguments.data, data_root=root, wanted=None)[0] is not None:
            split = "train"  # the others stay unseen, to judge the result by
        clips = read_clips(arguments.data, spec, max_clips=arguments.max_clips, data_root=root, split=split)
    with fitting_in_memory(f"pruning with {len(clips)} clips (fewer: --max_clips)"):
        pruned = prune_model(model.to(device), arguments.keep, clips=clips, show_progress_bar=True)
        losses = describe_loss(model, pruned, clips)
    files = save_model(pruned, target, overwrite=arguments.overwrite)
    counts = [sum(parameter.numel() for parameter in one.parameters()) / 1e6 for one in (model, pruned)]
    print(f"{spec.name}, width {model.spec.width:g} -> {spec.width:g}: {counts[0]:.2f} -> {counts[1]:.2f} M parameters")
    print(losses)
    print(f"written to {files[0]}\nTrain it with the whole network as its teacher:")
    print(train_command(arguments.model, target, spec))
    return 0


def train_command(whole: str, pruned: Path, spec: VariantSpec) -> str:
    """The command for the shell. It says all that the pruned network is: the whole one need not state it."""
    settings = {
        "teacher": whole,
        "variant": spec.name,
        "model_width": f"{spec.width:g}",
        "pretrained_model_path": str(pruned),
    }
    ours = VARIANTS[spec.name]
    settings |= {"latent_space": spec.latent_space} if spec.latent_space != ours.latent_space else {}
    settings |= {"activation": spec.activation} if spec.activation != ours.activation else {}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return "  " + shlex.join(["tinyvae", "train", "distill", *words, "--data_root", "VIDEOS"])
