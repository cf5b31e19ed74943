"""The settings of a training run: their list (``schema``), their rules, and the ways to and from files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinyvae.config.schema import TrainConfig

if TYPE_CHECKING:
    from tinyvae.config.load import LoadedConfig, load_config, load_preset

__all__ = ["LoadedConfig", "TrainConfig", "load_config", "load_preset"]


def __getattr__(name: str) -> Any:
    # At first use: a settings file that only builds a TrainConfig need not wait for what loading needs.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinyvae.config import load

    return getattr(load, name)
