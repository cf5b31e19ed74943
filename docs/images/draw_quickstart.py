"""Draw the picture of the README: held-out clips through the model that `tinyvae train quickstart` trained.

python docs/images/draw_quickstart.py RUN_FOLDER docs/images/quickstart.gif
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from PIL import Image

from tinyvae import load_model
from tinyvae.video.decode import iterate_frames

CLIPS = 2
FRAMES = 33
ERROR_GAIN = 4


def panels(frames_TCHW: torch.Tensor, model_folder: Path) -> torch.Tensor:
    """input | output | error, TCHW in [0, 1]."""
    model = load_model(model_folder)
    with torch.no_grad():
        decoded = model.reconstruct(frames_TCHW[None])[0]
    frames = frames_TCHW[: len(decoded)]
    error = (ERROR_GAIN * (decoded - frames).abs()).clamp(0, 1)
    return torch.cat([frames, decoded, error], dim=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    data_root = Path(json.loads((arguments.run / "config.json").read_text())["data_root"])
    listed = json.loads((data_root / "annotations.json").read_text())["list"]
    held_out = [entry["path"] for entry in listed if entry["split"] == "val"][:CLIPS]
    rows = []
    for name in held_out:
        frames = torch.stack(list(iterate_frames(data_root / name, stop=FRAMES))).float() / 255
        rows.append(panels(frames, arguments.run))
    length = min(len(row) for row in rows)
    film = torch.cat([row[:length] for row in rows], dim=2)
    pixels = (film * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    pictures = [Image.fromarray(frame).quantize(64) for frame in pixels[::3]]
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    pictures[0].save(arguments.picture, save_all=True, append_images=pictures[1:], duration=150, loop=0, optimize=True)
    print(f"{arguments.picture}: {arguments.picture.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
