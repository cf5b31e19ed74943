"""The settings of a training run: their list (`schema`), their rules (`rules`), and the way from files (`load`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyvae.config.load import LoadedConfig, TrainConfig, load_config, load_preset

__all__ = ["LoadedConfig", "TrainConfig", "load_config", "load_preset"]


def __getattr__(name: str) -> Any:
    # At first use: `python -m tinyvae.config.schema` finds its own module not yet imported.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinyvae.config import load

    return getattr(load, name)
