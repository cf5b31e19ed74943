"""Say what a weights file, run folder or variant is: network, sizes, and how it counts frames.

Without MODEL: the variants, one line each.

example:
  tinyvae info
  tinyvae info best_model/model.safetensors
  tinyvae info taew2_2 --frames 17
"""

from __future__ import annotations

import argparse
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.cli.options import MODEL, add_options
from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS
from tinyvae.terminal import in_columns

if TYPE_CHECKING:
    from tinyvae.models.taehv import TAEHV

SPACE_WORDS = {
    "diffusion": "diffusion: as the diffusion model sees latents",
    "vae": "vae: as the diffusion model's VAE makes latents, before scaling",
}
LAST_LENGTH = 52  # three chunks of taeh3
NETWORK = attrgetter("patch_size", "latent_channels", "encoder_strides", "decoder_strides", "decoder")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{MODEL}, or the name of a variant")
    add_options(parser, "--variant")
    add_options(parser, "--frames", default=17, help="clip length for the frame example (default: 17)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        if arguments.variant is not None:
            raise UserError(f"--variant is for a file; for the variant itself: tinyvae info {arguments.variant}")
        print(variant_table())
        return 0
    step: object = None
    if arguments.model in VARIANTS and not Path(arguments.model).exists():
        if arguments.variant is not None:
            raise UserError(f"{arguments.model} is the name of a variant, and --variant is for a file; leave one out.")
        import torch

        from tinyvae.models.taehv import TAEHV

        with torch.device("meta"):
            model = TAEHV(arguments.model)
        source = "variant (no weights loaded)"
    else:
        from tinyvae.models.weights import find_weights, load_model, read_weights

        file = find_weights(Path(arguments.model))
        model = load_model(file, variant=arguments.variant)
        source, step = str(file), read_weights(file)[1].get("training_step")
    for name, value in facts(model, source=source, step=step, num_frames=arguments.frames):
        print(f"{name:<16} {value}")
    return 0


def variant_table() -> str:
    """Every variant: whose VAE it stands in for, what one latent holds, and the clip lengths it trains at."""
    rows = [("variant", "stands in for the VAE of", "channels", "frames", "pixels", "trains at")]
    for name, spec in VARIANTS.items():
        lengths = [str(t) for t in range(2, LAST_LENGTH) if spec.is_training_length(t)][:4]
        pixels = f"{spec.space_factor}x{spec.space_factor}"
        trains_at = f"{', '.join(lengths)}, ..."
        rows.append((name, spec.teacher, str(spec.latent_channels), str(spec.time_factor), pixels, trains_at))
    legend = "channels, frames and pixels: of one latent; trains at: frames of a clip."
    more = "`tinyvae info NAME_OR_FILE` says more of one."
    return "\n".join([*in_columns(rows), "", legend, more])


def facts(model: TAEHV, *, source: str, step: object, num_frames: int) -> list[tuple[str, str]]:
    """The lines to show, as (name, value). ``step``: the training step that the file states, if it does."""
    spec = model.spec
    parameters = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("encoder", "decoder")}
    lengths = [t for t in range(1, LAST_LENGTH) if spec.is_training_length(t)]
    num_out, num_aligned = spec.frames_out(num_frames), spec.aligned_frames(num_frames)
    example = f"{num_frames} frames -> {spec.latents(num_frames)} latents -> {num_out} frames"
    pixels = f"{spec.space_factor}x{spec.space_factor} pixels"
    twins = [name for name, other in VARIANTS.items() if name != spec.name and NETWORK(other) == NETWORK(spec)]
    return [
        ("source", source),
        *([] if step is None else [("training step", str(step))]),
        ("variant", f"{spec.name}, stands in for the VAE of {spec.teacher}"),
        ("same network as", ", ".join(twins) or "no other variant"),
        ("width factor", f"{spec.width:g}"),
        ("parameters", " + ".join(f"{count / 1e6:.2f} M {part}" for part, count in parameters.items())),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        ("activation", {"relu": "ReLU", "leaky_relu": "LeakyReLU(0.2)"}[spec.activation]),
        ("latents", f"{spec.latent_channels} channels, 1 for {spec.time_factor} frames of {pixels}"),
        ("latent space", SPACE_WORDS[spec.latent_space]),
        ("frame sizes", f"multiples of {spec.space_factor}"),
        ("frame example", f"{example}, of which the first {num_aligned} are the input's"),
        ("trains at", f"{', '.join(map(str, lengths[:12]))}, ... frames"),
    ]
