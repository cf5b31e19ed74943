"""Peak memory of `tinyvae reconstruct` for a short and a long video of the same size: it must be the same.

    python benchmarks/reconstruct_memory.py --height 480 --width 720 --seconds 2 120 --model_width 0.125

Each video is reconstructed in a process of its own; what is compared is that process's peak resident memory. The
results are compared as a ratio within one run; absolute numbers depend on torch's build.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tinyvae import TAEHV, save_model
from tinyvae.data.sample_clips import render_clip
from tinyvae.video.write import VideoWriter

FPS = 24
CHILD = """
import json, sys
from pathlib import Path
import torch
from tinyvae.convert.reconstruct import Outputs, reconstruct_video
from tinyvae.evaluation.round_trip import open_model
torch.set_num_threads(int(sys.argv[4]))
def peak_mib():  # not getrusage: its maximum survives exec, so the parent's memory would count
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
model = open_model(sys.argv[1])
loaded = peak_mib()
done = reconstruct_video(model, Path(sys.argv[2]), Outputs(video=Path(sys.argv[3])))
peak = peak_mib()
print(json.dumps({"loaded_mib": loaded, "peak_mib": peak, "frames": done.num_frames, "seconds": done.seconds}))
"""


def write_film(path: Path, *, seconds: float, height: int, width: int) -> None:
    """A film of a moving scene, played to and fro."""
    scene = render_clip(0, height=height, width=width, frames=24, seed=0)
    loop = torch.cat([scene, scene.flip(0)])
    with VideoWriter(path, fps=FPS, height=height, width=width, preset="ultrafast") as writer:
        for number in range(round(seconds * FPS)):
            writer.write(loop[number % len(loop)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=720)
    parser.add_argument("--seconds", type=float, nargs="+", default=[2, 120])
    parser.add_argument("--variant", default="taehv")
    parser.add_argument("--model_width", type=float, default=0.125)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, {platform.machine()}, {arguments}", flush=True
    )
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.safetensors"
        save_model(TAEHV(arguments.variant, width=arguments.model_width), model)
        for seconds in arguments.seconds:
            film = Path(folder) / f"{seconds:g}s.mp4"
            write_film(film, seconds=seconds, height=arguments.height, width=arguments.width)
            output = Path(folder) / f"{seconds:g}s_out.mp4"
            command = [sys.executable, "-c", CHILD, str(model), str(film), str(output), str(arguments.threads)]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            peaks.append(result["peak_mib"])
            print(
                f"{seconds:g} s, {result['frames']} frames of {arguments.height}x{arguments.width}: peak "
                f"{result['peak_mib']:.0f} MiB ({result['loaded_mib']:.0f} MiB with the model loaded), "
                f"{result['frames'] / result['seconds']:.1f} frames/s",
                flush=True,
            )
    print(f"longest against shortest: {peaks[-1] / peaks[0]:.3f}")


if __name__ == "__main__":
    main()
