"""tinyvae trains, evaluates, speeds up and ships tiny video autoencoders (the TAEHV family)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinyvae.models import doors

if TYPE_CHECKING:
    from tinyvae.engines.fused import FusedTAEHV
    from tinyvae.models.streaming import StreamingDecoder, StreamingEncoder
    from tinyvae.models.taehv import TAEHV
    from tinyvae.models.variants import VARIANTS, VariantSpec, get_spec
    from tinyvae.models.weights import load_model, save_model

__version__ = "0.1.0"

__all__ = [
    "TAEHV",
    "VARIANTS",
    "FusedTAEHV",
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
    "TAEHV": "models.taehv",
    "FusedTAEHV": "engines.fused",
    "VARIANTS": "models.variants",
    "VariantSpec": "models.variants",
    "get_spec": "models.variants",
    "StreamingDecoder": "models.streaming",
    "StreamingEncoder": "models.streaming",
    "load_model": "models.weights",
    "save_model": "models.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tinyvae' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tinyvae.{_HOME[name]}"), name)


def _fuse(model: TAEHV) -> FusedTAEHV:
    from tinyvae.engines.fused import FusedTAEHV

    return FusedTAEHV(model)


def _run_folded(*arguments: Any, **options: Any) -> Any:
    from tinyvae.engines.eager import run_folded

    return run_folded(*arguments, **options)


doors.fuse, doors.run_folded = _fuse, _run_folded


def __dir__() -> list[str]:
    return sorted(__all__)
