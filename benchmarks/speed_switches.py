"""What each choice of the engines brings: codecs with a choice switched off beside one with all of them, in one process
and in turn, so that the GPU's clock is the same for both.

    python benchmarks/speed_switches.py [--variant taew2_2] [--size 480x736x49] [--settings=--copy_image] [--output DIR]

A setting is switches of speed_codec.py, as one word. Switches that stand alone count for both codecs. Medians in
milliseconds of whole videos and of a decode by pushes of three latents, and how many times as long the setting takes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from speed_codec import DTYPES, codec_parser, set_switches, spread_weights
from torch import Tensor

from tinyvae import TAEHV
from tinyvae.convert.bench import relative_error, stream_through, time_alternating_ms
from tinyvae.engines.fused import FusedTAEHV

SETTINGS = (  # those that matter most first
    "--no_early_launch",
    "--copy_image",
    "--no_replay",
    "--cudnn_channels",
    "--cudnn_channels 128 256",
)
PUSHED = 3  # latents


def calls_of(model: TAEHV, switches: argparse.Namespace, latents: Tensor, frames: Tensor) -> dict[str, Callable]:
    """By name what is timed, of a codec with these switches; their first calls run here."""
    set_switches(switches)
    codec = FusedTAEHV(model)

    def switched(call: Callable[[], object]) -> object:
        set_switches(switches)  # for what is launched outside of graphs
        return call()

    calls = {
        "decode": partial(switched, lambda: codec.decode_video(latents)),
        "encode": partial(switched, lambda: codec.encode_video(frames)),
        "pushes": partial(switched, lambda: stream_through(codec, "decode", latents, chunk_latents=PUSHED)),
    }
    for call in calls.values():
        for _ in range(3):  # the third from a graph
            call()
    return calls


@torch.no_grad()
def main() -> None:
    parser = codec_parser(__doc__)
    parser.add_argument("--variant", default="taew2_2")
    parser.add_argument("--size", default="480x736x49")
    parser.add_argument(
        "--settings", nargs="+", action="extend", help="these alone, e.g. --settings='--cudnn_channels 128 256'"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="folder for switches.json")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True  # as in `run_benchmark`
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = TAEHV(arguments.variant)
    spread_weights(model)
    model = model.to(device, DTYPES[arguments.dtype]).eval()
    height, width, num_frames = map(int, arguments.size.split("x"))
    frames = torch.rand(1, num_frames, 3, height, width, device=device).to(model.dtype)
    latents = model.encode_video(frames)
    rows = []
    for setting in arguments.settings or SETTINGS:
        switches = parser.parse_args(shlex.split(setting), namespace=argparse.Namespace(**vars(arguments)))
        with_it, without = (calls_of(model, these, latents, frames) for these in (switches, arguments))
        row: dict[str, object] = {"variant": arguments.variant, "setting": setting}
        for name in with_it:
            pair = {"setting": with_it[name], "all": without[name]}
            times = time_alternating_ms(pair, device, repeats=arguments.repeats, warmups=2)
            changed, before = (statistics.median(times[which]) for which in ("setting", "all"))
            row |= {f"{name}_ms": changed, f"{name}_all_ms": before, f"{name}_ratio": changed / before}
        if arguments.output:
            (arguments.output / "switches.json").write_text(json.dumps([*rows, row], indent=1))
        rows.append(row)
        difference = relative_error(with_it["decode"](), without["decode"]())
        words = (
            f"{name} {row[f'{name}_ms']:.3f} / {row[f'{name}_all_ms']:.3f} = {row[f'{name}_ratio']:.3f}"
            for name in with_it
        )
        print(f"{arguments.variant} {setting:36} {', '.join(words)}; difference {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
