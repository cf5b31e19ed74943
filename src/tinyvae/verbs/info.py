"""Say what a weights file, run folder or variant is: network, sizes, and how it counts frames.

example:
  tinyvae info best_model/model.safetensors
  tinyvae info taew2_2 --frames 17
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tinyvae.models.taehv import TAEHV
from tinyvae.models.variants import VARIANTS, VariantSpec, get_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a weights file, a model, checkpoint or run folder, or the name of a variant")
    parser.add_argument("--variant", help="the variant, where the file does not state it")
    parser.add_argument("--frames", type=int, default=17, help="clip length for the frame example (default: 17)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.model in VARIANTS and not Path(arguments.model).exists():
        import torch

        with torch.device("meta"):
            model = TAEHV(arguments.model)
        source = "variant (no weights loaded)"
    else:
        from tinyvae.models.weights import find_weights, load_model

        model = load_model(arguments.model, variant=arguments.variant)
        source = str(find_weights(Path(arguments.model)))
    for name, value in facts(model, source=source, num_frames=arguments.frames):
        print(f"{name:<16} {value}")
    return 0


def facts(model: TAEHV, *, source: str, num_frames: int) -> list[tuple[str, str]]:
    """The lines to show, as (name, value)."""
    spec = model.spec
    parameters = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("encoder", "decoder")}
    twins = [name for name in VARIANTS if name != spec.name and _same_network(name, spec)]
    return [
        ("source", source),
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
        ("trains at", ", ".join(str(t) for t in range(2, 70) if spec.is_training_length(t))[:60] + " ... frames"),
    ]


def _same_network(name: str, spec: VariantSpec) -> bool:
    other = get_spec(name)
    keys = ("patch_size", "latent_channels", "encoder_strides", "decoder_strides", "decoder")
    return all(getattr(other, key) == getattr(spec, key) for key in keys)
