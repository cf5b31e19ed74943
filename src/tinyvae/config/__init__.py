"""The settings of a training run: their list (`schema`), their rules (`rules`), and the way from files (`load`)."""

from tinyvae.config.load import LoadedConfig, load_config, load_preset
from tinyvae.config.schema import TrainConfig

__all__ = ["LoadedConfig", "TrainConfig", "load_config", "load_preset"]
