"""tinyvae trains, evaluates, speeds up and ships tiny video autoencoders (the TAEHV family)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinyvae import models

if TYPE_CHECKING:
    from tinyvae.convert.export import export as export
    from tinyvae.engines.fused import FusedTAEHV as FusedTAEHV
    from tinyvae.errors import UserError as UserError
    from tinyvae.models.streaming import StreamingDecoder as StreamingDecoder
    from tinyvae.models.streaming import StreamingEncoder as StreamingEncoder
    from tinyvae.models.taehv import TAEHV as TAEHV
    from tinyvae.models.variants import VARIANTS as VARIANTS
    from tinyvae.models.variants import VariantSpec as VariantSpec
    from tinyvae.models.variants import get_spec as get_spec
    from tinyvae.models.variants import list_variants as list_variants
    from tinyvae.models.weights import load_model as load_model
    from tinyvae.models.weights import save_model as save_model

__version__ = "0.1.0"

# A name is imported at first use, so that `tinyvae --help` and the data workers do not wait for torch.
_HOME = {
    "TAEHV": "models.taehv",
    "FusedTAEHV": "engines.fused",
    "VARIANTS": "models.variants",
    "VariantSpec": "models.variants",
    "get_spec": "models.variants",
    "list_variants": "models.variants",
    "StreamingDecoder": "models.streaming",
    "StreamingEncoder": "models.streaming",
    "load_model": "models.weights",
    "save_model": "models.weights",
    "UserError": "errors",
    "export": "convert.export",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tinyvae' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tinyvae.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _fuse(model: TAEHV, **options: Any) -> FusedTAEHV:
    from tinyvae.engines.fused import FusedTAEHV

    return FusedTAEHV(model, **options)


def _run_folded(*arguments: Any, **options: Any) -> Any:
    from tinyvae.engines.eager import run_folded

    return run_folded(*arguments, **options)


models.fuse, models.run_folded = _fuse, _run_folded
