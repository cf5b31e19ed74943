"""Which files of ours touch the data while something runs: the frames, latents and weights that functions take or give.

with DataFlow() as flow:
    load_model(file).decode(latents)
flow.files  # {"models/weights.py", "models/codec.py", ...}
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import av
import numpy as np
import torch

import tinyvae

SOURCE = str(Path(tinyvae.__file__).parent) + "/"
SMALL = 64
"""Arrays with fewer values are settings or counts, not data."""


def is_data(value: Any, depth: int = 2) -> bool:
    """Whether a value is a tensor, an array, a decoded frame or a packet, or holds one in its first few places."""
    if isinstance(value, torch.Tensor):
        return value.numel() >= SMALL
    if isinstance(value, np.ndarray):
        return value.size >= SMALL
    if isinstance(value, (av.VideoFrame, av.Packet)):
        return True
    if depth == 0:
        return False
    inside: list[Any] = []
    if isinstance(value, (list, tuple)):
        inside = list(value[:8])
    elif isinstance(value, dict):
        inside = list(value.values())[:8]
    elif dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return any(is_data(item, depth - 1) for item in inside)


class DataFlow:
    """Collects while its block runs, in this process and in the threads that start in it."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> DataFlow:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE) or event not in ("call", "return"):
            return
        file = code.co_filename.removeprefix(SOURCE)
        if file in self.files:
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals.get(name) for name in arguments if name not in ("self", "cls")]
        if any(is_data(value) for value in (values if event == "call" else [result])):
            self.files.add(file)
