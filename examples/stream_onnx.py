# %% [markdown]
# # Stream a video with onnxruntime and numpy alone
# `tinyvae export MODEL --to onnx --output FOLDER` writes two graphs. This file shows the loop around them: it needs
# neither torch nor tinyvae, so copy `OnnxEncoder` and `OnnxDecoder` into your own program.
# Run it as `python examples/stream_onnx.py FOLDER`, or without a folder: then it exports a small fresh model first.

# %%
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime


class _Graph:
    """One graph with the state of one video. Make a new object for each video."""

    def __init__(self, file: Path) -> None:
        self._session = onnxruntime.InferenceSession(file, providers=onnxruntime.get_available_providers())
        self.facts = json.loads(self._session.get_modelmeta().custom_metadata_map["tinyvae"])
        given = self._session.get_inputs()[0]
        self._name = given.name
        self._dtype = np.float16 if given.type == "tensor(float16)" else np.float32
        self.reset()

    def reset(self) -> None:
        self._states: list[np.ndarray] | None = None

    def run(self, given: np.ndarray, latent_height: int, latent_width: int) -> np.ndarray:
        if self._states is None:  # zeros start a video
            sizes = [(1, c, m * latent_height, m * latent_width) for c, m in self.facts["states"]]
            self._states = [np.zeros(size, self._dtype) for size in sizes]
        named = {f"state_{i}": state for i, state in enumerate(self._states)}
        made, *self._states = self._session.run(None, {self._name: given.astype(self._dtype), **named})
        return made


class OnnxEncoder(_Graph):
    """Frames in, latents out. Frames are (3, H, W) in [0, 1]; H and W are multiples of ``facts["space_factor"]``."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._waiting: list[np.ndarray] = []
        self._held: list[np.ndarray] = []  # taeh3 drops the last latents of a video: hold them until more come
        self._count = 0

    def push(self, frame: np.ndarray) -> list[np.ndarray]:
        """The latents (C, h, w) that this frame completes: none or one."""
        chunk = self.facts["chunk"]
        if chunk and self._count % chunk["frames"] == 0:  # taeh3: every chunk is a video of its own
            self.reset()
            self._waiting = [np.zeros_like(frame)] * chunk["zeros_before"]
        self._count += 1
        self._waiting.append(frame)
        if len(self._waiting) < self.facts["time_factor"]:
            return []
        factor = self.facts["space_factor"]
        latent = self.run(np.stack(self._waiting), frame.shape[1] // factor, frame.shape[2] // factor)[0]
        self._waiting = []
        self._held.append(latent)
        num_ready = max(0, len(self._held) - (chunk["last_latents_dropped"] if chunk else 0))
        ready, self._held = self._held[:num_ready], self._held[num_ready:]
        return ready

    def flush(self, last_frame: np.ndarray) -> list[np.ndarray]:
        """The end of the video: the last frame is repeated until a latent (taeh3: a chunk) is complete."""
        unit = self.facts["chunk"]["frames"] if self.facts["chunk"] else self.facts["time_factor"]
        made: list[np.ndarray] = []
        while self._count % unit:
            made += self.push(last_frame)
        return made


class OnnxDecoder(_Graph):
    """Latents in, frames out. ``num_latents``: of the whole video; only taecvx needs it."""

    def __init__(self, file: Path, num_latents: int | None = None) -> None:
        super().__init__(file)
        self._count = 0
        rule = self.facts["frame_rule"]
        assert rule != "even_keeps_all" or num_latents, "taecvx must know the number of latents"
        keeps_all = rule == "even_keeps_all" and num_latents is not None and num_latents % 2 == 0
        self._trim = 0 if keeps_all else self.facts["trim"]

    def push(self, latent: np.ndarray) -> list[np.ndarray]:
        """The frames (3, H, W) in [0, 1] of one latent (C, h, w); the first ones of a video are dropped."""
        made = self.run(latent[None], *latent.shape[1:])
        kept = [frame for place, frame in enumerate(made, self._count) if self._is_kept(place)]
        self._count += len(made)
        return kept

    def _is_kept(self, place: int) -> bool:
        chunk = self.facts["chunk"]
        if chunk:
            return place % (chunk["latents"] * self.facts["time_factor"]) >= chunk["zeros_before"]
        return place >= self._trim


# %% [markdown]
# ## A video through both
# Each frame goes in as it comes. The memory does not grow with the length of the video.


# %%
def main(folder: Path) -> None:
    encoder = OnnxEncoder(folder / "encoder.onnx")
    factor = encoder.facts["space_factor"]
    height, width = 4 * factor, 6 * factor
    y, x = np.mgrid[0:height, 0:width] / 16
    video = [np.stack([np.sin(x + t / 3), np.cos(y - t / 5), np.sin(x + y)]) / 2 + 0.5 for t in range(17)]

    latents = [latent for frame in video for latent in encoder.push(frame)]
    latents += encoder.flush(video[-1])
    print(f"{len(video)} frames of {width}x{height} -> {len(latents)} latents of shape {latents[0].shape}")

    decoder = OnnxDecoder(folder / "decoder.onnx", num_latents=len(latents))
    count = 0
    for number, latent in enumerate(latents):
        frames = decoder.push(latent)
        count += len(frames)
        print(f"latent {number}: {len(frames)} frames, {count} in all")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        from tinyvae import TAEHV, export

        with tempfile.TemporaryDirectory() as name:
            print(export(TAEHV("taehv", width=0.125), to="onnx", output=name).message)
            main(Path(name))
