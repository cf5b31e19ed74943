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
    from tinyvae.data.clip import ClipSettings as ClipSettings
    from tinyvae.data.clip_reading import BadFileLog as BadFileLog
    from tinyvae.data.clip_reading import ClipBatch as ClipBatch
    from tinyvae.data.index import open_index as open_index
    from tinyvae.data.index_build import build_index as build_index
    from tinyvae.data.index_build import open_or_build_index as open_or_build_index
    from tinyvae.data.loader import make_train_loader as make_train_loader
    from tinyvae.data.loader import make_validation_loader as make_validation_loader
    from tinyvae.data.splits import ClipSet as ClipSet
    from tinyvae.data.splits import split as split

_NAMES = {
    "clip": ("ClipSettings",),
    "clip_reading": ("BadFileLog", "ClipBatch"),
    "index": ("open_index",),
    "index_build": ("build_index", "open_or_build_index"),
    "loader": ("make_train_loader", "make_validation_loader"),
    "splits": ("ClipSet", "split"),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
