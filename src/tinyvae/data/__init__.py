"""From video files to exact, restartable batches: index -> clip choice -> decode -> augment -> loader.

::


    index = open_or_build_index("videos/", cache_dir="output")
    settings = ClipSettings(height=128, width=128, n_frames=13)
    train, val = split(index, settings, train_split=0.95)
    for batch in make_train_loader(train, settings, batch_size=4, num_workers=2):
        frames = batch.model_input("cuda")  # float32 NTCHW in [0, 1]

Names are imported when they are first used, so that reading an index does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyvae.data.clip import ClipSettings
    from tinyvae.data.clip_reading import BadFile, BadFileLog, ClipBatch
    from tinyvae.data.index import VideoIndex, is_index, open_index
    from tinyvae.data.index_build import build_index, open_or_build_index
    from tinyvae.data.loader import TrainLoader, ValidationLoader, make_train_loader, make_validation_loader
    from tinyvae.data.splits import ClipSet, split

_HOME = {
    "BadFile": "clip_reading",
    "BadFileLog": "clip_reading",
    "ClipBatch": "clip_reading",
    "ClipSet": "splits",
    "ClipSettings": "clip",
    "TrainLoader": "loader",
    "ValidationLoader": "loader",
    "VideoIndex": "index",
    "build_index": "index_build",
    "is_index": "index",
    "make_train_loader": "loader",
    "make_validation_loader": "loader",
    "open_index": "index",
    "open_or_build_index": "index_build",
    "split": "splits",
}

__all__ = [
    "BadFile",
    "BadFileLog",
    "ClipBatch",
    "ClipSet",
    "ClipSettings",
    "TrainLoader",
    "ValidationLoader",
    "VideoIndex",
    "build_index",
    "is_index",
    "make_train_loader",
    "make_validation_loader",
    "open_index",
    "open_or_build_index",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
