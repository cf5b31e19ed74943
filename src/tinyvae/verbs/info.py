"""Say what a weights file, run folder or variant is: network, sizes, and how it counts frames. Without one: the list
of variants.

example:
  tinyvae info
  tinyvae info best_model/model.safetensors
  tinyvae info taew2_2 --frames 17
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS, VariantSpec, get_spec

if TYPE_CHECKING:
    from tinyvae.models.taehv import TAEHV

LAST_LENGTH = 52  # three chunks of taeh3; a line's worth for the others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a weights file, a model, checkpoint or run folder, or the name of a variant; none: list the variants",
    )
    parser.add_argument("--variant", help="the variant, where the file does not state it")
    parser.add_argument("--frames", type=int, default=17, help="clip length for the frame example (default: 17)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        print("\n".join(variant_lines()))
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


def variant_lines() -> list[str]:
    """One line for each variant."""
    rows = [
        (
            spec.name,
            f"{spec.latent_channels} channels, 1 for {spec.time_factor} frames of {spec.space_factor}x"
            f"{spec.space_factor} pixels",
            spec.teacher,
        )
        for spec in VARIANTS.values()
    ]
    rows.insert(0, ("variant", "latents", "stands in for the VAE of"))
    return [f"{name:<16} {latents:<45} {teacher}" for name, latents, teacher in rows]


def facts(model: TAEHV, *, source: str, step: object, num_frames: int) -> list[tuple[str, str]]:
    """The lines to show, as (name, value). ``step``: the training step that the file states, if it does."""
    spec = model.spec
    parameters = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("encoder", "decoder")}
    lengths = [t for t in range(1, LAST_LENGTH) if spec.is_training_length(t)]
    twins = [name for name in VARIANTS if name != spec.name and _same_network(name, spec)]
    return [
        ("source", source),
        *([] if step is None else [("training step", str(step))]),
        ("variant", f"{spec.name}, stands in for the VAE of {spec.teacher}"),
        ("same network as", ", ".join(twins) or "no other variant"),
        ("width factor", f"{spec.width:g}"),
        ("parameters", " + ".join(f"{count / 1e6:.2f} M {part}" for part, count in parameters.items())),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        (
            "latents",
            f"{spec.latent_channels} channels, 1 for {spec.time_factor} frames of {spec.space_factor}x"
            f"{spec.space_factor} pixels",
        ),
        ("frame sizes", f"multiples of {spec.space_factor}"),
        (
            "frame example",
            f"{num_frames} frames -> {spec.latents(num_frames)} latents -> "
            f"{spec.frames_out(num_frames)} frames, of which the first {spec.aligned_frames(num_frames)} are "
            "the input's",
        ),
        ("trains at", f"{', '.join(map(str, lengths))}, ... frames"),
    ]


def _same_network(name: str, spec: VariantSpec) -> bool:
    other = get_spec(name)
    keys = ("patch_size", "latent_channels", "encoder_strides", "decoder_strides", "decoder")
    return all(getattr(other, key) == getattr(spec, key) for key in keys)
