"""tinyvae trains, evaluates, speeds up and ships tiny video autoencoders (the TAEHV family)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinyvae.version import __version__

if TYPE_CHECKING:
    from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
    from tinyvae.models.taehv import TAEHV
    from tinyvae.models.variants import VARIANTS, VariantSpec, get_spec
    from tinyvae.models.weights import load_model, save_model

__all__ = [
    "TAEHV",
    "VARIANTS",
    "StreamingDecoder",
    "StreamingEncoder",
    "VariantSpec",
    "__version__",
    "get_spec",
    "load_model",
    "save_model",
]

# Names are fetched at first use, so that `tinyvae --help` and the data workers do not wait for torch.
_HOME = {
    "TAEHV": "taehv",
    "VARIANTS": "variants",
    "VariantSpec": "variants",
    "get_spec": "variants",
    "StreamingDecoder": "streaming",
    "StreamingEncoder": "streaming",
    "load_model": "weights",
    "save_model": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tinyvae' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tinyvae.models.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
